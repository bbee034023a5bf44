// What composed_attention is to the dispatcher (ops/operator.h).
#pragma once

#include "ops/composed_attention/op.h"
#include "ops/operator.h"

namespace headloom::ops {

// The tensors of a HeadMix as a list (static, q_down, q_up, q_gate, k_down, k_up, k_gate); an empty
// list is no mix. kSide names it in messages.
enum class MixSide { kPre, kPost };
template <MixSide kSide>
struct MixTensors {
  using Value = HeadMix;
  using Passed = const c10::List<std::optional<Tensor>>&;
  static constexpr const char *kType = "Tensor?[]", *kStandard = nullptr;

  template <typename F>
  static void each_tensor(HeadMix& m, const F& f) {
    for (Tensor* t :
         {&m.static_matrix, &m.q_down, &m.q_up, &m.q_gate, &m.k_down, &m.k_up, &m.k_gate}) {
      f(*t);
    }
  }
  static c10::List<std::optional<Tensor>> pack(HeadMix& m) {
    c10::List<std::optional<Tensor>> list;
    if (m.defined()) {
      each_tensor(m, [&](const Tensor& t) { list.push_back(OptionalTensor::pack(t)); });
    }
    return list;
  }
  static void unpack(Passed list, HeadMix& m) {
    if (list.empty()) return;
    TORCH_CHECK_VALUE(list.size() == 7,
                      "composed_attention: ", kSide == MixSide::kPre ? "pre" : "post", " has ",
                      list.size(),
                      " tensors, expected 0 or 7 (static, q_down, q_up, q_gate, k_down, k_up, "
                      "k_gate).");
    size_t i = 0;
    each_tensor(m, [&](Tensor& t) { t = resolved(list.get(i++).value_or(Tensor())); });
  }
};

struct ComposedAttention {
  struct Arguments {
    Tensor q, k, v;
    ComposedAttentionOptions options;
  };
  using Result = Tensor;
  static constexpr const char* kName = "composed_attention";
  static constexpr const char* kDoc = "attention whose maps are convolved and mixed across heads";
  static constexpr const char* kSource =
      "Xiao et al. 2024; Golovneva et al. 2025; Shazeer et al. 2020; Ye et al. 2024";
  static constexpr const char* kOtherwise =
      "the reference for the rest (other types and devices); where nothing is composed, "
      "scaled_dot_product_attention for the rest, and in float32 for a few queries of many keys";

  static auto arguments(Arguments& a) {
    ComposedAttentionOptions& o = a.options;
    return std::tuple(
        differentiable("q", a.q), differentiable("k", a.k), differentiable("v", a.v),
        Argument<MixTensors<MixSide::kPre>, true>{"pre", o.pre},
        Argument<MixTensors<MixSide::kPost>, true>{"post", o.post},
        setting("pre_groups", o.pre.groups, "1"), setting("post_groups", o.post.groups, "1"),
        optional_differentiable("pre_conv", o.pre_conv),
        optional_differentiable("post_conv", o.post_conv),
        setting("conv_padding", o.conv_padding, "\"both\""),
        setting("conv_mask", o.conv_mask, "\"double\""), optional_differentiable("bias", o.bias),
        setting("causal", o.causal, "True"), setting("window", o.window, "None"),
        optional_constant("lengths", o.lengths), optional_constant("documents", o.documents),
        optional_constant("mask", o.mask), setting("scale", o.scale, "None"));
  }
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static bool prefers_kernels(const Arguments& a);
  static Tensor reference(const Arguments& a);
  static Tensor definition(const Arguments& a);
  // The result [B, T, H', E] and the log-sum-exp [B, H1, T], which is kept for the backward.
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

}  // namespace headloom::ops
