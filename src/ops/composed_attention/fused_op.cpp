// The fused kernels as operators: composed_attention_fused with its gradient,
// composed_attention_backward.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops/composed_attention/arguments.h"
#include "ops/composed_attention/fused.h"

#define HL_ATTENTION_SCHEMA                                                                      \
  "Tensor?[] pre, Tensor?[] post, int pre_groups, int post_groups, Tensor? pre_conv, "           \
  "Tensor? post_conv, str conv_padding, str conv_mask, Tensor? bias, bool causal, int? window, " \
  "Tensor? lengths, Tensor? documents, Tensor? mask, float? scale"
#define HL_ATTENTION_PARAMETERS                                                  \
  const OptionalTensors &pre, const OptionalTensors &post, int64_t pre_groups,   \
      int64_t post_groups, const std::optional<Tensor>&pre_conv,                 \
      const std::optional<Tensor>&post_conv, std::string_view conv_padding,      \
      std::string_view conv_mask, const std::optional<Tensor>&bias, bool causal, \
      std::optional<int64_t> window, const std::optional<Tensor>&lengths,        \
      const std::optional<Tensor>&documents, const std::optional<Tensor>&mask,   \
      std::optional<double> scale
#define HL_ATTENTION_ARGUMENTS                                                                    \
  pre, post, pre_groups, post_groups, pre_conv, post_conv, conv_padding, conv_mask, bias, causal, \
      window, lengths, documents, mask, scale
#define HL_ATTENTION_UNPACKED                                                                  \
  pack_mix(o.pre), pack_mix(o.post), o.pre.groups, o.post.groups, optional_tensor(o.pre_conv), \
      optional_tensor(o.post_conv), o.conv_padding, o.conv_mask, optional_tensor(o.bias),      \
      o.causal, o.window, optional_tensor(o.lengths), optional_tensor(o.documents),            \
      optional_tensor(o.mask), o.scale

namespace headloom::ops {
namespace {

using at::Tensor;
using Outputs = std::tuple<Tensor, Tensor>;

// Every tensor of a case that may want a gradient, absent ones undefined; both for options and
// gradients.
template <typename T>
std::vector<Tensor*> slots(T& x) {
  std::vector<Tensor*> out;
  for (HeadMix* m : {&x.pre, &x.post}) {
    for (Tensor* t :
         {&m->static_matrix, &m->q_down, &m->q_up, &m->q_gate, &m->k_down, &m->k_up, &m->k_gate}) {
      out.push_back(t);
    }
  }
  out.push_back(&x.pre_conv);
  out.push_back(&x.post_conv);
  return out;
}

std::vector<Tensor*> masks(ComposedAttentionOptions& o) {
  return {&o.bias, &o.lengths, &o.documents, &o.mask};
}

int64_t maps_after(const HeadMix& m, int64_t heads) {
  return m.static_matrix.defined() && m.static_matrix.dim() == 2 ? m.static_matrix.size(1) : heads;
}

Outputs fused_cpu(const Tensor& q, const Tensor& k, const Tensor& v, HL_ATTENTION_PARAMETERS) {
  return composed_attention_forward(q, k, v, make_options(HL_ATTENTION_ARGUMENTS));
}

Outputs fused_meta(const Tensor& q, const Tensor& k, const Tensor& v, HL_ATTENTION_PARAMETERS) {
  (void)k;
  const ComposedAttentionOptions o = make_options(HL_ATTENTION_ARGUMENTS);
  const int64_t middle = maps_after(o.pre, q.size(2));
  return {
      at::empty_symint({q.sym_size(0), q.sym_size(1), maps_after(o.post, middle), v.sym_size(3)},
                       q.options()),
      at::empty_symint({q.sym_size(0), middle, q.sym_size(1)}, q.options().dtype(at::kFloat))};
}

// Gradients of q, k, v and of each present tensor of slots(), in that order.
std::vector<Tensor> backward_cpu(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const Tensor& lse, HL_ATTENTION_PARAMETERS) {
  ComposedAttentionGrads grads =
      composed_attention_grads(grad_out, q, k, v, lse, make_options(HL_ATTENTION_ARGUMENTS));
  std::vector<Tensor> out{grads.q, grads.k, grads.v};
  for (Tensor* t : slots(grads)) {
    if (t->defined()) out.push_back(*t);
  }
  return out;
}

std::vector<Tensor> backward_meta(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                                  const Tensor&, HL_ATTENTION_PARAMETERS) {
  ComposedAttentionOptions o = make_options(HL_ATTENTION_ARGUMENTS);
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  std::vector<Tensor> out{like(q), like(k), like(v)};
  for (Tensor* t : slots(o)) {
    if (t->defined()) out.push_back(like(*t));
  }
  return out;
}

Outputs call_fused(const Tensor& q, const Tensor& k, const Tensor& v,
                   const ComposedAttentionOptions& o) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("headloom::composed_attention_fused", "")
                             .typed<decltype(fused_cpu)>();
  return op.call(q, k, v, HL_ATTENTION_UNPACKED);
}

std::vector<Tensor> call_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const Tensor& lse,
                                  const ComposedAttentionOptions& o) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("headloom::composed_attention_backward", "")
                             .typed<decltype(backward_cpu)>();
  return op.call(grad_out, q, k, v, lse, HL_ATTENTION_UNPACKED);
}

