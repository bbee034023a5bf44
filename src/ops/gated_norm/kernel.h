// Free of torch. Rows are contiguous.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::gated_norm_kernel {

struct Args {
  int64_t width;  // E
  Type type = Type::kFloat;
  const void *x, *gate;        // [rows, E]
  const float* eps;            // [rows]
  void* y = nullptr;           // forward
  const void* grad = nullptr;  // backward: of y
  void *grad_x = nullptr, *grad_gate = nullptr;
};

// Rows begin ... end: the backward where there is a gradient, else the forward.
using Run = void(const Args& args, int64_t begin, int64_t end);
Run run_DEFAULT, run_AVX2, run_AVX512, run_AVX512_BF16;

}  // namespace headloom::ops::gated_norm_kernel
