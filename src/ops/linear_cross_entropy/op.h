// The head of a model over many classes and its cross-entropy, in one operator: the scores of all
// positions are never there at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace headloom::ops {

// A position with this target counts for nothing, as in PyTorch.
constexpr int64_t kIgnoredTarget = -100;
// Of the scores that the kernels have in memory at once.
constexpr int64_t kScoreBytes = int64_t{256} << 20;

// With the scores s = hidden weight^T + bias,
//
//   loss = sum over the positions n that count of log(sum_v exp(s[n, v])) - s[n, targets[n]]
//   best = argmax_v s[n, v], and -1 where the target is ignored
//
// hidden [N, C], weight [V, C] and bias [V] (or undefined) of one floating dtype, targets [N] int64
// from 0 to V - 1 or kIgnoredTarget -> loss, a scalar of float32 (of float64 for float64), and best
// [N] int64. A float32 weight may stand beside a narrower hidden: it is rounded where it is
// multiplied, as in linear. Differentiable in hidden, weight and bias. Through the dispatcher
// (torch.ops.headloom.linear_cross_entropy).
//
// `backend`: "fused" (CPU, float32 and bfloat16) takes some positions at a time, those that count
// alone. Where a gradient is wanted, the forward computes all gradients with the scores at hand, as
// Liger does (Hsu et al. 2024), and the backward only scales them: computing the scores again would
// cost a third more and save no memory, since the weight's gradient has to be there anyway.
// "reference" is at::linear and at::cross_entropy_loss; absent: fused where it can. Throws
// c10::ValueError or c10::TypeError naming the argument, c10::IndexError for a target that is no
// class, NotImplementedError where "fused" cannot run.
std::tuple<at::Tensor, at::Tensor> linear_cross_entropy(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
    const at::Tensor& bias = {}, const std::optional<std::string>& backend = {});

}  // namespace headloom::ops
