// The fused CPU kernels of the causal convolution, torch side, as operators with their gradient.
#pragma once

#include "ops/causal_conv1d/op.h"

namespace headloom::ops {

// Why the fused kernels cannot run this case; null when they can. The text completes "because ...".
const char* causal_conv1d_unsupported(const at::Tensor& x, const at::Tensor& weight);

// y [B, L, C] through the dispatcher (torch.ops.headloom.causal_conv1d_fused), differentiable once.
// The case must be supported.
at::Tensor causal_conv1d_fused(const at::Tensor& x, const at::Tensor& weight,
                               const CausalConv1dOptions& options);

}  // namespace headloom::ops
