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
      return section(section(bias, 0, o.offset, length), 1, o.offset, all)
          .unsqueeze(0)
          .unsqueeze(0);
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

// [e^k v | e^k] relative to `exponent`; nothing where `hidden`, which may be undefined.
Tensor exponentials(const Tensor& k, const Tensor& v, const Tensor& exponent,
                    const Tensor& hidden) {
  if (!hidden.defined()) {
    const Tensor e = at::exp(k - exponent);
    return at::cat({e * v, e}, -1);
  }
  // A hidden key may be so large that its exponential has no gradient but NaN.
  const Tensor e = at::exp(k.masked_fill(hidden, kNoExponent) - exponent).masked_fill(hidden, 0);
  return at::cat({(e * v).masked_fill(hidden, 0), e}, -1);
}

// The largest of some keys, of those that are not hidden; no -inf, of which differences are NaN.
Tensor largest(const Tensor& k, int64_t dim, const Tensor& hidden) {
  const Tensor shown = hidden.defined() ? k.masked_fill(hidden, kNoExponent) : k;
  return shown.detach().amax(dim, true).clamp_min(kNoExponent);
}

// Without positions all queries see the same mean, [B, 1, C]; 0 where no key has any weight. k, v:
// [B, T, C].
Tensor mean_of_all(const Tensor& k, const Tensor& v, const Tensor& lengths) {
  Tensor hidden;
  if (lengths.defined()) {
    const Tensor place = at::arange(c10::Scalar(k.sym_size(1)), lengths.options());
    hidden = place.ge(lengths.unsqueeze(1)).unsqueeze(-1);
  }
  const std::vector<Tensor> sums =
      exponentials(k, v, largest(k, 1, hidden), hidden).sum(1, true).chunk(2, -1);
  return sums[0] / at::where(sums[1].eq(0), at::ones_like(sums[1]), sums[1]);
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

// Sums over keys for every query, with v and without: [a | b] e^exponent, [B, H, T, 2D] and [B, H,
// T, D]. The exponent is a constant to gradients.
struct Sums {
  Tensor both, exponent;
};

// The sums of a causal form: k, v [B, H, T, D], weights [1 or B, 1 or H, T, T], run [B, T] or
// undefined. An exponent has to be one of a key that the query sees, or all that it sees might
// vanish beside it. So the positions are halved again and again: queries of a second half see all
// keys of the first that are of their document.
std::vector<Sums> causal_sums(Tensor k, Tensor v, Tensor weights, Tensor run) {
  const int64_t length = fixed_size(k, 2);
  int64_t size = 1;
  while (size < length) size *= 2;
  const int64_t more = size - length;
  if (more > 0) {
    k = at::constant_pad_nd(k, {0, 0, 0, more});
    v = at::constant_pad_nd(v, {0, 0, 0, more});
    weights = at::constant_pad_nd(weights, {0, more, 0, more});
    if (run.defined()) run = at::constant_pad_nd(run, {0, more}, -1);
  }
  std::vector<Sums> all;
  const auto positions = [&](const Tensor& t) { return t.flatten(2, 3).narrow(2, 0, length); };
  weights = weights.unsqueeze(2);  // [1 or B, 1 or H, blocks, size, size]
  for (int64_t half = size / 2; half >= 1; half /= 2) {
    const int64_t blocks = weights.size(2);
    const auto first = [&](const Tensor& t) {
      return t.unflatten(2, {blocks, 2, half}).select(3, 0);
    };
    Tensor hidden, blind;  // keys that no query sees, and queries that see none
    if (run.defined()) {
      const Tensor halves = run.view_symint({run.sym_size(0), 1, blocks, 2, half, 1});
      const Tensor last = halves.select(3, 0).narrow(3, half - 1, 1);
      hidden = halves.select(3, 0).ne(last);
      blind = halves.select(3, 1).ne(last);
    }
    const Tensor keys = first(k), lower = weights.narrow(3, half, half).narrow(4, 0, half);
    Tensor top = largest(keys, 3, hidden);
    Tensor both = at::matmul(lower, exponentials(keys, first(v), top, hidden));
    std::vector<c10::SymInt> sizes = top.sym_sizes().vec();
    sizes[3] = half;
    top = top.expand_symint(sizes);
    if (blind.defined()) {
      top = top.masked_fill(blind, kNoExponent);
      both = both.masked_fill(blind, 0);
    }
    // Queries of the first halves have none of these sums.
    both = at::constant_pad_nd(both, {0, 0, half, 0});
    top = at::constant_pad_nd(top, {0, 0, half, 0}, kNoExponent);
    all.push_back({positions(both), positions(top)});
    const auto quarter = [&](int64_t from) {
      return weights.narrow(3, from, half).narrow(4, from, half);
    };
    weights = at::stack({quarter(0), quarter(half)}, 3).flatten(2, 3);
  }
  // Each query's own key.
  const Tensor own = weights.flatten(2, 4).unsqueeze(-1);
  const Tensor top = k.detach().clamp_min(kNoExponent);
  const Tensor both = own * exponentials(k, v, top, {});
  all.push_back({both.narrow(2, 0, length), top.narrow(2, 0, length)});
  return all;
}

// The sums of a form that is not causal, whose queries all see the same keys of their document, and
// of a graph that is traced for any length, whose halves are not known.
Sums sums_at_once(const Tensor& k, const Tensor& v, const Tensor& weights, const Tensor& run,
                  const Tensor& hidden) {
  Tensor top = largest(k, 2, hidden);
  if (run.defined()) {
    const Tensor shown = (hidden.defined() ? k.masked_fill(hidden, kNoExponent) : k).detach();
    const Tensor index = run.unsqueeze(1).unsqueeze(-1).expand_symint(k.sym_sizes());
    top =
        at::full_like(shown, kNoExponent).scatter_reduce(2, index, shown, "amax").gather(2, index);
  }
  const Tensor both = at::matmul(weights, exponentials(k, v, top, hidden));
  return {both, top.expand_symint(k.sym_sizes())};
}

// bool, broadcast to [B, 1, T, keys]: the keys that each query sees. `age` [T, keys] is how many
// positions a key, whose places are `key` [keys], stands before a query.
Tensor visible_keys(const AftOptions& o, const Keys& keys, const Tensor& key, const Tensor& age) {
  Tensor visible = at::ones({1, 1, 1, 1}, key.options().dtype(at::kBool));
  if (o.causal) visible = age.ge(0).unsqueeze(0).unsqueeze(0);
  if (keys.run.defined()) {
    visible =
        visible.logical_and(keys.of_rows.unsqueeze(-1).eq(keys.run.unsqueeze(1)).unsqueeze(1));
  }
  if (o.lengths.defined() && !o.causal) {
    visible = visible.logical_and(key.lt(o.lengths.view({-1, 1, 1, 1})));
  }
  return visible;
}

// What each of `length` queries has from a state: its sums [B, 3, C] of keys beyond the window, and
// the keys that a window has not left yet.
std::vector<Sums> sums_of_state(const Tensor& sums, const Keys& keys, const Tensor& weights,
                                int64_t window, const SymInt& length) {
  // What the state has is of the first document, and all of its queries see it.
  Tensor blind;
  if (keys.run.defined()) blind = keys.of_rows.ne(0).unsqueeze(1).unsqueeze(-1);
  std::vector<Sums> parts;
  const auto add = [&](Tensor both, Tensor exponent) {
    if (blind.defined()) {
      both = both.masked_fill(blind, 0);
      exponent = exponent.masked_fill(blind, kNoExponent);
    }
    parts.push_back({both, exponent});
  };
  const auto each = [&](const Tensor& t) {
    std::vector<c10::SymInt> sizes = t.sym_sizes().vec();
    sizes[2] = length;
    return t.expand_symint(sizes);
  };
  const auto row = [&](int64_t i) { return sums.narrow(1, i, 1).unsqueeze(1); };
  const Tensor m = row(2).detach().clamp_min(kNoExponent), factor = at::exp(row(2) - m);
  add(each(at::cat({row(0) * factor, row(1) * factor}, -1)), each(m));
  if (window > 1) {
    const Tensor k_old = keys.k.narrow(1, 0, window - 1).unsqueeze(1);
    const Tensor v_old = keys.v.narrow(1, 0, window - 1).unsqueeze(1);
    const Tensor none = k_old.le(kNoExponent / 2);  // places that a state leaves empty
    const Tensor top = largest(k_old, 2, none);
    add(at::matmul(weights.narrow(3, 0, window - 1), exponentials(k_old, v_old, top, none)),
        each(top));
  }
  return parts;
}

// The sums of weighted values over those of weights, [B, H, T, C / H].
Tensor weighted_mean(const std::vector<Sums>& parts) {
  Tensor top = parts[0].exponent;
  for (const Sums& part : parts) top = at::maximum(top, part.exponent);
  Tensor above, below;
  for (const Sums& part : parts) {
    const Tensor factor = at::exp(part.exponent - top);
    const std::vector<Tensor> halves = part.both.chunk(2, -1);
    above = above.defined() ? above + halves[0] * factor : halves[0] * factor;
    below = below.defined() ? below + halves[1] * factor : halves[1] * factor;
  }
  // A position may see nothing: of a sequence without keys, or of a document beyond the lengths.
  return above / at::where(below.eq(0), at::ones({}, below.options()), below);
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
  const Tensor visible = visible_keys(o, keys, key, age);
  Tensor weights = o.form == "simple" ? at::zeros_symint({1, 1, length, all}, keys.k.options())
                                      : pair_bias(o, keys, age, window);
  weights = at::where(visible, weights.exp(), at::zeros({}, weights.options()));

  const int64_t heads = o.form == "conv" ? o.bias.size(0) : 1;
  const auto of_heads = [&](const Tensor& t) {
    return t.unflatten(2, {heads, channels / heads}).transpose(1, 2);
  };
  const auto newest = [&](const Tensor& t, int64_t dim) {
    return t.narrow_symint(dim, keys.earlier, length);
  };
  const Tensor k_new = of_heads(newest(keys.k, 1)), v_new = of_heads(newest(keys.v, 1));
  std::vector<Sums> parts;
  if (o.causal && length.maybe_as_int()) {
    parts = causal_sums(k_new, v_new, newest(weights, 3), keys.of_rows);
  } else {
    Tensor hidden;
    if (o.lengths.defined() && !o.causal) hidden = key.ge(o.lengths.view({-1, 1, 1})).unsqueeze(-1);
    parts = {sums_at_once(k_new, v_new, newest(weights, 3), keys.of_rows, hidden)};
  }
  if (sums.defined()) {
    for (Sums& part : sums_of_state(sums, keys, weights, window, length)) {
      parts.push_back(std::move(part));
    }
  }
  const Tensor y = weighted_mean(parts).transpose(1, 2).flatten(2);
  if (!stateful(o)) return {finish(y), no_state()};

  return {finish(y), state_after(keys, key, sums, window).to(wide)};
}

}  // namespace headloom::ops
