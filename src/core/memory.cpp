#include "core/memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "core/error.h"
#include "core/platform.h"
#include "core/text.h"

namespace headloom {
namespace {

// Lowers `limit` where `bytes` are fewer.
void lower(MemoryLimit& limit, double bytes, const char* name) {
  if (bytes < limit.bytes) limit = {.bytes = bytes, .name = name};
}

// The number that a file begins with, or infinity: for no file and for "max".
double number_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  double number = 0;
  return file >> number ? number : std::numeric_limits<double>::infinity();
}

double physical_memory(const std::string& root) {
  std::ifstream info(root + "/proc/meminfo");
  std::string key;
  double kib = 0;
  if (info >> key >> kib && key == "MemTotal:") return kib * 1024;
  return std::numeric_limits<double>::infinity();
}

// Of the group that `path` names below `mount` and those around it. In a container the path may be
// that of the host, which is not there: the mount itself is then the container's.
void lower_by_groups(MemoryLimit& limit, const std::filesystem::path& mount,
                     const std::string& path, const char* file) {
  std::filesystem::path group = mount / std::filesystem::path(path).relative_path();
  while (true) {
    lower(limit, number_in(group / file), "the control group's limit");
    if (group == mount || !group.has_relative_path()) return;
    group = group.parent_path();
  }
}

void lower_by_groups(MemoryLimit& limit, const std::string& root) {
  // Lines such as "0::/user.slice" (version 2) and "9:memory:/docker/1" (version 1).
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    std::istringstream fields(line);
    std::string number, controllers, path;
    std::getline(fields, number, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    if (number == "0" && controllers.empty()) {
      lower_by_groups(limit, root + "/sys/fs/cgroup", path, "memory.max");
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      lower_by_groups(limit, root + "/sys/fs/cgroup/memory", path, "memory.limit_in_bytes");
    }
  }
}

// How many processes share what memory_limit() finds.
struct Sharing {
  int64_t machine = 1, control_group = 1;
};
Sharing g_sharing;

// The equal part of each of `processes`.
MemoryLimit part_of(const MemoryLimit& whole, int64_t processes) {
  if (processes == 1) return whole;
  return {.bytes = whole.bytes / static_cast<double>(processes),
          .name = str("an equal part of ", whole.name, " for each of ", processes, " processes")};
}

void lower_by_process(MemoryLimit& limit, decltype(RLIMIT_AS) resource, const char* name) {
  rlimit set{};
  if (::getrlimit(resource, &set) != 0 || set.rlim_cur == RLIM_INFINITY) return;
  lower(limit, static_cast<double>(set.rlim_cur), name);
}

}  // namespace

MemoryLimit memory_limit(const std::string& root) {
  MemoryLimit limit{.bytes = std::numeric_limits<double>::infinity(), .name = "no limit is known"};
  const MemoryLimit none = limit;
  lower(limit, physical_memory(root), "physical memory");
  limit = part_of(limit, g_sharing.machine);
  MemoryLimit of_groups = none;
  lower_by_groups(of_groups, root);
  of_groups = part_of(of_groups, g_sharing.control_group);
  if (of_groups.bytes < limit.bytes) limit = of_groups;
  lower_by_process(limit, RLIMIT_AS, "the limit of address space, ulimit -v");
  lower_by_process(limit, RLIMIT_DATA, "the limit of data, ulimit -d");
  return limit;
}

void share_memory(int64_t on_machine, int64_t in_control_group) {
  g_sharing = {on_machine, in_control_group};
}

void check_fits(const std::string& what, double bytes, const std::string& parts,
                const std::string& advice) {
  const MemoryLimit limit = memory_limit();
  if (bytes <= limit.bytes) return;
  usage_error(what, " at least ", human_bytes(bytes), " of memory by estimate (", parts,
              "), but this process can have ", human_bytes(limit.bytes), " (", limit.name, "); ",
              advice, ".");
}

PeakMemory::PeakMemory() {
  release_free_memory();  // which is not in use
  start_ = reset_peak_memory() ? process_memory("VmRSS") : -1;
}

int64_t PeakMemory::bytes() const {
  const int64_t peak = process_memory("VmHWM");
  return start_ < 0 || peak < 0 ? -1 : std::max<int64_t>(peak - start_, 0);
}

}  // namespace headloom
