// Where a machine keeps what can be computed again.
#pragma once

#include <cstdlib>
#include <filesystem>

namespace headloom {

// $XDG_CACHE_HOME/headloom or ~/.cache/headloom; empty where neither is known. It need not be
// there.
inline std::filesystem::path cache_folder() {
  // A relative one is to be ignored (XDG Base Directory Specification).
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache == '/') {
    return std::filesystem::path(cache) / "headloom";
  }
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home == '\0') return {};
  return std::filesystem::path(home) / ".cache" / "headloom";
}

}  // namespace headloom
