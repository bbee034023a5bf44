// One process at a time in a folder.
#include "core/lock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <optional>
#include <thread>

#include "core/error.h"
#include "testing/errors.h"
#include "testing/temp_folder.h"

namespace headloom::lock_test {
namespace {

namespace fs = std::filesystem;
using test::bytes_of;
using test::contains;
using test::message_of;
using test::TempFolder;

std::string host() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::string refusal(const std::string& folder) {
  return message_of([&] { const FolderLock lock(folder); });
}

TEST(Lock, TheSecondIsToldWhoHoldsIt) {
  const TempFolder folder;
  std::optional<FolderLock> lock(folder.path());
  const std::string message = refusal(folder.path());
  EXPECT_TRUE(contains(message, str(folder.path(), " is in use by process ", ::getpid(),
                                    " on host ", host(), " since 20")))
      << message;
  // Neither the refusal nor asking has taken the lock away.
  EXPECT_TRUE(FolderLock::is_held(folder.path()));
  EXPECT_TRUE(FolderLock::is_held(folder.path()));
  lock.reset();
  EXPECT_FALSE(FolderLock::is_held(folder.path()));
  EXPECT_TRUE(fs::is_empty(folder.path()));
  lock.emplace(folder.path());
  EXPECT_TRUE(contains(bytes_of(FolderLock::lock_file(folder.path())), host()));
}

TEST(Lock, AKilledProcessBlocksNobody) {
  const TempFolder folder;
  std::array<int, 2> ready{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const FolderLock lock(folder.path());
    [[maybe_unused]] const ssize_t written = ::write(ready[1], "x", 1);
    while (true) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_TRUE(FolderLock::is_held(folder.path()));
  EXPECT_TRUE(contains(refusal(folder.path()), str("is in use by process ", child, " on host")));
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(fs::exists(FolderLock::lock_file(folder.path()))) << "what the killed one left";
  EXPECT_FALSE(FolderLock::is_held(folder.path()));
  {
    const FolderLock lock(folder.path());
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(Lock, AskingRefusesNobody) {
  const TempFolder folder;
  std::atomic<bool> done = false;
  std::thread asks([&] {
    while (!done) FolderLock::is_held(folder.path());
  });
  for (int i = 0; i < 200; ++i) EXPECT_NO_THROW(const FolderLock lock(folder.path()));
  done = true;
  asks.join();
}

// What a folder brings with it that was copied while another machine worked in it.
TEST(Lock, WhatAnotherHostLeftOnADiskOfItsOwnBlocksNobody) {
  const TempFolder folder;
  for (const char* left : {"1\nelsewhere\n2020-01-01 00:00:00\n", "", "nonsense", "1\n"}) {
    folder.write(".headloom.lock", left);
    EXPECT_FALSE(FolderLock::is_held(folder.path()));
    const FolderLock lock(folder.path());
    EXPECT_TRUE(contains(bytes_of(FolderLock::lock_file(folder.path())),
                         str(::getpid(), "\n", host(), "\n")));
  }
}

TEST(Lock, NamesAFolderThatCannotBeWritten) {
  const TempFolder folder;
  EXPECT_TRUE(
      contains(refusal(folder.path("missing")), "missing/.headloom.lock: cannot be written"));
}

}  // namespace
}  // namespace headloom::lock_test
