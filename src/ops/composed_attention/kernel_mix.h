// Head composition of one tile, and its gradient. A tile holds x[t * line + h *
// kBlock + s]: all maps of a query side by side, so the key is the vector lane
// and every branch is a few multiply-adds.
#pragma once

#include "ops/composed_attention/kernel.h"
#include "ops/kernel/pairs.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

// The dynamic weights of a tile: q [t][h][q_width] scalars (down, up, gate), k
// [h][k_width][kBlock].
struct MixWeights {
  const float* q;
  const float* k;
};

// What a dynamic mix adds to: x itself; what y holds, the static mix of x; or x times a factor for
// each query and map, which the mix is then of.
enum class MixOf { kOwn, kOnto, kScaled };

// y = base + x * (qg + kg) + sum_r (sum_h x qd) qu + (sum_h x kd) ku for TB queries and VB vectors
// of keys, heads [h0, h1). Offsets q_in .. k_out choose which half of the weights leads in and
// which out; exchanging them gives the gradient with respect to x.
// HEADS is h1 - h0, or 0 where it is not known. Y is float, or Pair: neighbouring keys of y as
// pair_columns() has them.
template <int RQ, int RK, bool K, MixOf OF, int HEADS, int TB, int VB, typename Y>
HL_INLINE void mix_rows(int64_t h0, int64_t h1, const float* x, const float* factor,
                        int64_t factor_line, Y* y, int64_t line, const float* q, int64_t q_line,
                        int q_in, int q_out, const float* k, int k_in, int k_out, float* inner,
                        int64_t inner_line) {
  constexpr int64_t kKeys = kPaired<Y> ? 2 : 1;  // of one element of y
  constexpr int QW = 2 * RQ + 1;
  constexpr int KW = 2 * RK + 1;
  const int64_t heads = HEADS > 0 ? HEADS : h1 - h0;
  x += h0 * kBlock;
  y = y ? y + h0 * kBlock / kKeys : nullptr;
  q += h0 * QW;
  k += h0 * KW * kBlock;
  if (OF == MixOf::kScaled) factor += h0;
  vf iq[TB][RQ > 0 ? RQ : 1][VB], ik[TB][RK > 0 ? RK : 1][VB];
#pragma GCC unroll 4
  for (int t = 0; t < TB; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < VB; ++v) {
#pragma GCC unroll 4
      for (int r = 0; r < RQ; ++r) iq[t][r][v] = zero();
#pragma GCC unroll 4
      for (int r = 0; r < RK; ++r) ik[t][r][v] = zero();
    }
  }
  if constexpr (RQ + RK > 0) {
    for (int64_t h = 0; h < heads; ++h) {
      vf kd[RK > 0 ? RK : 1][VB];
#pragma GCC unroll 4
      for (int r = 0; r < RK; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) kd[r][v] = load(k + (h * KW + k_in + r) * kBlock + v * VL);
      }
#pragma GCC unroll 4
      for (int t = 0; t < TB; ++t) {
        const float* w = q + t * q_line + h * QW + q_in;
        vf a[VB];
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) {
          a[v] = load(x + t * line + h * kBlock + v * VL);
          if constexpr (OF == MixOf::kScaled) a[v] = a[v] * bcast(factor[t * factor_line + h]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < RQ; ++r) {
          const vf weight = bcast(w[r]);
#pragma GCC unroll 2
          for (int v = 0; v < VB; ++v) iq[t][r][v] = fma(a[v], weight, iq[t][r][v]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < RK; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < VB; ++v) ik[t][r][v] = fma(a[v], kd[r][v], ik[t][r][v]);
        }
      }
    }
    if (inner) {
#pragma GCC unroll 4
      for (int t = 0; t < TB; ++t) {
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) {
          float* at = inner + t * inner_line + v * VL;
#pragma GCC unroll 4
          for (int r = 0; r < RQ; ++r) store(at + r * kBlock, iq[t][r][v]);
#pragma GCC unroll 4
          for (int r = 0; r < RK; ++r) store(at + (RQ + r) * kBlock, ik[t][r][v]);
        }
      }
    }
  }
  if (!y) return;
  for (int64_t h = 0; h < heads; ++h) {
    vf ku[RK > 0 ? RK : 1][VB], kg[VB];
#pragma GCC unroll 2
    for (int v = 0; v < VB; ++v) {
      kg[v] = zero();
#pragma GCC unroll 4
      for (int r = 0; r < RK; ++r) ku[r][v] = load(k + (h * KW + k_out + r) * kBlock + v * VL);
      if constexpr (K) kg[v] = load(k + (h * KW + 2 * RK) * kBlock + v * VL);
    }
#pragma GCC unroll 4
    for (int t = 0; t < TB; ++t) {
      const float* w = q + t * q_line + h * QW;
      const int64_t at = t * line + h * kBlock;
      const vf q_gate = bcast(w[2 * RQ]);
      vf own[VB], out[VB];
#pragma GCC unroll 2
      for (int v = 0; v < VB; ++v) {
        own[v] = load(x + at + v * VL);
        if constexpr (OF == MixOf::kScaled) own[v] = own[v] * bcast(factor[t * factor_line + h]);
        out[v] = own[v];
        if constexpr (OF == MixOf::kOnto) out[v] = load(y + at + v * VL);
      }
#pragma GCC unroll 4
      for (int r = 0; r < RQ; ++r) {
        const vf weight = bcast(w[q_out + r]);
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) out[v] = fma(iq[t][r][v], weight, out[v]);
      }
#pragma GCC unroll 2
      for (int v = 0; v < VB; ++v) {
        // A sum of its own: one sum would take as long as all its terms after each other.
        vf key = RK > 0 ? ik[t][0][v] * ku[0][v] : zero();
#pragma GCC unroll 4
        for (int r = 1; r < RK; ++r) key = fma(ik[t][r][v], ku[r][v], key);
        out[v] = fma(own[v], K ? q_gate + kg[v] : q_gate, out[v]);
        if constexpr (RK > 0) out[v] = out[v] + key;
      }
      if constexpr (kPaired<Y>) {
        store_columns(y + t * line + h * kBlock / kKeys, out[0], out[VB - 1], VB == 2);
      } else {
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) store(y + at + v * VL, out[v]);
      }
    }
  }
}

struct MixCall {
  int64_t rows, line;
  const float* x;
  const float* factor;  // MixOf::kScaled: [rows][factor_line]
  int64_t factor_line;
  float* y;               // may be x; null: only the inner products, or `pairs`
  bool swapped;           // the gradient with respect to x: x is then the gradient of y
  float* inner;           // [rows][groups][rank_q + rank_k][kBlock] or null
  Pair* pairs = nullptr;  // MixOf::kScaled: in place of y, [rows][line]
};

// A few queries after each other with all their keys: their maps are then in the first-level cache
// for the second time that they are read.
template <int RQ, int RK, bool K, MixOf OF>
void mix_dynamic(const Mix& mix, const MixWeights& w, const MixCall& c) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int TB = 2, VB = RQ + RK <= 4 ? 2 : 1;
#else
  constexpr int TB = 1, VB = RQ + RK <= 4 ? 2 : 1;
#endif
  constexpr int QW = 2 * RQ + 1;
  const int q_in = c.swapped ? RQ : 0, q_out = RQ - q_in;
  const int k_in = c.swapped ? RK : 0, k_out = RK - k_in;
  const int64_t heads = mix.in, size = heads / mix.groups;
  const int64_t inner_line = mix.groups * (RQ + RK) * kBlock;
  const auto to = [&]<int ROWS, int HEADS>(int64_t t, auto* y) {
    constexpr int64_t kKeys = kPaired<std::remove_pointer_t<decltype(y)>> ? 2 : 1;
    if (y) y += t * c.line;
    for (int64_t g = 0; g < mix.groups; ++g) {
      const int64_t h0 = g * size, h1 = h0 + size;
      for (int64_t s = 0; s < kBlock; s += VB * VL) {
        float* inner = c.inner ? c.inner + t * inner_line + g * (RQ + RK) * kBlock + s : nullptr;
        mix_rows<RQ, RK, K, OF, HEADS, ROWS, VB>(
            h0, h1, c.x + t * c.line + s, c.factor + t * c.factor_line, c.factor_line,
            y ? y + s / kKeys : nullptr, c.line, w.q + t * heads * QW, heads * QW, q_in, q_out,
            w.k + s, k_in, k_out, inner, inner_line);
      }
    }
  };
  const auto some = [&]<int ROWS, int HEADS>(int64_t t) {
    if constexpr (HL_BFLOAT16 && OF == MixOf::kScaled) {
      if (c.pairs) return to.template operator()<ROWS, HEADS>(t, c.pairs);
    }
    to.template operator()<ROWS, HEADS>(t, c.y);
  };
  int64_t t = 0;
  if (size == 8) {
    for (; t + TB <= c.rows; t += TB) some.template operator()<TB, 8>(t);
  } else {
    for (; t + TB <= c.rows; t += TB) some.template operator()<TB, 0>(t);
  }
  for (; t < c.rows; ++t) some.template operator()<1, 0>(t);
}

