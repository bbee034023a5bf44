// The fused CPU kernels of composed attention, torch side: which cases they take, forward and
// backward.
#pragma once

#include <string>
#include <tuple>

#include "ops/composed_attention/op.h"

namespace headloom::ops {

// Why the fused kernels cannot run this case; null when they can. The text completes "because ...".
const char* unsupported_reason(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const ComposedAttentionOptions& options);

// The same for people, all cases in one sentence.
std::string fused_limits();

// out [B,T,H',E] through the dispatcher (torch.ops.headloom.composed_attention_fused),
// differentiable; the gradient of the gradient is the definition's. The case must be supported.
at::Tensor composed_attention_fused(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const ComposedAttentionOptions& options);

// The kernels alone. out [B,T,H',E] and the log-sum-exp [B,H1,T] (float) that the backward needs.
// Arguments are trusted.
std::tuple<at::Tensor, at::Tensor> composed_attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const ComposedAttentionOptions& options);

// Gradients of q, k, v and of what the mixes and convolutions hold (undefined where absent), and of
// the bias where it is asked for.
struct ComposedAttentionGrads {
  at::Tensor q, k, v;
  HeadMix pre, post;
  at::Tensor pre_conv, post_conv, bias;
};

ComposedAttentionGrads composed_attention_grads(const at::Tensor& grad_out, const at::Tensor& q,
                                                const at::Tensor& k, const at::Tensor& v,
                                                const at::Tensor& lse, bool bias_grad,
                                                const ComposedAttentionOptions& options);

}  // namespace headloom::ops
