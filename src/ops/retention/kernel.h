// The fused chunkwise kernels: what they are told, free of torch.
//
// A chunk is at most Args::chunk positions of one document. Inside it the parallel form, as small
// matrix products in cache; from chunk to chunk the state. A single position is a step of the
// recurrent form. One item of work is one head of one batch element. The backward goes over the
// chunks twice, without stored states: forwards with the state for the gradient of q, then
// backwards with the state's gradient for those of k and v; what the first pass learns of the
// scores' gradient is kept, T x chunk floats a worker.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::retention_kernel {

constexpr int64_t kAlign = 16;  // chunks and padded widths are multiples of it

struct Chunk {
  int64_t begin, length;
  bool fresh;  // the state before it is zero: a document begins, or the sequence without a state
};

struct Args {
  int64_t B, T, H, D, E;
  Type type;
  bool narrow = true;  // bfloat16: factors of products too, where the processor multiplies it
  bool amx = false;    // by the tile registers of AMX
  int64_t chunk;       // a multiple of kAlign
  HeadSequence q, k, v, grad_out;
  // [H, 3 chunk]: gamma^chunk, ..., gamma, 1, zeros up to 2 chunk, 1, gamma, ..., gamma^(chunk-1)
  const float* powers;
  const Chunk* chunks;
  const int64_t* first_chunk;    // [B + 1] into chunks
  const float* state = nullptr;  // [B, H, D, E]
  void* out = nullptr;           // [B, T, H, E]
  float* final_state = nullptr;  // [B, H, D, E]
  const float* grad_final_state = nullptr;
  void *grad_q = nullptr, *grad_k = nullptr, *grad_v = nullptr;
  float* grad_state = nullptr;
};

struct Task {
  bool backward;
  int64_t begin, end;  // items: batch * H + head
  float* scratch;      // as laid out in scratch.h
};

using Run = void(const Args& args, const Task& task);
Run run_DEFAULT, run_AVX2, run_AVX512, run_AVX512_BF16;

}  // namespace headloom::ops::retention_kernel
