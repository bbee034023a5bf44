#include "ops/composed_attention/op.h"

#include "ops/composed_attention/declaration.h"
#include "ops/composed_attention/kernel.h"

namespace headloom::ops {
namespace {

constexpr const char* kOp = "composed_attention";

// Checks one mix over `heads` maps and returns how many maps leave it.
int64_t check_mix(const HeadMix& m, const char* side, int64_t heads, const Tensor& q,
                  const Tensor& k) {
  if (!m.defined()) return heads;
  const std::string prefix = std::string(side) + ".";
  TORCH_CHECK_VALUE(m.groups >= 1 && heads % m.groups == 0, "composed_attention: ", prefix,
                    "groups is ", m.groups, ", expected a divisor of the ", heads, " heads.");
  const int64_t inside = heads / m.groups;
  int64_t out = heads;
  const bool dynamic =
      m.q_down.defined() || m.q_gate.defined() || m.k_down.defined() || m.k_gate.defined();
  if (m.static_matrix.defined()) {
    const Tensor& matrix = m.static_matrix;
    check_dtype(kOp, matrix, prefix + "static", q);
    if (matrix.dim() == 3 || m.groups > 1) {
      check_shape(kOp, matrix, prefix + "static", {m.groups, inside, inside}, "[g, H/g, H/g]");
    } else {
      TORCH_CHECK_VALUE(matrix.dim() == 2 && fixed_size(matrix, 0) == heads,
                        "composed_attention: ", prefix, "static has shape ", matrix.sym_sizes(),
                        ", expected [H, H'] with H = ", heads, ".");
      out = fixed_size(matrix, 1);
      TORCH_CHECK_VALUE(out >= 1, "composed_attention: ", prefix,
                        "static has no output maps, expected at least 1.");
      TORCH_CHECK_VALUE(out == heads || !dynamic, "composed_attention: ", prefix, "static maps ",
                        heads, " to ", out,
                        " heads, which admits no other term, but dynamic terms are given.");
    }
  }
  const auto check_pair = [&](const Tensor& down, const Tensor& up, const char* which,
                              const c10::SymInt& length, const char* legend) {
    TORCH_CHECK_VALUE(down.defined() == up.defined(), "composed_attention: ", prefix, which,
                      "_down and ", prefix, which, "_up go together, but only one is given.");
    if (!down.defined()) return;
    TORCH_CHECK_VALUE(down.dim() == 4, "composed_attention: ", prefix, which, "_down has shape ",
                      down.sym_sizes(), ", expected ", legend, ".");
    for (const auto& [t, end] : {std::pair(&down, "_down"), std::pair(&up, "_up")}) {
      check_shape(kOp, *t, prefix + which + end, {q.sym_size(0), length, down.sym_size(2), heads},
                  legend);
      check_dtype(kOp, *t, prefix + which + end, q);
    }
  };
  const auto check_gate = [&](const Tensor& gate, const char* which, const c10::SymInt& length,
                              const char* legend) {
    if (!gate.defined()) return;
    check_shape(kOp, gate, prefix + which, {q.sym_size(0), length, heads}, legend);
    check_dtype(kOp, gate, prefix + which, q);
  };
  check_pair(m.q_down, m.q_up, "q", q.sym_size(1), "[B, T, R, H]");
  check_pair(m.k_down, m.k_up, "k", k.sym_size(1), "[B, S, R, H]");
  check_gate(m.q_gate, "q_gate", q.sym_size(1), "[B, T, H]");
  check_gate(m.k_gate, "k_gate", k.sym_size(1), "[B, S, H]");
  return out;
}

void check_conv(const Tensor& kernel, const char* name, int64_t heads,
                const ComposedAttentionOptions& o, const Tensor& q) {
  if (!kernel.defined()) return;
  TORCH_CHECK_VALUE((kernel.dim() == 3 || kernel.dim() == 4) && fixed_size(kernel, 0) == heads,
                    "composed_attention: ", name, " has shape ", kernel.sym_sizes(),
                    ", expected [H, c_q, c_k] or [H, c_h, c_q, c_k] with H = ", heads, ".");
  const int64_t group = kernel.dim() == 4 ? fixed_size(kernel, 1) : 1;
  TORCH_CHECK_VALUE(group > 0 && heads % group == 0, "composed_attention: ", name,
                    " has groups of ", group, " heads, expected a divisor of ", heads, ".");
  TORCH_CHECK_VALUE(fixed_size(kernel, -2) >= 1 && fixed_size(kernel, -1) >= 1,
                    "composed_attention: ", name, " has shape ", kernel.sym_sizes(),
                    ", expected c_q and c_k of at least 1.");
  TORCH_CHECK_VALUE(o.conv_padding != "both" || fixed_size(kernel, -1) % 2 == 1,
                    "composed_attention: ", name, " has c_k = ", fixed_size(kernel, -1),
                    ", expected an odd number with conv_padding \"both\".");
  check_dtype(kOp, kernel, name, q);
}

void check_broadcast(const Tensor& t, const char* name, c10::SymIntArrayRef to,
                     const char* legend) {
  bool fits = t.dim() <= 4;
  for (int64_t i = 0; fits && i < t.dim(); ++i) {
    const c10::SymInt size = t.sym_size(t.dim() - 1 - i);
    fits = size == 1 || size == to[3 - i];
  }
  TORCH_CHECK_VALUE(fits, "composed_attention: ", name, " has shape ", t.sym_sizes(),
                    ", expected one that broadcasts to ", legend, " = ", to, ".");
}

}  // namespace

void ComposedAttention::check(const Arguments& a) {
  const auto& [q, k, v, o] = a;
  TORCH_CHECK_VALUE(q.dim() == 4, "composed_attention: q has shape ", q.sym_sizes(),
                    ", expected [B, T, H, D].");
  TORCH_CHECK_TYPE(q.is_floating_point(), "composed_attention: q has dtype ", q.scalar_type(),
                   ", expected a floating type.");
  TORCH_CHECK_VALUE(
      k.dim() == 4 && k.sym_size(0) == q.sym_size(0) && k.sym_size(3) == q.sym_size(3),
      "composed_attention: k has shape ", k.sym_sizes(),
      ", expected [B, S, Gk, D] with B = ", q.sym_size(0), " and D = ", q.sym_size(3), ".");
  TORCH_CHECK_VALUE(
      v.dim() == 4 && v.sym_size(0) == q.sym_size(0) && v.sym_size(1) == k.sym_size(1),
      "composed_attention: v has shape ", v.sym_sizes(),
      ", expected [B, S, Gv, E] with B = ", q.sym_size(0), " and S = ", k.sym_size(1), ".");
  check_dtype(kOp, k, "k", q);
  check_dtype(kOp, v, "v", q);
  const int64_t heads = fixed_size(q, 2);
  TORCH_CHECK_VALUE(
      heads >= 1 && fixed_size(k, 2) >= 1 && fixed_size(v, 2) >= 1 && fixed_size(q, 3) >= 1,
      "composed_attention: q has shape ", q.sym_sizes(), ", k ", k.sym_sizes(), ", v ",
      v.sym_sizes(), ", expected at least one head and D of at least 1.");
  TORCH_CHECK_VALUE(heads % fixed_size(k, 2) == 0, "composed_attention: k has ", fixed_size(k, 2),
                    " heads, expected a divisor of the ", heads, " heads of q.");
  TORCH_CHECK_VALUE(
      o.conv_padding == "both" || o.conv_padding == "left" || o.conv_padding == "right",
      "composed_attention: conv_padding is \"", o.conv_padding,
      "\", expected \"both\", \"left\" or \"right\".");
  TORCH_CHECK_VALUE(o.conv_mask == "double" || o.conv_mask == "exact",
                    "composed_attention: conv_mask is \"", o.conv_mask,
                    "\", expected \"double\" or \"exact\".");
  check_conv(o.pre_conv, "pre_conv", heads, o, q);
  const int64_t middle = check_mix(o.pre, "pre", heads, q, k);
  check_conv(o.post_conv, "post_conv", middle, o, q);
  const int64_t out = check_mix(o.post, "post", middle, q, k);
  TORCH_CHECK_VALUE(out % fixed_size(v, 2) == 0, "composed_attention: v has ", fixed_size(v, 2),
                    " heads, expected a divisor of the ", out, " output maps.");
  TORCH_CHECK_VALUE(!o.window || *o.window >= 1, "composed_attention: window is ",
                    o.window.value_or(0), ", expected at least 1.");
  const c10::SymInt batch = q.sym_size(0), queries = q.sym_size(1), keys = k.sym_size(1);
  if (o.bias.defined()) {
    check_broadcast(o.bias, "bias", {batch, heads, queries, keys}, "[B, H, T, S]");
    check_dtype(kOp, o.bias, "bias", q);
  }
  if (o.mask.defined()) {
    TORCH_CHECK_TYPE(o.mask.scalar_type() == at::kBool, "composed_attention: mask has dtype ",
                     o.mask.scalar_type(), ", expected bool.");
    check_broadcast(o.mask, "mask", {batch, 1, queries, keys}, "[B, 1, T, S]");
    check_device(kOp, o.mask, "mask", q);
  }
  if (o.lengths.defined()) {
    check_ids(kOp, o.lengths, "lengths", q);
    check_shape(kOp, o.lengths, "lengths", {batch}, "[B]");
  }
  if (o.documents.defined()) {
    check_ids(kOp, o.documents, "documents", q);
    check_shape(kOp, o.documents, "documents", {batch, keys}, "[B, S]");
    TORCH_CHECK_VALUE(queries <= keys,
                      "composed_attention: documents need S >= T, got T = ", queries,
                      " and S = ", keys, ".");
  }
}

// Everything that is multiplied is cast; masks and ids are not.
void ComposedAttention::autocast(Arguments& a, const AutocastCast& cast) {
  for (const detail::Slot& slot : detail::slots<ComposedAttention>(a)) {
    if (slot.differentiable) cast(*slot.tensor);
  }
}

// Plain attention in the fused kernels rather than in scaled_dot_product_attention. In float32 that
// has as fast a forward and a faster backward for more queries than read their keys in place, but
// fewer than 16 or a 32nd of the keys. Whether a gradient is wanted does not count: results must
// not depend on it.
bool ComposedAttention::prefers_kernels(const Arguments& a) {
  if (!is_plain(a.options) || a.q.scalar_type() == at::kBFloat16) return true;
  const c10::SymInt queries = a.q.sym_size(1), group = fixed_size(a.q, 2) / fixed_size(a.k, 2);
  return TORCH_GUARD_OR_FALSE(
             (queries * group).sym_le(composed_attention_kernel::kDirectQueries)) ||
         (TORCH_GUARD_OR_FALSE(queries.sym_ge(16)) &&
          TORCH_GUARD_OR_FALSE((queries * 32).sym_ge(a.k.sym_size(1))));
}

Tensor ComposedAttention::reference(const Arguments& a) {
  return composed_attention_reference(a.q, a.k, a.v, a.options);
}

// scaled_dot_product_attention has no second derivative.
Tensor ComposedAttention::definition(const Arguments& a) {
  return composed_attention_maps(a.q, a.k, a.v, a.options);
}

std::vector<Tensor> ComposedAttention::outputs(const Arguments& a, bool /*training*/) {
  const auto& [q, k, v, o] = a;
  const auto maps_after = [](const HeadMix& m, int64_t heads) {
    const bool mixed = m.static_matrix.defined() && m.static_matrix.dim() == 2;
    return mixed ? fixed_size(m.static_matrix, 1) : heads;
  };
  const int64_t middle = maps_after(o.pre, fixed_size(q, 2)), out = maps_after(o.post, middle);
  return {at::empty_symint({q.sym_size(0), q.sym_size(1), out, v.sym_size(3)}, q.options()),
          contiguous_float({q.sym_size(0), middle, q.sym_size(1)}, q)};
}

static const Define<ComposedAttention> composed_attention_operator;

Tensor composed_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                          const ComposedAttentionOptions& o) {
  return call<ComposedAttention>({q, k, v, o}, o.backend);
}

}  // namespace headloom::ops
