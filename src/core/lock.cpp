#include "core/lock.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <sstream>

#include "core/files.h"

namespace headloom {
namespace {

// Who holds a folder, as the lock's file says it; process 0: it says nothing.
struct Holder {
  pid_t process = 0;
  std::string host, since;
};

Holder this_process() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  std::array<char, 32> since{};
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  std::strftime(since.data(), since.size(), "%Y-%m-%d %H:%M:%S", ::localtime_r(&now, &local));
  return {::getpid(), host.data(), since.data()};
}

Holder read_holder(int fd) {
  std::array<char, 512> text{};
  const ssize_t got = ::pread(fd, text.data(), text.size() - 1, 0);
  std::istringstream lines(got > 0 ? std::string(text.data(), static_cast<size_t>(got)) : "");
  Holder holder;
  lines >> holder.process;
  lines.ignore();
  std::getline(lines, holder.host);
  std::getline(lines, holder.since);
  return lines ? holder : Holder{};
}

// Whether the file stands on a file system that other hosts write to as well. Their locks may be
// unknown here (NFS mounted with local locks, some clusters' file systems).
bool is_shared(int fd) {
  struct statfs info{};
  if (::fstatfs(fd, &info) != 0) return true;
  switch (static_cast<uint32_t>(info.f_type)) {
    case 0x6969:      // NFS
    case 0x517B:      // SMB
    case 0xFE534D42:  // SMB 2
    case 0xFF534D42:  // CIFS
    case 0x0BD00BD0:  // Lustre
    case 0x00C36400:  // Ceph
    case 0x47504653:  // GPFS
    case 0x19830326:  // BeeGFS
    case 0x65735546:  // FUSE
    case 0x01021997:  // 9P
      return true;
    default:
      return false;
  }
}

// Whether a holder that the file names is to be believed, though no lock of its is seen.
// `has_locks`: the file system has locks.
bool is_believed(const Holder& holder, bool has_locks, int fd) {
  if (holder.process == 0) return false;
  const bool here = holder.host == this_process().host;
  const bool ended = here && (::kill(holder.process, 0) != 0 && errno == ESRCH);
  const bool seen_if_locked = has_locks && (here || !is_shared(fd));
  return !seen_if_locked && !ended;
}

// A lock of this kind, unlike that of flock(), can be asked for without being taken. It belongs to
// the opened file too, so it ends with the process and is not lost where the process opens and
// closes the file once more. The first byte stands for the file.
struct flock byte_lock(int16_t type) {
  struct flock out{};
  out.l_type = type;
  out.l_whence = SEEK_SET;
  out.l_len = 1;
  return out;
}

// Whether the opened file is the one at `path`.
bool is_present(int fd, const std::string& path) {
  struct stat opened{}, present{};
  return ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &present) == 0 &&
         opened.st_ino == present.st_ino && opened.st_dev == present.st_dev;
}

[[noreturn]] void refuse(const std::string& folder, const Holder& holder, bool may_be_over) {
  const std::string path = FolderLock::lock_file(folder);
  if (holder.process == 0) {
    throw FolderInUse(str(folder, " is in use by another process, which holds ", path, "."));
  }
  throw FolderInUse(str(folder, " is in use by process ", holder.process, " on host ", holder.host,
                        " since ", holder.since,
                        may_be_over ? str("; if that process has ended, remove ", path, ".")
                                    : std::string("; wait until it ends, or end it.")));
}

}  // namespace

FolderLock::FolderLock(const std::string& folder) : path_(lock_file(folder)) {
  bool has_locks = true;
  while (true) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd_ < 0) throw CannotWrite(str(path_, ": cannot be written: ", std::strerror(errno), "."));
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) {
        Holder holder = read_holder(fd_);
        // Between taking the lock and writing the file lies a moment.
        for (int i = 0; i < 100 && holder.process == 0; ++i) {
          ::usleep(5000);
          holder = read_holder(fd_);
        }
        ::close(fd_);
        refuse(folder, holder, /*may_be_over=*/false);
      }
      has_locks = false;  // the file system has none: its content must do
    }
    // The holder before removes the file as it ends; a lock on a removed file holds nothing.
    if (is_present(fd_, path_)) break;
    ::close(fd_);
  }
  const Holder before = read_holder(fd_), now = this_process();
  if (is_believed(before, has_locks, fd_)) {
    ::close(fd_);
    refuse(folder, before, /*may_be_over=*/true);
  }
  struct flock shown = byte_lock(F_WRLCK);
  ::fcntl(fd_, F_OFD_SETLK, &shown);  // for is_held(), which otherwise goes by what the file says
  const std::string text = str(now.process, "\n", now.host, "\n", now.since, "\n");
  if (::ftruncate(fd_, 0) != 0 ||
      ::pwrite(fd_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    const std::string why = std::strerror(errno);
    ::unlink(path_.c_str());
    ::close(fd_);
    throw CannotWrite(str(path_, ": cannot be written: ", why, "."));
  }
}

bool FolderLock::is_held(const std::string& folder) {
  const int fd = ::open(lock_file(folder).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  struct flock found = byte_lock(F_RDLCK);
  const bool has_locks = ::fcntl(fd, F_OFD_GETLK, &found) == 0;
  const bool held =
      (has_locks && found.l_type != F_UNLCK) || is_believed(read_holder(fd), has_locks, fd);
  ::close(fd);
  return held;
}

FolderLock::~FolderLock() {
  // Where the folder was moved or removed meanwhile, another one's lock may be there.
  if (is_present(fd_, path_)) ::unlink(path_.c_str());
  ::close(fd_);
}

}  // namespace headloom
