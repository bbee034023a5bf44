// Attention whose maps nothing joins, one map after the other. With small heads a product makes a
// score of few operations, so that what surrounds it counts: here the rows of one map, its keys and
// its values stay in the first-level cache from the scores to the output. Maps lie with their
// queries side by side, [keys][queries]: softmax then never adds up the lanes of a vector, and
// vectors are full however small a head is.
#pragma once

#include "ops/composed_attention/kernel_backward.h"
#include "ops/composed_attention/kernel_forward.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

// Calls f.template operator()<n>(first) for the kKeyStep keys of a step, n at a time: as many sums
// as registers hold beside kVectors vectors of each.
template <int kVectors, typename F>
HL_INLINE void parts_of_step(F&& f) {
  static_assert(kKeyStep == 16);
  if constexpr (MR == 8 && kVectors == 1) {
    f.template operator()<16>(0);
  } else if constexpr (MR == 8 || kVectors == 1) {
    f.template operator()<8>(0);
    f.template operator()<8>(8);
  } else if constexpr (MR == 6) {
    f.template operator()<6>(0);
    f.template operator()<5>(6);
    f.template operator()<5>(11);
  } else {
    for (int64_t first = 0; first < kKeyStep; first += MR) f.template operator()<MR>(first);
  }
}

// to[r][2 i + j] = rows[2 r + j][i] for kMapRows rows.
HL_INLINE void two_queries(const float* rows, int64_t wide, float* to) {
  for (int64_t r = 0; r < kMapRows; r += 2) {
    const float *const first = rows + r * wide, *const second = first + wide;
    float* const line = to + r * wide;
    for (int64_t i = 0; i < wide; ++i) {
      line[2 * i] = first[i];
      line[2 * i + 1] = second[i];
    }
  }
}

// One tile of queries and the scratch of one map.
struct MapTile {
  const Args& a;
  const Plan& p;
  Tile tile;
  MapScratch w;

  HL_INLINE int64_t rows() const { return tile.count; }
  HL_INLINE int64_t blocks() const { return tile.blocks.end - tile.blocks.begin; }
  // Calls f.template operator()<masked>(j, bits, at) for the keys of all blocks that a vector of
  // queries, the one from `row` on, sees: j counts four keys round, `at` is the key's place in
  // [keys][kMapRows], and where it is masked the bits have the queries that see it.
  template <typename F>
  HL_INLINE void each_key(int64_t row, F&& f) const {
    for (int64_t i = 0; i < blocks(); ++i) {
      const ShownKeys& keys = w.shown[i];
      const auto range = [&]<bool kMasked>(int64_t s, int64_t end) __attribute__((always_inline)) {
        const auto key = [&](int64_t j, int64_t k) __attribute__((always_inline)) {
          f.template operator()<kMasked>(j, keys.rows[k], (i * kBlock + k) * kMapRows + row);
        };
        for (; s + 4 <= end; s += 4) {
#pragma GCC unroll 4
          for (int64_t j = 0; j < 4; ++j) key(j, s + j);
        }
        for (; s < end; ++s) key(0, s);
      };
      const ShownKeys::Half& half = keys.half[row / kMapHalf];
      range.template operator()<false>(half.begin, half.whole);
      range.template operator()<true>(half.whole, half.end);
    }
  }
  // Calls f(run) for the runs of keys of block i.
  template <typename F>
  HL_INLINE void each_run(int64_t i, F&& f) const {
    const ShownKeys& keys = w.shown[i];
    for (int64_t run = 0; run < keys.run_count; ++run) f(keys.runs[run]);
  }

