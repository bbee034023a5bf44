// Backward: everything is recomputed from q, k, v and the saved log-sum-exp.
// First pass over the key blocks: weights P, their gradient dP and what belongs
// to the values and the mix after softmax; the row sums of P dP and P. Second pass:
// the gradient of the scores and all that is before softmax.
#pragma once

#include "ops/composed_attention/kernel_tile.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

// x = exp(x - lse), 0 where invisible. kRounded as in weight_of(). A weight is at most 1, also
// where scores are so large that the saved sum is rounded to one that is smaller.
template <bool kRounded>
void weights_of_rows(const Args& a, const Plan& p, int64_t rows, const uint64_t* visible,
                     const float* lse, float* x) {
  constexpr int V = kBlock / VL;
  for (int64_t t = 0; t < rows; ++t) {
    const uint64_t bits = visible[t];
    const bool all = bits == ~uint64_t{0};
    for (int64_t h = 0; h < a.H1; ++h) {
      float* row = x + t * p.line + h * kBlock;
      const vf shift = bcast(lse[t * a.H1 + h]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        const vf below = vmin(zero(), load(row + v * VL) - shift);
        vf e = kRounded ? vexp_to_be_rounded(below) : vexp(below);
        if (!all) e = select(lanes(bits, v), e, zero());
        store(row + v * VL, e);
      }
    }
  }
}

void weights_from_lse(const Args& a, const Plan& p, int64_t rows, const uint64_t* visible,
                      const float* lse, float* x) {
  p.half ? weights_of_rows<true>(a, p, rows, visible, lse, x)
         : weights_of_rows<false>(a, p, rows, visible, lse, x);
}

// sums[t][h] += the sums over the keys that a query sees of P dP and of P, by lane. The second is 1
// but for the rounding of the saved log-sum-exp.
void add_row_sums(const Args& a, const Plan& p, int64_t rows, const uint64_t* visible,
                  const float* weights, const float* grad, float* sums) {
  for (int64_t t = 0; t < rows; ++t) {
    const uint64_t bits = visible[t];
    const bool all = bits == ~uint64_t{0};
    for (int64_t h = 0; h < a.H1; ++h) {
      const int64_t at = t * p.line + h * kBlock;
      float* to = sums + (t * a.H1 + h) * kRowSums;
      vf sum = load(to), weight_sum = load(to + kRowSums / 2);
#pragma GCC unroll 16
      for (int v = 0; v < kBlock / VL; ++v) {
        vf g = load(grad + at + v * VL);
        if (!all) g = select(lanes(bits, v), g, zero());
        const vf weight = load(weights + at + v * VL);
        sum = fma(weight, g, sum);
        weight_sum = weight_sum + weight;
      }
      store(to, sum);
      store(to + kRowSums / 2, weight_sum);
    }
  }
}

// From the row sums to the mean of dP, which is what each weight's gradient is compared with. Where
// one weight is nearly 1 the two differ by little, and a sum of P dP whose weights add up to
// something else would be mistaken by more than that.
void mean_of_rows(int64_t count, float* sums) {
  for (int64_t i = 0; i < count; ++i) {
    float* const row = sums + i * kRowSums;
    const float weight_sum = hsum(load(row + kRowSums / 2));
    row[0] = hsum(load(row)) / (weight_sum > 0 ? weight_sum : 1);  // no key: nothing reads it
  }
}

// grad = weights * (grad - delta), 0 where invisible: a product with a weight of 0 would not be 0
// for a gradient or a sum that is not finite.
void softmax_grad(const Args& a, const Plan& p, int64_t rows, const uint64_t* visible,
                  const float* weights, const float* delta, float* grad) {
  for (int64_t t = 0; t < rows; ++t) {
    const uint64_t bits = visible[t];
    const bool all = bits == ~uint64_t{0};
    for (int64_t h = 0; h < a.H1; ++h) {
      const int64_t at = t * p.line + h * kBlock;
      const vf shift = bcast(delta[(t * a.H1 + h) * kRowSums]);
#pragma GCC unroll 16
      for (int v = 0; v < kBlock / VL; ++v) {
        const int64_t to = at + v * VL;
        vf g = load(weights + to) * (load(grad + to) - shift);
        if (!all) g = select(lanes(bits, v), g, zero());
        store(grad + to, g);
      }
    }
  }
}

