// wkv on its CPU kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <tuple>

#include "ops/wkv/op.h"

namespace headloom::ops {

// What they take, for `headloom list`.
std::string wkv_fused_limits();

// The operator headloom::wkv_fused: wkv on supported arguments, rate and bonus float32, with its
// own autograd formula.
std::tuple<at::Tensor, at::Tensor> wkv_fused(const at::Tensor& k, const at::Tensor& v,
                                             const at::Tensor& rate, const at::Tensor& bonus,
                                             const WkvOptions& options);

}  // namespace headloom::ops
