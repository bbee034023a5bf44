#include "ops/composed_attention/arguments.h"

namespace headloom::ops {

using at::Tensor;

HeadMix unpack_mix(const OptionalTensors& list, int64_t groups, const char* name) {
  HeadMix mix;
  mix.groups = groups;
  if (list.empty()) return mix;
  Tensor* slots[] = {&mix.static_matrix, &mix.q_down, &mix.q_up,  &mix.q_gate,
                     &mix.k_down,        &mix.k_up,   &mix.k_gate};
  TORCH_CHECK_VALUE(list.size() == std::size(slots), "composed_attention: ", name, " has ",
                    list.size(), " tensors, expected 0 or ", std::size(slots),
                    " (static, q_down, q_up, q_gate, k_down, k_up, k_gate).");
  for (size_t i = 0; i < list.size(); ++i) {
    const std::optional<Tensor> tensor = list.get(i);
    if (tensor && tensor->defined()) *slots[i] = *tensor;
  }
  return mix;
}

OptionalTensors pack_mix(const HeadMix& mix) {
  OptionalTensors list;
  if (!mix.defined()) return list;
  for (const Tensor& t :
       {mix.static_matrix, mix.q_down, mix.q_up, mix.q_gate, mix.k_down, mix.k_up, mix.k_gate}) {
    list.push_back(optional_tensor(t));
  }
  return list;
}

ComposedAttentionOptions make_options(HL_ATTENTION_PARAMETERS) {
  ComposedAttentionOptions o;
  o.pre = unpack_mix(pre, pre_groups, "pre");
  o.post = unpack_mix(post, post_groups, "post");
  o.pre_conv = pre_conv.value_or(Tensor());
  o.post_conv = post_conv.value_or(Tensor());
  o.conv_padding = std::string(conv_padding);
  o.conv_mask = std::string(conv_mask);
  o.bias = bias.value_or(Tensor());
  o.causal = causal;
  o.window = window;
  o.lengths = lengths.value_or(Tensor());
  o.documents = documents.value_or(Tensor());
  o.mask = mask.value_or(Tensor());
  o.scale = scale;
  return o;
}

}  // namespace headloom::ops
