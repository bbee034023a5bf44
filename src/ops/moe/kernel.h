// What of the experts is no matrix product: the activation, and adding rows up for the tokens.
// Free of torch. Rows are contiguous.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::moe_kernel {

enum class Step {
  kActivate,  // a = SiLU(g) u
  kBackward,  // given the gradient of a without the weight: those of g and u, and of the weight; a
              // becomes weight SiLU(g) u
  kGather,    // rows of tokens, one after the other
  kCombine,   // y[n] = sum_j weight[n, j] rows[row[n, j]]
};

struct Args {
  Step step;
  Type type = Type::kFloat;
  int64_t width;                   // I; C in kGather and kCombine
  const void* h = nullptr;         // [rows, 2I]: g, u
  void* a = nullptr;               // [rows, I]; kBackward: the gradient on entry
  void* grad_h = nullptr;          // [rows, 2I]
  const float* weight = nullptr;   // [rows]; kCombine: [N, choices], or null for ones
  float* grad_weight = nullptr;    // [rows]
  const void* rows = nullptr;      // kGather: [N, C]; kCombine: [N choices, C]
  const int64_t* index = nullptr;  // kGather: a row's token; kCombine: [N, choices] rows
  int64_t choices = 0;
  void* out = nullptr;  // kGather: [rows, C]; kCombine: [N, C]
};

// Rows (kCombine: tokens) begin ... end.
using Run = void(const Args& args, int64_t begin, int64_t end);
Run run_DEFAULT, run_AVX2, run_AVX512, run_AVX512_BF16;

}  // namespace headloom::ops::moe_kernel