// Adds, for HB heads, the products that make the gradients of one side's
// weights over n steps: keys of one query (query side) or queries of one vector
// of keys (key side). sum[h][2R+1] vectors, `width` apart.
template <int R, int HB>
HL_INLINE void grad_heads(int64_t n, int64_t step, int64_t inner_step, const float* x,
                          const float* dy, const float* inner, const float* dinner, float* sum,
                          int64_t width) {
  vf acc[HB][2 * R + 1];
#pragma GCC unroll 8
  for (int h = 0; h < HB; ++h) {
#pragma GCC unroll 9
    for (int i = 0; i < 2 * R + 1; ++i) acc[h][i] = load(sum + (h * (2 * R + 1) + i) * width);
  }
  for (int64_t i = 0; i < n; ++i) {
    vf in[R > 0 ? R : 1], din[R > 0 ? R : 1];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      in[r] = load(inner + i * inner_step + r * kBlock);
      din[r] = load(dinner + i * inner_step + r * kBlock);
    }
#pragma GCC unroll 8
    for (int h = 0; h < HB; ++h) {
      const vf a = load(x + i * step + h * kBlock), b = load(dy + i * step + h * kBlock);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        acc[h][r] = fma(a, din[r], acc[h][r]);
        acc[h][R + r] = fma(b, in[r], acc[h][R + r]);
      }
      acc[h][2 * R] = fma(a, b, acc[h][2 * R]);
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < HB; ++h) {
#pragma GCC unroll 9
    for (int i = 0; i < 2 * R + 1; ++i) store(sum + (h * (2 * R + 1) + i) * width, acc[h][i]);
  }
}

template <int R>
void grad_side(int64_t heads, int64_t n, int64_t step, int64_t inner_step, const float* x,
               const float* dy, const float* inner, const float* dinner, float* sum,
               int64_t width) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int kAccumulators = 20;
#else
  constexpr int kAccumulators = 10;
#endif
  constexpr int W = 2 * R + 1;
  constexpr int HB = kAccumulators / W >= 4 ? 4 : kAccumulators / W >= 2 ? 2 : 1;
  int64_t h = 0;
  for (; h + HB <= heads; h += HB) {
    grad_heads<R, HB>(n, step, inner_step, x + h * kBlock, dy + h * kBlock, inner, dinner,
                      sum + h * W * width, width);
  }
  for (; h < heads; ++h) {
    grad_heads<R, 1>(n, step, inner_step, x + h * kBlock, dy + h * kBlock, inner, dinner,
                     sum + h * W * width, width);
  }
}

struct MixGradCall {
  int64_t rows, line;
  const float *x, *dy;
  const float *inner, *dinner;  // of x, and of dy (a swapped mix)
  float* q_sum;                 // [rows][h][q_width][VL]: still to be summed over lanes
  float* k_sum;                 // [h][k_width][kBlock]
};

template <int RQ, int RK, bool Q, bool K>
void mix_grad_dynamic(const Mix& mix, const MixGradCall& c) {
  const int64_t heads = mix.in, size = heads / mix.groups;
  const int64_t inner_line = mix.groups * (RQ + RK) * kBlock;
  for (int64_t g = 0; g < mix.groups; ++g) {
    const int64_t h0 = g * size;
    const int64_t in = g * (RQ + RK) * kBlock;
    if constexpr (Q) {
      for (int64_t t = 0; t < c.rows; ++t) {
        const int64_t at = t * c.line + h0 * kBlock;
        grad_side<RQ>(size, kBlock / VL, VL, VL, c.x + at, c.dy + at, c.inner + t * inner_line + in,
                      c.dinner + t * inner_line + in,
                      c.q_sum + (t * heads + h0) * (2 * RQ + 1) * VL, VL);
      }
    }
    if constexpr (K) {
      for (int64_t s = 0; s < kBlock; s += VL) {
        const int64_t at = h0 * kBlock + s;
        grad_side<RK>(size, c.rows, c.line, inner_line, c.x + at, c.dy + at,
                      c.inner + in + RQ * kBlock + s, c.dinner + in + RQ * kBlock + s,
                      c.k_sum + h0 * (2 * RK + 1) * kBlock + s, kBlock);
      }
    }
  }
}

// Chooses the instantiation; f.template operator()<RQ, RK, Q, K>().
template <typename F>
HL_INLINE void with_ranks(const Mix& m, F&& f) {
  const bool q = m.q_rank > 0, k = m.k_rank > 0;
#define HL_RANK(R)                                                            \
  case R:                                                                     \
    if (q && k) return f.template operator()<R, R, true, true>();             \
    if (q && m.k_gate.data) return f.template operator()<R, 0, true, true>(); \
    if (q) return f.template operator()<R, 0, true, false>();                 \
    if (m.q_gate.data) return f.template operator()<0, R, true, true>();      \
    return f.template operator()<0, R, false, true>();
  switch (m.rank) {
    HL_RANK(1)
    HL_RANK(2)
    HL_RANK(3)
    HL_RANK(4)
    default:
      if (m.q_gate.data && m.k_gate.data) return f.template operator()<0, 0, true, true>();
      if (m.q_gate.data) return f.template operator()<0, 0, true, false>();
      return f.template operator()<0, 0, false, true>();
  }
#undef HL_RANK
}

template <MixOf OF>
void mix_apply(const Mix& mix, const MixWeights& w, const MixCall& call) {
  with_ranks(mix,
             [&]<int RQ, int RK, bool Q, bool K>() { mix_dynamic<RQ, RK, K, OF>(mix, w, call); });
}

void mix_grad(const Mix& mix, const MixGradCall& call) {
  with_ranks(mix,
             [&]<int RQ, int RK, bool Q, bool K>() { mix_grad_dynamic<RQ, RK, Q, K>(mix, call); });
}

// y[m] = sum_h M[h * ld + m] x[h] for ROWS maps of y, IN maps of x and two vectors of keys.
template <int IN, int ROWS>
HL_INLINE void static_block(const float* matrix, int64_t ld, const float* x, float* y) {
  constexpr int NV = 2;
  vf acc[ROWS][NV];
#pragma GCC unroll 16
  for (int h = 0; h < IN; ++h) {
    vf b[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) b[v] = load(x + h * kBlock + v * VL);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      const vf a = bcast(matrix[h * ld + m]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[m][v] = h == 0 ? a * b[v] : fma(a, b[v], acc[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(y + m * kBlock + v * VL, acc[m][v]);
  }
}

// The same for `out` maps of y and a whole block of keys. IN is small, so its loop is unrolled.
template <int IN>
HL_INLINE void static_rows(const float* matrix, int64_t ld, int64_t out, const float* x, float* y) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int ROWS = 8;
#else
  constexpr int ROWS = 4;
#endif
  for (int64_t s = 0; s < kBlock; s += 2 * VL) {
    int64_t m = 0;
    for (; m + ROWS <= out; m += ROWS) {
      static_block<IN, ROWS>(matrix + m, ld, x + s, y + m * kBlock + s);
    }
    for (; m + 2 <= out; m += 2) {
      static_block<IN, 2>(matrix + m, ld, x + s, y + m * kBlock + s);
    }
    if (m < out) static_block<IN, 1>(matrix + m, ld, x + s, y + m * kBlock + s);
  }
}

// y[h'] = sum_h M[h, h'] f[h] x[h], f 1 where `factor` is null (else [rows][factor_line]).
void mix_static(const Mix& mix, int64_t rows, int64_t line, const float* x, const float* factor,
                int64_t factor_line, float* y) {
  const int64_t in = mix.in / mix.groups, out = mix.out / mix.groups;
  const int64_t padded = (out + VL - 1) / VL * VL, ld = factor ? padded : out;
  float own[kMaxHeads * kMaxHeads], scaled[kMaxHeads * kMaxHeads];
  if (factor) {
    for (int64_t h = 0; h < mix.in; ++h) {
      for (int64_t m = 0; m < padded; m += VL) {
        store(own + h * padded + m, load_some(mix.matrix + h * out + m, out - m));
      }
    }
  }
  for (int64_t t = 0; t < rows; ++t) {
    const float* matrix = mix.matrix;
    if (factor) {
      for (int64_t h = 0; h < mix.in; ++h) {
        const vf f = bcast(factor[t * factor_line + h]);
        for (int64_t m = h * padded; m < (h + 1) * padded; m += VL) {
          store(scaled + m, f * load(own + m));
        }
      }
      matrix = scaled;
    }
    for (int64_t g = 0; g < mix.groups; ++g, matrix += in * ld) {
      const float* source = x + t * line + g * in * kBlock;
      float* target = y + t * line + g * out * kBlock;
      switch (in) {
        case 2:
          static_rows<2>(matrix, ld, out, source, target);
          break;
        case 4:
          static_rows<4>(matrix, ld, out, source, target);
          break;
        case 8:
          static_rows<8>(matrix, ld, out, source, target);
          break;
        default:
          gemm<false, false>(out, kBlock, in, matrix, ld, source, kBlock, target, kBlock);
      }
    }
  }
}

// dx[h] = sum_h' M[h, h'] dy[h'].
void mix_static_transposed(const Mix& mix, int64_t rows, int64_t line, const float* dy, float* dx) {
  const int64_t in = mix.in / mix.groups, out = mix.out / mix.groups;
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t g = 0; g < mix.groups; ++g) {
      gemm<false, true>(in, kBlock, out, mix.matrix + g * in * out, out,
                        dy + t * line + g * out * kBlock, kBlock, dx + t * line + g * in * kBlock,
                        kBlock);
    }
  }
}

template <int A, int B>
HL_INLINE void static_grad_block(int64_t rows, int64_t line, const float* x, const float* dy,
                                 float* sum, int64_t ld) {
  vf acc[A][B];
#pragma GCC unroll 4
  for (int i = 0; i < A; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < B; ++j) acc[i][j] = zero();
  }
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t s = 0; s < kBlock; s += VL) {
      vf b[B];
#pragma GCC unroll 4
      for (int j = 0; j < B; ++j) b[j] = load(dy + t * line + j * kBlock + s);
#pragma GCC unroll 4
      for (int i = 0; i < A; ++i) {
        const vf a = load(x + t * line + i * kBlock + s);
#pragma GCC unroll 4
        for (int j = 0; j < B; ++j) acc[i][j] = fma(a, b[j], acc[i][j]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < A; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < B; ++j) sum[i * ld + j] += hsum(acc[i][j]);
  }
}

// sum[g][h][h'] += sum over queries and keys of x[h] dy[h'].
void mix_static_grad(const Mix& mix, int64_t rows, int64_t line, const float* x, const float* dy,
                     float* sum) {
  constexpr int BI = VL == 16 ? 4 : 2;
  const int64_t in = mix.in / mix.groups, out = mix.out / mix.groups;
  for (int64_t g = 0; g < mix.groups; ++g) {
    const float* xg = x + g * in * kBlock;
    const float* dyg = dy + g * out * kBlock;
    float* sg = sum + g * in * out;
    for (int64_t i = 0; i < in;) {
      const bool wide = i + BI <= in;
      for (int64_t j = 0; j < out;) {
        const float* a = xg + i * kBlock;
        const float* b = dyg + j * kBlock;
        float* to = sg + i * out + j;
        const bool four = j + 4 <= out;
        if (wide && four) {
          static_grad_block<BI, 4>(rows, line, a, b, to, out);
        } else if (wide) {
          static_grad_block<BI, 1>(rows, line, a, b, to, out);
        } else if (four) {
          static_grad_block<1, 4>(rows, line, a, b, to, out);
        } else {
          static_grad_block<1, 1>(rows, line, a, b, to, out);
        }
        j += four ? 4 : 1;
      }
      i += wide ? BI : 1;
    }
  }
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel
