// Files that are whole or absent; small text helpers.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <cmath>
#include <cstdio>
#include <filesystem>

#include "core/files.h"
#include "core/shell.h"
#include "core/text.h"
#include "testing/errors.h"
#include "testing/file_limit.h"
#include "testing/temp_folder.h"

namespace headloom::files_text_test {
namespace {

namespace fs = std::filesystem;
using test::bytes_of;
using test::contains;
using test::FileSizeLimit;
using test::message_of;
using test::TempFolder;

size_t entries(const std::string& folder) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(folder), {}));
}

TEST(Files, WriteReplacesAndLeavesNothingElse) {
  const TempFolder folder;
  const std::string path = folder.path("a.txt");
  write_file(path, "first");
  write_file(path, std::string("sec\0nd", 6));
  EXPECT_EQ(read_file(path), std::string("sec\0nd", 6));
  write_file(path, "");
  EXPECT_EQ(read_file(path), "");
  EXPECT_EQ(entries(folder.path()), 1u);
}

TEST(Files, WhatIsReplacedKeepsItsPermissions) {
  const TempFolder folder;
  const std::string path = folder.path("a.txt");
  write_file(path, "first");
  for (const auto mode :
       {fs::perms::owner_read | fs::perms::owner_write,
        fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_write}) {
    fs::permissions(path, mode);
    write_file(path, "second");
    EXPECT_EQ(fs::status(path).permissions(), mode);
  }
}

TEST(Files, AnExceptionWhileWritingKeepsTheOldContent) {
  const TempFolder folder;
  const std::string path = folder.path("a.txt");
  write_file(path, "old");
  EXPECT_THROW(write_file(path,
                          [](const Sink& sink) {
                            sink("half", 4);
                            fail("stopped");
                          }),
               Error);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(entries(folder.path()), 1u) << "the half-written file is still there";
}

TEST(Files, AFullDiskKeepsTheOldContentAndSaysWhy) {
  const TempFolder folder;
  const std::string path = folder.path("a.txt");
  write_file(path, "old");
  std::string message;
  {
    const FileSizeLimit limit(1000);
    message = message_of([&] { write_file(path, std::string(5000, 'x')); });
  }
  EXPECT_TRUE(contains(message, path));
  EXPECT_TRUE(contains(message, "File too large"));
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(entries(folder.path()), 1u);
}

TEST(Files, ErrorsNameThePath) {
  const TempFolder folder;
  EXPECT_TRUE(contains(message_of([&] { read_file(folder.path("no")); }), "no: cannot be read"));
  EXPECT_TRUE(contains(message_of([&] { read_file(folder.path()); }), "cannot be read: Is a dir"));
  EXPECT_TRUE(
      contains(message_of([&] { write_file(folder.path("no/x"), "y"); }), "there is no folder"));
  folder.write("file", "x");
  EXPECT_TRUE(contains(message_of([&] { make_folders(folder.path("file/sub")); }), "file/sub"));
  fs::create_directory(folder.path("folder"));
  EXPECT_TRUE(contains(message_of([&] { write_file(folder.path("folder"), "y"); }), "folder: "));
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    EXPECT_NE(entry.path().extension(), ".tmp");
  }
  EXPECT_FALSE(is_folder(folder.path("no")));
  EXPECT_TRUE(contains(message_of([&] { is_folder(folder.path(std::string(300, 'x'))); }),
                       "x: cannot be read: File name too long."));
}