  // The tile's rows of a tensor [B, T, heads, size], all heads of a row together: as [line][wide]
  // and turned, [wide][line]. Backward: the former as two_queries() where keys are summed so.
  template <typename T>
  HL_INLINE void pack(const void* source, const int64_t* stride, int64_t heads, int64_t size,
                      float scale, float* to, float* turned) const {
    const T* from = static_cast<const T*>(source) + tile.batch * stride[0] + tile.first * stride[1];
    const int64_t wide = wide_row(heads, size);
    const bool two = p.backward && sums_two_queries(p, size);
    float* const packed = two ? w.turned_back : to;
    pack_wide_rows(from, stride, rows(), kMapRows, heads, size, scale, packed);
    transpose(kMapRows, (heads * size + 3) / 4 * 4, packed, wide, turned, kMapRows);
    if (two) two_queries(packed, wide, to);
  }
  // The other way round: to rows of a contiguous tensor [B, T, heads, size].
  template <typename T>
  HL_INLINE void write(const float* turned, float scale, int64_t heads, int64_t size,
                       void* to) const {
    const int64_t wide = wide_row(heads, size), values = heads * size;
    transpose((values + 3) / 4 * 4, kMapRows, turned, kMapRows, w.turned_back, wide);
    T* out = static_cast<T*>(to) + (tile.batch * a.T + tile.first) * values;
    for (int64_t r = 0; r < rows(); ++r) {
      store_scaled(w.turned_back + r * wide, values, scale, out + r * values);
    }
  }

  // One head of wide rows: of the keys or values of a block, or of queries.
  struct Head {
    const float* rows;
    int64_t wide, size;
  };
  HL_INLINE Head keys(const Task& task, int64_t i, int64_t h) const {
    const PackedBlock block = packed_block(a, p, task.packed, tile.blocks.begin + i);
    return {block.k_rows + shared_head(h, a.Gk, a.H) * a.D, wide_row(a.Gk, a.D), a.D};
  }
  HL_INLINE Head values(const Task& task, int64_t i, int64_t h) const {
    const PackedBlock block = packed_block(a, p, task.packed, tile.blocks.begin + i);
    return {block.v_rows + shared_head(h, a.Gv, a.H) * a.E, wide_row(a.Gv, a.E), a.E};
  }

  // map = keys turned for one block: turned [size][kMapRows], map [keys][kMapRows]. What a run does
  // not have is not written, and not read by anything.
  HL_INLINE void to_map(int64_t i, const Head& keys, const float* turned, float* map) const {
    each_run(i, [&](const ShownKeys::Run& run) __attribute__((always_inline)) {
      const auto vectors = [&]<int kVectors>(int64_t s, int64_t r) __attribute__((always_inline)) {
        parts_of_step<kVectors>([&]<int kKeys>(int64_t k) __attribute__((always_inline)) {
          gemm_block<kKeys, kVectors, false, true, false>(
              keys.size, keys.rows + (s + k) * keys.wide, keys.wide, turned + r, kMapRows,
              map + (i * kBlock + s + k) * kMapRows + r, kMapRows, 1, nullptr);
        });
      };
      for (int64_t s = run.begin; s < run.end; s += kKeyStep) {
        const int64_t end = run.row + run.rows;
        int64_t r = run.row;
        for (; r + 2 * VL <= end; r += 2 * VL) vectors.template operator()<2>(s, r);
        if constexpr (VL == kMapHalf) {
          if (r < end) vectors.template operator()<1>(s, r);
        }
      }
    });
  }
  // turned += keys^T map for one block: of the queries.
  HL_INLINE void to_queries(int64_t i, const Head& keys, const float* map, float* turned) const {
    each_run(i, [&](const ShownKeys::Run& run) __attribute__((always_inline)) {
      gemm<true, false>(keys.size, run.rows, run.end - run.begin, keys.rows + run.begin * keys.wide,
                        keys.wide, map + (i * kBlock + run.begin) * kMapRows + run.row, kMapRows,
                        turned + run.row, kMapRows);
    });
  }
  HL_INLINE Head queries(const float* rows, int64_t h, int64_t size) const {
    const int64_t first = h * size * (sums_two_queries(p, size) ? 2 : 1);
    return {rows + first, wide_row(a.H, size), size};
  }
  // sums += map queries for one block: of the keys; queries [rows][wide] or as two_queries(), sums
  // [kBlock][padded], of which what is after the head is anything.
  HL_INLINE void to_keys(int64_t i, const float* map, const Head& queries, int64_t padded,
                         float* sums) const {
    if (sums_two_queries(p, queries.size)) {
      return add_to_keys<1, TwoFloats>(i, map, queries, 0, padded, sums);
    }
    int64_t d = 0;
    for (; d + VL < queries.size; d += 2 * VL) {
      add_to_keys<2, float>(i, map, queries, d, padded, sums);
    }
    if (d < queries.size) add_to_keys<1, float>(i, map, queries, d, padded, sums);
  }
  // T: the floats of the queries that an element of the product has, one or two.
  template <int kVectors, typename T>
  HL_INLINE void add_to_keys(int64_t i, const float* map, const Head& queries, int64_t d,
                             int64_t padded, float* sums) const {
    constexpr int64_t kQueries = sizeof(T) / sizeof(float);
    each_run(i, [&](const ShownKeys::Run& run) __attribute__((always_inline)) {
      const int64_t count = lesser(rows() - run.row, run.rows);
      const T* const of_queries =
          reinterpret_cast<const T*>(queries.rows + run.row * queries.wide + d);
      for (int64_t s = run.begin; s < run.end; s += kKeyStep) {
        parts_of_step<kVectors>([&]<int kKeys>(int64_t k) __attribute__((always_inline)) {
          const float* const of_keys = map + (i * kBlock + s + k) * kMapRows + run.row;
          gemm_block<kKeys, kVectors, true, true, false>(
              (count + kQueries - 1) / kQueries, reinterpret_cast<const T*>(of_keys),
              kMapRows / kQueries, of_queries, queries.wide, sums + (s + k) * padded + d, padded, 1,
              nullptr);
        });
      }
    });
  }
};

