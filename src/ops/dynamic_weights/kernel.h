// Free of torch. Rows are contiguous.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::dynamic_weights_kernel {

// Most weights of one side and group, 2 rank heads: the kernel keeps them on its stack.
constexpr int64_t kMostWeights = 1024;

struct Args {
  int64_t sides, groups, inner, rank, heads;  // heads: of one group
  Type type;                                  // of hidden and y
  const void* hidden;                         // [rows, sides, groups, inner]
  const float* w2;                            // [sides, groups, inner, 2 rank heads]
  void* y = nullptr;                          // [rows, sides, 2 rank, groups heads]
};

// Rows begin ... end.
using Run = void(const Args& args, int64_t begin, int64_t end);
Run run_DEFAULT, run_AVX2, run_AVX512, run_AVX512_BF16;

}  // namespace headloom::ops::dynamic_weights_kernel
