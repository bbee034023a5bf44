// RWKV's token shift (Peng et al. 2023, eq. 11-13): every channel mixed with the position before,
// in as many proportions as there are maps that read the result:
//
//   y^i_t = mu^i * x_t + (1 - mu^i) * x_{t-1}
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace headloom::ops {

struct TokenShiftOptions {
  at::Tensor last = {};  // [B, C] of x's dtype: what is before the first position; zero when absent
  at::Tensor documents = {};  // [B, T] int64 ids: x_{t-1} counts as zero where the id changes;
                              // `last` belongs to the first position's document
  std::optional<std::string> backend = {};  // "reference", "fused"; absent: fused where it can run
};

// x [B, T, C], mix mu [N, C] of any floating type -> N tensors [B, T, C] of x's dtype, computed in
// float32, or float64 for float64. Differentiable in x, mix and last. Through the dispatcher
// (torch.ops.headloom.token_shift). Throws c10::ValueError or c10::TypeError naming the argument.
std::vector<at::Tensor> token_shift(const at::Tensor& x, const at::Tensor& mix,
                                    const TokenShiftOptions& options);

}  // namespace headloom::ops
