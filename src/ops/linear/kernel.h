// Free of torch. Rows are contiguous.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::linear_kernel {

struct Args {
  int64_t rows, in;
  Type type, weight_type;  // of x, bias and y: kFloat or kBFloat16; of the weights: that or kInt8
  const void* x;           // [rows, in]
  const void* weight;      // [out, in]
  const float* scale;      // [out] or null
  const void* bias;        // [out] or null
  int64_t out;             // y's row stride
  void* y = nullptr;       // [rows, out]
};

// Outputs begin ... end of every row.
using Run = void(const Args& args, int64_t begin, int64_t end);
Run run_DEFAULT, run_AVX2, run_AVX512, run_AVX512_BF16;

}  // namespace headloom::ops::linear_kernel
