// Retention (RetNet, Sun et al. 2023): attention whose softmax is replaced by a fixed exponential
// decay, so that a state of constant size carries the past.
//
//   parallel    o = ((q k^T) * Dm) v,  Dm[n, m] = gamma^(n-m) for n >= m, else 0    (eq. 5)
//   recurrent   S_n = gamma S_{n-1} + k_n^T v_n,  o_n = q_n S_n                     (eq. 6)
//   chunkwise   parallel inside a chunk plus the state carried between chunks       (eq. 7)
//
// The three agree. Cost: parallel T^2 (D + E), recurrent T D E, one step after the other,
// chunkwise T (chunk (D + E) + 2 D E), as matrix products. Nothing is scaled, rotated or normalised
// here: that is the mixer's.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace headloom::ops {

struct RetentionOptions {
  at::Tensor state = {};      // [B, H, D, E]: S before the first position; zero when absent
  at::Tensor documents = {};  // [B, T] int64 ids: the state starts anew wherever the id changes; an
                              // initial state belongs to the first position's document
  std::string form = "chunkwise";  // "parallel", "recurrent"
  int64_t chunk = 64;  // positions a chunk, chunkwise only; the fused kernels round it up to 16s
  std::optional<std::string> backend = {};  // "reference", "fused"; absent: fused where it can
};

// q, k [B, T, H, D], v [B, T, H, E], gamma [H] (float32 or float64 whatever q is) -> output
// [B, T, H, E] of q's dtype and the state after the last position [B, H, D, E], float64 for float64
// inputs and float32 otherwise, the type in which everything is accumulated. Through the dispatcher
// (torch.ops.headloom.retention); differentiable in all of q, k, v, gamma and state. Throws
// c10::ValueError or c10::TypeError naming the argument, NotImplementedError where "fused" is asked
// for and cannot run.
//
// 0 < gamma <= 1: the fused kernels refuse others with c10::ValueError; the reference, which also
// runs on tensors without values, takes them. A gamma from 1 - 2^-25 on, RetNet's head 20 and
// later, does not change a float32 state in a single step, only in a chunk.
std::tuple<at::Tensor, at::Tensor> retention(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, const at::Tensor& gamma,
                                             const RetentionOptions& options);

}  // namespace headloom::ops
