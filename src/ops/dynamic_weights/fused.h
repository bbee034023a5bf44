// dynamic_weights on its CPU kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace headloom::ops {

// Why the kernels cannot run the case, as the end of a sentence; nullptr where they can.
const char* dynamic_weights_unsupported(const at::Tensor& hidden, const at::Tensor& w2);

// What they take, for `headloom list`.
std::string dynamic_weights_limits();

// The operator headloom::dynamic_weights_fused, without a gradient: [B, L, S, 2 R, H]. The case
// must be supported.
at::Tensor dynamic_weights_fused(const at::Tensor& hidden, const at::Tensor& w2, int64_t rank);

}  // namespace headloom::ops
