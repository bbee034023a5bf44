// Files that are either whole or absent: written to a temporary name, synced, renamed.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "core/error.h"

namespace headloom {

// A file or folder cannot be written: the place is at fault, and not what was to be written there.
class CannotWrite : public Obstacle {
 public:
  using Obstacle::Obstacle;
};

// Throws Error where `path` cannot be written as a file: where it is a folder, a device, a pipe or
// a socket, or its folder is not there. write_file() checks that too; a command that works for long
// before it writes asks first.
void check_output_file(const std::string& path);

// Replaces `path`, or the file that it links to, by `content`. Throws CannotWrite naming the path
// and the system's reason (a full disk, say); what stood at `path` before is then untouched.
void write_file(const std::string& path, std::string_view content);

// Has the system write to its disk what it keeps of a file, or of a folder's entries, in memory.
// Does nothing where that is not possible, as with folders on some file systems.
void sync_file(const std::string& path);

// Whether there is a folder (or what a link leads to). Throws Error where the system does not tell,
// as without permission.
bool is_folder(const std::string& path);
// Whether there is a file (or what a link leads to). False too where the system does not tell, as
// without permission; reading the file then gives the reason.
bool is_there(const std::string& path);

// The last part of a folder's path, also of "runs/a/" and "."; "" of "/".
std::string folder_name(const std::string& folder);

// The content of a file. Throws Error naming the path and the system's reason.
std::string read_file(const std::string& path);

// Writes through a sink that appends bytes, then renames, as write_file does.
using Sink = std::function<void(const void* data, size_t size)>;
void write_file(const std::string& path, const std::function<void(const Sink&)>& produce);

// Makes a finished folder `from` appear as `to` (which must not exist), surviving a power cut.
// Throws CannotWrite.
void publish_folder(const std::string& from, const std::string& to);

// Throws CannotWrite.
void make_folders(const std::string& path);

}  // namespace headloom
