// Transposes of small matrices, four by four: the same code for every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/kernel/inline.h"

namespace headloom::ops {
namespace {

// to[j * to_line + i] = from[i * from_line + j] for i < rows, j < columns, both multiples of 4. A
// cache line of four rows is moved at a time. What stands kAhead floats after it is fetched
// meanwhile, because a processor does not foresee so many rows by itself.
template <int64_t kAhead = 0>
void transpose(int64_t rows, int64_t columns, const float* from, int64_t from_line, float* to,
               int64_t to_line) {
  using Four = float __attribute__((vector_size(16)));
  constexpr int64_t kLine = 64 / sizeof(float);
  for (int64_t line = 0; line < columns; line += kLine) {
    const int64_t end = line + kLine < columns ? line + kLine : columns;
    for (int64_t i = 0; i < rows; i += 4) {
      if constexpr (kAhead > 0) {
        for (int r = 0; r < 4; ++r) __builtin_prefetch(from + (i + r) * from_line + line + kAhead);
      }
      for (int64_t j = line; j < end; j += 4) {
        Four x[4];
        for (int r = 0; r < 4; ++r) {
          std::memcpy(&x[r], from + (i + r) * from_line + j, sizeof(Four));
        }
        const Four a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5);
        const Four b = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
        const Four c = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
        const Four d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
        const Four y[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5),
                           __builtin_shufflevector(a, b, 2, 3, 6, 7),
                           __builtin_shufflevector(c, d, 0, 1, 4, 5),
                           __builtin_shufflevector(c, d, 2, 3, 6, 7)};
        for (int r = 0; r < 4; ++r) {
          std::memcpy(to + (j + r) * to_line + i, &y[r], sizeof(Four));
        }
      }
    }
  }
}

}  // namespace
}  // namespace headloom::ops
