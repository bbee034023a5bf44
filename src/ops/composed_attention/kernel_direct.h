// A few queries against one key block whose keys and values are read where they lie: dot products
// along a key's row, and rows of values times one weight each. Packing the block for the products of
// kernel_products.h would take longer than these, which wait for memory.
#pragma once

#include "ops/composed_attention/kernel_tile.h"
#include "ops/kernel/functions.h"

namespace headloom::ops::fused {
namespace {

constexpr int kKeys = 4;  // taken at a time: all their heads, so that memory is read in its order
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kQueries = 4;  // whose sums stay in registers
#else
constexpr int kQueries = 2;
#endif
// Rows are fetched this many bytes ahead, and no less than the keys taken at a time. Left to the
// hardware they come at a half of the memory's bandwidth.
constexpr int64_t kAhead = 8192;

// Rows of one head in the keys or the values, [S, size].
template <typename T>
struct HeadRows {
  const T* data;
  int64_t line, size;  // in elements
};

template <typename T>
HL_INLINE void fetch(const HeadRows<T>& rows, int64_t first, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = first; i < first + count; ++i) {
    const T* row = rows.data + i * rows.line;
    for (int64_t d = 0; d < rows.size; d += kLine) __builtin_prefetch(row + d);
  }
}

// The range of keys that anything in `visible` sees, within a block.
HL_INLINE Range seen_keys(int64_t rows, const uint64_t* visible) {
  uint64_t any = 0;
  for (int64_t r = 0; r < rows; ++r) any |= visible[r];
  if (any == 0) return {0, 0};
  return {__builtin_ctzll(any), 64 - __builtin_clzll(any)};
}

// sums[j][i] = a vector whose lanes add up to query j . key i. Queries are padded with zeros.
template <typename T, int K, int Q>
HL_INLINE void dot_tile(const HeadRows<T>& keys, int64_t key, const float* q, int64_t q_line,
                        float* sums) {
  vf acc[Q][K];
#pragma GCC unroll 4
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 4
    for (int i = 0; i < K; ++i) acc[j][i] = zero();
  }
  const T* k = keys.data + key * keys.line;
  const auto add = [&](int64_t d, const auto& load_key) __attribute__((always_inline)) {
    vf rows[K];
#pragma GCC unroll 4
    for (int i = 0; i < K; ++i) rows[i] = load_key(k + i * keys.line + d);
#pragma GCC unroll 4
    for (int j = 0; j < Q; ++j) {
      const vf query = load(q + j * q_line + d);
#pragma GCC unroll 4
      for (int i = 0; i < K; ++i) acc[j][i] = fma(rows[i], query, acc[j][i]);
    }
  };
  int64_t d = 0;
  for (; d + VL <= keys.size; d += VL) {
    add(d, [](const T* p) __attribute__((always_inline)) { return load(p); });
  }
  if (d < keys.size) {
    const int64_t left = keys.size - d;
    add(d, [left](const T* p) __attribute__((always_inline)) { return load_part(p, left); });
  }
#pragma GCC unroll 4
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 4
    for (int i = 0; i < K; ++i) store(sums + (j * VL + i) * VL, acc[j][i]);
  }
}

template <typename T, int K>
HL_INLINE void dot_rows(const HeadRows<T>& keys, int64_t key, int64_t queries, const float* q,
                        int64_t q_line, float* sums) {
  int64_t j = 0;
  for (; j + kQueries <= queries; j += kQueries) {
    dot_tile<T, K, kQueries>(keys, key, q + j * q_line, q_line, sums + j * VL * VL);
  }
  for (; j < queries; ++j) dot_tile<T, K, 1>(keys, key, q + j * q_line, q_line, sums + j * VL * VL);
}