TEST(Files, WhatIsNoRegularFileStaysWhatItIs) {
  const TempFolder folder;
  const std::string pipe = folder.path("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  fs::create_symlink("pipe", folder.path("link"));
  for (const char* name : {"pipe", "link"}) {
    const std::string path = folder.path(name);
    for (const std::string& said : {message_of([&] { write_file(path, "x"); }),
                                    message_of([&] { check_output_file(path); })}) {
      EXPECT_EQ(said, path + ": is a device, a pipe or a socket, expected the name of a file to "
                             "write.");
    }
  }
  EXPECT_TRUE(fs::is_fifo(fs::symlink_status(pipe)));
  EXPECT_TRUE(fs::is_symlink(folder.path("link")));
  EXPECT_TRUE(contains(message_of([&] { check_output_file(folder.path()); }), "is a folder"));
  EXPECT_TRUE(contains(message_of([&] { check_output_file(folder.path("no/x")); }),
                       "no/x: there is no folder " + folder.path("no") + "."));
  check_output_file(folder.path("new"));
}

TEST(Files, ALinkStaysAndItsTargetIsWritten) {
  const TempFolder folder;
  fs::create_directory(folder.path("sub"));
  fs::create_symlink("sub/second", folder.path("first"));
  fs::create_symlink(folder.path("sub/file"), folder.path("sub/second"));
  for (const char* text : {"new", "old"}) {  // the target is not there, and is
    write_file(folder.path("first"), text);
    EXPECT_TRUE(fs::is_symlink(folder.path("first")));
    EXPECT_TRUE(fs::is_symlink(folder.path("sub/second")));
    EXPECT_FALSE(fs::is_symlink(folder.path("sub/file")));
    EXPECT_EQ(bytes_of(folder.path("sub/file")), text);
  }
  EXPECT_EQ(entries(folder.path()), 2u);
  EXPECT_EQ(entries(folder.path("sub")), 2u);
  fs::create_symlink("circle", folder.path("circle"));
  EXPECT_TRUE(contains(message_of([&] { write_file(folder.path("circle"), "x"); }),
                       "circle: cannot be written: Too many levels of symbolic links."));
}

TEST(Files, PublishedFoldersAppearWhole) {
  const TempFolder folder;
  folder.write("writing/a", "1");
  publish_folder(folder.path("writing"), folder.path("done"));
  EXPECT_FALSE(fs::exists(folder.path("writing")));
  EXPECT_EQ(bytes_of(folder.path("done/a")), "1");
  folder.write("again/a", "2");
  EXPECT_TRUE(contains(
      message_of([&] { publish_folder(folder.path("again"), folder.path("done")); }), "done"));
  EXPECT_EQ(bytes_of(folder.path("done/a")), "1");
}

TEST(Text, NearestIsAPlausibleMisspelling) {
  const std::vector<std::string> keys = {"steps", "batch", "lr", "weight_decay", "mha"};
  EXPECT_EQ(nearest("step", keys), "steps");
  EXPECT_EQ(nearest("stpes", keys), "steps");
  EXPECT_EQ(nearest("weight-decay", keys), "weight_decay");
  EXPECT_EQ(nearest("mah", keys), "mha");
  EXPECT_EQ(nearest("lr2", keys), "lr");
  EXPECT_EQ(nearest("temperature", keys), "");
  EXPECT_EQ(nearest("xy", keys), "") << "nothing in common";
  EXPECT_EQ(nearest("tied", {"kind", "width"}), "") << "half of it is other";
  EXPECT_EQ(nearest("", keys), "");
  EXPECT_EQ(nearest("steps", {}), "");
}

TEST(Text, NumbersForPeople) {
  EXPECT_EQ(counted(0, "file"), "0 files");
  EXPECT_EQ(counted(1, "file"), "1 file");
  EXPECT_EQ(counted(2, "file"), "2 files");
  EXPECT_EQ(formatted("%.4f", -1e-9), "0.0000");
  EXPECT_EQ(formatted("%+.4f", -1e-9), "+0.0000");
  EXPECT_EQ(formatted("%.4f", -0.25), "-0.2500");
  EXPECT_EQ(formatted("%.3f", -INFINITY), "-inf");
  EXPECT_EQ(human_count(0), "0");
  EXPECT_EQ(human_count(999), "999");
  EXPECT_EQ(human_count(1234567), "1.23M");
  EXPECT_EQ(human_count(1500), "1.5k");
  EXPECT_EQ(human_count(2.5e12), "2.5T");
  EXPECT_EQ(human_count(999999), "1M") << "not 1e+03k";
  EXPECT_EQ(human_seconds(0), "0s");
  EXPECT_EQ(human_seconds(0.0936), "0.094s");
  EXPECT_EQ(human_seconds(0.96), "1s");
  EXPECT_EQ(human_seconds(4.2), "4s");
  EXPECT_EQ(human_seconds(59.6), "1m00s");
  EXPECT_EQ(human_seconds(75), "1m15s");
  EXPECT_EQ(human_seconds(3661), "1h01m");
  EXPECT_EQ(human_bytes(512), "512 B");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_bytes(3.0 * 1024 * 1024), "3.0 MiB");
  EXPECT_EQ(join({"a", "b"}), "a, b");
  EXPECT_EQ(join({"", "b"}), ", b") << "an empty word is a word";
  EXPECT_EQ(join({}), "");
}

TEST(Shell, ReadsAWordBackAsItWas) {
  EXPECT_EQ(shell_word("runs/text-1.toml"), "runs/text-1.toml");
  EXPECT_EQ(shell_word(""), "''");
  EXPECT_EQ(shell_word("it's"), "'it'\\''s'");
  for (const std::string word : {"a b", "it's", "\"x\" `y` $HOME \\ ~", "a=[\"b\"]",
                                 "*?{}<>|&;()#!", "\n\t", "-x", "é", "'"}) {
    const std::string command = "printf %s " + shell_word(word);
    FILE* pipe = ::popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    std::string read;
    for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) read += static_cast<char>(c);
    ::pclose(pipe);
    EXPECT_EQ(read, word) << command;
  }
}

}  // namespace
}  // namespace headloom::files_text_test
