// One process at a time in a folder.
#pragma once

#include <string>

#include "core/error.h"

namespace headloom {

// Another process holds the folder.
class FolderInUse : public Obstacle {
 public:
  using Obstacle::Obstacle;
};

// Holds a folder while it lives, through a lock of the system on the hidden file that lock_file()
// names. The system gives the lock back when a process ends, however it ends, so a killed one
// blocks nobody; the file says who holds the folder.
class FolderLock {
 public:
  // `folder` must be there. Throws FolderInUse "FOLDER is in use by process N on host H since TIME"
  // where another holds it, and CannotWrite where the lock's file cannot be written.
  explicit FolderLock(const std::string& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  // Whether a process holds the folder. It only asks: nothing is locked meanwhile, so a process
  // that takes the folder at this moment is not refused. A lock's file that was copied along with
  // the folder holds nothing.
  static bool is_held(const std::string& folder);

  static std::string lock_file(const std::string& folder) { return folder + "/.headloom.lock"; }

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace headloom
