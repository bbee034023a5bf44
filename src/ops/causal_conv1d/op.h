// Causal depthwise convolution, as before the selective scan of Mamba (Gu & Dao 2023): each channel
// has a filter of its own.
//
//   y_t = act(bias + sum_{j < W} weight[:, j] * x_{t - (W - 1) + j})      act: SiLU or nothing
//
// The last tap is the current position's. What is before the first position comes from the state,
// or is zero; what belongs to another document counts as zero.
//
// Legend: B batch, L length, C channels, W taps.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace headloom::ops {

struct CausalConv1dOptions {
  at::Tensor bias = {};  // [C]
  bool silu = false;
  at::Tensor state = {};      // [B, W - 1, C]: the rows before the first position; zero when absent
  at::Tensor documents = {};  // [B, L] int64 ids: a document begins wherever the id changes; the
                              // state belongs to the first position's document
  std::optional<std::string> backend = {};  // "reference", "fused"; absent: fused where it can run
};

// x [B, L, C], weight [C, W] -> y [B, L, C] and the state after the last position [B, W - 1, C],
// which a later piece takes up, both of x's dtype. state has x's dtype; weight and bias have it or
// float32. float64 is computed in float64, all else in float32. An x whose channels are adjacent is
// read in place. Through the dispatcher (torch.ops.headloom.causal_conv1d); differentiable in x,
// weight, bias and state, the fused kernels once. Throws c10::ValueError or c10::TypeError naming
// the argument, c10::NotImplementedError where `backend` cannot run.
std::tuple<at::Tensor, at::Tensor> causal_conv1d(const at::Tensor& x, const at::Tensor& weight,
                                                 const CausalConv1dOptions& options);

}  // namespace headloom::ops
