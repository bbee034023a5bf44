// The positionwise operators on their CPU kernels, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace headloom::ops {

// What they take, for `headloom list`.
std::string positionwise_limits();

at::Tensor rms_norm_fused(const at::Tensor& x, const at::Tensor& scale, double eps);
// cos and sin want no gradient.
at::Tensor rotary_fused(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                        bool interleaved);
at::Tensor swiglu_fused(const at::Tensor& x);

}  // namespace headloom::ops