// Adds up what fold() left: n times kFolded numbers become n numbers at the same address.
HL_INLINE void sum_folded(int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) {
    const float* const from = x + i * kFolded;
    x[i] = (from[0] + from[1]) + (from[2] + from[3]);
  }
}

HL_INLINE void put(bool add, float value, float* to) { *to = add ? *to + value : value; }

// Writes or adds the gradients of query t's weights, values [h][q_width].
void put_query_weights(const Mix& mix, const Args& a, int64_t batch, int64_t t, bool add,
                       const float* values) {
  if (!mix.query_side()) return;
  const int64_t width = mix.q_width(), rank = (width - 1) / 2, row = batch * a.T + t;
  for (int64_t h = 0; h < mix.in; ++h) {
    const float* from = values + h * width;
    for (int64_t r = 0; r < mix.q_rank; ++r) {
      put(add, from[r], mix.grad.q_down + (row * mix.q_rank + r) * mix.in + h);
      put(add, from[rank + r], mix.grad.q_up + (row * mix.q_rank + r) * mix.in + h);
    }
    if (mix.q_gate.data) put(add, from[2 * rank], mix.grad.q_gate + row * mix.in + h);
  }
}

// Writes or adds the gradient of query t, values [H] apart by `step`.
template <typename T>
void put_query(const Args& a, int64_t batch, int64_t t, bool add, float scale, const float* values,
               int64_t step) {
  T* out = static_cast<T*>(a.grad_q) + (batch * a.T + t) * a.H * a.D;
  for (int64_t h = 0; h < a.H; ++h) {
    if (!add) {
      store_scaled(values + h * step, a.D, scale, out + h * a.D);
      continue;
    }
    for (int64_t d = 0; d < a.D; ++d) {
      T* to = out + h * a.D + d;
      narrow(scale * values[h * step + d] + widen(*to), to);
    }
  }
}

// A tile's rows before its own belong to the tile before: their gradients are
// added there, or, at a worker's first tile, kept until all workers are done.
template <typename T>
void put_queries(const Args& a, const Plan& p, const Task& task, const Tile& tile, bool first_tile,
                 const Scratch& w) {
  const int64_t width = a.H * a.pre.q_width();
  const Boundary owed = boundary(a, task.sums + p.sums - boundary(a, nullptr).size);
  if (first_tile && tile.out > 0) {
    owed.rows[0] = tile.batch;
    owed.rows[1] = tile.first;
    owed.rows[2] = tile.out;
  }
  for (int64_t r = 0; r < tile.count; ++r) {
    const float* grad = w.grad_q + r * p.Dp;
    const bool earlier = r < tile.out;
    const bool mixed = r >= tile.prob && a.pre.present;
    const float* weights = w.pre_sum + (r - tile.prob) * width;
    if (earlier && first_tile) {
      for (int64_t h = 0; h < a.H; ++h) {
        for (int64_t d = 0; d < a.D; ++d) {
          owed.grad_q[(r * a.H + h) * a.D + d] = a.scale * grad[h * p.height * p.Dp + d];
        }
      }
      for (int64_t i = 0; i < width; ++i) owed.pre[r * width + i] = mixed ? weights[i] : 0;
      continue;
    }
    put_query<T>(a, tile.batch, tile.first + r, earlier, a.scale, grad, p.height * p.Dp);
    if (mixed) put_query_weights(a.pre, a, tile.batch, tile.first + r, earlier, weights);
  }
  for (int64_t r = tile.out; r < tile.count; ++r) {
    put_query_weights(a.post, a, tile.batch, tile.first + r, false,
                      w.post_sum + (r - tile.out) * a.H1 * a.post.q_width());
  }
}

// Adds what the workers owe to the queries before their first tiles.
template <typename T>
void settle(const Args& a, const Plan& p, const Task& task) {
  const int64_t width = a.H * a.pre.q_width(), size = boundary(a, nullptr).size;
  for (int64_t worker = 0; worker < p.workers; ++worker) {
    const Boundary owed = boundary(a, task.sums + (worker + 1) * p.sums - size);
    for (int64_t r = 0; r < owed.rows[2]; ++r) {
      const int64_t t = owed.rows[1] + r;
      put_query<T>(a, owed.rows[0], t, true, 1, owed.grad_q + r * a.H * a.D, a.D);
      if (a.pre.present) {
        put_query_weights(a.pre, a, owed.rows[0], t, true, owed.pre + r * width);
      }
    }
    owed.rows[2] = 0;
  }
}

