#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <limits>

#include "ops/check.h"
#include "ops/composed_attention/op.h"
#include "ops/composed_attention/trace.h"

// Batch and sequence lengths stay symbolic (SymInt) so that torch.compile does not specialise on
// them.
namespace headloom::ops {
namespace {

using at::Tensor;
using c10::SymInt;

struct Visibility {
  Tensor all;             // [B or 1, 1, T, S] boolean; undefined when everything is visible
  Tensor without_causal;  // the same without the causal limit
};

Tensor both(const Tensor& a, const Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? at::logical_and(a, b) : a;
}

Visibility visibility(const Tensor& q, const Tensor& k, const ComposedAttentionOptions& o) {
  const SymInt queries = q.sym_size(1);
  const SymInt keys = k.sym_size(1);
  const auto options = q.options().dtype(at::kLong);
  Visibility out;
  if (o.causal || o.window || o.documents.defined()) {
    const SymInt past = keys - queries;
    const Tensor key = at::arange(c10::Scalar(keys), options).unsqueeze(0);  // [1, S]
    const Tensor query =
        at::arange(c10::Scalar(past), c10::Scalar(keys), options).unsqueeze(1);  // [T, 1]
    if (o.window) {
      const Tensor distance = query - key;
      out.without_causal = (o.causal ? distance : distance.abs()).lt(*o.window);
      out.without_causal = out.without_causal.unsqueeze(0).unsqueeze(0);
    }
    if (o.documents.defined()) {
      const Tensor own = o.documents.index_select(1, query.squeeze(1));  // [B, T]
      out.without_causal =
          both(out.without_causal, own.unsqueeze(-1).eq(o.documents.unsqueeze(1)).unsqueeze(1));
    }
    if (o.causal) out.all = key.le(query).unsqueeze(0).unsqueeze(0);
  }
  if (o.lengths.defined()) {
    const Tensor key = at::arange(c10::Scalar(keys), options);
    out.without_causal =
        both(out.without_causal, key.lt(o.lengths.unsqueeze(-1)).unsqueeze(1).unsqueeze(1));
  }
  if (o.mask.defined()) {
    Tensor mask = o.mask;
    while (mask.dim() < 4) mask = mask.unsqueeze(0);
    out.without_causal = both(out.without_causal, mask);
  }
  out.all = both(out.all, out.without_causal);
  return out;
}

Tensor repeat_heads(const Tensor& x_bhsd, int64_t heads) {
  const int64_t present = fixed_size(x_bhsd, 1);
  return present == heads ? x_bhsd : x_bhsd.repeat_interleave(heads / present, 1);
}

Tensor hide(const Tensor& x, const Tensor& visible, double value) {
  return visible.defined() ? x.masked_fill(visible.logical_not(), value) : x;
}

// sum_r (sum_h x[h] down[r,h]) up[r,h'], weights indexed by query ("t") or key ("s").
// x [B, g, n, T, S]; down, up [B, T or S, R, g, n].
Tensor low_rank(const Tensor& x, const Tensor& down, const Tensor& up, bool by_query) {
  const Tensor inner = by_query ? at::einsum("bgnts,btrgn->brgts", {x, down})
                                : at::einsum("bgnts,bsrgn->brgts", {x, down});
  return by_query ? at::einsum("brgts,btrgn->bgnts", {inner, up})
                  : at::einsum("brgts,bsrgn->bgnts", {inner, up});
}

Tensor mix(const Tensor& x, const HeadMix& m) {
  if (!m.defined()) return x;
  const bool grouped = m.static_matrix.defined() && m.static_matrix.dim() == 3;
  if (m.static_matrix.defined() && !grouped && m.groups == 1 &&
      fixed_size(m.static_matrix, 0) != fixed_size(m.static_matrix, 1)) {
    return at::einsum("bhts,hm->bmts", {x, m.static_matrix});
  }
  const auto shape = [&](const Tensor& w) { return w.unflatten(-1, {m.groups, -1}); };
  const Tensor xg = x.unflatten(1, {m.groups, -1});
  Tensor y = xg;
  if (m.static_matrix.defined()) {
    const Tensor matrix = grouped ? m.static_matrix : m.static_matrix.unsqueeze(0);
    y = at::einsum("bgnts,gnm->bgmts", {xg, matrix});
  }
  if (m.q_down.defined()) y = y + low_rank(xg, shape(m.q_down), shape(m.q_up), true);
  if (m.k_down.defined()) y = y + low_rank(xg, shape(m.k_down), shape(m.k_up), false);
  y = y.flatten(1, 2);
  if (m.q_gate.defined()) y = y + x * m.q_gate.transpose(1, 2).unsqueeze(-1);
  if (m.k_gate.defined()) y = y + x * m.k_gate.transpose(1, 2).unsqueeze(-2);
  return y;
}

// Grouped cross-correlation; x is already 0 where it does not count.
Tensor correlate(const Tensor& x, const Tensor& kernel, const std::string& padding,
                 int64_t query_pad) {
  // conv2d refuses what is smaller than its kernel, even where nothing comes of it. The sum, of
  // which nothing comes either, gives the kernel a gradient of zeros.
  if (TORCH_GUARD_OR_FALSE(x.sym_numel().sym_eq(0))) return x + kernel.sum();
  const int64_t ck = fixed_size(kernel, -1);
  const int64_t left = padding == "both" ? (ck - 1) / 2 : padding == "left" ? ck - 1 : 0;
  const Tensor weight = kernel.dim() == 4 ? kernel : kernel.unsqueeze(1);
  const int64_t groups = fixed_size(kernel, 0) / fixed_size(weight, 1);
  const Tensor padded = at::constant_pad_nd(x, {left, ck - 1 - left, query_pad, 0});
  return at::conv2d(padded, weight, {}, at::IntArrayRef{1, 1}, at::IntArrayRef{0, 0},
                    at::IntArrayRef{1, 1}, groups);
}

// The convolution of maps that are 0 where they do not count. The row of an earlier query counts
// only within the current query's document and, with `exact`, up to the current query's key.
Tensor convolve(const Tensor& x, const Tensor& kernel, const ComposedAttentionOptions& o,
                bool exact) {
  const int64_t cq = fixed_size(kernel, -2);
  exact = exact && o.causal;
  if (!exact && !o.documents.defined()) return correlate(x, kernel, o.conv_padding, cq - 1);
  const SymInt queries = x.sym_size(2), keys = x.sym_size(3);
  const auto options = x.options().dtype(at::kLong);
  const Tensor key = at::arange(c10::Scalar(keys), options).unsqueeze(0);
  const Tensor query = at::arange(c10::Scalar(keys - queries), c10::Scalar(keys), options);
  const Tensor future = key.gt(query.unsqueeze(1)).unsqueeze(0).unsqueeze(0);  // [1, 1, T, S]
  const Tensor document = o.documents.defined() ? o.documents.index_select(1, query) : Tensor();
  Tensor y;
  for (int64_t i = 0; i < cq; ++i) {
    const int64_t back = cq - 1 - i;
    // Row t of `shifted` is row t - back of x; the first `back` rows are outside and count as 0.
    Tensor shifted = at::constant_pad_nd(x, {0, 0, back, 0}).narrow_symint(2, SymInt(0), queries);
    if (exact) shifted = shifted.masked_fill(future, 0);
    if (document.defined()) {
      const Tensor theirs =
          at::constant_pad_nd(document, {back, 0}).narrow_symint(1, SymInt(0), queries);
      shifted = shifted.masked_fill(theirs.ne(document).unsqueeze(1).unsqueeze(-1), 0);
    }
    const Tensor term = correlate(shifted, kernel.narrow(-2, i, 1), o.conv_padding, 0);
    y = y.defined() ? y + term : term;
  }
  return y;
}

Tensor plain(const Tensor& q, const Tensor& k, const Tensor& v, const ComposedAttentionOptions& o) {
  const int64_t heads = fixed_size(q, 2);
  const bool same_groups = fixed_size(k, 2) == fixed_size(v, 2);
  const auto bhsd = [&](const Tensor& x) {
    return same_groups ? x.transpose(1, 2) : repeat_heads(x.transpose(1, 2), heads);
  };
  const bool limited = o.window || o.lengths.defined() || o.documents.defined() ||
                       o.mask.defined() || o.bias.defined();
  // is_causal of scaled_dot_product_attention aligns the first query with the first key. On the CPU
  // it multiplies the -inf of hidden scores by the scale, which has to be positive.
  const bool square =
      o.causal && !limited && q.sym_size(1) == k.sym_size(1) && o.scale.value_or(1) > 0;
  std::optional<Tensor> mask;
  Tensor visible;
  if (!square) {
    visible = visibility(q, k, o).all;
    if (o.bias.defined()) {
      mask = hide(o.bias, visible, -std::numeric_limits<double>::infinity());
      while (mask->dim() < 4) mask = mask->unsqueeze(0);
    } else if (visible.defined()) {
      mask = visible;
    }
  }
  const bool grouped = same_groups && fixed_size(k, 2) != heads;
  return at::scaled_dot_product_attention(q.transpose(1, 2), bhsd(k), bhsd(v), mask, 0.0, square,
                                          o.scale, grouped)
      .transpose(1, 2);
}

}  // namespace

bool is_plain(const ComposedAttentionOptions& o) {
  return !o.pre.defined() && !o.post.defined() && !o.pre_conv.defined() && !o.post_conv.defined();
}

Tensor composed_attention_reference(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const ComposedAttentionOptions& o) {
  return is_plain(o) ? plain(q, k, v, o) : composed_attention_maps(q, k, v, o);
}

namespace {

// mix(), and its terms where `trace` asks for them. A term alone is the mix of its weights over a
// static matrix of zeros, which takes the place of the skip.
Tensor mix_traced(const Tensor& x, const HeadMix& m, CompositionTrace* trace) {
  const Tensor y = mix(x, m);
  if (trace == nullptr) return y;
  trace->after = y;
  if (!m.defined()) return y;
  HeadMix part;
  part.groups = m.groups;
  part.static_matrix = m.static_matrix;
  trace->by_static = mix(x, part);
  const int64_t heads = fixed_size(x, 1), own = heads / m.groups;
  const Tensor nothing = at::zeros(
      m.groups == 1 ? std::vector<int64_t>{heads, heads} : std::vector<int64_t>{m.groups, own, own},
      x.options().requires_grad(false));
  part.static_matrix = nothing;
  if (m.q_down.defined() || m.q_gate.defined()) {
    HeadMix query = part;
    query.q_down = m.q_down;
    query.q_up = m.q_up;
    query.q_gate = m.q_gate;
    trace->by_query = mix(x, query);
  }
  if (m.k_down.defined() || m.k_gate.defined()) {
    HeadMix key = part;
    key.k_down = m.k_down;
    key.k_up = m.k_up;
    key.k_gate = m.k_gate;
    trace->by_key = mix(x, key);
  }
  return y;
}

Tensor weights(const Tensor& q, const Tensor& k, const Visibility& visible,
               const ComposedAttentionOptions& o, CompositionTrace* trace = nullptr) {
  const double scale = o.scale.value_or(1.0 / std::sqrt(static_cast<double>(fixed_size(q, 3))));
  Tensor a = at::matmul(q.transpose(1, 2) * scale,
                        repeat_heads(k.transpose(1, 2), fixed_size(q, 2)).transpose(-1, -2));
  if (o.bias.defined()) a = a + o.bias;
  if (trace != nullptr) trace->before = a;
  if (o.pre_conv.defined()) {
    const bool exact = o.conv_mask == "exact";
    a = convolve(hide(a, exact ? visible.without_causal : visible.all, 0), o.pre_conv, o, exact);
    if (trace != nullptr) trace->convolved = a;
  }
  a = mix_traced(a, o.pre, trace);
  // The lowest finite number instead of -inf: a row with no visible key then has finite gradients.
  const auto wide = at::toOpMathType(a.scalar_type());
  a = a.to(wide);
  // A score of -inf hides a key as a mask does: a row of nothing else is one that sees no key.
  const Tensor some =
      both(a.ne(-std::numeric_limits<double>::infinity()), visible.all).any(-1, true);
  const Tensor scores = hide(a, visible.all, std::numeric_limits<float>::lowest());
  const Tensor p = at::softmax(hide(scores, some, 0), -1);
  return hide(hide(p, visible.all, 0), some, 0).to(q.scalar_type());
}

Tensor traced(const Tensor& q, const Tensor& k, const Tensor& v, const ComposedAttentionOptions& o,
              const Visibility& visible, ComposedAttentionTrace* trace) {
  CompositionTrace* after = trace == nullptr ? nullptr : &trace->weights;
  Tensor p = weights(q, k, visible, o, trace == nullptr ? nullptr : &trace->scores);
  if (after != nullptr) after->before = p;
  if (o.post_conv.defined()) {
    p = hide(convolve(p, o.post_conv, o, false), visible.all, 0);
    if (after != nullptr) after->convolved = p;
  }
  p = mix_traced(p, o.post, after);
  return at::matmul(p, repeat_heads(v.transpose(1, 2), fixed_size(p, 1))).transpose(1, 2);
}

// sum_r down[r, h] up[r, h'] + gate[h] for h = h', within each of the groups: [B, L, H, H].
Tensor dense_map(const Tensor& down, const Tensor& up, const Tensor& gate, int64_t groups) {
  Tensor out;
  if (down.defined()) {
    const int64_t heads = down.size(-1), own = heads / groups;
    out = at::zeros({down.size(0), down.size(1), heads, heads}, down.options());
    for (int64_t g = 0; g < groups; ++g) {
      const Tensor block =
          at::matmul(down.narrow(-1, g * own, own).transpose(-1, -2), up.narrow(-1, g * own, own));
      out.narrow(2, g * own, own).narrow(3, g * own, own).copy_(block);
    }
  }
  if (!gate.defined()) return out;
  const Tensor diagonal = at::diag_embed(gate);
  return out.defined() ? out + diagonal : diagonal;
}

}  // namespace

Tensor composed_attention_weights(const Tensor& q, const Tensor& k,
                                  const ComposedAttentionOptions& o) {
  return weights(q, k, visibility(q, k, o), o);
}

Tensor composed_attention_maps(const Tensor& q, const Tensor& k, const Tensor& v,
                               const ComposedAttentionOptions& o) {
  return traced(q, k, v, o, visibility(q, k, o), nullptr);
}

Tensor composed_attention_traced(const Tensor& q, const Tensor& k, const Tensor& v,
                                 const ComposedAttentionOptions& o, ComposedAttentionTrace& trace) {
  const Visibility visible = visibility(q, k, o);
  trace.visible = visible.all;
  return traced(q, k, v, o, visible, &trace);
}

CompositionMaps composition_maps(const HeadMix& m, int64_t heads, const at::TensorOptions& like) {
  CompositionMaps maps;
  if (!m.static_matrix.defined()) {
    maps.by_static = at::eye(heads, like);
  } else if (m.static_matrix.dim() == 3) {
    maps.by_static = at::block_diag(m.static_matrix.unbind(0));
  } else {
    maps.by_static = m.static_matrix;
  }
  maps.by_query = dense_map(m.q_down, m.q_up, m.q_gate, m.groups);
  maps.by_key = dense_map(m.k_down, m.k_up, m.k_gate, m.groups);
  return maps;
}

}  // namespace headloom::ops
