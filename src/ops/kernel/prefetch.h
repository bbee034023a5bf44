// Rows that no prefetcher of the machine foresees, because they lie far apart.
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

}  // namespace
}  // namespace headloom::ops
