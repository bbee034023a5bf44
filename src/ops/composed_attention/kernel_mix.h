// Head composition of one tile, and its gradient. A tile holds x[t * line + h *
// kBlock + s]: all maps of a query side by side, so the key is the vector lane
// and every branch is a few multiply-adds.
#pragma once

#include "ops/composed_attention/kernel.h"
#include "ops/kernel/gemm.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

// The dynamic weights of a tile: q [t][h][q_width] scalars (down, up, gate), k
// [h][k_width][kBlock].
struct MixWeights {
  const float* q;
  const float* k;
};

// y = base + x * (qg + kg) + sum_r (sum_h x qd) qu + (sum_h x kd) ku for TB queries and VB vectors
// of keys, heads [h0, h1). Offsets q_in .. k_out choose which half of the weights leads in and
// which out; exchanging them gives the gradient with respect to x.
template <int RQ, int RK, bool K, int TB, int VB>
HL_INLINE void mix_rows(int64_t h0, int64_t h1, const float* x, const float* base, float* y,
                        int64_t line, const float* q, int64_t q_line, int q_in, int q_out,
                        const float* k, int k_in, int k_out, float* inner, int64_t inner_line) {
  constexpr int QW = 2 * RQ + 1;
  constexpr int KW = 2 * RK + 1;
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
    for (int64_t h = h0; h < h1; ++h) {
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
        for (int v = 0; v < VB; ++v) a[v] = load(x + t * line + h * kBlock + v * VL);
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
  for (int64_t h = h0; h < h1; ++h) {
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
      vf out[VB];
#pragma GCC unroll 2
      for (int v = 0; v < VB; ++v) {
        const vf gate = K ? q_gate + kg[v] : q_gate;
        out[v] = fma(load(x + at + v * VL), gate, load(base + at + v * VL));
      }
#pragma GCC unroll 4
      for (int r = 0; r < RQ; ++r) {
        const vf weight = bcast(w[q_out + r]);
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) out[v] = fma(iq[t][r][v], weight, out[v]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < RK; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) out[v] = fma(ik[t][r][v], ku[r][v], out[v]);
      }
#pragma GCC unroll 2
      for (int v = 0; v < VB; ++v) store(y + at + v * VL, out[v]);
    }
  }
}

struct MixCall {
  int64_t rows, line;
  const float *x, *base;
  float* y;      // may be x or base; null: only the inner products
  bool swapped;  // the gradient with respect to x: x is then the gradient of y
  float* inner;  // [rows][groups][rank_q + rank_k][kBlock] or null
};

template <int RQ, int RK, bool K>
void mix_dynamic(const Mix& mix, const MixWeights& w, const MixCall& c) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int TB = 2, VB = RQ + RK <= 4 ? 2 : 1;
#else
  constexpr int TB = RQ + RK <= 4 ? 2 : 1, VB = 1;
#endif
  constexpr int QW = 2 * RQ + 1;
  const int q_in = c.swapped ? RQ : 0, q_out = RQ - q_in;
  const int k_in = c.swapped ? RK : 0, k_out = RK - k_in;
  const int64_t heads = mix.in, size = heads / mix.groups;
  const int64_t inner_line = mix.groups * (RQ + RK) * kBlock;
  for (int64_t g = 0; g < mix.groups; ++g) {
    const int64_t h0 = g * size, h1 = h0 + size;
    for (int64_t s = 0; s < kBlock; s += VB * VL) {
      const auto at = [&](auto* p, int64_t t) { return p ? p + t * c.line + s : nullptr; };
      const auto inner_at = [&](int64_t t) {
        return c.inner ? c.inner + t * inner_line + g * (RQ + RK) * kBlock + s : nullptr;
      };
      int64_t t = 0;
      for (; t + TB <= c.rows; t += TB) {
        mix_rows<RQ, RK, K, TB, VB>(h0, h1, at(c.x, t), at(c.base, t), at(c.y, t), c.line,
                                    w.q + t * heads * QW, heads * QW, q_in, q_out, w.k + s, k_in,
                                    k_out, inner_at(t), inner_line);
      }
      for (; t < c.rows; ++t) {
        mix_rows<RQ, RK, K, 1, VB>(h0, h1, at(c.x, t), at(c.base, t), at(c.y, t), c.line,
                                   w.q + t * heads * QW, heads * QW, q_in, q_out, w.k + s, k_in,
                                   k_out, inner_at(t), inner_line);
      }
    }
  }
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

void mix_apply(const Mix& mix, const MixWeights& w, const MixCall& call) {
  with_ranks(mix, [&]<int RQ, int RK, bool Q, bool K>() { mix_dynamic<RQ, RK, K>(mix, w, call); });
}

void mix_grad(const Mix& mix, const MixGradCall& call) {
  with_ranks(mix,
             [&]<int RQ, int RK, bool Q, bool K>() { mix_grad_dynamic<RQ, RK, Q, K>(mix, call); });
}

// y[h'] = sum_h M[h, h'] x[h], or with `transposed` the gradient dx[h] = sum_h'
// M[h, h'] dy[h'].
void mix_static(const Mix& mix, int64_t rows, int64_t line, const float* x, float* y,
                bool transposed) {
  const int64_t in = mix.in / mix.groups, out = mix.out / mix.groups;
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t g = 0; g < mix.groups; ++g) {
      const float* matrix = mix.matrix + g * in * out;
      const float* source = x + t * line + g * (transposed ? out : in) * kBlock;
      float* target = y + t * line + g * (transposed ? in : out) * kBlock;
      if (transposed) {
        gemm<false, true>(in, kBlock, out, matrix, out, source, kBlock, target, kBlock);
      } else {
        gemm<false, false>(out, kBlock, in, matrix, out, source, kBlock, target, kBlock);
      }
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
