// The second half of DCMHA's weight networks (Xiao et al. 2024, eq. 7 and section 3.2), for all
// sides of a layer at once:
//
//   down, up = split(GELU(hidden) W2)                       (exact GELU)
//   down = down / sqrt(mean over the group's heads of down^2 + 1e-6)
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace headloom::ops {

// hidden [B, L, S g I] = x W1 of S sides and g groups; w2 [S, g, I, 2 R n], R = `rank` rows of n
// heads for `down` and as many for `up` -> 2 S tensors [B, L, R, H] of hidden's type with H = g n:
// each side's `down`, then each side's `up`. Through the dispatcher
// (torch.ops.headloom.dynamic_weights). `backend`: "fused" (CPU, hidden in float32 or bfloat16, at
// most kStreamedRows positions, 2 R n at most 1024, where no gradient is wanted; NVIDIA GPUs with
// Triton, with a backward) or "reference" (plain ATen: any floating dtype, device and number of
// positions, differentiable); absent: fused where it can. Throws c10::ValueError or c10::TypeError
// naming the argument, NotImplementedError where "fused" cannot run.
std::vector<at::Tensor> dynamic_weights(const at::Tensor& hidden, const at::Tensor& w2,
                                        int64_t rank,
                                        const std::optional<std::string>& backend = {});

}  // namespace headloom::ops