// scores[r][h] = scale q k for one block, as score_product: of keys `seen` (within the block), 0
// for the others. Keys before `end` (of the sequence) are fetched ahead.
template <typename T>
void direct_scores(const Args& a, const Plan& p, int64_t batch, int64_t block, Range seen,
                   int64_t end, const Scratch& w, float* scores) {
  constexpr int64_t kRows = 16;  // of queries and heads whose sums stay in the first-level cache
  alignas(64) float sums[kRows * VL * VL];
  const int64_t first = block * kBlock, shared = a.H / a.Gk * a.T, rows = a.H * a.T;
  const int64_t ahead =
      greater(kKeys, kAhead / static_cast<int64_t>(sizeof(T)) / greater(a.k_stride[1], 1));
  const auto to = [&](int64_t m) { return scores + m % a.T * p.line + m / a.T * kBlock; };
  for (int64_t s = 0; s < kBlock; s += VL) {
    const int64_t lo = greater(s, seen.begin), hi = lesser(s + VL, seen.end);
    if (lo >= hi) {
      for (int64_t m = 0; m < rows; ++m) store(to(m) + s, zero());
      continue;
    }
    for (int64_t m0 = 0; m0 < rows; m0 += kRows) {
      const int64_t m1 = lesser(rows, m0 + kRows);
      if (hi - lo < VL) fill(sums, (m1 - m0) * VL * VL, 0);
      for (int64_t i = lo; i < hi; i += kKeys) {
        for (int64_t m = m0, next; m < m1; m = next) {
          const int64_t g = m / shared;
          next = lesser((g + 1) * shared, m1);
          const HeadRows<T> keys{static_cast<const T*>(a.k) + batch * a.k_stride[0] +
                                     g * a.k_stride[2],
                                 a.k_stride[1], a.D};
          if (m == g * shared && first + i + ahead + kKeys <= end) {
            fetch(keys, first + i + ahead, kKeys);
          }
          const float* q = w.q + m * p.Dp;
          float* to_sums = sums + ((m - m0) * VL + i - s) * VL;
          if (i + kKeys <= hi) {
            dot_rows<T, kKeys>(keys, first + i, next - m, q, p.Dp, to_sums);
          } else {
            for (int64_t j = i; j < hi; ++j) {
              dot_rows<T, 1>(keys, first + j, next - m, q, p.Dp, to_sums + (j - i) * VL);
            }
          }
        }
      }
      for (int64_t m = m0; m < m1; ++m) store(to(m) + s, row_sums(sums + (m - m0) * VL * VL));
    }
  }
}

// out[j] += sum of weights[j][i] v[key + i] over i < count, for N vectors of the row.
template <int Q, int N, typename Load>
HL_INLINE void value_tile(int64_t count, const float* const* weights, float* out, int64_t out_line,
                          const Load& load_row) {
  vf acc[Q][N];
#pragma GCC unroll 4
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[j][n] = load(out + j * out_line + n * VL);
  }
  for (int64_t i = 0; i < count; ++i) {
    vf row[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) row[n] = load_row(i, n);
#pragma GCC unroll 4
    for (int j = 0; j < Q; ++j) {
      const vf weight = bcast(weights[j][i]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[j][n] = fma(weight, row[n], acc[j][n]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(out + j * out_line + n * VL, acc[j][n]);
  }
}

template <typename T, int Q>
HL_INLINE void value_rows(const HeadRows<T>& values, int64_t key, int64_t count,
                          const float* const* weights, float* out, int64_t out_line) {
  const T* v = values.data + key * values.line;
  int64_t e = 0;
  const auto whole = [&](int64_t i, int n) __attribute__((always_inline)) {
    return load(v + i * values.line + e + n * VL);
  };
  for (; e + 4 * VL <= values.size; e += 4 * VL) {
    value_tile<Q, 4>(count, weights, out + e, out_line, whole);
  }
  for (; e + VL <= values.size; e += VL) {
    value_tile<Q, 1>(count, weights, out + e, out_line, whole);
  }
  if (e == values.size) return;
  value_tile<Q, 1>(count, weights, out + e, out_line,
                   [&](int64_t i, int) __attribute__((always_inline)) {
                     return load_part(v + i * values.line + e, values.size - e);
                   });
}

// out[h'][r] += x v for keys `seen` of one block, as value_product.
template <typename T>
void direct_values(const Args& a, const Plan& p, int64_t batch, int64_t block, Range seen,
                   int64_t end, const Scratch& w, const float* x) {
  const int64_t first = block * kBlock, shared = a.H2 / a.Gv * a.T;
  const int64_t ahead =
      greater(kKeys, kAhead / static_cast<int64_t>(sizeof(T)) / greater(a.v_stride[1], 1));
  for (int64_t i = seen.begin; i < seen.end; i += kKeys) {
    const int64_t count = lesser(kKeys, seen.end - i);
    for (int64_t g = 0; g < a.Gv; ++g) {
      const HeadRows<T> values{
          static_cast<const T*>(a.v) + batch * a.v_stride[0] + g * a.v_stride[2], a.v_stride[1],
          a.E};
      if (first + i + ahead + kKeys <= end) fetch(values, first + i + ahead, kKeys);
      const float* weights[kQueries];
      for (int64_t m = g * shared, next; m < (g + 1) * shared; m = next) {
        const bool many = m + kQueries <= (g + 1) * shared;
        next = m + (many ? kQueries : 1);
        for (int64_t j = m; j < next; ++j) {
          weights[j - m] = x + j % a.T * p.line + j / a.T * kBlock + i;
        }
        float* out = w.out + m * p.Ep;
        if (many) {
          value_rows<T, kQueries>(values, first + i, count, weights, out, p.Ep);
        } else {
          value_rows<T, 1>(values, first + i, count, weights, out, p.Ep);
        }
      }
    }
  }
}

}  // namespace
}  // namespace headloom::ops::fused
