// aft conv as a convolution, where no kernel runs: T W C instead of the definition's T^2 C.
#include "ops/aft/declaration.h"
#include "ops/wkv/op.h"

namespace headloom::ops {
namespace {

using c10::SymInt;

constexpr int64_t kBlock = 64;  // queries of one product

// What lies before the band of every position: x [B, H, T, E] summed up to `window` positions back.
Tensor before_band(const Tensor& x, int64_t window) {
  return at::constant_pad_nd(x.cumsum(2), {0, 0, window, 0}).narrow_symint(2, 0, x.sym_size(2));
}

}  // namespace

// Form conv without documents: blocks of positions times a band of e^w, and running sums of what
// lies outside it, in float64, relative to the largest key. Not every query of the causal form sees
// that one, and keys more than 600 below it count as nothing, so on a CPU the causal form is the
// reference's. Elsewhere the reference's tables of all pairs of positions would take the memory.
std::tuple<Tensor, Tensor> Aft::otherwise(const Arguments& given) {
  const auto& [q, k, v, o] = given;
  const bool by_reference = o.documents.defined() || (o.causal && q.is_cpu());
  if (o.form != "conv" || by_reference) return reference(given);
  const auto wide = at::toOpMathType(q.scalar_type());
  const auto ids = q.options().dtype(at::kLong).requires_grad(false);
  const SymInt length = q.sym_size(1);
  const int64_t channels = fixed_size(q, 2), heads = o.bias.size(0), size = channels / heads;
  const int64_t columns = o.bias.size(1), window = o.causal ? columns : (columns + 1) / 2;
  Tensor keys = k.to(at::kDouble), hidden;
  if (o.lengths.defined() && !o.causal) {
    hidden = at::arange(c10::Scalar(length), ids).ge(o.lengths.unsqueeze(1)).unsqueeze(-1);
    keys = keys.masked_fill(hidden, kNoExponent);
  }
  // No -inf is taken away, which would leave NaN where all keys are that.
  Tensor e = at::exp(keys - keys.amax(1, true).detach().clamp_min(kNoExponent));
  if (hidden.defined()) e = e.masked_fill(hidden, 0);  // all are, of a sequence without keys
  const auto of_heads = [&](const Tensor& t) {
    return t.unflatten(2, {heads, size}).transpose(1, 2);
  };
  Tensor with_v = e * v.to(at::kDouble);
  if (hidden.defined()) with_v = with_v.masked_fill(hidden, 0);   // though it were NaN
  const Tensor x = at::cat({of_heads(with_v), of_heads(e)}, -1);  // [B, H, T, 2D]

  // Blocks of queries times the keys within their reach: one band a head for all blocks.
  // A graph that is traced for any length has whole blocks, and at least two of them: PyTorch takes
  // a size of 1 for a case of its own.
  const std::optional<int64_t> known = length.maybe_as_int();
  const int64_t block = std::min(known.value_or(kBlock), kBlock);
  const SymInt blocks = (length + (block - 1)) / block + (known ? 0 : 1);
  const int64_t reach = block + columns - 1;
  const Tensor column = at::arange(reach, ids) - at::arange(block, ids).unsqueeze(1);
  const Tensor inside = column.ge(0).logical_and(column.lt(columns));
  // An entry that no pair of positions uses must not become an infinity, which times the zeros
  // around the sequence is NaN.
  const Tensor age = (at::arange(columns, ids) - (window - 1)).abs();
  const Tensor weights = o.bias.to(at::kDouble)
                             .masked_fill(age.ge(c10::Scalar(length)), 0)
                             .exp()
                             .index_select(1, column.clamp(0, columns - 1).flatten())
                             .view({heads, 1, block, reach});
  const Tensor band = at::where(inside, weights, at::zeros({}, weights.options()));
  const SymInt after = blocks * block - length + (columns - window);
  const Tensor seen =
      at::constant_pad_nd_symint(x, {0, 0, window - 1, after}).unfold(2, reach, block);
  Tensor both = at::matmul(band, seen.transpose(-1, -2)).flatten(2, 3).narrow_symint(2, 0, length);
  both = both + before_band(x, window);
  if (!o.causal) both = both + before_band(x.flip(2), window).flip(2);

  const auto joined = [&](int64_t from) {
    return both.narrow(-1, from, size).transpose(1, 2).flatten(2);
  };
  const Tensor below = joined(size);
  const Tensor y = joined(0) / at::where(below.eq(0), at::ones({}, below.options()), below);
  return {(y * at::sigmoid(q.to(at::kDouble))).to(q.scalar_type()),
          q.new_empty_symint({q.sym_size(0), 0, channels}, wide)};
}

}  // namespace headloom::ops
