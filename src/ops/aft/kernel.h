// What the CPU kernels of causal aft local read and write. No torch.
//
// A task is kChannels channels of one sequence. Time goes in chunks of kChunk positions, cut where
// a document begins. With X_s = [e^{k_s} v_s | e^{k_s}], all relative to one exponent a chunk and
// channel, the sums of a chunk are a banded matrix of e^w times X, and the running sum of all X
// before the band. Only where keys lie further apart than float32 can bear does each position take
// an exponent of its own. The backward recomputes a chunk from the running sum at its start.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::aft_kernel {

constexpr int64_t kChunk = 32;
constexpr int64_t kChannels = 64;
constexpr int64_t kRows = 8;  // queries of one banded product

struct Args {
  int64_t B = 0, T = 0, C = 0, W = 1;
  Type type = Type::kFloat;
  Sequence q, k, v;
  const float *bias = nullptr, *weight = nullptr;  // w and e^w, [L, W] contiguous
  bool mild = true;                                // every e^w is a comfortable float
  int64_t offset = 0;                              // position of the first in its document
  const float* state = nullptr;                    // [B, 3 + 2(W - 1), C]; empty where null
  const int64_t* documents = nullptr;              // [B, T] contiguous; one where null

  // Forward.
  void* out = nullptr;               // [B, T, C] contiguous
  float* end = nullptr;              // as state, after the last position
  float* checkpoints_out = nullptr;  // [B, ceil(T / kChunk), 3, C]: running sums before positions
                                     // 0, kChunk, ...; not kept where null

  // Backward. Gradients are contiguous, those of q, k, v in their type.
  const float* checkpoints = nullptr;
  Sequence grad_out;
  const float* grad_end = nullptr;                               // none where null
  void *grad_q = nullptr, *grad_k = nullptr, *grad_v = nullptr;  // [B, T, C]
  float* grad_bias = nullptr;   // [workers, L, W], zeroed by the caller
  float* grad_state = nullptr;  // as state; none where null
  int64_t bias_size = 0;        // L W
};

// kChannels channels from `channel` on of batch element `batch`, by worker `worker`. `scratch`:
// scratch_size() floats.
struct Task {
  int64_t batch, channel, worker;
  float* scratch;
};

int64_t scratch_size(int64_t window, bool backward);

using Run = void(const Args&, const Task&);
Run aft_forward_DEFAULT, aft_forward_AVX2, aft_forward_AVX512, aft_forward_AVX512_BF16;
Run aft_backward_DEFAULT, aft_backward_AVX2, aft_backward_AVX512, aft_backward_AVX512_BF16;

}  // namespace headloom::ops::aft_kernel