struct FusedFunction : torch::autograd::Function<FusedFunction> {
  // `weights` are the present tensors of slots(o) again: autograd sees only tensors among the
  // arguments.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const Tensor& q, const Tensor& k, const Tensor& v,
                                                at::TensorList weights,
                                                const ComposedAttentionOptions& given) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [out, lse] = call_fused(q, k, v, given);
    ComposedAttentionOptions o = given;
    torch::autograd::variable_list saved{q, k, v, lse};
    for (Tensor* t : slots(o)) saved.push_back(*t);
    for (Tensor* t : masks(o)) saved.push_back(*t);
    ctx->save_for_backward(std::move(saved));
    auto& data = ctx->saved_data;
    data["weights"] = static_cast<int64_t>(weights.size());
    data["pre_groups"] = o.pre.groups;
    data["post_groups"] = o.post.groups;
    data["conv_padding"] = o.conv_padding;
    data["conv_mask"] = o.conv_mask;
    data["causal"] = o.causal;
    data["window"] = o.window;
    data["scale"] = o.scale;
    ctx->mark_non_differentiable({lse});
    return {out, lse};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    ComposedAttentionOptions o;
    size_t i = 4;
    for (Tensor* t : slots(o)) *t = saved[i++];
    for (Tensor* t : masks(o)) *t = saved[i++];
    o.pre.groups = data["pre_groups"].toInt();
    o.post.groups = data["post_groups"].toInt();
    o.conv_padding = data["conv_padding"].toStringRef();
    o.conv_mask = data["conv_mask"].toStringRef();
    o.causal = data["causal"].toBool();
    o.window = data["window"].toOptional<int64_t>();
    o.scale = data["scale"].toOptional<double>();
    auto out = call_backward(grads[0], saved[0], saved[1], saved[2], saved[3], o);
    out.emplace_back();  // the options
    return out;
  }
};

Outputs fused_autograd(const Tensor& q, const Tensor& k, const Tensor& v, HL_ATTENTION_PARAMETERS) {
  ComposedAttentionOptions o = make_options(HL_ATTENTION_ARGUMENTS);
  std::vector<Tensor> weights;
  for (Tensor* t : slots(o)) {
    if (t->defined()) weights.push_back(*t);
  }
  const auto out = FusedFunction::apply(q, k, v, at::TensorList(weights), o);
  return {out[0], out[1]};
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def("composed_attention_fused(Tensor q, Tensor k, Tensor v, " HL_ATTENTION_SCHEMA
        ") -> (Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "composed_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor "
      "lse, " HL_ATTENTION_SCHEMA ") -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CPU, m) {
  m.impl("composed_attention_fused", fused_cpu);
  m.impl("composed_attention_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(headloom, Meta, m) {
  m.impl("composed_attention_fused", fused_meta);
  m.impl("composed_attention_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(headloom, Autograd, m) {
  m.impl("composed_attention_fused", fused_autograd);
  m.impl("composed_attention_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

Tensor composed_attention_fused(const Tensor& q, const Tensor& k, const Tensor& v,
                                const ComposedAttentionOptions& o) {
  return std::get<0>(call_fused(q, k, v, o));
}

}  // namespace headloom::ops
