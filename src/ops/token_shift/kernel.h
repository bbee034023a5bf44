// What the CPU kernels of token_shift read and write. No torch.
#pragma once

#include <cstdint>

#include "ops/kernel/inline.h"

namespace headloom::ops::token_shift_kernel {

constexpr int64_t kMixes = 4;  // most proportions of one call

enum class Type { kFloat, kBFloat16 };

// [B, T, C], the channels next to each other; strides in elements.
struct Sequence {
  const void* data = nullptr;
  int64_t batch = 0, time = 0;
};

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

using Run = void (*)(const Args&, const Task&);
#define HL_DECLARE(capability)                                     \
  void token_shift_forward_##capability(const Args&, const Task&); \
  void token_shift_backward_##capability(const Args&, const Task&)
HL_DECLARE(DEFAULT);
HL_DECLARE(AVX2);
HL_DECLARE(AVX512);
HL_DECLARE(AVX512_BF16);
#undef HL_DECLARE

}  // namespace headloom::ops::token_shift_kernel
