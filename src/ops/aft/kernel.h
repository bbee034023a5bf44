// What the CPU kernels of causal aft read and write. No torch.
//
// Local and conv, whose w ends with the window. A task is kChannels channels of one sequence. Time
// goes in chunks of kChunk positions, cut where a document begins. With X_s = [e^{k_s} v_s |
// e^{k_s}], all relative to one exponent a chunk and channel, the sums of a chunk are a banded
// matrix of e^w times X, and the running sum of all X before the band. Only where keys lie further
// apart than float32 can bear does each position take an exponent of its own. The backward
// recomputes a chunk from the running sum at its start.
//
// Full, whose w is a table of all pairs. Chunks are of kFullChunk queries, and the sums of a chunk
// are rows of e^w times X of all keys so far, a chunk of keys at a time, relative to one exponent
// near the largest key up to the chunk's end: its first query sees nearly as large a one, or each
// query takes an exponent of its own. The forward keeps the sums. The backward makes the gradients
// of the sums, then those of each chunk of keys, then those of kFullChunk rows of w, and none of
// these tasks shares what it writes.
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
  const float *bias = nullptr, *weight = nullptr;  // w and e^w, contiguous: local's [L, W]
  bool by_distance = false;                        // or conv's [H, W]
  bool mild = true;                                // every e^w is a comfortable float
  int64_t offset = 0;                              // position of the first in its document
  const float* state = nullptr;                    // [B, 3 + 2(W - 1), C]; empty where null
  const int64_t* documents = nullptr;              // [B, T] contiguous; one where null

  // Forward.
  void* out = nullptr;               // [B, T, C] contiguous
  float* end = nullptr;              // as state, after the last position; not wanted where null
  float* checkpoints_out = nullptr;  // [B, ceil(T / kChunk), 3, C]: running sums before positions
                                     // 0, kChunk, ...; not kept where null

  // Backward. Gradients are contiguous, those of q, k, v in their type.
  const float* checkpoints = nullptr;
  Sequence grad_out;
  const float* grad_end = nullptr;                               // none where null
  void *grad_q = nullptr, *grad_k = nullptr, *grad_v = nullptr;  // [B, T, C]
  float* grad_bias = nullptr;   // [workers, L or H, W], zeroed by the caller
  float* grad_state = nullptr;  // as state; none where null
  int64_t bias_size = 0;        // of one worker
};

// `count` channels, at most kChannels, from `channel` on of batch element `batch`; of one head, if
// there are any. By worker `worker`. `scratch`: scratch_size() floats.
struct Task {
  int64_t batch, channel, count, head, worker;
  float* scratch;
};

int64_t scratch_size(int64_t window, bool backward);

using Run = void(const Args&, const Task&);
Run aft_forward_DEFAULT, aft_forward_AVX2, aft_forward_AVX512, aft_forward_AVX512_BF16;
Run aft_backward_DEFAULT, aft_backward_AVX2, aft_backward_AVX512, aft_backward_AVX512_BF16;

constexpr int64_t kFullChunk = 64;

// Queries [from, to) of one document; no chunk reaches over a multiple of kFullChunk in it.
struct Chunk {
  int64_t batch, from, to;
  int64_t place;        // of `from` in its document
  int64_t first, last;  // the document's chunks
};

struct FullArgs {
  int64_t T = 0, C = 0;
  Type type = Type::kFloat;
  Sequence q, k, v;
  // w and e^w of a query and a key at their places in the document; each row's values adjacent.
  const float *bias = nullptr, *weight = nullptr;
  int64_t bias_line = 0, weight_line = 0;
  bool mild = true;
  const Chunk* chunks = nullptr;
  int64_t chunk_count = 0;

  void* out = nullptr;  // [B, T, C] contiguous
  // [B, groups of kChannels, T, 3, kChannels]: sums of every position with v and without, and their
  // exponent. Not kept where null.
  float* sums_out = nullptr;

  // Backward. Gradients are contiguous, those of q, k, v in their type.
  const float* sums = nullptr;
  Sequence grad_out;
  float* grad_sums = nullptr;  // [B, groups, T, 2, kChannels]
  // [chunks, groups]: whether the positions have exponents of their own, or gradients that are not
  // finite.
  bool* alone = nullptr;
  void *grad_q = nullptr, *grad_k = nullptr, *grad_v = nullptr;  // [B, T, C]
  float* grad_bias = nullptr;                                    // zeroed by the caller
  int64_t grad_line = 0;

  HL_INLINE int64_t groups() const { return (C + kChannels - 1) / kChannels; }
};

// Task i is for channels kChannels (i % groups) on of chunk i / groups, with kFullScratch floats of
// scratch. Task i of aft_full_bias is for rows kFullChunk i on of w, with full_scratch_bias()
// floats.
constexpr int64_t kFullScratch = kFullChunk * (kFullChunk + 6 * kChannels);
HL_INLINE int64_t full_scratch_bias(int64_t places) {
  return kFullScratch + kFullChunk * (places + kFullChunk);
}

using RunFull = void(const FullArgs&, int64_t task, float* scratch);
RunFull aft_full_DEFAULT, aft_full_AVX2, aft_full_AVX512, aft_full_AVX512_BF16;
RunFull aft_full_sums_DEFAULT, aft_full_sums_AVX2, aft_full_sums_AVX512, aft_full_sums_AVX512_BF16;
RunFull aft_full_keys_DEFAULT, aft_full_keys_AVX2, aft_full_keys_AVX512, aft_full_keys_AVX512_BF16;
RunFull aft_full_bias_DEFAULT, aft_full_bias_AVX2, aft_full_bias_AVX512, aft_full_bias_AVX512_BF16;

}  // namespace headloom::ops::aft_kernel
