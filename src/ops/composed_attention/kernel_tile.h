// What forward and backward share: packing of keys, queries and weights, and
// which keys a query sees.
#pragma once

#include "ops/composed_attention/kernel_products.h"
#include "ops/kernel/prefetch.h"
#include "ops/kernel/transpose.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

HL_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
HL_INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
HL_INLINE void fill(float* p, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i) p[i] = value;
}

// rows[i][0..padded) = scale * source row i, zero beyond `size`; source rows of
// one head, from `first`.
template <typename T>
void pack_rows(const T* source, const int64_t* stride, int64_t n, int64_t total, int64_t size,
               int64_t padded, float scale, float* rows) {
  for (int64_t i = 0; i < total; ++i) {
    float* to = rows + i * padded;
    const T* from = source + i * stride[1];
    int64_t d = 0;
    if (i < n && stride[3] == 1) {
      for (; d + VL <= size; d += VL) store(to + d, bcast(scale) * load(from + d));
      if (d < size) {
        store(to + d, bcast(scale) * load_part(from + d, size - d));
        d += VL;
      }
      for (; d < padded; d += VL) store(to + d, zero());
    } else if (i < n) {
      for (; d < size; ++d) to[d] = scale * widen(from[d * stride[3]]);
    }
    for (; d < padded; ++d) to[d] = 0;
  }
}

// The same of all heads, side by side: rows[i][wide_row(heads, size)].
template <typename T>
void pack_wide_rows(const T* source, const int64_t* stride, int64_t n, int64_t total, int64_t heads,
                    int64_t size, float scale, float* rows) {
  const int64_t wide = wide_row(heads, size);
  const bool together = stride[3] == 1 && stride[2] == size;
  const int64_t runs = together ? 1 : heads, run = together ? heads * size : size;
  for (int64_t i = 0; i < total; ++i) {
    float* const row = rows + i * wide;
    if (i >= n) {
      fill(row, heads * size, 0);
      continue;
    }
    for (int64_t r = 0; r < runs; ++r) {
      const T* const from = source + i * stride[1] + r * stride[2];
      float* const to = row + r * run;
      if (stride[3] == 1) {
        store_scaled(from, run, scale, to);
      } else {
        for (int64_t d = 0; d < run; ++d) to[d] = scale * widen(from[d * stride[3]]);
      }
    }
  }
}

// panel[d][s] of one head and block.
template <typename T>
void pack_panel(const T* source, const int64_t* stride, int64_t n, int64_t size, float* panel) {
  int64_t keys = 0, columns = 0;  // what is transposed in registers
  if constexpr (sizeof(T) == sizeof(float)) {
    if (stride[3] == 1) {
      keys = n / 4 * 4;
      columns = size / 4 * 4;
      transpose(keys, columns, source, stride[1], panel, kBlock);
    }
  }
  for (int64_t d = 0; d < size; ++d) {
    for (int64_t s = d < columns ? keys : 0; s < kBlock; ++s) {
      panel[d * kBlock + s] = s < n ? widen(source[s * stride[1] + d * stride[3]]) : 0.0f;
    }
  }
}

HL_INLINE uint32_t half(float) { return 0; }  // floats are never packed in pairs
HL_INLINE uint32_t half(BFloat16 x) { return x.bits; }
#if HL_BFLOAT16
// VL values, each in the low half of its lane.
HL_INLINE __m512i wide_bits(const float*) { return _mm512_setzero_si512(); }
HL_INLINE __m512i wide_bits(const BFloat16* p) {
  __m256i halves;
  std::memcpy(&halves, p, sizeof(halves));
  return _mm512_cvtepu16_epi32(halves);
}
#endif

// scale * source rows, two neighbours along the row in a pair: [total][padded / 2]. The scale is 1
// or a power of two, so that nothing is rounded.
template <typename T>
void pack_row_halves(const T* source, const int64_t* stride, int64_t n, int64_t total, int64_t size,
                     int64_t padded, float scale, float* rows) {
  T* const to = reinterpret_cast<T*>(rows);
  for (int64_t i = 0; i < total; ++i) {
    const T* const from = source + i * stride[1];
    T* const row = to + i * padded;
    int64_t d = 0;
    if (i < n && stride[3] == 1 && scale == 1) {
      d = size;
      std::memcpy(row, from, static_cast<size_t>(d) * sizeof(T));
    } else if (i < n && stride[3] == 1) {
      d = size;
      store_scaled(from, size, scale, row);
    } else if (i < n) {
      for (; d < size; ++d) narrow(scale * widen(from[d * stride[3]]), row + d);
    }
    for (; d < padded; ++d) narrow(0.0f, row + d);
  }
}

// Two neighbouring rows in a pair: [(n + 1) / 2 or more][padded].
template <typename T>
void pack_row_pairs(const T* source, const int64_t* stride, int64_t n, int64_t total, int64_t size,
                    int64_t padded, float* rows) {
  for (int64_t i = 0; i < total; i += 2) {
    Pair* to = reinterpret_cast<Pair*>(rows) + i / 2 * padded;
    const T* from = source + i * stride[1];
    int64_t d = 0;
#if HL_BFLOAT16
    if (i + 1 < n && stride[3] == 1) {
      for (; d + VL <= size; d += VL) {
        const __m512i low = wide_bits(from + d), high = wide_bits(from + stride[1] + d);
        _mm512_storeu_si512(to + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    }
#endif
    for (; d < padded; ++d) {
      const bool inside = d < size;
      const uint32_t low = inside && i < n ? half(from[d * stride[3]]) : 0;
      const uint32_t high = inside && i + 1 < n ? half(from[stride[1] + d * stride[3]]) : 0;
      to[d].bits = low | high << 16;
    }
  }
}

// panel[d / 2][s] in pairs along d.
template <typename T>
void pack_panel_pairs(const T* source, const int64_t* stride, int64_t n, int64_t size,
                      float* panel) {
  Pair* to = reinterpret_cast<Pair*>(panel);
  int64_t keys = 0, columns = 0;
  if (stride[3] == 1 && stride[1] % 2 == 0) {
    keys = n / 4 * 4;
    columns = size / 8 * 8;
    transpose(keys, columns / 2, reinterpret_cast<const float*>(source), stride[1] / 2, panel,
              kBlock);
  }
  for (int64_t d = 0; d < size; d += 2) {
    for (int64_t s = d < columns ? keys : 0; s < kBlock; ++s) {
      const T* from = source + s * stride[1];
      const uint32_t low = s < n ? half(from[d * stride[3]]) : 0;
      const uint32_t high = s < n && d + 1 < size ? half(from[(d + 1) * stride[3]]) : 0;
      to[d / 2 * kBlock + s].bits = low | high << 16;
    }
  }
}

// One head's keys of a block as columns and as rows, in the form that the products take.
template <typename T>
HL_INLINE void pack_columns(const Plan& p, const T* source, const int64_t* stride, int64_t n,
                            int64_t size, float* to) {
  p.half ? pack_panel_pairs(source, stride, n, size, to) : pack_panel(source, stride, n, size, to);
}
template <typename T>
HL_INLINE void pack_key_rows(const Plan& p, const T* source, const int64_t* stride, int64_t n,
                             int64_t size, int64_t padded, float* to) {
  p.half ? pack_row_pairs(source, stride, n, kBlock, size, padded, to)
         : pack_rows(source, stride, n, kBlock, size, padded, 1, to);
}

// to[h * to_line + s] for the heads of n keys.
template <typename T>
void pack_heads(const T* source, int64_t line, int64_t step, int64_t n, int64_t heads, float* to,
                int64_t to_line) {
  int64_t keys = 0, columns = 0;  // what is transposed in registers
  if (step == 1) {
    keys = n / 4 * 4;
    columns = heads / 4 * 4;
    if constexpr (sizeof(T) == sizeof(float)) {
      transpose(keys, columns, source, line, to, to_line);
    } else {
      float wide[kBlock * kMaxHeads];
      for (int64_t s = 0; s < keys; ++s) {
        for (int64_t h = 0; h < columns; h += 4) {
          for (int64_t i = h; i < h + 4; ++i) wide[s * columns + i] = widen(source[s * line + i]);
        }
      }
      transpose(keys, columns, wide, columns, to, to_line);
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t s = h < columns ? keys : 0; s < n; ++s) {
      to[h * to_line + s] = widen(source[s * line + h * step]);
    }
  }
}

// Key-side weights of one block, [h][k_width][kBlock].
template <typename T>
void pack_key_weights_as_floats(const Args& a, const Mix& mix, int64_t batch, int64_t block,
                                float* to) {
  const int64_t first = block * kBlock, n = lesser(kBlock, a.S - first);
  const int64_t width = mix.k_width(), rank = (width - 1) / 2, line = width * kBlock;
  const auto pack = [&](const AnyView& view, int64_t r, int64_t heads_at, int64_t at) {
    const T* source = static_cast<const T*>(view.data) + batch * view.stride[0] +
                      first * view.stride[1] + r * view.stride[2];
    pack_heads(source, view.stride[1], view.stride[heads_at], n, mix.in, to + at * kBlock, line);
  };
  for (int64_t r = 0; r < mix.k_rank; ++r) {
    pack(mix.k_down, r, 3, r);
    pack(mix.k_up, r, 3, rank + r);
  }
  if (mix.k_gate.data) pack(mix.k_gate, 0, 2, 2 * rank);
}

// Panels of ranks [rank][map_pairs][kBlock], which are pairs of maps, as pairs of ranks:
// to[maps][rank_pairs][kBlock].
HL_INLINE void pair_ranks(const Pair* panels, int64_t ranks, int64_t maps, const PairedWeights& at,
                          Pair* to) {
  const int64_t panel = at.map_pairs * kBlock;
  for (int64_t r = 0; r < ranks; r += 2) {
    const bool two = r + 1 < ranks;
    for (int64_t h = 0; h < maps; ++h) {
      const int shift = h % 2 * 16;
      const Pair* const first = panels + r * panel + h / 2 * kBlock;
      Pair* const pairs = to + (h * at.rank_pairs + r / 2) * kBlock;
      for (int64_t s = 0; s < kBlock; ++s) {
        const uint32_t second = two ? first[panel + s].bits >> shift << 16 : 0;
        pairs[s].bits = (first[s].bits >> shift & 0xffff) | second;
      }
    }
  }
}

// The same as PairedWeights has them.
template <typename T>
void pack_key_weights_in_pairs(const Args& a, const Plan& p, const Mix& mix, int64_t batch,
                               int64_t block, float* to) {
  const int64_t first = block * kBlock, n = lesser(kBlock, a.S - first);
  const int64_t rank = mix.packed_k_rank(), size = mix.in / mix.groups;
  const PairedWeights at = paired_weights(mix, rank, p.backward);
  const auto source = [&](const AnyView& view) {
    return static_cast<const T*>(view.data) + batch * view.stride[0] + first * view.stride[1];
  };
  if (mix.k_gate.data) {
    pack_heads(source(mix.k_gate), mix.k_gate.stride[1], mix.k_gate.stride[2], n, mix.in,
               to + at.gate * kBlock, kBlock);
  }
  Pair* const all = reinterpret_cast<Pair*>(to);
  Pair room[kMaxRank * kMaxHeads / 2 * kBlock];
  for (int64_t g = 0; g < mix.groups; ++g) {
    const auto pack = [&](const AnyView& view, Pair* panels) {
      for (int64_t r = 0; r < mix.k_rank; ++r) {
        pack_panel_pairs(source(view) + r * view.stride[2] + g * size * view.stride[3], view.stride,
                         n, size, reinterpret_cast<float*>(panels + r * at.map_pairs * kBlock));
      }
    };
    const auto inward = [&](int way) {
      return all + (at.inward[way] + g * rank * at.map_pairs) * kBlock;
    };
    const auto outward = [&](int way) {
      return all + (at.outward[way] + g * size * at.rank_pairs) * kBlock;
    };
    Pair* const down = inward(0);
    Pair* const up = p.backward ? inward(1) : room;
    pack(mix.k_down, down);
    pack(mix.k_up, up);
    pair_ranks(up, mix.k_rank, size, at, outward(0));
    if (p.backward) pair_ranks(down, mix.k_rank, size, at, outward(1));
  }
}

template <typename T>
void pack_key_weights(const Args& a, const Plan& p, const Mix& mix, int64_t batch, int64_t block,
                      float* to) {
  if (!mix.key_side()) return;
  // What nothing is written to: ranks and gates that are absent, keys after the last.
  if (a.S - block * kBlock < kBlock || mix.k_rank < mix.packed_k_rank() || !mix.k_gate.data) {
    fill(to, key_weights_size(mix, p) * kBlock, 0);
  }
  p.mixes_pairs ? pack_key_weights_in_pairs<T>(a, p, mix, batch, block, to)
                : pack_key_weights_as_floats<T>(a, mix, batch, block, to);
}

// Fetches what pack_key_weights reads of a block, for a worker that comes to it after another.
template <typename T>
HL_INLINE void fetch_key_weights(const Args& a, const Mix& mix, int64_t batch, int64_t block) {
  const int64_t first = block * kBlock, n = lesser(kBlock, a.S - first);
  const AnyView* const views[] = {&mix.k_down, &mix.k_up, &mix.k_gate};
  for (const AnyView* view : views) {
    // Rows that lie far apart have more between them than in them.
    const bool near = view->stride[1] <= 2 * mix.in * mix.k_width();
    if (!view->data || n <= 0 || !near) continue;
    const T* from = static_cast<const T*>(view->data) + batch * view->stride[0];
    prefetch_row(from + first * view->stride[1], n * view->stride[1]);
  }
}

// Query-side weights of query t, [h][q_width].
template <typename T>
void pack_query_weights_as_floats(const Mix& mix, int64_t batch, int64_t t, float* to) {
  const int64_t width = mix.q_width(), rank = (width - 1) / 2;
  for (int64_t h = 0; h < mix.in; ++h) {
    float* at = to + h * width;
    for (int64_t r = 0; r < mix.q_rank; ++r) {
      at[r] = widen(mix.q_down.get<T>(batch, t, r, h));
      at[rank + r] = widen(mix.q_up.get<T>(batch, t, r, h));
    }
    if (mix.q_gate.data) at[2 * rank] = widen(mix.q_gate.get<T>(batch, t, h, 0));
  }
}

// to[i * to_step] = (low[i], high[i]) for n values that are `step` apart; where high is null, 0.
template <typename T>
HL_INLINE void pair_values(const T* low, const T* high, int64_t step, int64_t n, Pair* to,
                           int64_t to_step) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t upper = high ? half(high[i * step]) : 0;
    to[i * to_step].bits = half(low[i * step]) | upper << 16;
  }
}

// The same as PairedWeights has them.
template <typename T>
void pack_query_weights_in_pairs(const Plan& p, const Mix& mix, int64_t batch, int64_t t,
                                 float* to) {
  const int64_t rank = mix.packed_q_rank(), size = mix.in / mix.groups;
  const PairedWeights at = paired_weights(mix, rank, p.backward);
  Pair* const all = reinterpret_cast<Pair*>(to);
  const auto row = [&](const AnyView& view, int64_t r) {
    return static_cast<const T*>(view.data) + batch * view.stride[0] + t * view.stride[1] +
           r * view.stride[2];
  };
  for (int64_t r = 0; r < mix.q_rank; ++r) {
    for (int way = 0; way < (p.backward ? 2 : 1); ++way) {
      const AnyView& inward = way == 0 ? mix.q_down : mix.q_up;
      const AnyView& outward = way == 0 ? mix.q_up : mix.q_down;
      const int64_t step = inward.stride[3];
      for (int64_t g = 0; g < mix.groups; ++g) {
        const T* const from = row(inward, r) + g * size * step;
        Pair* const pairs = all + at.inward[way] + (g * rank + r) * at.map_pairs;
        pair_values(from, from + step, 2 * step, size / 2, pairs, 1);
        if (size % 2 == 1) {
          pair_values<T>(from + (size - 1) * step, nullptr, step, 1, pairs + size / 2, 1);
        }
      }
      if (r % 2 == 0) {
        pair_values<T>(row(outward, r), r + 1 < mix.q_rank ? row(outward, r + 1) : nullptr,
                       outward.stride[3], mix.in, all + at.outward[way] + r / 2, at.rank_pairs);
      }
    }
  }
  if (!mix.q_gate.data) return;
  const T* const gate = row(mix.q_gate, 0);
  for (int64_t h = 0; h < mix.in; ++h) to[at.gate + h] = widen(gate[h * mix.q_gate.stride[2]]);
}

// Query-side weights of a tile, one query after the other.
template <typename T>
void pack_query_weights(const Plan& p, const Mix& mix, int64_t batch, int64_t first, int64_t n,
                        float* to) {
  if (!mix.dynamic()) return;
  const int64_t size = query_weights_size(mix, p);
  fill(to, n * size, 0);
  if (!mix.query_side()) return;
  for (int64_t t = 0; t < n; ++t) {
    p.mixes_pairs ? pack_query_weights_in_pairs<T>(p, mix, batch, first + t, to + t * size)
                  : pack_query_weights_as_floats<T>(mix, batch, first + t, to + t * size);
  }
}

// Keys of one block and the weights before softmax that go with them.
template <typename T>
void pack_keys(const Args& a, const Plan& p, int64_t batch, int64_t block, const PackedBlock& to) {
  const int64_t first = block * kBlock, n = lesser(kBlock, a.S - first);
  for (int64_t g = 0; g < a.Gk; ++g) {
    const T* k = static_cast<const T*>(a.k) + batch * a.k_stride[0] + first * a.k_stride[1] +
                 g * a.k_stride[2];
    pack_columns(p, k, a.k_stride, n, a.D, to.k_panel + g * p.Dp * kBlock);
    if (p.backward) pack_key_rows(p, k, a.k_stride, n, a.D, p.Dp, to.k_rows + g * kBlock * p.Dp);
  }
  pack_key_weights<T>(a, p, a.pre, batch, block, to.pre);
}

// The same for values and after softmax.
template <typename T>
void pack_values(const Args& a, const Plan& p, int64_t batch, int64_t block,
                 const PackedBlock& to) {
  const int64_t first = block * kBlock, n = lesser(kBlock, a.S - first);
  for (int64_t g = 0; g < a.Gv; ++g) {
    const T* v = static_cast<const T*>(a.v) + batch * a.v_stride[0] + first * a.v_stride[1] +
                 g * a.v_stride[2];
    if (p.backward) {
      pack_columns(p, v, a.v_stride, n, a.E, to.v_panel + g * p.Ep * kBlock);
    } else {
      pack_key_rows(p, v, a.v_stride, n, a.E, p.Ep, to.v_rows + g * kBlock * p.Ep);
    }
  }
  pack_key_weights<T>(a, p, a.post, batch, block, to.post);
}

template <typename T>
void pack_block(const Args& a, const Plan& p, const Task& task, int64_t block) {
  const PackedBlock to = packed_block(a, p, task.packed, block);
  if (p.by_map) {
    const int64_t first = block * kBlock, n = lesser(kBlock, a.S - first);
    const auto rows = [&](const void* source, const int64_t* stride) {
      return static_cast<const T*>(source) + task.batch * stride[0] + first * stride[1];
    };
    pack_wide_rows(rows(a.k, a.k_stride), a.k_stride, n, kBlock, a.Gk, a.D, 1, to.k_rows);
    pack_wide_rows(rows(a.v, a.v_stride), a.v_stride, n, kBlock, a.Gv, a.E, 1, to.v_rows);
    return;
  }
  pack_keys<T>(a, p, task.batch, block, to);
  pack_values<T>(a, p, task.batch, block, to);
}

// The keys that causality, window and length let query t see, before documents
// and mask. `future` drops causality but keeps what a causal window begins
// with.
HL_INLINE Range key_range(const Args& a, int64_t batch, int64_t t, bool future = false) {
  const int64_t position = t + a.S - a.T;
  Range keys{0, a.S};
  if (a.lengths) keys.end = lesser(keys.end, a.lengths[batch]);
  if (a.causal && !future) keys.end = lesser(keys.end, position + 1);
  if (a.window > 0) {
    keys.begin = greater(0, position - a.window + 1);
    if (!a.causal) keys.end = lesser(keys.end, position + a.window);
  }
  keys.end = greater(keys.end, keys.begin);
  return keys;
}

// One tile: rows [0, count) are the queries from `first` on. Rows from `prob`
// on have weights, rows from `out` on outputs; the ones before are there for
// the convolutions.
struct Tile {
  int64_t batch, first, count, prob, out;
  Range blocks;  // that any of the rows may see
};

HL_INLINE Tile make_tile(const Args& a, const Plan& p, int64_t batch, int64_t index) {
  Tile tile;
  const int64_t begin = index * p.rows, end = lesser(a.T, begin + p.rows);
  const int64_t prob = greater(0, begin - a.post_conv.halo());
  tile.batch = batch;
  tile.first = greater(0, prob - a.pre_conv.halo());
  tile.count = end - tile.first;
  tile.prob = prob - tile.first;
  tile.out = begin - tile.first;
  Range keys{a.S, 0};
  for (int64_t t = tile.first; t < end; ++t) {
    const Range own = key_range(a, batch, t);
    if (own.begin == own.end) continue;
    keys.begin = lesser(keys.begin, own.begin);
    keys.end = greater(keys.end, own.end);
  }
  tile.blocks = {0, 0};
  if (keys.begin < keys.end) {
    tile.blocks = {keys.begin / kBlock, (keys.end + kBlock - 1) / kBlock};
  }
  return tile;
}

// One bit a key: those of `block` that query t sees.
uint64_t visible_keys(const Args& a, int64_t batch, int64_t t, int64_t block, bool future) {
  const int64_t first = block * kBlock;
  const Range keys = key_range(a, batch, t, future);
  const int64_t lo = greater(keys.begin - first, 0), hi = lesser(keys.end - first, kBlock);
  if (lo >= hi) return 0;
  uint64_t bits = (~uint64_t{0} >> (kBlock - (hi - lo))) << lo;
  if (a.documents) {
    const int64_t* ids = a.documents + batch * a.S;
    const int64_t own = ids[t + a.S - a.T];
    uint64_t same = 0;
    for (int64_t s = lo; s < hi; ++s) same |= static_cast<uint64_t>(ids[first + s] == own) << s;
    bits &= same;
  }
  if (a.mask.data != nullptr) {
    uint64_t shown = 0;
    for (int64_t s = lo; s < hi; ++s) {
      shown |= static_cast<uint64_t>(*a.mask.at(batch, 0, t, first + s)) << s;
    }
    bits &= shown;
  }
  return bits;
}

// visible[j - begin][row] for the blocks of a tile.
void tile_visibility(const Args& a, const Plan& p, const Tile& tile, const Scratch& w) {
  for (int64_t j = tile.blocks.begin; j < tile.blocks.end; ++j) {
    for (int64_t r = 0; r < tile.count; ++r) {
      const int64_t at = (j - tile.blocks.begin) * p.height + r;
      w.visible[at] = visible_keys(a, tile.batch, tile.first + r, j, false);
      if (w.raw_visible == w.visible) continue;
      w.raw_visible[at] = visible_keys(a, tile.batch, tile.first + r, j, true);
    }
  }
}

// Whether rows [first, count) of the tile see any key of block i of it.
HL_INLINE bool any_visible(const Plan& p, const Tile& tile, const uint64_t* visible, int64_t i,
                           int64_t first) {
  uint64_t any = 0;
  if (i < 0 || i >= tile.blocks.end - tile.blocks.begin) return false;
  for (int64_t r = first; r < tile.count; ++r) any |= visible[i * p.height + r];
  return any != 0;
}

// From the first to the last key of a block that the bits have, within the block.
HL_INLINE Range reach(uint64_t bits) {
  if (bits == 0) return {0, 0};
  return {__builtin_ctzll(bits), 64 - __builtin_clzll(bits)};
}
// The keys of a block that any of the rows sees.
HL_INLINE Range seen_keys(int64_t rows, const uint64_t* visible) {
  uint64_t any = 0;
  for (int64_t r = 0; r < rows; ++r) any |= visible[r];
  return reach(any);
}
// The same for rows [first, count) of the tile and block i of it, in whole vectors.
HL_INLINE SeenKeys seen_keys(const Plan& p, const Tile& tile, const uint64_t* visible, int64_t i,
                             int64_t first) {
  return whole_vectors(seen_keys(tile.count - first, visible + i * p.height + first));
}

// x = 0 where invisible.
void hide(int64_t rows, int64_t maps, int64_t line, const uint64_t* visible, float* x) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint64_t bits = visible[r];
    if (bits == ~uint64_t{0}) continue;
    for (int64_t h = 0; h < maps; ++h) {
      float* at = x + r * line + h * kBlock;
#pragma GCC unroll 16
      for (int v = 0; v < kBlock / VL; ++v) {
        store(at + v * VL, select(lanes(bits, v), load(at + v * VL), zero()));
      }
    }
  }
}

// scores[r][h][s] += bias for all rows and maps of a tile and one block.
void add_bias(const Args& a, const Plan& p, const Tile& tile, int64_t block, float* scores) {
  if (!a.bias.data) return;
  const int64_t key = block * kBlock, n = lesser(kBlock, a.S - key);
  for (int64_t r = 0; r < tile.count; ++r) {
    for (int64_t h = 0; h < a.H; ++h) {
      const float* from = a.bias.at(tile.batch, h, tile.first + r, key);
      float* to = scores + r * p.line + h * kBlock;
      int64_t s = 0;
      if (a.bias.stride[3] == 1) {
        for (; s + VL <= n; s += VL) store(to + s, load(to + s) + load(from + s));
      }
      for (; s < n; ++s) to[s] += from[s * a.bias.stride[3]];
    }
  }
}

// The chunks of block i of a tile and its neighbours; those that rows from
// `first` on do not see are 0.
HL_INLINE Neighbours neighbours(const Plan& p, const Tile& tile, const uint64_t* visible, int64_t i,
                                int64_t first, const float* row) {
  Neighbours out;
  for (int64_t d = -1; d <= 1; ++d) {
    out.block[d + 1] =
        any_visible(p, tile, visible, i + d, first) ? row + (i + d) * p.chunk : nullptr;
  }
  return out;
}

// The rows of a tile that a convolution couples, of those in `valid`.
HL_INLINE ConvRows conv_rows_of(const Args& a, const Tile& tile, RowRange valid) {
  if (!a.documents) return {valid, nullptr};
  return {valid, a.documents + tile.batch * a.S + a.S - a.T + tile.first};
}

// Keys of block i that row `prob` of the tile counts in the convolution before
// softmax under the exact mask (one more for each later row); kNoLimit where
// the mask is not exact or hides nothing here.
HL_INLINE int64_t exact_limit(const Args& a, const Tile& tile, int64_t i) {
  if (!a.exact_mask || !a.causal) return kNoLimit;
  const int64_t end = tile.first + tile.prob + a.S - a.T + 1;
  const int64_t limit = end - (tile.blocks.begin + i) * kBlock;
  return limit >= kBlock + a.pre_conv.keys ? kNoLimit : limit;
}

// Scores of block i into `to`, 0 where a convolution does not count them.
void raw_scores(const Args& a, const Plan& p, const Task& task, const Tile& tile, const Scratch& w,
                int64_t i, const Upcoming& next, float* to) {
  const uint64_t* visible = w.raw_visible + i * p.height;
  if (!any_visible(p, tile, w.raw_visible, i, 0)) return;
  const int64_t block = tile.blocks.begin + i;
  score_product(a, p, tile.count, w, packed_block(a, p, task.packed, block),
                seen_keys(p, tile, w.raw_visible, i, 0), next, to);
  add_bias(a, p, tile, block, to);
  if (a.pre_conv.kernel) hide(tile.count, a.H, p.line, visible, to);
}

// The weights of queries from `row` on, packed from q, and of a block of keys.
HL_INLINE MixWeights mix_weights(const Plan& p, const Mix& mix, const float* q, int64_t row,
                                 const float* k) {
  return {q + row * query_weights_size(mix, p), k, p.mixes_pairs, p.backward};
}

// y = Mix(x), or, swapped, the gradient of x from that of y; y may not be x where M is given. Where
// `to` is pairs, targets.y is only room for what M makes.
void tile_mix_to(MixTo to, const MixTargets& targets, const Mix& mix, const MixWeights& w,
                 int64_t rows, int64_t line, const float* x, bool swapped, float* inner) {
  if (mix.matrix) {
    swapped ? mix_static_transposed(mix, rows, line, x, targets.y)
            : mix_static(mix, rows, line, x, nullptr, 0, targets.y);
  }
  if (!mix.dynamic()) return;
  const MixCall call{rows, line, x, nullptr, 0, to, targets, swapped, inner};
  mix.matrix ? mix_apply<MixOf::kOnto>(mix, w, call) : mix_apply<MixOf::kOwn>(mix, w, call);
}
HL_INLINE void tile_mix(const Mix& mix, const MixWeights& w, int64_t rows, int64_t line,
                        const float* x, float* y, bool swapped, float* inner) {
  tile_mix_to(MixTo::kFloats, {y}, mix, w, rows, line, x, swapped, inner);
}

// Whether tile_mix_scaled() can take the mix: not one with both a static and a dynamic part.
HL_INLINE bool mixes_scaled(const Mix& mix) {
  return mix.present && !(mix.matrix && mix.dynamic());
}
// y = Mix(f x) for a factor f [rows][factor_line] of each query and map. A dynamic mix writes
// `pairs` in place of y, where they are given.
void tile_mix_scaled(const Mix& mix, const MixWeights& w, int64_t rows, int64_t line,
                     const float* x, const float* factor, int64_t factor_line, float* y,
                     Pair* pairs) {
  if (mix.matrix) return mix_static(mix, rows, line, x, factor, factor_line, y);
  const MixTo to = pairs ? MixTo::kKeyPairs : MixTo::kFloats;
  mix_apply<MixOf::kScaled>(
      mix, w, {rows, line, x, factor, factor_line, to, {y, pairs, nullptr}, false, nullptr});
}

// Calls f(first, n) for the rows of a tile, a few at a time: what several steps read and write
// stays in the first-level cache, or near it.
constexpr int64_t kFewRows = 8;
template <typename F>
HL_INLINE void few_rows(int64_t rows, F&& f) {
  for (int64_t r = 0; r < rows; r += kFewRows) f(r, lesser(kFewRows, rows - r));
}

// The scores of block i after convolution and mix, for rows from `prob` on: into `weights`. Scores
// are made in w.scores where that is kept (blocks up to i + 1 with a convolution), else in passing.
// finish(first, n) takes over rows of `weights`, counted from `prob`, as soon as they are made.
template <typename F>
HL_INLINE void mixed_scores(const Args& a, const Plan& p, const Task& task, const Tile& tile,
                            const Scratch& w, int64_t i, const Upcoming& next, float* weights,
                            F&& finish) {
  const PackedBlock keys = packed_block(a, p, task.packed, tile.blocks.begin + i);
  const int64_t skip = tile.prob * p.line;
  float* x = w.scores ? w.scores + i * p.chunk : a.pre.matrix ? w.tile[0] : weights;
  if (a.pre_conv.kernel) {
    const Neighbours near = neighbours(p, tile, w.raw_visible, i, 0, w.scores);
    const ConvRows in = conv_rows_of(a, tile, {0, tile.count});
    const RowRange out{tile.prob, tile.count};
    const int64_t limit = exact_limit(a, tile, i);
    x = w.mix_in ? w.mix_in + i * p.chunk : a.pre.matrix ? w.tile[0] : weights;
    if (limit == kNoLimit) {
      conv_apply(a.pre_conv, false, a.H, p.line, near, in, out, limit, x, w.conv);
    } else {
      conv_apply_exact(a.pre_conv, a.H, p.line, near, in, out, limit, x, w.conv);
    }
  } else {
    raw_scores(a, p, task, tile, w, i, next, x);
  }
  few_rows(tile.count - tile.prob, [&](int64_t r, int64_t n) {
    if (a.pre.present) {
      const MixWeights by = mix_weights(p, a.pre, w.pre_q, r, keys.pre);
      const int64_t at = skip + r * p.line;
      tile_mix(a.pre, by, n, p.line, x + at, weights + at, false, nullptr);
    }
    finish(r, n);
  });
}

// Fetches rows [begin, end) of a batch element, if it is there. Short ones end before a prefetcher
// of the machine has found their rows.
template <typename T>
HL_INLINE void fetch_rows(int64_t batch, const void* source, const int64_t* stride, int64_t begin,
                          int64_t end, int64_t heads, int64_t size) {
  if (batch < 0 || stride[3] != 1) return;
  const T* const from = static_cast<const T*>(source) + batch * stride[0];
  for (int64_t i = begin; i < end; ++i) {
    if (stride[2] == size) {
      prefetch_row(from + i * stride[1], heads * size);
      continue;
    }
    for (int64_t h = 0; h < heads; ++h) {
      prefetch_row(from + i * stride[1] + h * stride[2], size);
    }
  }
}

// The share of keys and values that goes with tile `index`.
template <typename T>
HL_INLINE void fetch_next_keys(const Args& a, const Plan& p, const Task& task, int64_t index) {
  const int64_t begin = a.S * index / p.tiles, end = a.S * (index + 1) / p.tiles;
  fetch_rows<T>(task.next, a.k, a.k_stride, begin, end, a.Gk, a.D);
  fetch_rows<T>(task.next, a.v, a.v_stride, begin, end, a.Gv, a.E);
}

// Queries and their weights of a tile, and what they see.
template <typename T>
void prepare_tile(const Args& a, const Plan& p, const Task& task, const Tile& tile,
                  const Scratch& w) {
  const int64_t end = tile.first + tile.count;
  fetch_rows<T>(tile.batch, a.q, a.q_stride, tile.first, end, a.H, a.D);
  pack_query_weights<T>(p, a.pre, tile.batch, tile.first + tile.prob, tile.count - tile.prob,
                        w.pre_q);
  pack_query_weights<T>(p, a.post, tile.batch, tile.first + tile.out, tile.count - tile.out,
                        w.post_q);
  tile_visibility(a, p, tile, w);
  fetch_rows<T>(task.next, a.q, a.q_stride, tile.first + tile.out, end, a.H, a.D);
  for (int64_t h = 0; h < a.H; ++h) {
    const T* q = static_cast<const T*>(a.q) + tile.batch * a.q_stride[0] +
                 tile.first * a.q_stride[1] + h * a.q_stride[2];
    if (p.half) {
      pack_row_halves(q, a.q_stride, tile.count, tile.count, a.D, p.Dp, p.half_scale,
                      w.q + h * p.height * p.Dp);
    } else {
      pack_rows(q, a.q_stride, tile.count, tile.count, a.D, p.Dp, a.scale,
                w.q + h * p.height * p.Dp);
    }
    if (p.half && p.backward) {
      pack_row_pairs(q, a.q_stride, tile.count, tile.count, a.D, p.Dp,
                     w.q_pairs + h * ((p.height + 1) / 2) * p.Dp);
    }
  }
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel
