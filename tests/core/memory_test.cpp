// How much memory there is, what does not fit, and what an exception says of it.
#include "core/memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <vector>

#include "core/error.h"
#include "core/platform.h"
#include "core/problem.h"
#include "testing/errors.h"
#include "testing/temp_folder.h"

namespace headloom::test::memory_test {
namespace {

// A machine of files, with the limits of this process.
class Machine {
 public:
  explicit Machine(double mebibytes) {
    add("proc/meminfo", str("MemTotal:       ", mebibytes * 1024, " kB\nMemFree: 1 kB\n"));
  }
  void add(const std::string& path, const std::string& text) const { folder_.write(path, text); }
  std::string root() const { return folder_.path(); }
  // "8 physical memory", in mebibytes.
  std::string limit() const {
    const MemoryLimit found = memory_limit(root());
    return str(found.bytes / 1024 / 1024, " ", found.name);
  }

 private:
  TempFolder folder_;
};

TEST(MemoryLimit, IsTheSmallestOfMachineAndGroups) {
  const Machine machine(8);
  EXPECT_EQ(machine.limit(), "8 physical memory");
  // Version 2: the group and those around it.
  machine.add("proc/self/cgroup", "0::/user.slice/job\n");
  machine.add("sys/fs/cgroup/user.slice/job/memory.max", "max\n");
  EXPECT_EQ(machine.limit(), "8 physical memory");
  machine.add("sys/fs/cgroup/user.slice/memory.max", str(2 << 20, "\n"));
  EXPECT_EQ(machine.limit(), "2 the control group's limit");
  machine.add("sys/fs/cgroup/memory.max", str(1 << 20, "\n"));
  EXPECT_EQ(machine.limit(), "1 the control group's limit");
}

TEST(MemoryLimit, ReadsControlGroupsOfVersionOneAndOfContainers) {
  const Machine machine(8);
  machine.add("proc/self/cgroup", "12:cpu,cpuacct:/docker/1\n9:memory:/docker/1\n0::/\n");
  machine.add("sys/fs/cgroup/memory/memory.limit_in_bytes", str(4 << 20, "\n"));
  EXPECT_EQ(machine.limit(), "4 the control group's limit");
  machine.add("sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", str(3 << 20, "\n"));
  EXPECT_EQ(machine.limit(), "3 the control group's limit");
}

TEST(MemoryLimit, KnowsTheProcessesOwn) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the address sanitizer needs more address space than the limit leaves";
#endif
  rlimit before{};
  ::getrlimit(RLIMIT_AS, &before);
  const rlimit now{.rlim_cur = rlim_t{1} << 40, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &now), 0);
  const Machine machine(1 << 30);
  EXPECT_EQ(machine.limit(), "1.04858e+06 the limit of address space, ulimit -v");
  const std::string refusal = message_of<UsageError>(
      [] { check_fits("this needs", 1e18, "half of it for nothing", "less needs less"); });
  EXPECT_TRUE(contains(refusal,
                       "this needs at least 888.2 PiB of memory by estimate (half of it "
                       "for nothing), but this process can have "))
      << refusal;
  EXPECT_TRUE(refusal.ends_with("; less needs less."));
  check_fits("this needs", 1e6, "", "");
  ::setrlimit(RLIMIT_AS, &before);
}

TEST(MemoryLimit, IsSharedByTheProcessesOfOneMachine) {
  const Machine machine(8);
  share_memory(4, 1);
  EXPECT_EQ(machine.limit(), "2 an equal part of physical memory for each of 4 processes");
  machine.add("proc/self/cgroup", "0::/job\n");
  machine.add("sys/fs/cgroup/job/memory.max", str(3 << 20, "\n"));
  EXPECT_EQ(machine.limit(), "2 an equal part of physical memory for each of 4 processes");
  share_memory(4, 2);
  EXPECT_EQ(machine.limit(),
            "1.5 an equal part of the control group's limit for each of 2 processes");
  share_memory(1, 1);
  EXPECT_EQ(machine.limit(), "3 the control group's limit");
}

TEST(MemoryLimit, IsInfiniteWhereNothingSays) {
  const TempFolder empty;
  rlimit space{};
  ::getrlimit(RLIMIT_AS, &space);
  if (space.rlim_cur == RLIM_INFINITY) {
    EXPECT_TRUE(std::isinf(memory_limit(empty.path()).bytes));
  }
}

TEST(FreedMemory, IsKeptButForLargeBlocksWhereTheseAreReturned) {
#if defined(__SANITIZE_ADDRESS__) || !defined(__GLIBC__)
  GTEST_SKIP() << "another allocator";
#endif
  const auto kept = [](size_t mebibytes) {  // of a block that was used and freed
    const int64_t before = process_memory("VmRSS");
    {
      const std::vector<char> block(mebibytes << 20, 1);
      EXPECT_GT(block[block.size() / 2], 0);
    }
    return (process_memory("VmRSS") - before) >> 20;
  };
  ASSERT_TRUE(keep_freed_memory());
  EXPECT_GT(kept(64), 50);
  return_large_blocks();
  EXPECT_LT(kept(128), 20);  // more than is free, or it would be found there
  return_freed_memory();
  release_free_memory();
}

TEST(Problem, OfAnAllocationNamesItsSize) {
  const std::string known = problem_of(OutOfMemory(size_t{3} << 30));
  EXPECT_TRUE(known.starts_with("out of memory: an allocation of 3.0 GiB failed")) << known;
  EXPECT_TRUE(known.ends_with("; a smaller batch, length or model needs less."));
  EXPECT_TRUE(problem_of(std::bad_alloc()).starts_with("out of memory: an allocation failed"));
  const std::runtime_error torchs(
      "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
      "you tried to allocate 70368744177664 bytes. Error code 12 (Cannot allocate memory)\n"
      "frame #0: x");
  EXPECT_TRUE(problem_of(torchs).starts_with("out of memory: an allocation of 64.0 TiB failed"));
}

TEST(Problem, OfAnotherKindIsToldWithoutAStack) {
  EXPECT_EQ(problem_of(Error("a sentence.")), "a sentence.");
  EXPECT_EQ(problem_of(std::runtime_error("wrong shape.\nException raised from f at g:1")),
            "wrong shape.");
  EXPECT_EQ(problem_of(std::runtime_error("wrong.\nframe #0: f + 0x6a")), "wrong.");
}

}  // namespace
}  // namespace headloom::test::memory_test
