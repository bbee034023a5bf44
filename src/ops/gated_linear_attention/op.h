// Gated linear attention (Yang et al. 2024, section 4.1): retention whose decay is computed from
// the sequence, one for each row of the state:
//
//   S_t = diag(alpha_t) S_{t-1} + k_t^T v_t,   o_t = q_t S_t,   alpha_t = exp(log_decay_t)
//
// Nothing is scaled or normalised here: that is the mixer's.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace headloom::ops {

struct GatedLinearAttentionOptions {
  at::Tensor state = {};      // [B, H, D, E]: S before the first position; zero when absent
  at::Tensor documents = {};  // [B, T] int64 ids: the state starts anew wherever the id changes; an
                              // initial state belongs to the first position's document
  // How the reference computes: "chunkwise", matrix products inside chunks (section 4.2), or
  // "recurrent", step after step. The two agree, and the kernels compute either.
  std::string form = "chunkwise";
  // Positions of the reference's chunks. Of each pair in a chunk it keeps D decays.
  int64_t chunk = 16;
  std::optional<std::string> backend = {};  // "reference", "fused"; absent: fused where it can
};

// q, k [B, T, H, D], v [B, T, H, E], log_decay [B, T, H, D] (at most 0; float32 or of q's dtype) ->
// output [B, T, H, E] of q's dtype and the state after the last position [B, H, D, E], float64 for
// float64 inputs and float32 otherwise, the type in which everything is computed. Through the
// dispatcher (torch.ops.headloom.gated_linear_attention); differentiable in q, k, v, log_decay and
// state. Throws c10::ValueError or c10::TypeError naming the argument, NotImplementedError where
// "fused" is asked for and cannot run.
//
// No exponential of a positive number is taken unless log_decay has one: any decay is safe, minus
// infinity, which forgets everything, too.
std::tuple<at::Tensor, at::Tensor> gated_linear_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay,
    const GatedLinearAttentionOptions& options);

}  // namespace headloom::ops
