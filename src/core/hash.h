// A short name for a text, the same on every machine.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/error.h"

namespace headloom {

// FNV-1a of 64 bits in hexadecimal digits. It tells texts apart that differ by accident, and is no
// protection against those that somebody has made alike.
inline std::string hash_text(std::string_view text) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return str(std::hex, hash);
}

}  // namespace headloom
