// Context parallelism: processes share out the positions of every sequence (Liu et al. 2023, Ring
// Attention with Blockwise Transformers; the name is Megatron-LM's).
//
// A sequence of T positions is cut into 2 S equal chunks for S processes. Process r has chunk r and
// chunk 2 S - 1 - r, so that under a causal mask all processes have equally many keys to read. A
// batch of B sequences becomes 2 B rows of T / (2 S) positions in each process: the earlier chunk
// of every sequence, then the later one. What works position by position notices nothing. What
// reads other positions asks for them here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "mixers/decoding_state.h"

namespace headloom {

using at::Tensor;

// This process's place among those that share every sequence.
struct ContextParallel {
  int64_t size = 1;  // S
  int64_t rank = 0;  // r
  // Adds up a contiguous tensor over the processes, in place.
  std::function<void(const Tensor&)> sum;
  // The tensors of all processes, by rank.
  std::function<std::vector<Tensor>(const Tensor& own)> gather;
  // Begins to send `own`, contiguous, to the next process, and to receive the one before's in
  // `other`, of the same shape. The last process is before the first. Neither may be touched until
  // the function that comes back has been called: it waits for the end.
  std::function<std::function<void()>(const Tensor& own, const Tensor& other)> start_shift;

  // The places, among all 2 S, of this process's chunks.
  int64_t early_chunk() const { return rank; }
  int64_t late_chunk() const { return 2 * size - 1 - rank; }
  // This process's rows of whole sequences [B, T, ...], T a multiple of 2 S: [2 B, T / (2 S), ...].
  Tensor rows_of(const Tensor& whole) const;
  // What stands before each of `rows` rows of `length` positions.
  Positions before(int64_t rows, int64_t length) const;
};

// `own` of all processes, a tensor for each row, in the order of the chunks: [2 B, ...] ->
// [2 S, B, ...]. Differentiable.
Tensor gather_chunks(const Tensor& own, const ContextParallel& among);
// This process's rows of what there is of every chunk: [2 S, B, ...] -> [2 B, ...].
Tensor own_chunks(const Tensor& all, const ContextParallel& among);

// For each row the `own` of the chunk before it, zero before the first chunk: [2 B, ...] ->
// [2 B, ...]. Differentiable.
Tensor chunk_before(const Tensor& own, const ContextParallel& among);

// The state before each row, of a recurrence that is linear in its state: after a chunk it is
// decay * (the state before) + added. `added` is what the rows leave of a state of zero, [2 B,
// ...]; decay broadcasts to that shape and is the same in all processes where its first size is 1.
// Differentiable.
Tensor state_before(const Tensor& added, const Tensor& decay, const ContextParallel& among);

// Causal softmax attention over all positions of the sequences: q [2 B, L, H, D], k and v [2 B, L,
// G, D] -> [2 B, L, H, D], with scores times D^-0.5. Query head h reads key head floor(h G / H).
// Keys and values go round the processes and are never all in memory; while they are on their way,
// those that are there are read. Differentiable once.
Tensor ring_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                      const ContextParallel& among);

}  // namespace headloom
