// The route "blocked": Headloom's own kernels on all threads.
#pragma once

#include "ops/product/product.h"

namespace headloom::ops {

// product() by product/kernel_cpu.cpp.
void blocked_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                     const at::Tensor& bias, bool add);
void blocked_product(const at::Tensor& out, const at::Tensor& a, const MadeFactor& b,
                     const at::Tensor& bias);

}  // namespace headloom::ops
