#include "ops/aft/declaration.h"
#include "ops/documents.h"
#include "ops/section.h"
#include "ops/wkv/op.h"

namespace headloom::ops {
namespace {

using c10::SymInt;

// Keys as the queries see them: those of the state first.
struct Keys {
  Tensor k, v;          // [B, S, C] float64
  Tensor run, of_rows;  // [B, S], [B, T]: documents begun before; undefined: all one
  Tensor position;      // [1 or B, T]: of the queries, in their document
  int64_t earlier;      // S - T
};

// Each query's place in its document and which document that is.
void place(Keys& keys, const AftOptions& o, const SymInt& length, const at::TensorOptions& ids) {
  const Tensor step = at::arange(c10::Scalar(length), ids).unsqueeze(0);
  keys.position = step + o.offset;
  if (!o.documents.defined()) return;
  const Tensor begins = at::constant_pad_nd(id_changes(o.documents), {1, 0});
  keys.of_rows = begins.to(at::kLong).cumsum(1);
  keys.run = at::constant_pad_nd(keys.of_rows, {keys.earlier, 0});
  const Tensor start = std::get<0>(at::cummax((step * begins), 1));
  keys.position = at::where(keys.of_rows.eq(0), keys.position, step - start);
}

// w of every pair, [1 or B, 1 or H, T, S].
Tensor pair_bias(const AftOptions& o, const Keys& keys, const Tensor& age, int64_t window) {
  const Tensor bias = o.bias.to(at::kDouble);
  const SymInt length = age.sym_size(0), all = age.sym_size(1), batch = keys.position.sym_size(0);
  if (o.form == "full") {
    if (!o.documents.defined()) {
      return section(section(bias, 0, 0, length), 1, 0, all).unsqueeze(0).unsqueeze(0);
    }
    // The key's position, where it is in the query's document; elsewhere nothing is read.
    const Tensor other = (keys.position.unsqueeze(-1) - age).clamp(0, bias.size(1) - 1);
    const Tensor pair = keys.position.unsqueeze(-1) * bias.size(1) + other;
    return bias.flatten().index_select(0, pair.flatten()).view_symint({batch, 1, length, all});
  }
  const Tensor inside = age.abs().lt(window);
  const Tensor column = (window - 1 - age).clamp(0, bias.size(1) - 1);
  Tensor w;
  if (o.form == "conv") {
    w = bias.index_select(1, column.flatten()).view_symint({1, bias.size(0), length, all});
  } else {
    const Tensor rows =
        bias.index_select(0, keys.position.flatten()).view_symint({batch, 1, length, bias.size(1)});
    w = rows.gather(3, column.expand_symint({batch, 1, length, all}));
  }
  return at::where(inside, w, at::zeros({}, w.options()));
}

// Without positions all queries see the same mean, [B, 1, C]. k, v: [B, T, C].
Tensor mean_of_all(const Tensor& k, const Tensor& v, const Tensor& lengths) {
  if (!lengths.defined()) return (at::softmax(k, 1) * v).sum(1, true);
  const Tensor place = at::arange(c10::Scalar(k.sym_size(1)), lengths.options());
  const Tensor hidden = place.ge(lengths.unsqueeze(1)).unsqueeze(-1);
  // A sequence without any key has weights of 0.
  return (at::softmax(k.masked_fill(hidden, kNoExponent), 1).masked_fill(hidden, 0) * v)
      .sum(1, true);
}

// The last W - 1 positions, and the sums of those before them, of the last document. `key` numbers
// the keys, and `sums` [B, 3, C] are those of the state that was given.
Tensor state_after(const Keys& keys, const Tensor& key, const Tensor& sums, int64_t window) {
  const SymInt all = key.sym_size(0);
  const int64_t ring = window - 1;
  Tensor kept_k = at::constant_pad_nd(keys.k, {0, 0, ring, 0}, kNoExponent);
  Tensor kept_v = at::constant_pad_nd(keys.v, {0, 0, ring, 0});
  Tensor old = at::ones_symint({1, all, 1}, key.options().dtype(at::kBool));
  if (keys.run.defined()) {
    old = keys.run.eq(keys.run.narrow_symint(1, all - 1, 1)).unsqueeze(-1);
    const Tensor same = at::constant_pad_nd(old, {0, 0, ring, 0}, true);
    kept_k = at::where(same, kept_k, at::full({}, kNoExponent, kept_k.options()));
    kept_v = kept_v * same;
  }
  old = old.logical_and(key.lt(c10::Scalar(all - ring)).unsqueeze(-1));
  // Not the places that a state leaves empty; NaN is none.
  old = old.logical_and(keys.k.le(kNoExponent / 2).logical_not());
  const Tensor none = at::full({}, kNoExponent, keys.k.options());
  Tensor old_k = at::where(old, keys.k, none), m = old_k.amax(1, true).detach();
  Tensor carried;
  if (sums.defined()) {
    carried = sums;
    if (keys.run.defined()) {
      const Tensor same = keys.run.narrow_symint(1, all - 1, 1).eq(0).unsqueeze(-1);
      carried =
          at::cat({sums.narrow(1, 0, 2) * same, at::where(same, sums.narrow(1, 2, 1), none)}, 1);
    }
    m = at::maximum(m, carried.narrow(1, 2, 1)).detach();
  }
  const Tensor added = at::exp(old_k - m) * old;
  Tensor a = (added * keys.v).sum(1, true), b = added.sum(1, true);
  if (carried.defined()) {
    const Tensor factor = at::exp(carried.narrow(1, 2, 1) - m);
    a = a + carried.narrow(1, 0, 1) * factor;
    b = b + carried.narrow(1, 1, 1) * factor;
  }
  const auto newest = [&](const Tensor& t) {
    return t.narrow_symint(1, t.sym_size(1) - ring, ring);
  };
  return at::cat({a, b, m, newest(kept_k), newest(kept_v)}, 1);
}

}  // namespace

std::tuple<Tensor, Tensor> Aft::reference(const Arguments& given) {
  const auto& [q, k, v, o] = given;
  const auto wide = at::toOpMathType(q.scalar_type());
  const auto ids = q.options().dtype(at::kLong).requires_grad(false);
  const SymInt batch = q.sym_size(0), length = q.sym_size(1);
  const int64_t channels = fixed_size(q, 2);
  const auto no_state = [&] { return q.new_empty_symint({batch, 0, channels}, wide); };
  int64_t window = 1;
  if (o.form == "local" || o.form == "conv") {
    window = o.causal ? o.bias.size(1) : (o.bias.size(1) + 1) / 2;
  }
  const auto finish = [&](const Tensor& y) {
    return (y * at::sigmoid(q.to(y.scalar_type()))).to(q.scalar_type());
  };
  if (o.form == "simple" && !o.causal && !o.documents.defined()) {
    return {finish(mean_of_all(k.to(wide), v.to(wide), o.lengths).expand_as(q)), no_state()};
  }

  Keys keys = {k.to(at::kDouble), v.to(at::kDouble), {}, {}, {}, 0};
  Tensor sums;  // [B, 3, C]
  if (o.state.defined()) {
    const Tensor state = o.state.to(at::kDouble);
    keys.earlier = window - 1;
    sums = state.narrow(1, 0, 3);
    keys.k = at::cat({state.narrow(1, 3, window - 1), keys.k}, 1);
    keys.v = at::cat({state.narrow(1, 2 + window, window - 1), keys.v}, 1);
  }
  place(keys, o, length, ids);
  const SymInt all = keys.earlier + length;
  const Tensor key = at::arange(c10::Scalar(all), ids);
  const Tensor age = key.narrow_symint(0, keys.earlier, length).unsqueeze(1) - key;
  Tensor visible = at::ones({1, 1, 1, 1}, ids.dtype(at::kBool));
  if (o.causal) visible = age.ge(0).unsqueeze(0).unsqueeze(0);
  if (keys.run.defined()) {
    visible =
        visible.logical_and(keys.of_rows.unsqueeze(-1).eq(keys.run.unsqueeze(1)).unsqueeze(1));
  }
  if (o.lengths.defined() && !o.causal) {
    visible = visible.logical_and(key.lt(o.lengths.view({-1, 1, 1, 1})));
  }
  Tensor weights = o.form == "simple" ? at::zeros_symint({1, 1, length, all}, keys.k.options())
                                      : pair_bias(o, keys, age, window);
  weights = at::where(visible, weights.exp(), at::zeros({}, weights.options()));

  // Everything relative to one exponent a channel, which cancels; float64 bears the rest.
  Tensor scale = keys.k.amax(1, true);
  if (sums.defined()) scale = at::maximum(scale, sums.narrow(1, 2, 1));
  scale = scale.detach();
  const Tensor e = at::exp(keys.k - scale);
  const int64_t heads = fixed_size(weights, 1), size = channels / heads;
  const auto of_heads = [&](const Tensor& t) {
    return t.unflatten(2, {heads, size}).transpose(1, 2);
  };
  const Tensor both =
      at::matmul(weights, at::cat({of_heads(e * keys.v), of_heads(e)}, -1)).transpose(1, 2);
  Tensor above = both.narrow(-1, 0, size).flatten(2),
         below = both.narrow(-1, size, size).flatten(2);
  if (sums.defined()) {
    Tensor factor = at::exp(sums.narrow(1, 2, 1) - scale);
    if (keys.run.defined()) factor = factor * keys.of_rows.eq(0).unsqueeze(-1);
    above = above + sums.narrow(1, 0, 1) * factor;
    below = below + sums.narrow(1, 1, 1) * factor;
  }
  // A position may see nothing: of a sequence without keys, or of a document beyond the lengths.
  const Tensor y = above / at::where(below.eq(0), at::ones({}, below.options()), below);
  if (!stateful(o)) return {finish(y), no_state()};

  return {finish(y), state_after(keys, key, sums, window).to(wide)};
}

}  // namespace headloom::ops
