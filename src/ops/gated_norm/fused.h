// gated_norm on its CPU kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace headloom::ops {

// Why the kernels cannot run the case, as the end of a sentence; nullptr where they can.
const char* gated_norm_unsupported_reason(const at::Tensor& x, const at::Tensor& eps);

// What they take, for `headloom list`.
std::string gated_norm_limits();

// The operator headloom::gated_norm_fused, with its own gradient. eps [...] in full.
at::Tensor gated_norm_fused(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& eps);

}  // namespace headloom::ops
