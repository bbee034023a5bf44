#include "core/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace headloom {
namespace {

namespace fs = std::filesystem;

std::string system_reason() { return std::strerror(errno); }

[[noreturn]] void cannot_write(const std::string& path, const std::string& why) {
  throw CannotWrite(str(path, ": cannot be written: ", why, "."));
}

std::string folder_of(const std::string& path) {
  const std::string folder = fs::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

// The file that `path` leads to, which need not be there: a link stays and its target is written.
std::string target_of(const std::string& path) {
  fs::path target = path;
  std::error_code error;
  for (int links = 0; fs::is_symlink(target, error); ++links) {
    if (links == 40) cannot_write(path, "Too many levels of symbolic links");
    target = target.parent_path() / fs::read_symlink(target, error);
  }
  return target.string();
}

}  // namespace

void check_output_file(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    fail(path, ": is ", fs::is_directory(status) ? "a folder" : "a device, a pipe or a socket",
         ", expected the name of a file to write.");
  }
  const std::string folder = fs::absolute(folder_of(target_of(path))).lexically_normal().string();
  if (!fs::is_directory(folder, error)) fail(path, ": there is no folder ", folder, ".");
}

namespace {

// Opens the file, empty, for this process alone: another one that writes it is waited for. -1 where
// the system refuses.
int open_alone(const std::string& path) {
  while (true) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return fd;
    while (::flock(fd, LOCK_EX) != 0 && errno == EINTR) {
    }
    struct stat opened{}, there{};
    const bool same = ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &there) == 0 &&
                      opened.st_dev == there.st_dev && opened.st_ino == there.st_ino;
    if (same && ::ftruncate(fd, 0) == 0) return fd;
    ::close(fd);  // the other one has renamed it meanwhile
    if (same) return -1;
  }
}

}  // namespace

void write_file(const std::string& name, const std::function<void(const Sink&)>& produce) {
  check_output_file(name);
  const std::string path = target_of(name);
  const std::string temporary = path + ".tmp";
  const int fd = open_alone(temporary);
  if (fd < 0) cannot_write(path, system_reason());
  struct stat before{};  // of a file that is replaced, whose readers and writers stay the same
  if (::stat(path.c_str(), &before) == 0) ::fchmod(fd, before.st_mode & 07777);
  try {
    produce([&](const void* data, size_t size) {
      const char* at = static_cast<const char*>(data);
      while (size > 0) {
        const ssize_t written = ::write(fd, at, size);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) cannot_write(path, system_reason());
        at += written;
        size -= static_cast<size_t>(written);
      }
    });
    if (::fsync(fd) != 0) cannot_write(path, system_reason());
    if (::rename(temporary.c_str(), path.c_str()) != 0) cannot_write(path, system_reason());
  } catch (...) {
    ::unlink(temporary.c_str());
    ::close(fd);
    throw;
  }
  ::close(fd);
  sync_file(folder_of(path));
}

void write_file(const std::string& path, std::string_view content) {
  write_file(path, [&](const Sink& sink) { sink(content.data(), content.size()); });
}

bool is_folder(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (error && status.type() == fs::file_type::none) {
    fail(path, ": cannot be read: ", error.message(), ".");
  }
  return fs::is_directory(status);
}

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

void sync_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

std::string folder_name(const std::string& folder) {
  return fs::absolute(folder + "/").lexically_normal().parent_path().filename().string();
}

std::string read_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail(path, ": cannot be read: ", system_reason(), ".");
  std::string content;
  char buffer[1 << 16];
  while (true) {
    const ssize_t got = ::read(fd, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {  // a folder, for one
      const std::string why = system_reason();
      ::close(fd);
      fail(path, ": cannot be read: ", why, ".");
    }
    if (got == 0) break;
    content.append(buffer, static_cast<size_t>(got));
  }
  ::close(fd);
  return content;
}

void publish_folder(const std::string& from, const std::string& to) {
  sync_file(from);
  if (::rename(from.c_str(), to.c_str()) != 0) cannot_write(to, system_reason());
  sync_file(folder_of(to));
}

void make_folders(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) throw CannotWrite(str(path, ": the folder cannot be made: ", error.message(), "."));
}

}  // namespace headloom
