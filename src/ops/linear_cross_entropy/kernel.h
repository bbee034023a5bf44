// The softmax of some positions' scores. Free of torch.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::linear_cross_entropy_kernel {

struct Args {
  int64_t classes = 0;  // V
  Type type = Type::kFloat;
  bool gradient = false;   // the scores become softmax(scores) less 1 at the target
  void* scores = nullptr;  // [rows, V], `apart` values from row to row
  int64_t apart = 0;
  const int64_t* targets = nullptr;  // [rows], each a class
  float* sums = nullptr;             // [rows]: the sum of exp(score - largest score)
  float* below = nullptr;            // [rows]: the largest score less the target's
  int64_t* best = nullptr;           // [rows]: the first class with the largest score
};

// Rows begin ... end.
using Run = void(const Args& args, int64_t begin, int64_t end);
Run run_DEFAULT, run_AVX2, run_AVX512, run_AVX512_BF16;

}  // namespace headloom::ops::linear_cross_entropy_kernel
