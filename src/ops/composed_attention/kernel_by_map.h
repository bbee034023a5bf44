// Attention whose maps nothing joins, one map after the other. With small heads a product makes a
// score of few operations, so that what surrounds it counts: here the rows of one map, its keys and
// its values stay in the first-level cache from the scores to the output.
#pragma once

#include "ops/composed_attention/kernel_backward.h"
#include "ops/composed_attention/kernel_forward.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

enum class Shown { kAll, kSome, kNone };

// The lanes of a vector that a row shows, `other` elsewhere.
template <Shown kShown>
HL_INLINE vf shown(uint64_t bits, int64_t i, vf x, vf other) {
  if constexpr (kShown == Shown::kAll) return x;
  return select(lanes(bits, static_cast<int>(i / VL)), x, other);
}

// One tile of queries and the scratch of one map.
struct MapTile {
  const Args& a;
  const Plan& p;
  Tile tile;
  MapScratch w;

  HL_INLINE int64_t rows() const { return tile.count; }
  HL_INLINE int64_t blocks() const { return tile.blocks.end - tile.blocks.begin; }
  HL_INLINE SeenKeys seen(int64_t i) const { return w.seen[i]; }
  // For the vectors of all blocks that anything sees, and kTogether rows from `row` on: calls
  // f.template operator()<what they show>(j, bits, s, at) for row `row` + j, its bits of the block,
  // the first key within the block and its place in [rows][line].
  template <typename F>
  HL_INLINE void each_vector(int64_t row, F&& f) const {
    for (int64_t i = 0; i < blocks(); ++i) {
      const ShownKeys& keys = w.shown[row / kTogether * p.span + i];
      const int64_t first = row * p.line + i * kBlock, end = w.seen[i].end;
      int64_t s = w.seen[i].begin;
      const auto rows = [&]<Shown kShown>() __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int64_t j = 0; j < kTogether; ++j) {
          f.template operator()<kShown>(j, keys.bits[j], s, first + j * p.line + s);
        }
      };
      for (; s < keys.whole; s += VL) rows.template operator()<Shown::kAll>();
      for (; s < keys.end; s += VL) rows.template operator()<Shown::kSome>();
      for (; s < end; s += VL) rows.template operator()<Shown::kNone>();
    }
  }
  HL_INLINE PackedBlock keys(const Task& task, int64_t i) const {
    return packed_block(a, p, task.packed, tile.blocks.begin + i);
  }

  // The rows of one head of a tensor [B, T, heads, size] that the tile has.
  template <typename T>
  HL_INLINE void pack(const void* source, const int64_t* stride, int64_t h, int64_t size,
                      int64_t padded, float scale, float* to) const {
    const T* from = static_cast<const T*>(source) + tile.batch * stride[0] +
                    tile.first * stride[1] + h * stride[2];
    pack_rows(from, stride, rows(), rows(), size, padded, scale, to);
  }

  // x = left panel for one block: left [rows][padded], panel [size][kBlock].
  HL_INLINE void times_panel(int64_t i, const float* left, int64_t size, int64_t padded,
                             const float* panel, float* x) const {
    const SeenKeys keys = seen(i);
    gemm<false, true>(rows(), keys.count(), size, left, padded, panel + keys.begin, kBlock,
                      x + i * kBlock + keys.begin, p.line);
  }
  // sums += x right for one block: right [kBlock][padded], sums [rows][padded].
  HL_INLINE void times_rows(int64_t i, const float* x, const float* right, int64_t size,
                            int64_t padded, float* sums) const {
    const SeenKeys keys = seen(i);
    gemm<true, true>(rows(), whole(size), keys.count(), x + i * kBlock + keys.begin, p.line,
                     right + keys.begin * padded, padded, sums, padded);
  }
  // sums += x^T right for one block: right [rows][padded], sums [kBlock][padded].
  HL_INLINE void add_turned(int64_t i, const float* x, const float* right, int64_t size,
                            int64_t padded, float* sums) const {
    const SeenKeys keys = seen(i);
    gemm<true, false>(keys.count(), whole(size), rows(), x + i * kBlock + keys.begin, p.line, right,
                      padded, sums + keys.begin * padded, padded);
  }
  HL_INLINE static int64_t whole(int64_t size) { return (size + VL - 1) / VL * VL; }
};

template <typename T>
MapTile map_tile(const Args& a, const Plan& p, const Task& task, int64_t index) {
  MapTile m{a, p, make_tile(a, p, task.batch, index), map_scratch(p, task.scratch)};
  fetch_next<T>(task, a.q, a.q_stride, m.tile.first, m.tile.first + m.rows(), a.H, a.D);
  for (int64_t i = 0; i < m.blocks(); ++i) {
    uint64_t seen = 0;
    for (int64_t r = 0; r < m.rows(); r += kTogether) {
      ShownKeys& keys = m.w.shown[r / kTogether * p.span + i];
      uint64_t all = ~uint64_t{0}, any = 0;
      for (int64_t j = 0; j < kTogether; ++j) {
        // Rows behind the last show nothing.
        keys.bits[j] = r + j < m.rows() ? visible_keys(a, task.batch, m.tile.first + r + j,
                                                       m.tile.blocks.begin + i, false)
                                        : 0;
        all &= keys.bits[j];
        any |= keys.bits[j];
      }
      keys.whole = (all == ~uint64_t{0} ? kBlock : __builtin_ctzll(~all)) / VL * VL;
      keys.end = whole_vectors(reach(any)).end;
      seen |= any;
    }
    m.w.seen[i] = whole_vectors(reach(seen));
  }
  return m;
}

// x = exp(x - the row's largest) for the rows of a map, 0 where invisible. Leaves the inverse sums
// of the rows in `total` and writes their log-sum-exp.
void map_softmax(const MapTile& m, int64_t h) {
  float* const x = m.w.weights;
  float* const lse = m.a.lse + (m.tile.batch * m.a.H1 + h) * m.a.T + m.tile.first;
  for (int64_t r = 0; r < m.rows(); r += kTogether) {
    vf best[kTogether], sums[kTogether];
#pragma GCC unroll 4
    for (int64_t j = 0; j < kTogether; ++j) {
      best[j] = bcast(-FLT_MAX);
      sums[j] = zero();
    }
    m.each_vector(r, [&]<Shown kShown>(int64_t j, uint64_t bits, int64_t s, int64_t at)
                         __attribute__((always_inline)) {
                           if constexpr (kShown == Shown::kNone) return;
                           const vf e = shown<kShown>(bits, s, load(x + at), bcast(-FLT_MAX));
                           best[j] = vmax(e, best[j]);
                         });
    float high[kTogether];
    hmax4(best[0], best[1], best[2], best[3], high);
    m.each_vector(r, [&]<Shown kShown>(int64_t j, uint64_t bits, int64_t s, int64_t at)
                         __attribute__((always_inline)) {
                           if constexpr (kShown == Shown::kNone) return store(x + at, zero());
                           const vf e = vexp_of_negative(load(x + at) - bcast(high[j]));
                           const vf weight = shown<kShown>(bits, s, e, zero());
                           sums[j] = sums[j] + weight;
                           store(x + at, weight);
                         });
#pragma GCC unroll 4
    for (int64_t j = 0; j < kTogether; ++j) m.w.total[r + j] = hsum(sums[j]);
    std::memcpy(m.w.high + r, high, sizeof(high));
  }
  for (int64_t r = 0; r < m.rows(); r += VL) {
    const vf total = load(m.w.total + r), half = bcast(0.5f);
    // As log_of_sum and inverse_of_sum.
    const vf log = select(above(half, total), zero(), load(m.w.high + r) + vlog(total));
    store_some(lse + r, log, m.rows() - r);
    store(m.w.total + r, select(above(half, total), zero(), bcast(1.0f) / total));
  }
}

template <typename T>
void forward_by_map(const Args& a, const Plan& p, const Task& task, int64_t index) {
  const MapTile m = map_tile<T>(a, p, task, index);
  for (int64_t h = 0; h < a.H; ++h) {
    const int64_t key = shared_head(h, a.Gk, a.H), value = shared_head(h, a.Gv, a.H);
    m.pack<T>(a.q, a.q_stride, h, a.D, p.Dp, a.scale, m.w.q);
    for (int64_t i = 0; i < m.blocks(); ++i) {
      m.times_panel(i, m.w.q, a.D, p.Dp, m.keys(task, i).k_panel + key * p.Dp * kBlock,
                    m.w.weights);
    }
    map_softmax(m, h);
    fill(m.w.out, m.rows() * p.Ep, 0);
    for (int64_t i = 0; i < m.blocks(); ++i) {
      m.times_rows(i, m.w.weights, m.keys(task, i).v_rows + value * kBlock * p.Ep, a.E, p.Ep,
                   m.w.out);
    }
    T* out = static_cast<T*>(a.out) + ((m.tile.batch * a.T + m.tile.first) * a.H + h) * a.E;
    for (int64_t r = 0; r < m.rows(); ++r) {
      store_scaled(m.w.out + r * p.Ep, a.E, m.w.total[r], out + r * a.H * a.E);
    }
  }
  fetch_next_keys<T>(a, p, task, index);
}

// For the rows of a map: weights = exp(weights - lse), and grads = weights (grads - the row's sum
// of weights times grads); 0 where invisible.
void map_softmax_backward(const MapTile& m, int64_t h) {
  float *const x = m.w.weights, *const grads = m.w.grads;
  const float* const lse = m.a.lse + (m.tile.batch * m.a.H1 + h) * m.a.T + m.tile.first;
  for (int64_t r = 0; r < m.rows(); r += kTogether) {
    vf sums[kTogether];
    float shift[kTogether], delta[kTogether];
#pragma GCC unroll 4
    for (int64_t j = 0; j < kTogether; ++j) {
      shift[j] = r + j < m.rows() ? lse[r + j] : 0;
      sums[j] = zero();
    }
    m.each_vector(r, [&]<Shown kShown>(int64_t j, uint64_t bits, int64_t s,
                                       int64_t at) __attribute__((always_inline)) {
      if constexpr (kShown == Shown::kNone) return store(x + at, zero());
      const vf weight = shown<kShown>(bits, s, vexp(load(x + at) - bcast(shift[j])), zero());
      sums[j] = fma(weight, shown<kShown>(bits, s, load(grads + at), zero()), sums[j]);
      store(x + at, weight);
    });
#pragma GCC unroll 4
    for (int64_t j = 0; j < kTogether; ++j) delta[j] = hsum(sums[j]);
    m.each_vector(r, [&]<Shown kShown>(int64_t j, uint64_t bits, int64_t s, int64_t at)
                         __attribute__((always_inline)) {
                           if constexpr (kShown == Shown::kNone) return store(grads + at, zero());
                           const vf grad = load(x + at) * (load(grads + at) - bcast(delta[j]));
                           store(grads + at, shown<kShown>(bits, s, grad, zero()));
                         });
  }
}

template <typename T>
void backward_by_map(const Args& a, const Plan& p, const Task& task, int64_t index) {
  const MapTile m = map_tile<T>(a, p, task, index);
  fetch_next<T>(task, a.grad_out, a.grad_out_stride, m.tile.first, m.tile.first + m.rows(), a.H,
                a.E);
  for (int64_t h = 0; h < a.H; ++h) {
    const int64_t key = shared_head(h, a.Gk, a.H), value = shared_head(h, a.Gv, a.H);
    m.pack<T>(a.q, a.q_stride, h, a.D, p.Dp, a.scale, m.w.q);
    m.pack<T>(a.grad_out, a.grad_out_stride, h, a.E, p.Ep, 1, m.w.grad_out);
    for (int64_t i = 0; i < m.blocks(); ++i) {
      const PackedBlock in = m.keys(task, i);
      m.times_panel(i, m.w.q, a.D, p.Dp, in.k_panel + key * p.Dp * kBlock, m.w.weights);
      m.times_panel(i, m.w.grad_out, a.E, p.Ep, in.v_panel + value * p.Ep * kBlock, m.w.grads);
    }
    map_softmax_backward(m, h);
    fill(m.w.grad_q, m.rows() * p.Dp, 0);
    for (int64_t i = 0; i < m.blocks(); ++i) {
      const BlockSums sums = block_sums(a, p, task.sums, m.tile.blocks.begin + i);
      m.add_turned(i, m.w.weights, m.w.grad_out, a.E, p.Ep, sums.v + value * kBlock * p.Ep);
      m.add_turned(i, m.w.grads, m.w.q, a.D, p.Dp, sums.k + key * kBlock * p.Dp);
      m.times_rows(i, m.w.grads, m.keys(task, i).k_rows + key * kBlock * p.Dp, a.D, p.Dp,
                   m.w.grad_q);
    }
    for (int64_t r = 0; r < m.rows(); ++r) {
      const int64_t row = (m.tile.batch * a.T + m.tile.first + r) * a.H + h;
      store_scaled(m.w.grad_q + r * p.Dp, a.D, a.scale, static_cast<T*>(a.grad_q) + row * a.D);
    }
  }
  fetch_next_keys<T>(a, p, task, index);
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel
