// What the CPU kernels of wkv read and write. No torch.
//
// Channels are independent, so that they are the vector lanes and what threads share out. Time goes
// in chunks of kChunk positions, cut where a document begins. Inside a chunk all exponentials are
// taken relative to one exponent a channel, the middle of its keys; only where keys of a chunk lie
// further apart than float32 can bear are they rescaled at every step. The backward recomputes a
// chunk from the state at its start.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::wkv_kernel {

constexpr int64_t kChunk = 32;
// Channels a task takes are a multiple of this, the last one's excepted, so that vectors hold the
// same channels whatever the number of threads.
constexpr int64_t kChannels = 64;

struct Args {
  int64_t B = 0, T = 0, C = 0;
  Type type = Type::kFloat;
  Sequence k, v, r;                                // r: none where null
  const float *decay = nullptr, *bonus = nullptr;  // w, u [C]
  const float* state = nullptr;                    // [B, 3, C] contiguous; empty where null
  const int64_t* documents = nullptr;              // [B, T] contiguous; one where null

  // Forward.
  void* out = nullptr;               // [B, T, C] contiguous
  float* end = nullptr;              // [B, 3, C]: the state after the last position
  float* checkpoints_out = nullptr;  // [B, ceil(T / kChunk), 3, C]: states before positions 0,
                                     // kChunk, ...; not kept where null

  // Backward. Gradients are contiguous, those of k, v, r in k's type.
  const float* checkpoints = nullptr;
  Sequence grad_out;
  const float* grad_end = nullptr;            // [B, 3, C]; its m is not read; none where null
  void *grad_k = nullptr, *grad_v = nullptr;  // [B, T, C]
  void* grad_r = nullptr;                     // with r
  float* grad_rates = nullptr;                // [B, 2, C]: of w and u, a batch element's part
  float* grad_state = nullptr;                // [B, 3, C], also the carried gradient of the sums
};

// Channels [begin, end) of batch element `batch`. The backward needs `scratch`, kScratch floats.
struct Task {
  int64_t batch, begin, end;
  float* scratch;
};
constexpr int64_t kScratch = 3 * kChunk * kChannels;

using Run = void(const Args&, const Task&);
Run wkv_forward_DEFAULT, wkv_forward_AVX2, wkv_forward_AVX512, wkv_forward_AVX512_BF16;
Run wkv_backward_DEFAULT, wkv_backward_AVX2, wkv_backward_AVX512, wkv_backward_AVX512_BF16;

}  // namespace headloom::ops::wkv_kernel
