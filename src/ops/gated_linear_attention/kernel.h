// What the CPU kernels of gated linear attention are told. No torch.
//
// One item of work is one head of one batch element. It goes through the sequence chunk by chunk;
// inside a chunk a tile of the state stays in registers while the positions pass. The forward keeps
// the state before each group of chunks. The backward takes the groups from the last to the first:
// it computes the states before a group's chunks again and goes back through these.
#pragma once

#include "ops/kernel/inline.h"
#include "ops/kernel/types.h"

namespace headloom::ops::gated_linear_attention_kernel {

constexpr int64_t kSteps = 16;  // positions of a chunk: the backward's sums over them stay in cache
constexpr int64_t kGroup = 8;   // chunks of a group
constexpr int64_t kLanes = 16;  // rows in scratch are whole vectors of every instruction set

struct Args {
  int64_t B = 0, T = 0, H = 0, D = 0, E = 0;
  Type type = Type::kFloat, decay_type = Type::kFloat;
  HeadSequence q, k, v, log_decay;
  const int64_t* documents = nullptr;  // [B, T]; one document where null
  const float* state = nullptr;        // [B, H, D, E]; zero where null
  void* out = nullptr;                 // [B, T, H, E]
  float* last = nullptr;               // [B, H, D, E]
  // The state before each group of chunks [B, H, groups, D, E]: written by the forward where not
  // null, read by the backward.
  float* kept = nullptr;

  // Backward only.
  HeadSequence grad_out;
  const float* grad_last = nullptr;                              // [B, H, D, E]; zero where null
  void *grad_q = nullptr, *grad_k = nullptr, *grad_v = nullptr;  // as q, k and v, contiguous
  float* grad_log_decay = nullptr;                               // [B, T, H, D]
  float* grad_state = nullptr;                                   // [B, H, D, E], with `state`
};

// Of a length that may be symbolic.
template <typename Int>
HL_INLINE Int group_count(const Int& length) {
  return (length + (kGroup * kSteps - 1)) / (kGroup * kSteps);
}
HL_INLINE int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
// The distance of rows in scratch: a cache line more keeps them out of each other's cache sets.
HL_INLINE int64_t line(int64_t width) { return padded(width) + kLanes; }
// Floats: q, k, the decays and the gradients of these; v, the output or its gradient, the gradient
// of v; the state's gradient and the state, in the backward before each chunk of a group.
HL_INLINE int64_t scratch_size(const Args& a, bool backward) {
  const int64_t states = backward ? 1 + kGroup : 2;
  return 6 * kSteps * line(a.D) + (3 * kSteps + states * padded(a.D)) * line(a.E);
}

struct Task {
  bool backward;
  int64_t begin, end;  // items: batch * H + head
  float* scratch;
};

using Run = void(const Args& args, const Task& task);
Run run_DEFAULT, run_AVX2, run_AVX512, run_AVX512_BF16;

}  // namespace headloom::ops::gated_linear_attention_kernel