HL_INLINE void add_taps(const Conv& c, int64_t maps, int64_t worker, float* lanes_sum) {
  const int64_t n = conv_taps(c, maps);
  for (int64_t i = 0; i < n; ++i) c.grad[worker * n + i] += hsum(load(lanes_sum + i * VL));
}

// The steps of one tile's backward, each for one key block i.
struct BackwardTile {
  const Args& a;
  const Plan& p;
  const Task& task;
  const Tile& tile;
  const Scratch& w;

  int64_t prob_rows() const { return tile.count - tile.prob; }
  int64_t rows() const { return tile.count - tile.out; }
  int64_t prob_skip() const { return tile.prob * p.line; }
  int64_t out_skip() const { return tile.out * p.line; }
  RowRange out_range() const { return {tile.out, tile.count}; }
  ConvRows weight_rows() const { return conv_rows_of(a, tile, {tile.prob, tile.count}); }
  const uint64_t* prob_visible(int64_t i) const { return w.visible + i * p.height + tile.prob; }
  bool has_weights(int64_t i) const { return any_visible(p, tile, w.visible, i, tile.prob); }
  bool has_outputs(int64_t i) const { return any_visible(p, tile, w.visible, i, tile.out); }
  PackedBlock keys(int64_t i) const {
    return packed_block(a, p, task.packed, tile.blocks.begin + i);
  }
  BlockSums sums(int64_t i) const { return block_sums(a, p, task.sums, tile.blocks.begin + i); }

  int64_t blocks() const { return tile.blocks.end - tile.blocks.begin; }
  int64_t panel(int64_t padded) const { return kBlock * padded / (p.half ? 2 : 1); }
  float* weights_of(int64_t i) const { return w.weights + (p.keeps_weights ? i * p.chunk : 0); }
  // What the row keeps of them.
  const float* kept_weights(int64_t i) const { return p.keeps_weights ? weights_of(i) : nullptr; }
  // After the scores of block i come the gradients of its weights; after the gradient of its values
  // the scores of the next block; after the gradient of its queries that of its keys; after this
  // the gradient of the queries from the block before it.
  Upcoming after_scores(int64_t i) const {
    return {keys(i).v_panel, panel(p.Ep), {w.grads + i * p.chunk}, p.chunk};
  }
  Upcoming after_outputs(int64_t i) const { return {sums(i).v, kBlock * p.Ep, {}, 0}; }
  Upcoming after_values(int64_t i) const {
    if (i + 1 >= blocks()) return {};
    const int64_t at = (i + 1) * p.chunk;
    return {keys(i + 1).k_panel,
            panel(p.Dp),
            {w.scores ? w.scores + at : nullptr, kept_weights(i + 1)},
            p.chunk};
  }
  Upcoming after_queries(int64_t i) const {
    const float* chunk = i > 0 && w.scores ? w.scores + (i - 1) * p.chunk : nullptr;
    return {sums(i).k, kBlock * p.Dp, {chunk}, p.chunk};
  }
  Upcoming after_keys(int64_t i) const {
    if (i == 0) return {};
    const int64_t at = (i - 1) * p.chunk;
    return {keys(i - 1).k_rows, panel(p.Dp), {kept_weights(i - 1), w.grads + at}, p.chunk};
  }
  SeenKeys seen(int64_t i) const { return seen_keys(p, tile, w.visible, i, tile.out); }

  Pair* row_pairs(int64_t r) const { return pairs(w.row_pairs) + r / 2 * p.line; }
  // The mix before softmax gives the gradient of the scores in pairs for both products that take
  // it.
  bool pairs_score_grads() const {
    return p.mixes_pairs && a.pre.dynamic() && !a.pre_conv.kernel && !a.grad_bias.data;
  }

