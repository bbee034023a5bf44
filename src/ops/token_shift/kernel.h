// What the CPU kernels of token_shift read and write. No torch.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::token_shift_kernel {

constexpr int64_t kMixes = 4;  // most proportions of one call

struct Args {
  int64_t B = 0, T = 0, C = 0, N = 0;
  Type type = Type::kFloat;
  Sequence x;
  const float* mix = nullptr;          // [N, C] contiguous
  const void* last = nullptr;          // [B, C] contiguous; zero where null
  const int64_t* documents = nullptr;  // [B, T] contiguous; one where null

  void* out[kMixes] = {};  // forward: each [B, T, C] contiguous

  Sequence grad_out[kMixes];  // backward
  void* grad_x = nullptr;     // [B, T, C]
  void* grad_last = nullptr;  // [B, C], with `last`
  float* grad_mix = nullptr;  // [workers, N, C], zeroed by the caller
};

// Positions [begin, end) of all B T, done by one worker.
struct Task {
  int64_t begin, end, worker;
};

using Run = void(const Args&, const Task&);
Run token_shift_forward_DEFAULT, token_shift_forward_AVX2, token_shift_forward_AVX512,
    token_shift_forward_AVX512_BF16;
Run token_shift_backward_DEFAULT, token_shift_backward_AVX2, token_shift_backward_AVX512,
    token_shift_backward_AVX512_BF16;

}  // namespace headloom::ops::token_shift_kernel
