// Fetching what no prefetcher of the machine foresees, or not far enough ahead.
#pragma once

#include <cstdint>

#include "ops/kernel/inline.h"

namespace headloom::ops {
namespace {

// Asks for the lines of `width` values; kLocality as in __builtin_prefetch, 2 for the second-level
// cache and 3 for the first. Inlined always: the compiler drops calls of a function that only
// prefetches.
template <int kLocality = 2, typename T>
HL_INLINE void prefetch_row(const T* row, int64_t width) {
  const char* const bytes = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < width * static_cast<int64_t>(sizeof(T)); i += 64) {
    __builtin_prefetch(bytes + i, 0, kLocality);
  }
}

// Asks for a line of what is read once: past the second-level cache, where everything else that is
// read again would make room for it, or into it (fetches_past_cache() in capability.h).
HL_INLINE void prefetch_once(const void* line, bool past_cache) {
  past_cache ? __builtin_prefetch(line, 0, 0) : __builtin_prefetch(line, 0, 2);
}

}  // namespace
}  // namespace headloom::ops