  // P of the rows from `prob` on, from the saved log-sum-exp.
  void weights(int64_t i) const {
    if (!has_weights(i)) return;
    float* x = weights_of(i);
    mixed_scores(a, p, task, tile, w, i, after_scores(i), x, [&](int64_t r, int64_t n) {
      weights_from_lse(a, p, n, prob_visible(i) + r, w.lse + r * a.H1,
                       x + prob_skip() + r * p.line);
    });
  }

  // From the outputs to the gradient of what enters the mix after softmax (in
  // grads), with the gradients of values and mix.
  void values(int64_t i) const {
    if (!has_outputs(i)) return;
    const PackedBlock in = keys(i);
    const BlockSums to = sums(i);
    const int64_t skip = out_skip();
    float* x = weights_of(i) + skip;
    float* grad = w.grads + i * p.chunk + skip;
    if (a.post_conv.kernel) {
      const Neighbours near = neighbours(p, tile, w.visible, i, tile.prob, w.weights);
      x = w.tile[1] + skip;
      conv_apply(a.post_conv, false, a.H1, p.line, near, weight_rows(), out_range(), kNoLimit,
                 w.tile[1], w.conv);
      hide(rows(), a.H1, p.line, w.visible + i * p.height + tile.out, x);
    }
    float* mixed_grad = a.post.present ? w.tile[0] : grad;
    float* mixed = x;
    if (a.post.present) mixed = w.tile[a.post_conv.kernel ? 2 : 1];  // tile[1] may be x
    // Only the values' gradient reads what is mixed, in pairs of queries.
    const bool paired = p.mixes_pairs && a.post.dynamic();
    output_product(a, p, rows(), w, in, seen(i), after_outputs(i), mixed_grad);
    few_rows(rows(), [&](int64_t r, int64_t n) {
      const int64_t at = r * p.line;
      if (a.post.present) {
        const int64_t width = r * a.H1 * a.post.q_width();
        const MixWeights by = mix_weights(p, a.post, w.post_q, r, in.post);
        tile_mix(a.post, by, n, p.line, mixed_grad + at, grad + at, true, w.grad_inner);
        tile_mix_to(paired ? MixTo::kQueryPairs : MixTo::kFloats,
                    {mixed + at, nullptr, row_pairs(r)}, a.post, by, n, p.line, x + at, false,
                    w.inner);
        if (a.post.dynamic()) {
          mix_grad(a.post, {n, p.line, x + at, mixed_grad + at, w.inner, w.grad_inner,
                            w.post_sum + width * kFolded, to.post, p.mixes_pairs});
        }
      }
      if (!a.post_conv.kernel) add_sums(i, r, n);
    });
    static_gradient(a.post, rows(), x, mixed_grad);
    value_grad_product(a, p, rows(), w, seen(i), after_values(i), paired ? nullptr : mixed, to.v);
    if (a.post_conv.kernel) {
      hide(rows(), a.H1, p.line, w.visible + i * p.height + tile.out, grad);
    }
  }

  // The gradient of a static matrix.
  void static_gradient(const Mix& mix, int64_t rows, const float* x, const float* dy) const {
    if (!mix.grad.matrix) return;
    float* sum = mix.grad.matrix + task.worker * mix.in * mix.out / mix.groups;
    mix_static_grad(mix, rows, p.line, x, dy, sum);
  }

  float* weight_grads(int64_t i) const {
    return (a.post_conv.kernel ? w.conv_grads : w.grads) + i * p.chunk;
  }

  // The row sums of P dP and P over block i, of rows [r, r + n) from `prob` on.
  void add_sums(int64_t i, int64_t r, int64_t n) const {
    const int64_t at = prob_skip() + r * p.line;
    add_row_sums(a, p, n, prob_visible(i) + r, weights_of(i) + at, weight_grads(i) + at,
                 w.delta + r * a.H1 * kRowSums);
  }

  // Through the convolution after softmax, and the row sums.
  void convolved_row_sums(int64_t i) const {
    if (!has_weights(i)) return;
    const Neighbours near = neighbours(p, tile, w.visible, i, tile.out, w.grads);
    conv_apply(a.post_conv, true, a.H1, p.line, near, conv_rows_of(a, tile, out_range()),
               {tile.prob, tile.count}, kNoLimit, weight_grads(i), w.conv);
    if (has_outputs(i)) {
      const Neighbours near = neighbours(p, tile, w.visible, i, tile.prob, w.weights);
      conv_grad(a.post_conv, a.H1, p.line, near, weight_rows(), out_range(), kNoLimit,
                w.grads + i * p.chunk, w.post_taps, w.conv);
    }
    add_sums(i, 0, prob_rows());
  }

  // From dP to the gradient of what enters the mix before softmax.
  float* mix_input_grads(int64_t i) const {
    if (!has_weights(i)) return nullptr;
    float* const grad = weight_grads(i) + prob_skip();
    float* const weights = weights_of(i) + prob_skip();
    const bool apart = a.pre_conv.kernel && a.post_conv.kernel;
    float* const to = apart ? w.grads + i * p.chunk : w.tile[0];
    const PackedBlock in = keys(i);
    const BlockSums sum = sums(i);
    const float* x = nullptr;
    if (a.pre.present) x = (w.mix_in ? w.mix_in : w.scores) + i * p.chunk + prob_skip();
    few_rows(prob_rows(), [&](int64_t r, int64_t n) {
      const int64_t at = r * p.line, width = r * a.H * a.pre.q_width();
      const MixWeights by = mix_weights(p, a.pre, w.pre_q, r, in.pre);
      if (!p.keeps_weights) {
        tile_mix(a.pre, by, n, p.line, x + at, weights + at, false, w.inner);
        weights_from_lse(a, p, n, prob_visible(i) + r, w.lse + r * a.H1, weights + at);
      } else if (a.pre.present && a.pre.dynamic()) {
        mix_apply<MixOf::kOwn>(a.pre, by,
                               {n, p.line, x + at, nullptr, 0, MixTo::kFloats, {}, false, w.inner});
      }
      softmax_grad(a, p, n, prob_visible(i) + r, weights + at, w.delta + r * a.H1 * kRowSums,
                   grad + at);
      if (!a.pre.present) return;
      tile_mix_to(pairs_score_grads() ? MixTo::kBothPairs : MixTo::kFloats,
                  {to + prob_skip() + at, pairs(w.halves) + at, row_pairs(r)}, a.pre, by, n, p.line,
                  grad + at, true, w.grad_inner);
      if (a.pre.dynamic()) {
        mix_grad(a.pre, {n, p.line, x + at, grad + at, w.inner, w.grad_inner,
                         w.pre_sum + width * kFolded, sum.pre, p.mixes_pairs});
      }
    });
    if (!a.pre.present) return grad - prob_skip();
    static_gradient(a.pre, prob_rows(), x, grad);
    if (a.pre_conv.kernel && !a.post_conv.kernel) {
      std::memcpy(grad, to + prob_skip(), sizeof(float) * prob_rows() * p.line);
    }
    return to;
  }

  // Back through the convolution before softmax; `row` has the gradients of its
  // outputs.
  const float* convolution(int64_t i, const float* row) const {
    if (!any_visible(p, tile, w.raw_visible, i, 0)) return nullptr;
    const Conv& c = a.pre_conv;
    const RowRange raw{0, tile.count}, mixed{tile.prob, tile.count};
    const ConvRows in = conv_rows_of(a, tile, raw), out = conv_rows_of(a, tile, mixed);
    const Neighbours near = neighbours(p, tile, w.visible, i, tile.prob, row);
    const Neighbours x = neighbours(p, tile, w.raw_visible, i, 0, w.scores);
    const int64_t limit = exact_limit(a, tile, i);
    const float* dy = row + i * p.chunk;
    if (limit == kNoLimit) {
      conv_apply(c, true, a.H, p.line, near, out, raw, limit, w.tile[0], w.conv);
      if (near.block[1]) {
        conv_grad(c, a.H, p.line, x, in, mixed, limit, dy, w.pre_taps, w.conv);
      }
    } else {
      conv_transpose_exact(c, a.H, p.line, near, out, raw, limit, w.tile[0], w.tile[1], w.conv);
      if (near.block[1]) {
        conv_grad_exact(c, a.H, p.line, x, in, mixed, limit, dy, w.pre_taps, w.conv);
      }
    }
    hide(tile.count, a.H, p.line, w.raw_visible + i * p.height, w.tile[0]);
    return w.tile[0];
  }

