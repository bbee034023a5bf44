// The fused CPU kernels of retention, chunkwise forward and backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/retention/op.h"

namespace headloom::ops {

// Why the fused kernels cannot run a case, as the end of a sentence; nullptr where they can.
const char* retention_unsupported_reason(const at::Tensor& q, const at::Tensor& gamma,
                                         const RetentionOptions& options);

// What `headloom list` says of them.
std::string retention_limits();

// As retention(), through the operator retention_fused: differentiable in q, k, v and the state.
std::tuple<at::Tensor, at::Tensor> retention_fused(const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& v, const at::Tensor& gamma,
                                                   const RetentionOptions& options);

// The kernels themselves, float32 and bfloat16. Arguments are trusted.
std::tuple<at::Tensor, at::Tensor> retention_forward(const at::Tensor& q, const at::Tensor& k,
                                                     const at::Tensor& v, const at::Tensor& gamma,
                                                     const RetentionOptions& options);
// Gradients of q, k, v and, where there is one, of the state. An undefined `grad_state` (of the
// state after the last position) counts as zero.
std::vector<at::Tensor> retention_grads(const at::Tensor& grad_out, const at::Tensor& grad_state,
                                        const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const at::Tensor& gamma,
                                        const RetentionOptions& options);

}  // namespace headloom::ops
