// The flat argument lists of the dispatcher's operators and the options they stand for. Schema and
// parameters are written once, here, for every operator of composed attention.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "ops/composed_attention/op.h"
#include "ops/dispatch.h"

// What follows q, k and v in a schema: everything but the backend.
#define HL_ATTENTION_SCHEMA                                                           \
  "Tensor?[] pre, Tensor?[] post, int pre_groups=1, int post_groups=1, "              \
  "Tensor? pre_conv=None, Tensor? post_conv=None, str conv_padding=\"both\", "        \
  "str conv_mask=\"double\", Tensor? bias=None, bool causal=True, int? window=None, " \
  "Tensor? lengths=None, Tensor? documents=None, Tensor? mask=None, float? scale=None"
// The same in C++, its names, and the options `o` as such a list: lists cannot stand in
// parentheses. NOLINTBEGIN(bugprone-macro-parentheses)
#define HL_ATTENTION_PARAMETERS                                                        \
  const OptionalTensors &pre, const OptionalTensors &post, int64_t pre_groups,         \
      int64_t post_groups, const std::optional<at::Tensor>&pre_conv,                   \
      const std::optional<at::Tensor>&post_conv, std::string_view conv_padding,        \
      std::string_view conv_mask, const std::optional<at::Tensor>&bias, bool causal,   \
      std::optional<int64_t> window, const std::optional<at::Tensor>&lengths,          \
      const std::optional<at::Tensor>&documents, const std::optional<at::Tensor>&mask, \
      std::optional<double> scale
#define HL_ATTENTION_ARGUMENTS                                                                    \
  pre, post, pre_groups, post_groups, pre_conv, post_conv, conv_padding, conv_mask, bias, causal, \
      window, lengths, documents, mask, scale
#define HL_ATTENTION_UNPACKED(o)                                                               \
  pack_mix(o.pre), pack_mix(o.post), o.pre.groups, o.post.groups, optional_tensor(o.pre_conv), \
      optional_tensor(o.post_conv), o.conv_padding, o.conv_mask, optional_tensor(o.bias),      \
      o.causal, o.window, optional_tensor(o.lengths), optional_tensor(o.documents),            \
      optional_tensor(o.mask), o.scale
// NOLINTEND(bugprone-macro-parentheses)

namespace headloom::ops {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

// A mix as a list (static, q_down, q_up, q_gate, k_down, k_up, k_gate); an empty list is no mix.
OptionalTensors pack_mix(const HeadMix& mix);
HeadMix unpack_mix(const OptionalTensors& list, int64_t groups, const char* name);

ComposedAttentionOptions make_options(HL_ATTENTION_PARAMETERS);

// Every tensor of a case, beside q, k and v, that may want a gradient, absent ones undefined: of
// the options, or their gradients.
template <typename T>
std::vector<at::Tensor*> slots(T& x) {
  std::vector<at::Tensor*> out;
  for (HeadMix* m : {&x.pre, &x.post}) {
    for (at::Tensor* t :
         {&m->static_matrix, &m->q_down, &m->q_up, &m->q_gate, &m->k_down, &m->k_up, &m->k_gate}) {
      out.push_back(t);
    }
  }
  for (at::Tensor* t : {&x.pre_conv, &x.post_conv, &x.bias}) out.push_back(t);
  return out;
}

}  // namespace headloom::ops