  // The gradient of the scores added to that of the bias.
  void bias(int64_t i, const float* grad) const {
    View<float> to = a.grad_bias;
    to.data += task.worker * a.grad_bias_size;
    const int64_t key = (tile.blocks.begin + i) * kBlock, n = lesser(kBlock, a.S - key);
    for (int64_t r = 0; r < tile.count; ++r) {
      for (int64_t h = 0; h < a.H; ++h) {
        const float* from = grad + r * p.line + h * kBlock;
        float* at = to.at(tile.batch, h, tile.first + r, key);
        for (int64_t s = 0; s < n; ++s) at[s * to.stride[3]] += from[s];
      }
    }
  }

  // dQ and dK from the gradient of the scores.
  void queries_and_keys(int64_t i, const float* grad) const {
    if (!grad) return;
    if (a.grad_bias.data) bias(i, grad);
    const SeenKeys seen = seen_keys(p, tile, w.raw_visible, i, 0);
    if (pairs_score_grads()) grad = nullptr;
    query_grad_product(a, p, tile.count, w, keys(i), seen, after_queries(i), grad);
    key_grad_product(a, p, tile.count, w, seen, after_keys(i), grad, sums(i).k);
  }
};

template <typename T>
void prepare_backward(const Args& a, const Plan& p, const Task& task, const Tile& tile,
                      const Scratch& w) {
  const int64_t first = tile.first + tile.out, rows = tile.count - tile.out;
  const int64_t prob_rows = tile.count - tile.prob;
  prepare_tile<T>(a, p, task, tile, w);
  fetch_rows<T>(task.next, a.grad_out, a.grad_out_stride, first, first + rows, a.H2, a.E);
  for (int64_t h = 0; h < a.H2; ++h) {
    const T* from = static_cast<const T*>(a.grad_out) + tile.batch * a.grad_out_stride[0] +
                    first * a.grad_out_stride[1] + h * a.grad_out_stride[2];
    float* to = w.grad_out + h * p.rows * p.Ep;
    if (p.half) {
      pack_row_halves(from, a.grad_out_stride, rows, rows, a.E, p.Ep, 1, to);
      pack_row_pairs(from, a.grad_out_stride, rows, rows, a.E, p.Ep,
                     w.grad_out_pairs + h * ((p.rows + 1) / 2) * p.Ep);
    } else {
      pack_rows(from, a.grad_out_stride, rows, rows, a.E, p.Ep, 1, to);
    }
  }
  for (int64_t t = 0; t < prob_rows; ++t) {
    for (int64_t h = 0; h < a.H1; ++h) {
      w.lse[t * a.H1 + h] = a.lse[(tile.batch * a.H1 + h) * a.T + tile.first + tile.prob + t];
    }
  }
  fill(w.grad_q, a.H * p.height * p.Dp, 0);
  fill(w.delta, prob_rows * a.H1 * kRowSums, 0);
  fill(w.pre_sum, prob_rows * a.H * a.pre.q_width() * kFolded, 0);
  fill(w.post_sum, rows * a.H1 * a.post.q_width() * kFolded, 0);
  fill(w.pre_taps, conv_taps(a.pre_conv, a.H) * VL, 0);
  fill(w.post_taps, conv_taps(a.post_conv, a.H1) * VL, 0);
}

