// The recurrence of RWKV version 4 (Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer
// Era", eq. 16), a channel at a time:
//
//   y_t = (sum_{i<t} e^{-(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / (the same sum without v)
//   out = sigmoid(r_t) y_t, or y_t where there is no r
//
// With w = 0 and u = 0 it is the causal AFT-simple (Zhai et al. 2021). No exponential overflows,
// however large k is: sums are kept as a e^m and b e^m, with m the largest exponent in them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace headloom::ops {

struct WkvOptions {
  at::Tensor receptance = {};  // r [B, T, C]; absent: no gate
  // [B, 3, C], the sums before the first position: a (with v), b (without) and the exponent m, so
  // that they are a e^m and b e^m; a = b = 0, m = -1e38 when absent.
  at::Tensor state = {};
  at::Tensor documents = {};  // [B, T] int64 ids: the sums start anew wherever the id changes; an
                              // initial state belongs to the first position's document
  std::optional<std::string> backend = {};  // "reference", "fused"; absent: fused where it can run
};

// k, v [B, T, C], rate w [C] and bonus u [C], both of any floating type ->
// output [B, T, C] of k's dtype and the state after the last position [B, 3, C], float64 for
// float64 inputs and float32 otherwise, the type in which everything is accumulated.
//
// The rate is at least 0: exp(time_decay), not RWKV's parameter time_decay, which the mixer calls
// `decay`. The fused kernels refuse a negative one with c10::ValueError; the reference, which also
// runs on tensors without values, takes it. Where every key so far is -inf the output is 0.
//
// Differentiable in k, v, rate, bonus, r and the initial state. Of the state returned, m is a
// constant to gradients: what depends on it through a e^m and b e^m, as this operator does, gets
// the right ones.
//
// Through the dispatcher (torch.ops.headloom.wkv). Throws c10::ValueError or c10::TypeError naming
// the argument. The reference under torch.compile compiles each T by itself.
std::tuple<at::Tensor, at::Tensor> wkv(const at::Tensor& k, const at::Tensor& v,
                                       const at::Tensor& rate, const at::Tensor& bonus,
                                       const WkvOptions& options);

// The exponent of an empty sum.
constexpr double kNoExponent = -1e38;

}  // namespace headloom::ops
