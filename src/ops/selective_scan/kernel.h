// What the selective scan's kernels take. No torch.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::selective_scan_kernel {

constexpr int64_t kChannels =
    32;                         // a block: what one task computes, from the first step to the last
constexpr int64_t kSteps = 32;  // a chunk: what the backward recomputes from a kept state

struct Args {
  int64_t B = 0, L = 0, channels = 0, groups = 1, states = 0;
  Type type = Type::kFloat;
  bool softplus = false;
  bool constant_b = false, constant_c = false;
  Sequence u, delta, z;
  const float* A = nullptr;     // [N, channels]
  const float* D = nullptr;     // [channels] or null
  const float* bias = nullptr;  // [channels] or null
  const float* b = nullptr;     // [B, G, N, L]; constant: [N, channels]
  const float* c = nullptr;
  const int64_t* documents = nullptr;  // [B, L] or null
  const float* state = nullptr;        // [B, N, channels], null: zero
  void* out = nullptr;                 // [B, L, channels]
  float* last = nullptr;               // [B, N, channels]
  // The state before each chunk, [B, ceil(L / kSteps), N, channels]: written by the forward where
  // not null, read by the backward.
  float* kept = nullptr;

  // Backward only.
  Sequence grad_out;
  const float* grad_last = nullptr;                                  // [B, N, channels], null: zero
  void *grad_u = nullptr, *grad_delta = nullptr, *grad_z = nullptr;  // [B, L, channels]
  // One summand for each batch row: [B, N, channels] and [B, channels].
  float *grad_A = nullptr, *grad_D = nullptr, *grad_bias = nullptr;
  // One summand for each worker, zero at first: [workers, B, G, N, L]; constant: [B, N, channels].
  float *grad_b = nullptr, *grad_c = nullptr;
  float* grad_state = nullptr;  // [B, N, channels]
};

// Blocks are numbered batch row by batch row, group by group.
inline int64_t blocks_of_group(const Args& a) {
  return (a.channels / a.groups + kChannels - 1) / kChannels;
}
inline int64_t block_count(const Args& a) { return a.B * a.groups * blocks_of_group(a); }

// Neighbouring blocks go through the sequence together, chunk by chunk, so that each page of the
// inputs is visited once: as many as keep what they carry from chunk to chunk in cache.
inline int64_t blocks_together(const Args& a) {
  return a.states < 16 ? 32 : a.states < 512 ? 512 / a.states : 1;
}
// Floats that a block carries.
inline int64_t carried(const Args& a) { return (5 * a.states + 2) * kChannels; }

struct Task {
  bool backward = false;
  int64_t worker = 0, begin = 0, end = 0;  // blocks
  float* scratch = nullptr;                // blocks_together * carried
};

using Run = void(const Args& args, const Task& task);
Run run_DEFAULT, run_AVX2, run_AVX512, run_AVX512_BF16;

}  // namespace headloom::ops::selective_scan_kernel
