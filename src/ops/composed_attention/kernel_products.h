// The matrix products of a tile with keys, values, queries and output
// gradients: in float, or, where plan.half is set, in pairs of bfloat16 with
// float sums.
#pragma once

#include "ops/composed_attention/kernel_conv.h"
#include "ops/composed_attention/kernel_scratch.h"
#include "ops/kernel/pairs.h"
#include "ops/kernel/tiles.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

// Which of its heads map h of `maps` reads: consecutive maps share one.
HL_INLINE int64_t shared_head(int64_t h, int64_t heads, int64_t maps) { return h * heads / maps; }

HL_INLINE Pair* pairs(float* p) { return reinterpret_cast<Pair*>(p); }
HL_INLINE const Pair* pairs(const float* p) { return reinterpret_cast<const Pair*>(p); }

struct Range {
  int64_t begin, end;
};

// What is read or written after a product over heads, fetched while it runs: the first head's piece
// of the next product's larger factor, and chunks of the row. Each head fetches what the one after
// it needs, and its share of the chunks.
struct Upcoming {
  const float* first = nullptr;
  int64_t first_size = 0;
  const float* chunks[3] = {};
  int64_t chunk_size = 0;

  HL_INLINE Ahead during(int64_t h, int64_t heads, const float* piece, int64_t size) const {
    Ahead ahead;
    if (h + 1 < heads) {
      ahead.add(piece, size);
    } else {
      ahead.add(first, first_size);
    }
    const int64_t begin = chunk_size * h / heads, end = chunk_size * (h + 1) / heads;
    for (const float* chunk : chunks) {
      if (chunk) ahead.add(chunk + begin, end - begin);
    }
    return ahead;
  }
};

HL_INLINE SeenKeys whole_vectors(Range keys) {
  return {keys.begin / VL * VL, (keys.end + VL - 1) / VL * VL};
}

HL_INLINE void clear_unseen(const Plan& p, int64_t rows, int64_t maps, SeenKeys seen, float* x) {
  if (seen.count() == kBlock) return;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < maps; ++h) {
      float* at = x + r * p.line + h * kBlock;
      for (int64_t s = 0; s < seen.begin; s += VL) store(at + s, zero());
      for (int64_t s = seen.end; s < kBlock; s += VL) store(at + s, zero());
    }
  }
}

// x[r][h] = scale left panel all maps: left [maps][left_rows][padded], columns
// [heads][padded][kBlock], both `size` long.
HL_INLINE void panel_product(const Plan& p, int64_t rows, int64_t maps, int64_t heads, int64_t size,
                             int64_t padded, const float* left, int64_t left_rows, float scale,
                             const float* panels, SeenKeys seen, const Upcoming& next, float* x) {
  for (int64_t h = 0; h < maps; ++h) {
    const float* row = left + h * left_rows * padded;
    const float* panel = panels + shared_head(h, heads, maps) * padded * kBlock;
    float* to = x + h * kBlock + seen.begin;
    const int64_t piece = padded * kBlock / (p.half ? 2 : 1);
    Ahead ahead = next.during(h, maps, panel + padded * kBlock, piece);
    if (HL_BFLOAT16 && p.amx) {
      tile_gemm<false>(rows, seen.count(), (size + 1) / 2, pairs(row), padded / 2,
                       pairs(panel) + seen.begin, kBlock, to, p.line, scale);
    } else if (HL_BFLOAT16 && p.half) {
      gemm<false, true>(rows, seen.count(), (size + 1) / 2, pairs(row), padded / 2,
                        pairs(panel) + seen.begin, kBlock, to, p.line, scale, ahead);
    } else {
      gemm<false, true>(rows, seen.count(), size, row, padded, panel + seen.begin, kBlock, to,
                        p.line, 1, ahead);
    }
  }
  clear_unseen(p, rows, maps, seen, x);
}

// scores[r][h] = scale q k (in float the whole scale is already in q, in pairs a part of it).
void score_product(const Args& a, const Plan& p, int64_t rows, const Scratch& w,
                   const PackedBlock& keys, SeenKeys seen, const Upcoming& next, float* scores) {
  panel_product(p, rows, a.H, a.Gk, a.D, p.Dp, w.q, p.height, a.scale / p.half_scale, keys.k_panel,
                seen, next, scores);
}

// grad[r][h'] = dO v.
void output_product(const Args& a, const Plan& p, int64_t rows, const Scratch& w,
                    const PackedBlock& keys, SeenKeys seen, const Upcoming& next, float* grad) {
  panel_product(p, rows, a.H2, a.Gv, a.E, p.Ep, w.grad_out, p.rows, 1, keys.v_panel, seen, next,
                grad);
}

// sums[h][r] += x keys for all maps: x[r][h], keys [heads][kBlock][padded], sums
// [maps][sum_rows][padded]. In pairs, x null: they are in w.halves already.
HL_INLINE void key_sum_product(const Plan& p, int64_t rows, int64_t maps, int64_t heads,
                               int64_t padded, const Scratch& w, const float* x, const float* keys,
                               SeenKeys seen, const Upcoming& next, float* sums, int64_t sum_rows) {
  const bool half = HL_BFLOAT16 && p.half;
  const Pair* const halves = half ? pairs(w.halves) : nullptr;
  if (half && x) pair_columns(rows, maps * kBlock, x, p.line, pairs(w.halves), p.line);
  for (int64_t h = 0; h < maps; ++h) {
    const float* key = keys + shared_head(h, heads, maps) * kBlock * padded;
    float* to = sums + h * sum_rows * padded;
    Ahead ahead = next.during(h, maps, key + kBlock * padded, kBlock * padded / (half ? 2 : 1));
    if (half && p.amx) {
      tile_gemm<true>(rows, padded, seen.count() / 2, halves + (h * kBlock + seen.begin) / 2,
                      p.line, pairs(key) + seen.begin / 2 * padded, padded, to, padded, 1);
    } else if (half) {
      gemm<true, true>(rows, padded, seen.count() / 2, halves + (h * kBlock + seen.begin) / 2,
                       p.line, pairs(key) + seen.begin / 2 * padded, padded, to, padded, 1, ahead);
    } else {
      gemm<true, true>(rows, padded, seen.count(), x + h * kBlock + seen.begin, p.line,
                       key + seen.begin * padded, padded, to, padded, 1, ahead);
    }
  }
}

// out[h'][r] += x v.
void value_product(const Args& a, const Plan& p, int64_t rows, const Scratch& w,
                   const PackedBlock& keys, SeenKeys seen, const Upcoming& next, const float* x) {
  key_sum_product(p, rows, a.H2, a.Gv, p.Ep, w, x, keys.v_rows, seen, next, w.out, p.rows);
}

// dQ += dS k (still to be scaled).
void query_grad_product(const Args& a, const Plan& p, int64_t rows, const Scratch& w,
                        const PackedBlock& keys, SeenKeys seen, const Upcoming& next,
                        const float* x) {
  key_sum_product(p, rows, a.H, a.Gk, p.Dp, w, x, keys.k_rows, seen, next, w.grad_q, p.height);
}

// sums[head][s] += x^T rows for all maps: x[r][h], rows [maps][row_lines][padded], in pairs
// [maps][(row_lines + 1) / 2][padded]; sums [heads][kBlock][padded]. In pairs, x null: they are in
// w.row_pairs already.
HL_INLINE void row_sum_product(const Plan& p, int64_t rows, int64_t maps, int64_t heads,
                               int64_t padded, const Scratch& w, const float* x, const float* right,
                               const float* right_pairs, int64_t right_rows, SeenKeys seen,
                               const Upcoming& next, float* sums) {
  const bool half = HL_BFLOAT16 && p.half;
  const int64_t turned = turned_pairs(rows);
  const Pair* halves = nullptr;
  if (half && p.amx) {
    halves = turn_rows(rows, maps * kBlock, x, p.line, pairs(w.halves), turned);
  } else if (half) {
    halves = pairs(w.row_pairs);
    if (x) pair_rows(rows, maps * kBlock, x, p.line, pairs(w.row_pairs), p.line);
  }
  for (int64_t h = 0; h < maps; ++h) {
    float* head = sums + shared_head(h, heads, maps) * kBlock * padded;
    float* to = head + seen.begin * padded;
    Ahead ahead = next.during(h, maps, head + kBlock * padded, kBlock * padded);
    const float* const row_pairs = right_pairs + h * ((right_rows + 1) / 2) * padded;
    if (half && p.amx) {
      tile_gemm<true>(seen.count(), padded, (rows + 1) / 2,
                      halves + (h * kBlock + seen.begin) * turned, turned, pairs(row_pairs), padded,
                      to, padded, 1);
    } else if (half) {
      gemm<true, false>(seen.count(), padded, (rows + 1) / 2, halves + h * kBlock + seen.begin,
                        p.line, pairs(row_pairs), padded, to, padded, 1, ahead);
    } else {
      gemm<true, false>(seen.count(), padded, rows, x + h * kBlock + seen.begin, p.line,
                        right + h * right_rows * padded, padded, to, padded, 1, ahead);
    }
  }
}

// dV += x^T dO.
void value_grad_product(const Args& a, const Plan& p, int64_t rows, const Scratch& w, SeenKeys seen,
                        const Upcoming& next, const float* x, float* grad_v) {
  row_sum_product(p, rows, a.H2, a.Gv, p.Ep, w, x, w.grad_out, w.grad_out_pairs, p.rows, seen, next,
                  grad_v);
}

// dK += dS^T q (in pairs still to be scaled).
void key_grad_product(const Args& a, const Plan& p, int64_t rows, const Scratch& w, SeenKeys seen,
                      const Upcoming& next, const float* x, float* grad_k) {
  row_sum_product(p, rows, a.H, a.Gk, p.Dp, w, x, w.q, w.q_pairs, p.height, seen, next, grad_k);
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel
