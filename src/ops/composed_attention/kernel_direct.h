// A few queries against one key block whose keys and values are read where they lie: dot products
// along a key's row, and rows of values times one weight each. Packing the block for the products
// of kernel_products.h would take longer than these, which wait for memory.
#pragma once

#include "ops/composed_attention/kernel_tile.h"
#include "ops/kernel/functions.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

constexpr int kKeys = 4;  // taken at a time: all their heads, so that memory is read in its order
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kQueries = 4;  // whose sums stay in registers
#else
constexpr int kQueries = 2;
#endif

// Rows of one head in the keys or the values, [S, size].
template <typename T>
struct HeadRows {
  const T* data;
  int64_t line, size;  // in elements
};

// Fetches rows of keys or values ahead of the one that is read, in the order in which they lie.
// Left to the hardware, or fetched head by head, they come at two thirds of the memory's bandwidth.
template <typename T>
struct Fetcher {
  const T* row;
  int64_t line, span, rows;  // of elements from row to row, in a row, and rows left
  bool past_cache;           // as Args has it
  int64_t at = 0;

  HL_INLINE void next(int64_t elements) {
    constexpr int64_t kLine = 64 / sizeof(T);
    for (; elements > 0 && rows > 0; elements -= kLine) {
      prefetch_once(row + at, past_cache);
      at += kLine;
      if (at < span) continue;
      at = 0;
      row += line;
      --rows;
    }
  }
};

// For a reader of rows [begin, ...), who shares their memory with nobody before row `end`.
template <typename T>
HL_INLINE Fetcher<T> fetcher(const T* data, const int64_t* stride, int64_t heads, int64_t size,
                             int64_t begin, int64_t end, bool past_cache) {
  constexpr int64_t kAhead = 8192 / sizeof(T);
  const int64_t first = begin + greater(kKeys, kAhead / greater(stride[1], 1));
  const int64_t span = heads * size;
  // Heads that lie apart are left to the hardware.
  const bool adjacent = heads == 1 || stride[2] == size;
  Fetcher<T> f{data + first * stride[1], stride[1], span, adjacent ? end - first : 0, past_cache};
  if (stride[1] == span && f.rows > 0) {
    f.span *= f.rows;
    f.rows = 1;
  }
  return f;
}

// sums[j][i] = a vector whose lanes add up to query j . key i, kKeys vectors from j to j + 1.
// Queries are padded with zeros.
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
    for (int i = 0; i < K; ++i) store(sums + (j * kKeys + i) * VL, acc[j][i]);
  }
}

template <typename T, int K>
HL_INLINE void dot_rows(const HeadRows<T>& keys, int64_t key, int64_t queries, const float* q,
                        int64_t q_line, float* sums) {
  int64_t j = 0;
  const auto take = [&]<int Q>() __attribute__((always_inline)) {
    for (; j + Q <= queries; j += Q) {
      dot_tile<T, K, Q>(keys, key, q + j * q_line, q_line, sums + j * kKeys * VL);
    }
  };
  if constexpr (kQueries > 2) take.template operator()<kQueries>();
  take.template operator()<2>();
  take.template operator()<1>();
}

// Multiplies each of `rows` rows of a block's keys, `shared` of them for a head, by the scales of
// that head's keys `seen`, and by 0 elsewhere. The scales [S, heads] begin at the block's first
// key.
HL_INLINE void scale_rows(const float* scales, const int64_t* stride, int64_t keys, int64_t heads,
                          Range seen, int64_t rows, int64_t shared, float* const* to) {
  alignas(64) float panel[kMaxHeads * kBlock];
  pack_panel(scales, stride, keys, heads, panel);
  for (int64_t m = 0; m < rows; ++m) {
    float* of_head = panel + m / shared * kBlock;
    if (m % shared == 0 && seen.end - seen.begin < kBlock) {
      fill(of_head, seen.begin, 0);
      fill(of_head + seen.end, kBlock - seen.end, 0);
    }
    for (int64_t i = 0; i < kBlock; i += VL) {
      store(to[m] + i, load(to[m] + i) * load(of_head + i));
    }
  }
}

// Where row m of a tile's maps is, m counting the queries of a map, then the maps.
HL_INLINE void map_rows(const Args& a, const Plan& p, int64_t maps, float* x, float** rows) {
  for (int64_t h = 0; h < maps; ++h) {
    for (int64_t t = 0; t < a.T; ++t) rows[h * a.T + t] = x + t * p.line + h * kBlock;
  }
}

// scores[r][h] = scale q k for one block, as score_product: of keys `seen` (within the block), 0
// for the others. `end`: where this worker's keys end.
template <typename T>
void direct_scores(const Args& a, const Plan& p, int64_t batch, int64_t block, Range seen,
                   int64_t end, const Scratch& w, float* scores) {
  constexpr int64_t kBatch = VL / kKeys;  // of queries and maps, summed across lanes at a time
  alignas(64) float sums[VL * VL] = {}, dots[VL];
  float* to[kMaxHeads * kDirectQueries];
  map_rows(a, p, a.H, scores, to);
  const int64_t first = block * kBlock, shared = a.H / a.Gk * a.T, rows = a.H * a.T;
  const T* data = static_cast<const T*>(a.k) + batch * a.k_stride[0];
  Fetcher<T> ahead =
      fetcher(data, a.k_stride, a.Gk, a.D, first + seen.begin, end, a.past_cache);
  if (seen.end - seen.begin < kBlock) {
    for (int64_t m = 0; m < rows; ++m) fill(to[m], kBlock, 0);
  }
  for (int64_t i = seen.begin / kKeys * kKeys; i < seen.end; i += kKeys) {
    const int64_t lo = greater(i, seen.begin), hi = lesser(i + kKeys, seen.end);
    if (hi - lo < kKeys) fill(sums, VL * VL, 0);
    int64_t g = 0;
    for (int64_t m0 = 0; m0 < rows; m0 += kBatch) {
      const int64_t m1 = lesser(rows, m0 + kBatch);
      for (int64_t m = m0, next; m < m1; m = next) {
        next = lesser((g + 1) * shared, m1);
        const HeadRows<T> keys{data + g * a.k_stride[2], a.k_stride[1], a.D};
        const float* q = w.q + m * p.Dp;
        float* to_sums = sums + (m - m0) * kKeys * VL;
        if (m == g * shared) ahead.next(kKeys * a.D);
        if (hi - lo == kKeys) {
          dot_rows<T, kKeys>(keys, first + i, next - m, q, p.Dp, to_sums);
        } else {
          for (int64_t j = lo; j < hi; ++j) {
            dot_rows<T, 1>(keys, first + j, next - m, q, p.Dp, to_sums + (j - i) * VL);
          }
        }
        if (next == (g + 1) * shared) ++g;
      }
      store(dots, row_sums(sums));
      for (int64_t m = m0; m < m1; ++m) {
        std::memcpy(to[m] + i, dots + (m - m0) * kKeys, kKeys * sizeof(float));
      }
    }
  }
  if (a.k_scale) {
    scale_rows(a.k_scale + batch * a.k_scale_stride[0] + first * a.k_scale_stride[1],
               a.k_scale_stride, lesser(kBlock, a.S - first), a.Gk, seen, rows, shared, to);
  }
}

// out[j] += sum of weights[j][i] row i over i in `keys`, for N vectors of the row.
template <int Q, int N, typename Load>
HL_INLINE void value_tile(Range keys, float* const* weights, float* out, int64_t out_line,
                          const Load& load_row) {
  vf acc[Q][N];
#pragma GCC unroll 4
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[j][n] = load(out + j * out_line + n * VL);
  }
  for (int64_t i = keys.begin; i < keys.end; ++i) {
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
HL_INLINE void value_rows(const HeadRows<T>& values, int64_t first, Range keys,
                          float* const* weights, float* out, int64_t out_line) {
  const T* v = values.data + first * values.line;
  int64_t e = 0;
  const auto whole = [&](int64_t i, int n) __attribute__((always_inline)) {
    return load(v + i * values.line + e + n * VL);
  };
  for (; e + 4 * VL <= values.size; e += 4 * VL) {
    value_tile<Q, 4>(keys, weights, out + e, out_line, whole);
  }
  for (; e + VL <= values.size; e += VL) {
    value_tile<Q, 1>(keys, weights, out + e, out_line, whole);
  }
  if (e == values.size) return;
  value_tile<Q, 1>(keys, weights, out + e, out_line,
                   [&](int64_t i, int) __attribute__((always_inline)) {
                     return load_part(v + i * values.line + e, values.size - e);
                   });
}

// out[h'][r] += x v for keys `seen` of one block, as value_product.
template <typename T>
void direct_values(const Args& a, const Plan& p, int64_t batch, int64_t block, Range seen,
                   int64_t end, const Scratch& w, float* x) {
  const int64_t first = block * kBlock, shared = a.H2 / a.Gv * a.T;
  const T* data = static_cast<const T*>(a.v) + batch * a.v_stride[0];
  Fetcher<T> ahead =
      fetcher(data, a.v_stride, a.Gv, a.E, first + seen.begin, end, a.past_cache);
  float* from[kMaxHeads * kDirectQueries];
  map_rows(a, p, a.H2, x, from);
  if (a.v_scale) {
    scale_rows(a.v_scale + batch * a.v_scale_stride[0] + first * a.v_scale_stride[1],
               a.v_scale_stride, lesser(kBlock, a.S - first), a.Gv, seen, a.H2 * a.T, shared, from);
  }
  for (int64_t i = seen.begin; i < seen.end; i += kKeys) {
    const int64_t count = lesser(kKeys, seen.end - i);
    for (int64_t g = 0; g < a.Gv; ++g) {
      const HeadRows<T> values{data + g * a.v_stride[2], a.v_stride[1], a.E};
      ahead.next(kKeys * a.E);
      int64_t m = g * shared;
      for (; m + kQueries <= (g + 1) * shared; m += kQueries) {
        value_rows<T, kQueries>(values, first, {i, i + count}, from + m, w.out + m * p.Ep, p.Ep);
      }
      for (; m < (g + 1) * shared; ++m) {
        value_rows<T, 1>(values, first, {i, i + count}, from + m, w.out + m * p.Ep, p.Ep);
      }
    }
  }
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel
