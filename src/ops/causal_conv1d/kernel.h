// What the causal convolution's kernels take. No torch.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::causal_conv1d_kernel {

constexpr int64_t kMaxTaps = 8;

struct Args {
  int64_t B = 0, L = 0, C = 0, taps = 1;
  Type type = Type::kFloat;
  bool silu = false;
  Sequence x;
  const float* weight = nullptr;       // [taps, C]: row k meets the position k before
  const float* bias = nullptr;         // [C] or null
  const void* state = nullptr;         // [B, taps - 1, C] or null
  const int64_t* documents = nullptr;  // [B, L] or null
  void* out = nullptr;                 // [B, L, C]

  // Backward only.
  Sequence grad_out;
  void *grad_x = nullptr, *grad_state = nullptr;  // like x and state; grad_state with the state
  // One summand for each worker, zero at first: [workers, taps, C] and [workers, C].
  float *grad_weight = nullptr, *grad_bias = nullptr;
};

struct Task {
  bool backward = false;
  int64_t worker = 0, begin = 0, end = 0;  // positions of all sequences, one after the other
  float* scratch = nullptr;                // taps * C
};

using Run = void(const Args& args, const Task& task);
Run run_DEFAULT, run_AVX2, run_AVX512, run_AVX512_BF16;

}  // namespace headloom::ops::causal_conv1d_kernel
