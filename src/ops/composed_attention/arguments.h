// The flat argument lists of the dispatcher's operators and the options they stand for.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "ops/composed_attention/op.h"

namespace headloom::ops {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

// A mix as a list (static, q_down, q_up, q_gate, k_down, k_up, k_gate); an empty list is no mix.
OptionalTensors pack_mix(const HeadMix& mix);
HeadMix unpack_mix(const OptionalTensors& list, int64_t groups, const char* name);

inline std::optional<at::Tensor> optional_tensor(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

// Everything but the backend, in the order of the schemas.
ComposedAttentionOptions make_options(
    const OptionalTensors& pre, const OptionalTensors& post, int64_t pre_groups,
    int64_t post_groups, const std::optional<at::Tensor>& pre_conv,
    const std::optional<at::Tensor>& post_conv, std::string_view conv_padding,
    std::string_view conv_mask, const std::optional<at::Tensor>& bias, bool causal,
    std::optional<int64_t> window, const std::optional<at::Tensor>& lengths,
    const std::optional<at::Tensor>& documents, const std::optional<at::Tensor>& mask,
    std::optional<double> scale);

}  // namespace headloom::ops
