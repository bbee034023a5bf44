// token_shift on its CPU kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "ops/token_shift/op.h"

namespace headloom::ops {

// Why the kernels cannot run the case, as the end of a sentence; null when they can.
const char* token_shift_unsupported(const at::Tensor& x, const at::Tensor& mix);

// What they take, for `headloom list`.
std::string token_shift_limits();

// The operator headloom::token_shift_fused: token_shift on supported arguments, mix float32, with
// its own autograd formula.
std::vector<at::Tensor> token_shift_fused(const at::Tensor& x, const at::Tensor& mix,
                                          const TokenShiftOptions& options);

}  // namespace headloom::ops
