// The static part of a mix, M[h, h'], of one tile, and its gradients. The layout is that of
// kernel_mix.h.
#pragma once

#include "ops/composed_attention/kernel.h"
#include "ops/kernel/gemm.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

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
