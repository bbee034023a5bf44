// Register-blocked small matrix products. C [M, N] = (or +=) A [M, K] B [K, N],
// row-major B and C with leading dimensions ldb and ldc, N a multiple of VL. A
// is read one element at a time at A[m * sam + k * sak], so a transposed A
// costs nothing.
#pragma once

#include <type_traits>

#include "ops/kernel/vec.h"

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
#define HL_BFLOAT16 1
#else
#define HL_BFLOAT16 0
#endif

namespace headloom::ops {
namespace {

// Two bfloat16 along K, the earlier in the low half: one element of A or B.
struct Pair {
  uint32_t bits;
};
template <typename T>
constexpr bool kPaired = false;
template <>
constexpr bool kPaired<Pair> = true;

#if HL_BFLOAT16
HL_INLINE __m512i load(const Pair* p) { return _mm512_loadu_si512(p); }
HL_INLINE __m512i bcast(Pair a) { return _mm512_set1_epi32(static_cast<int>(a.bits)); }
HL_INLINE vf fma(__m512i a, __m512i b, vf c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
// The bfloat16 of each float in the low half of its lane.
HL_INLINE __m512i half_bits(vf a) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a)); }
#else
// Never run: kernels ask for pairs only where plan.half is set.
HL_INLINE vf load(const Pair*) { return zero(); }
HL_INLINE vf bcast(Pair) { return zero(); }
#endif

// Rows of one register block: with NV = 2 columns of vectors, enough
// accumulators to hide the latency of two multiply-adds a cycle, within the
// registers there are.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int MR = 8;
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int MR = 6;
#else
constexpr int MR = 4;
#endif

// Memory that a product has fetched into the second-level cache while it runs, a line for each step
// of its sums, because what comes next lies in larger and slower memory. The ranges are taken in
// their order, as far as the product is long.
struct Ahead {
  struct Range {
    const char *at = nullptr, *end = nullptr;
  };
  static constexpr int kRanges = 5;
  Range ranges[kRanges];
  int count = 0, current = 0;

  HL_INLINE void add(const float* from, int64_t floats) {
    if (!from || floats <= 0) return;
    ranges[count].at = reinterpret_cast<const char*>(from);
    ranges[count++].end = reinterpret_cast<const char*>(from + floats);
  }
  // Where the next `lines` lines are, or null if nothing is left.
  HL_INLINE const char* take(int64_t lines) {
    while (current < count && ranges[current].at >= ranges[current].end) ++current;
    if (current == count) return nullptr;
    const char* at = ranges[current].at;
    ranges[current].at += 64 * lines;
    return at;
  }
};
struct NothingAhead {
  HL_INLINE const char* take(int64_t) { return nullptr; }
};

// Rows of the next block, of `left` that are left, where a block has at most `most`. The last ones
// are split evenly, because a block of one or two rows waits for its own sums.
HL_INLINE int64_t rows_of_block(int64_t left, int64_t most) {
  if (left == most || left >= 2 * most) return most;
  return left > most ? (left + 1) / 2 : left;
}

template <int M, int NV, bool ACC, bool A_BY_ROW, bool FETCH, typename T>
HL_INLINE void gemm_block(int64_t K, const T* A, int64_t lda, const T* B, int64_t ldb, float* C,
                          int64_t ldc, float scale, const char* ahead) {
  // In float the scale is in A already.
  const bool scaled = !ACC && kPaired<T> && scale != 1;
  vf acc[M][NV];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) acc[i][j] = ACC ? load(C + i * ldc + j * VL) : zero();
  }
  // Unrolled, a step has fewer instructions beside its multiply-adds. That is faster where another
  // thread shares the core's decoder (measured with AVX2; with AVX-512 it was not tried).
#if !defined(CPU_CAPABILITY_AVX512)
#pragma GCC unroll 4
#endif
  for (int64_t k = 0; k < K; ++k) {
    if constexpr (FETCH) __builtin_prefetch(ahead + 64 * k, 0, 2);
    decltype(load(B)) b[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) b[j] = load(B + k * ldb + j * VL);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const auto a = bcast(A_BY_ROW ? A[i * lda + k] : A[k * lda + i]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] = fma(a, b[j], acc[i][j]);
    }
  }
  if (scaled) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] = acc[i][j] * bcast(scale);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(C + i * ldc + j * VL, acc[i][j]);
  }
}

template <int NV, bool ACC, bool A_BY_ROW, typename T, typename Next>
void gemm_columns(int64_t M, int64_t K, const T* A, int64_t lda, const T* B, int64_t ldb, float* C,
                  int64_t ldc, float scale, Next& next) {
  constexpr bool FETCH = !std::is_same_v<Next, NothingAhead>;
  // One column of vectors has as many accumulators in twice the rows.
  constexpr int kMost = NV == 1 ? 2 * MR : MR;
  const int64_t step = A_BY_ROW ? lda : 1;
  for (int64_t m = 0; m < M;) {
    const int64_t rows = rows_of_block(M - m, kMost);
    const T* a = A + m * step;
    float* c = C + m * ldc;
    const char* ahead = next.take(K);
    // NOLINTNEXTLINE(bugprone-switch-missing-default-case): rows is 1 to kMost, at most 16.
    switch (rows) {
#define HL_ROWS(n)                                                                        \
  case n:                                                                                 \
    if constexpr ((n) <= kMost) {                                                         \
      if (FETCH && ahead != nullptr) {                                                    \
        gemm_block<n, NV, ACC, A_BY_ROW, FETCH>(K, a, lda, B, ldb, c, ldc, scale, ahead); \
      } else {                                                                            \
        gemm_block<n, NV, ACC, A_BY_ROW, false>(K, a, lda, B, ldb, c, ldc, scale, ahead); \
      }                                                                                   \
    }                                                                                     \
    break;
      HL_ROWS(1)
      HL_ROWS(2)
      HL_ROWS(3)
      HL_ROWS(4)
      HL_ROWS(5)
      HL_ROWS(6)
      HL_ROWS(7)
      HL_ROWS(8)
      HL_ROWS(9)
      HL_ROWS(10)
      HL_ROWS(11)
      HL_ROWS(12)
      HL_ROWS(13)
      HL_ROWS(14)
      HL_ROWS(15)
      HL_ROWS(16)
#undef HL_ROWS
    }
    m += rows;
  }
}

// A_BY_ROW: A[m * lda + k]; otherwise A[k * lda + m]. `next` is an Ahead, or NothingAhead.
template <bool ACC, bool A_BY_ROW, typename T, typename Next>
void gemm(int64_t M, int64_t N, int64_t K, const T* A, int64_t lda, const T* B, int64_t ldb,
          float* C, int64_t ldc, float scale, Next& next) {
  int64_t n = 0;
  for (; n + 2 * VL <= N; n += 2 * VL) {
    gemm_columns<2, ACC, A_BY_ROW>(M, K, A, lda, B + n, ldb, C + n, ldc, scale, next);
  }
  if (n < N) gemm_columns<1, ACC, A_BY_ROW>(M, K, A, lda, B + n, ldb, C + n, ldc, scale, next);
}

template <bool ACC, bool A_BY_ROW, typename T>
void gemm(int64_t M, int64_t N, int64_t K, const T* A, int64_t lda, const T* B, int64_t ldb,
          float* C, int64_t ldc, float scale = 1) {
  NothingAhead next;
  gemm<ACC, A_BY_ROW>(M, N, K, A, lda, B, ldb, C, ldc, scale, next);
}

}  // namespace
}  // namespace headloom::ops