template <typename T>
void backward_tile(const Args& a, const Plan& p, const Task& task, int64_t index) {
  const Scratch w = scratch(a, p, task.scratch);
  const Tile tile = make_tile(a, p, task.batch, index);
  const int64_t blocks = tile.blocks.end - tile.blocks.begin;
  const int64_t prob_rows = tile.count - tile.prob;
  const bool pre_conv = a.pre_conv.kernel, post_conv = a.post_conv.kernel;
  const BackwardTile step{a, p, task, tile, w};
  prepare_backward<T>(a, p, task, tile, w);

  const auto raw = [&](int64_t i) {
    if (!pre_conv || i >= blocks) return;
    raw_scores(a, p, task, tile, w, i, step.after_scores(i), w.scores + i * p.chunk);
  };
  raw(0);
  for (int64_t i = 0; i < blocks; ++i) {
    raw(i + 1);
    step.weights(i);
    if (!post_conv) step.values(i);
  }
  if (post_conv) {
    for (int64_t i = 0; i < blocks; ++i) step.values(i);
    for (int64_t i = 0; i < blocks; ++i) step.convolved_row_sums(i);
  }
  fetch_next_keys<T>(a, p, task, index);
  mean_of_rows(prob_rows * a.H1, w.delta);
  // The other way round: the rows' ends were written last, so that they are still near.
  for (int64_t i = blocks - 1; i >= 0; --i) {
    const float* grad = step.mix_input_grads(i);
    if (!pre_conv) step.queries_and_keys(i, grad);
  }
  if (pre_conv) {
    const float* row = a.pre.present || !post_conv ? w.grads : w.conv_grads;
    for (int64_t i = blocks - 1; i >= 0; --i) step.queries_and_keys(i, step.convolution(i, row));
  }
  sum_folded(prob_rows * a.H * a.pre.q_width(), w.pre_sum);
  sum_folded((tile.count - tile.out) * a.H1 * a.post.q_width(), w.post_sum);
  put_queries<T>(a, p, task, tile, index == task.begin, w);
  if (pre_conv) add_taps(a.pre_conv, a.H, task.worker, w.pre_taps);
  if (post_conv) add_taps(a.post_conv, a.H1, task.worker, w.post_taps);
}

// Adds the workers' sums into those of the first and clears the others.
HL_INLINE void gather(const Plan& p, float* sums, int64_t n) {
  for (int64_t i = 0; i < n; i += VL) {
    vf total = load(sums + i);
    for (int64_t w = 1; w < p.workers; ++w) {
      float* other = sums + w * p.sums + i;
      total = total + load(other);
      store(other, zero());
    }
    store(sums + i, total);
  }
}

void write_key_grads(const Mix& mix, const Args& a, int64_t batch, int64_t first, int64_t n,
                     const float* sum) {
  if (!mix.key_side()) return;
  const int64_t width = mix.k_width(), rank = (width - 1) / 2;
  for (int64_t s = 0; s < n; ++s) {
    const int64_t row = batch * a.S + first + s;
    for (int64_t h = 0; h < mix.in; ++h) {
      const float* from = sum + h * width * kBlock + s;
      for (int64_t r = 0; r < mix.k_rank; ++r) {
        mix.grad.k_down[(row * mix.k_rank + r) * mix.in + h] = from[r * kBlock];
        mix.grad.k_up[(row * mix.k_rank + r) * mix.in + h] = from[(rank + r) * kBlock];
      }
      if (mix.k_gate.data) mix.grad.k_gate[row * mix.in + h] = from[2 * rank * kBlock];
    }
  }
}

// Whether the gradients of keys or values are summed for two queries side by side, because a head
// fills at most half a vector: lane 2 d + i has value d and the queries 2 r + i.
HL_INLINE bool sums_two_queries(const Plan& p, int64_t size) { return p.by_map && 2 * size <= VL; }

template <typename T>
void reduce_block(const Args& a, const Plan& p, const Task& task, int64_t block) {
  const BlockSums sums = block_sums(a, p, task.sums, block);
  if (p.workers > 1) gather(p, sums.k, sums.size);
  const int64_t first = block * kBlock, n = lesser(kBlock, a.S - first);
  const auto write = [&](const float* from, void* to, int64_t heads, int64_t size, int64_t padded,
                         float scale) {
    T* out = static_cast<T*>(to) + (task.batch * a.S + first) * heads * size;
    for (int64_t s = 0; s < n; ++s) {
      for (int64_t g = 0; g < heads; ++g) {
        const float* const sum = from + (g * kBlock + s) * padded;
        T* const at = out + (s * heads + g) * size;
        if (sums_two_queries(p, size)) {
          store_part(at, sums_of_two(load(sum)), size);
        } else {
          store_scaled(sum, size, scale, at);
        }
      }
    }
  };
  write(sums.k, a.grad_k, a.Gk, a.D, p.Dp, p.half ? a.scale : 1);
  write(sums.v, a.grad_v, a.Gv, a.E, p.Ep, 1);
  write_key_grads(a.pre, a, task.batch, first, n, sums.pre);
  write_key_grads(a.post, a, task.batch, first, n, sums.post);
  fill(sums.k, sums.size, 0);
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel
