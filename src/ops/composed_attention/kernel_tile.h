// What forward and backward share: packing of keys, queries and weights, and which keys a query
// sees.
#pragma once

#include "ops/composed_attention/kernel_mix.h"
#include "ops/composed_attention/kernel_scratch.h"

namespace headloom::ops::fused {
namespace {

struct BFloat16 {
  uint16_t bits;
};
HL_INLINE float widen(float x) { return x; }
HL_INLINE float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}
HL_INLINE void narrow(float x, float* to) { *to = x; }
HL_INLINE void narrow(float x, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (x != x) {
    to->bits = static_cast<uint16_t>((bits >> 16) | 64);  // stays a NaN
    return;
  }
  to->bits = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest even
}

HL_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
HL_INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
HL_INLINE void fill(float* p, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i) p[i] = value;
}

// Which of its heads map h of `maps` reads: consecutive maps share one.
HL_INLINE int64_t shared_head(int64_t h, int64_t heads, int64_t maps) { return h * heads / maps; }

// rows[i][0..padded) = scale * source row i, zero beyond `size`; source rows of one head, from
// `first`.
template <typename T>
void pack_rows(const T* source, const int64_t* stride, int64_t n, int64_t total, int64_t size,
               int64_t padded, float scale, float* rows) {
  for (int64_t i = 0; i < total; ++i) {
    float* to = rows + i * padded;
    int64_t d = 0;
    if (i < n) {
      const T* from = source + i * stride[1];
      if (stride[3] == 1) {
        for (; d < size; ++d) to[d] = scale * widen(from[d]);
      } else {
        for (; d < size; ++d) to[d] = scale * widen(from[d * stride[3]]);
      }
    }
    for (; d < padded; ++d) to[d] = 0;
  }
}

// panel[d][s] of one head and block.
template <typename T>
void pack_panel(const T* source, const int64_t* stride, int64_t n, int64_t size, float* panel) {
  for (int64_t s = 0; s < kBlock; ++s) {
    if (s < n) {
      const T* from = source + s * stride[1];
      for (int64_t d = 0; d < size; ++d) panel[d * kBlock + s] = widen(from[d * stride[3]]);
    } else {
      for (int64_t d = 0; d < size; ++d) panel[d * kBlock + s] = 0;
    }
  }
}

// Key-side weights of one block, [h][k_width][kBlock].
void pack_key_weights(const Mix& mix, int64_t batch, int64_t first, int64_t n, float* to) {
  if (!mix.key_side()) return;
  const int64_t width = mix.k_width(), rank = (width - 1) / 2;
  fill(to, mix.in * width * kBlock, 0);
  for (int64_t s = 0; s < n; ++s) {
    for (int64_t h = 0; h < mix.in; ++h) {
      float* at = to + h * width * kBlock + s;
      for (int64_t r = 0; r < mix.k_rank; ++r) {
        at[r * kBlock] = *mix.k_down.at(batch, first + s, r, h);
        at[(rank + r) * kBlock] = *mix.k_up.at(batch, first + s, r, h);
      }
      if (mix.k_gate.data) at[2 * rank * kBlock] = *mix.k_gate.at(batch, first + s, h, 0);
    }
  }
}

// Query-side weights of a tile, [t][h][q_width].
void pack_query_weights(const Mix& mix, int64_t batch, int64_t first, int64_t n, float* to) {
  if (!mix.dynamic()) return;
  const int64_t width = mix.q_width(), rank = (width - 1) / 2;
  fill(to, n * mix.in * width, 0);
  if (!mix.query_side()) return;
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t h = 0; h < mix.in; ++h) {
      float* at = to + (t * mix.in + h) * width;
      for (int64_t r = 0; r < mix.q_rank; ++r) {
        at[r] = *mix.q_down.at(batch, first + t, r, h);
        at[rank + r] = *mix.q_up.at(batch, first + t, r, h);
      }
      if (mix.q_gate.data) at[2 * rank] = *mix.q_gate.at(batch, first + t, h, 0);
    }
  }
}

template <typename T>
void pack_block(const Args& a, const Plan& p, const Task& task, int64_t block) {
  const PackedBlock to = packed_block(a, p, task.packed, block);
  const int64_t first = block * kBlock, n = lesser(kBlock, a.S - first);
  for (int64_t g = 0; g < a.Gk; ++g) {
    const T* k = static_cast<const T*>(a.k) + task.batch * a.k_stride[0] + first * a.k_stride[1] +
                 g * a.k_stride[2];
    pack_panel(k, a.k_stride, n, a.D, to.k_panel + g * a.D * kBlock);
    if (p.backward)
      pack_rows(k, a.k_stride, n, kBlock, a.D, p.Dp, 1, to.k_rows + g * kBlock * p.Dp);
  }
  for (int64_t g = 0; g < a.Gv; ++g) {
    const T* v = static_cast<const T*>(a.v) + task.batch * a.v_stride[0] + first * a.v_stride[1] +
                 g * a.v_stride[2];
    if (p.backward) {
      pack_panel(v, a.v_stride, n, a.E, to.v_panel + g * a.E * kBlock);
    } else {
      pack_rows(v, a.v_stride, n, kBlock, a.E, p.Ep, 1, to.v_rows + g * kBlock * p.Ep);
    }
  }
  pack_key_weights(a.pre, task.batch, first, n, to.pre);
  pack_key_weights(a.post, task.batch, first, n, to.post);
}

struct Range {
  int64_t begin, end;
};

// The keys that causality, window and length let query t see, before documents and mask.
HL_INLINE Range key_range(const Args& a, int64_t batch, int64_t t) {
  const int64_t position = t + a.S - a.T;
  Range keys{0, a.S};
  if (a.lengths) keys.end = lesser(keys.end, a.lengths[batch]);
  if (a.causal) keys.end = lesser(keys.end, position + 1);
  if (a.window > 0) {
    keys.begin = greater(0, position - a.window + 1);
    if (!a.causal) keys.end = lesser(keys.end, position + a.window);
  }
  keys.end = greater(keys.end, keys.begin);
  return keys;
}

// The key blocks that queries [first, first + rows) may see.
HL_INLINE Range block_range(const Args& a, int64_t batch, int64_t first, int64_t rows) {
  Range out{a.S, 0};
  for (int64_t t = first; t < first + rows; ++t) {
    const Range keys = key_range(a, batch, t);
    if (keys.begin == keys.end) continue;
    out.begin = lesser(out.begin, keys.begin);
    out.end = greater(out.end, keys.end);
  }
  if (out.begin >= out.end) return {0, 0};
  return {out.begin / kBlock, (out.end + kBlock - 1) / kBlock};
}

// One bit a key: those of `block` that query t sees.
uint64_t visible_keys(const Args& a, int64_t batch, int64_t t, int64_t block) {
  const int64_t first = block * kBlock;
  const Range keys = key_range(a, batch, t);
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
  if (a.mask.data) {
    uint64_t shown = 0;
    for (int64_t s = lo; s < hi; ++s) {
      shown |= static_cast<uint64_t>(*a.mask.at(batch, 0, t, first + s)) << s;
    }
    bits &= shown;
  }
  return bits;
}

// visible[j - begin][t] for the blocks of a tile.
void tile_visibility(const Args& a, const Plan& p, int64_t batch, int64_t first, int64_t rows,
                     Range blocks, uint64_t* visible) {
  for (int64_t j = blocks.begin; j < blocks.end; ++j) {
    for (int64_t t = 0; t < rows; ++t) {
      visible[(j - blocks.begin) * p.rows + t] = visible_keys(a, batch, first + t, j);
    }
  }
}

HL_INLINE bool any_visible(const uint64_t* bits, int64_t rows) {
  uint64_t any = 0;
  for (int64_t t = 0; t < rows; ++t) any |= bits[t];
  return any != 0;
}

// scores[t][h][s] = scale q k + bias for all maps of a tile and one block.
void tile_scores(const Args& a, const Plan& p, int64_t batch, int64_t first, int64_t rows,
                 int64_t block, const float* q, const PackedBlock& keys, float* scores) {
  for (int64_t h = 0; h < a.H; ++h) {
    const float* panel = keys.k_panel + shared_head(h, a.Gk, a.H) * a.D * kBlock;
    gemm<false, true>(rows, kBlock, a.D, q + h * p.rows * p.Dp, p.Dp, panel, kBlock,
                      scores + h * kBlock, p.line);
  }
  if (!a.bias.data) return;
  const int64_t key = block * kBlock, n = lesser(kBlock, a.S - key);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t h = 0; h < a.H; ++h) {
      const float* from = a.bias.at(batch, h, first + t, key);
      float* to = scores + t * p.line + h * kBlock;
      for (int64_t s = 0; s < n; ++s) to[s] += from[s * a.bias.stride[3]];
    }
  }
}

// y = Mix(x), or, swapped, the gradient of x from that of y; y may not be x where M is given.
void tile_mix(const Mix& mix, const MixWeights& w, int64_t rows, int64_t line, const float* x,
              float* y, bool swapped, float* inner) {
  const float* base = x;
  if (mix.matrix) {
    mix_static(mix, rows, line, x, y, swapped);
    base = y;
  }
  if (mix.dynamic()) mix_apply(mix, w, {rows, line, x, base, y, swapped, inner});
}

template <typename T>
void pack_queries(const Args& a, const Plan& p, int64_t batch, int64_t first, int64_t rows,
                  float* to) {
  for (int64_t h = 0; h < a.H; ++h) {
    const T* q = static_cast<const T*>(a.q) + batch * a.q_stride[0] + first * a.q_stride[1] +
                 h * a.q_stride[2];
    pack_rows(q, a.q_stride, rows, rows, a.D, p.Dp, a.scale, to + h * p.rows * p.Dp);
  }
}

}  // namespace
}  // namespace headloom::ops::fused
