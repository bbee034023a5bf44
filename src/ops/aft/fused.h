// Causal aft local on its CPU kernels; causal simple is a case of wkv.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "ops/aft/op.h"

namespace headloom::ops {

// What they take, for `headloom list`.
std::string aft_limits();

// The operator headloom::aft_local_fused: aft local on float32 or bfloat16 on the CPU, causal, bias
// float32, with its own autograd formula.
std::tuple<at::Tensor, at::Tensor> aft_local_fused(const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& v, const AftOptions& options);

}  // namespace headloom::ops
