// The experts of a mixture of experts (DeepSeekMoE, Dai et al. 2024, eq. 3 and 5): every token runs
// through the few SwiGLU networks chosen for it and gets their weighted sum.
//
//   y_n = sum_j weight[n, j] expert_i(x_n),  i = choice[n, j]
//   expert_i(x) = down_i (SiLU(g) * u),      [g | u] = up_i x
//
// Who chooses, and what the weights are, is the mixer's.
//
// Layout legend: n token, j choice, i expert, C width, I hidden units of an expert.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace headloom::ops {

// x [N, C], up [experts, 2I, C] (the gate's rows first), down [experts, C, I], choice [N, K] int64
// (an expert may come twice), weight [N, K] float32 or of x's dtype -> [N, C] of x's dtype. Through
// the dispatcher (torch.ops.headloom.moe); differentiable in x, up, down and weight.
//
// `backend`: "fused" sorts the tokens by expert and computes only what was chosen, as one matrix
// product an expert (CPU, float32 and bfloat16); "reference" runs every expert on every token;
// absent: fused where it can. Throws c10::ValueError or c10::TypeError naming the argument,
// IndexError for a choice that is no expert, NotImplementedError where "fused" cannot run.
at::Tensor moe(const at::Tensor& x, const at::Tensor& up, const at::Tensor& down,
               const at::Tensor& choice, const at::Tensor& weight,
               const std::optional<std::string>& backend = {});

}  // namespace headloom::ops