// Prefetches the share of the next batch element's rows that goes with one head of tile `index`. In
// small shares, because a long run of prefetches stalls. The lambda is always inlined, because the
// compiler drops calls of a function that only prefetches.
template <typename T>
HL_INLINE void fetch_share(const Args& a, const Plan& p, const Task& task, int64_t index,
                           int64_t h) {
  const int64_t share = index * a.H + h, all = p.tiles * a.H;
  const auto fetch = [&](const void* source, const int64_t* stride, int64_t rows, int64_t heads,
                         int64_t size) __attribute__((always_inline)) {
    fetch_rows<T>(task.next, source, stride, rows * share / all, rows * (share + 1) / all, heads,
                  size);
  };
  fetch(a.q, a.q_stride, a.T, a.H, a.D);
  fetch(a.k, a.k_stride, a.S, a.Gk, a.D);
  fetch(a.v, a.v_stride, a.S, a.Gv, a.E);
  if (p.backward) fetch(a.grad_out, a.grad_out_stride, a.T, a.H, a.E);
}

// What a tile sees of a block, from the keys that each of its rows sees.
void show_keys(const uint64_t* bits, int64_t rows, ShownKeys& keys) {
  bool masked = false;
  for (int64_t h = 0; h < kMapRows / kMapHalf; ++h) {
    // A query after the last one sees no key. Its weights must be 0, because add_to_keys() may sum
    // two queries at once.
    uint64_t all = rows < (h + 1) * kMapHalf ? 0 : ~uint64_t{0}, any = 0;
    for (int64_t r = h * kMapHalf; r < lesser(rows, (h + 1) * kMapHalf); ++r) {
      all &= bits[r];
      any |= bits[r];
    }
    ShownKeys::Half& half = keys.half[h];
    const Range seen = reach(any);
    half.begin = seen.begin / kKeyStep * kKeyStep;
    half.end = (seen.end + kKeyStep - 1) / kKeyStep * kKeyStep;
    const uint64_t hidden = ~(all >> half.begin);
    half.whole = all == ~uint64_t{0} ? half.end : half.begin + __builtin_ctzll(hidden);
    masked |= half.whole < half.end;
  }
  keys.run_count = 0;
  for (int64_t s = 0; s < kBlock; s += kKeyStep) {
    const auto sees = [&](int64_t h) { return keys.half[h].begin <= s && s < keys.half[h].end; };
    if (!sees(0) && !sees(1)) continue;
    const int64_t row = sees(0) ? 0 : kMapHalf, count = (sees(1) ? kMapRows : kMapHalf) - row;
    ShownKeys::Run* const last = keys.run_count > 0 ? &keys.runs[keys.run_count - 1] : nullptr;
    if (last != nullptr && last->end == s && last->row == row && last->rows == count) {
      last->end += kKeyStep;
    } else {
      keys.runs[keys.run_count++] = {s, s + kKeyStep, row, count};
    }
  }
  if (!masked) return;
  std::memset(keys.rows, 0, sizeof(keys.rows));
  for (int64_t r = 0; r < rows; ++r) {
    const uint32_t low = static_cast<uint32_t>(bits[r]),
                   high = static_cast<uint32_t>(bits[r] >> 32);
    for (uint32_t s = 0; s < 32; ++s) {
      keys.rows[s] |= (low >> s & 1) << r;
      keys.rows[32 + s] |= (high >> s & 1) << r;
    }
  }
}

MapTile map_tile(const Args& a, const Plan& p, const Task& task, int64_t index) {
  MapTile m{a, p, make_tile(a, p, task.batch, index), map_scratch(a, p, task.scratch)};
  for (int64_t i = 0; i < m.blocks(); ++i) {
    uint64_t bits[kMapRows];
    for (int64_t r = 0; r < m.rows(); ++r) {
      bits[r] = visible_keys(a, task.batch, m.tile.first + r, m.tile.blocks.begin + i, false);
    }
    show_keys(bits, m.rows(), m.w.shown[i]);
  }
  return m;
}

template <bool kMasked>
HL_INLINE vf shown(uint64_t bits, int64_t row, vf x, vf other) {
  if constexpr (!kMasked) return x;
  return select(lanes(bits, static_cast<int>(row / VL)), x, other);
}

HL_INLINE vf sum4(const vf* x) { return (x[0] + x[1]) + (x[2] + x[3]); }

// x = exp(x - the query's largest) for a map, 0 where invisible. Leaves the inverse sums of the
// queries in `factor` and writes their log-sum-exp.
void map_softmax(const MapTile& m, int64_t h) {
  float* const lse = m.a.lse + (m.tile.batch * m.a.H1 + h) * m.a.T + m.tile.first;
  for (int64_t r = 0; r < m.rows(); r += VL) {
    float* const x = m.w.weights;
    vf best[4], sums[4];
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j) {
      best[j] = bcast(-FLT_MAX);
      sums[j] = zero();
    }
    m.each_key(
        r, [&]<bool kMasked>(int64_t j, uint64_t bits, int64_t at) __attribute__((always_inline)) {
          const vf e = shown<kMasked>(bits, r, load(x + at), bcast(-FLT_MAX));
          best[j] = vmax(e, best[j]);
        });
    const vf high = vmax(vmax(best[0], best[1]), vmax(best[2], best[3]));
    m.each_key(
        r, [&]<bool kMasked>(int64_t j, uint64_t bits, int64_t at) __attribute__((always_inline)) {
          const vf e = vexp_of_negative(load(x + at) - high);
          const vf weight = shown<kMasked>(bits, r, e, zero());
          sums[j] = sums[j] + weight;
          store(x + at, weight);
        });
    const vf total = sum4(sums), half = bcast(0.5f);
    // As log_of_sum and inverse_of_sum.
    const vf log = select(above(half, total), zero(), high + vlog(total));
    store_some(lse + r, log, m.rows() - r);
    store(m.w.factor + r, select(above(half, total), zero(), bcast(1.0f) / total));
  }
}

template <typename T>
void forward_by_map(const Args& a, const Plan& p, const Task& task, int64_t index) {
  const MapTile m = map_tile(a, p, task, index);
  m.pack<T>(a.q, a.q_stride, a.H, a.D, a.scale, m.w.q, m.w.q_turned);
  fill(m.w.out, a.H * a.E * kMapRows, 0);
  for (int64_t h = 0; h < a.H; ++h) {
    fetch_share<T>(a, p, task, index, h);
    for (int64_t i = 0; i < m.blocks(); ++i) {
      m.to_map(i, m.keys(task, i, h), m.w.q_turned + h * a.D * kMapRows, m.w.weights);
    }
    map_softmax(m, h);
    float* const out = m.w.out + h * a.E * kMapRows;
    for (int64_t i = 0; i < m.blocks(); ++i) {
      m.to_queries(i, m.values(task, i, h), m.w.weights, out);
    }
    for (int64_t r = 0; r < kMapRows; r += VL) {
      const vf factor = load(m.w.factor + r);
      for (int64_t e = 0; e < a.E; ++e) {
        store(out + e * kMapRows + r, load(out + e * kMapRows + r) * factor);
      }
    }
  }
  m.write<T>(m.w.out, 1, a.H, a.E, a.out);
}

