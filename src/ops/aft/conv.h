// aft conv as a convolution: T W C instead of the definition's T^2 C.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "ops/aft/op.h"

namespace headloom::ops {

// aft of form conv without documents, in ATen operations: blocks of positions times a band of e^w,
// and running sums of what lies outside it, in float64. Arguments are trusted.
std::tuple<at::Tensor, at::Tensor> aft_conv(const at::Tensor& q, const at::Tensor& k,
                                            const at::Tensor& v, const AftOptions& options);

}  // namespace headloom::ops
