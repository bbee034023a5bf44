// The attention-free transformer (Zhai et al. 2021, eq. 1-5), a channel at a time:
//
//   y_t = sigmoid(q_t) * (sum_s e^{k_s + w[t,s]} v_s) / (sum_s e^{k_s + w[t,s]})
//
//   simple   w = 0
//   local    w learned where |t - s| < W, 0 elsewhere
//   full     w learned for all pairs up to a length
//   conv     w a function of t - s where |t - s| < W, 0 elsewhere, shared by the channels of a head
//
// s runs over all positions, or with `causal` over those up to t. Keys may lie any distance apart.
// Two causal calls that run no kernel bear 600 between a key and the largest of its document: any
// form in a graph that is traced for any length, and conv without documents on other devices than a
// CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace headloom::ops {

struct AftOptions {
  std::string form = "simple";  // "local", "full", "conv"
  // w. local [L, W]: bias[t, i] for s = t - (W - 1) + i; not causal [L, 2W - 1]. full [L, L]:
  // bias[t, s]. conv [H, W] or [H, 2W - 1], columns as in local. L is at least T (+ offset).
  at::Tensor bias = {};
  bool causal = true;
  // [B] int64: positions of each sequence that are keys where the form is not causal; an empty
  // sequence gives 0. A causal form reads no later position, and its state takes all in.
  at::Tensor lengths = {};
  // [B, T] int64 ids: nothing is read across a change of id, and positions count from there. Causal
  // forms compare neighbours: ids may come back.
  at::Tensor documents = {};
  // Causal simple and local: what is before the first position, of its document. [B, 3 + 2(W - 1),
  // C] (W = 1 for simple): the sums with and without v and their exponent m (a e^m, b e^m; m =
  // -1e38 where empty) over all but the last W - 1 positions, then those positions' k (-1e38
  // where there is none) and v.
  at::Tensor state = {};
  int64_t offset = 0;  // position of the first in its document, for local's and full's w
  std::optional<std::string> backend = {};  // "reference", "fused"; absent: fused where it can run
};

// q, k, v [B, T, C] -> output [B, T, C] of q's dtype and the state after the last position, float64
// for float64 inputs and float32 otherwise; of a form that has none, [B, 0, C].
//
// Differentiable in q, k, v, bias and state; of the state returned, m is a constant to gradients,
// as in wkv. Cost: T C for simple, T W C for local and conv and T^2 C for full where the fused
// kernels run (causal, float32 and bfloat16). Otherwise T W C for conv without documents, both ways
// or on other devices than a CPU, and matrix products of T^2 C for the rest, in float64. Nothing is
// of size T T C. Through the dispatcher (torch.ops.headloom.aft). Throws c10::ValueError or
// c10::TypeError naming the argument.
std::tuple<at::Tensor, at::Tensor> aft(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const AftOptions& options);

}  // namespace headloom::ops