// For the queries of a map: weights = exp(weights - lse), and grads = weights (grads - the query's
// mean of grads by weight, as mean_of_rows() has it); 0 where invisible.
void map_softmax_backward(const MapTile& m, int64_t h) {
  const float* const lse = m.a.lse + (m.tile.batch * m.a.H1 + h) * m.a.T + m.tile.first;
  for (int64_t r = 0; r < m.rows(); r += VL) {
    float *const x = m.w.weights, *const grads = m.w.grads;
    const vf shift = load_some(lse + r, m.rows() - r);
    vf sums[4], weight_sums[4];
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j) sums[j] = weight_sums[j] = zero();
    m.each_key(
        r, [&]<bool kMasked>(int64_t j, uint64_t bits, int64_t at) __attribute__((always_inline)) {
          // At most 1, though the score was rounded otherwise than in the forward pass.
          const vf e = vexp(vmin(zero(), load(x + at) - shift));
          const vf weight = shown<kMasked>(bits, r, e, zero());
          const vf grad = shown<kMasked>(bits, r, load(grads + at), zero());
          sums[j] = fma(weight, grad, sums[j]);
          weight_sums[j] = weight_sums[j] + weight;
          store(x + at, weight);
        });
    const vf delta = sum4(sums) / divisor(sum4(weight_sums));
    m.each_key(
        r, [&]<bool kMasked>(int64_t, uint64_t bits, int64_t at) __attribute__((always_inline)) {
          const vf grad = load(x + at) * (load(grads + at) - delta);
          store(grads + at, shown<kMasked>(bits, r, grad, zero()));
        });
  }
}

template <typename T>
void backward_by_map(const Args& a, const Plan& p, const Task& task, int64_t index) {
  const MapTile m = map_tile(a, p, task, index);
  m.pack<T>(a.q, a.q_stride, a.H, a.D, a.scale, m.w.q, m.w.q_turned);
  m.pack<T>(a.grad_out, a.grad_out_stride, a.H, a.E, 1, m.w.grad_out, m.w.grad_out_turned);
  fill(m.w.grad_q, a.H * a.D * kMapRows, 0);
  for (int64_t h = 0; h < a.H; ++h) {
    fetch_share<T>(a, p, task, index, h);
    for (int64_t i = 0; i < m.blocks(); ++i) {
      m.to_map(i, m.keys(task, i, h), m.w.q_turned + h * a.D * kMapRows, m.w.weights);
      m.to_map(i, m.values(task, i, h), m.w.grad_out_turned + h * a.E * kMapRows, m.w.grads);
    }
    map_softmax_backward(m, h);
    const MapTile::Head q = m.queries(m.w.q, h, a.D);
    const MapTile::Head grad_out = m.queries(m.w.grad_out, h, a.E);
    for (int64_t i = 0; i < m.blocks(); ++i) {
      const BlockSums sums = block_sums(a, p, task.sums, m.tile.blocks.begin + i);
      m.to_keys(i, m.w.weights, grad_out, p.Ep, sums.v + shared_head(h, a.Gv, a.H) * kBlock * p.Ep);
      m.to_keys(i, m.w.grads, q, p.Dp, sums.k + shared_head(h, a.Gk, a.H) * kBlock * p.Dp);
      m.to_queries(i, m.keys(task, i, h), m.w.grads, m.w.grad_q + h * a.D * kMapRows);
    }
  }
  m.write<T>(m.w.grad_q, a.scale, a.H, a.D, a.grad_q);
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel
