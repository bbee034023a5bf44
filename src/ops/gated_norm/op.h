// What follows a linear attention's heads (RetNet, Sun et al. 2023, eq. 8): a norm of each head's
// values, times a swish gate.
//
//   y = SiLU(gate) * x / sqrt(mean(x^2) + eps)     the mean over the last dimension
//
// eps differs from row to row: a positive factor c of a row, which the norm would remove, is the
// same as eps / c^2.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace headloom::ops {

// x, gate [..., E], eps float32 of a shape that broadcasts to x's without the last dimension
// -> [..., E] of x's dtype; computed in float32 or wider. Through the dispatcher
// (torch.ops.headloom.gated_norm); differentiable in x and gate. `backend`: "fused" (CPU, float32
// and bfloat16) or "reference" (plain ATen: any floating dtype, device, and derivatives of any
// order); absent: fused where it can. Throws c10::ValueError or c10::TypeError naming the argument,
// NotImplementedError where "fused" cannot run.
at::Tensor gated_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& eps,
                      const std::optional<std::string>& backend = {});

}  // namespace headloom::ops
