// Float matrices narrowed to pairs of bfloat16 along the dimension that a product sums over: the
// factors of gemm<..., Pair>. Only where the processor multiplies such pairs.
#pragma once

#include "ops/kernel/gemm.h"

namespace headloom::ops {
namespace {

#if HL_BFLOAT16
using vp = __m512i;  // 16 pairs
// Neighbouring lanes of two vectors, one after the other.
HL_INLINE vp pair_lanes(vf first, vf second) { return (vp)_mm512_cvtne2ps_pbh(second, first); }
// Lane i is (low[i], high[i]).
HL_INLINE vp pair_vectors(vf low, vf high) {
  const vp order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                    23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, pair_lanes(low, high));
}
HL_INLINE void store(Pair* to, vp pairs) { _mm512_storeu_si512(to, pairs); }
#else
using vp = vf;
HL_INLINE vp pair_lanes(vf, vf) { return zero(); }
HL_INLINE vp pair_vectors(vf, vf) { return zero(); }
HL_INLINE void store(Pair*, vp) {}
#endif

// Neighbouring lanes of one vector, or of two: 8 or 16 pairs.
HL_INLINE void store_columns(Pair* to, vf first, vf second, bool two) {
  const vp both = pair_lanes(first, second);
  std::memcpy(to, &both, two ? sizeof(both) : sizeof(both) / 2);
}

// Neighbouring columns: to[r][i] = (from[r][2 i], from[r][2 i + 1]), i < columns / 2 rounded up to
// whole vectors, which are read too. Lines in elements of each. T is float or int8_t.
template <typename T>
HL_INLINE const Pair* pair_columns(int64_t rows, int64_t columns, const T* from, int64_t line,
                                   Pair* to, int64_t to_line) {
#if HL_BFLOAT16
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < columns; i += 2 * VL) {
      const T* at = from + r * line + i;
      store_columns(to + r * to_line + i / 2, load(at), load(at + VL), true);
    }
  }
#else
  (void)rows, (void)columns, (void)from, (void)line, (void)to_line;
#endif
  return to;
}

// Neighbouring rows: to[r][i] = (from[2 r][i], from[2 r + 1][i]), i < columns rounded up to whole
// vectors; a last odd row is paired with zeros. T is float or BFloat16.
template <typename T>
HL_INLINE const Pair* pair_rows(int64_t rows, int64_t columns, const T* from, int64_t line,
                                Pair* to, int64_t to_line) {
#if HL_BFLOAT16
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t i = 0; i < columns; i += VL) {
      const T* at = from + r * line + i;
      store(to + r / 2 * to_line + i,
            pair_vectors(load(at), r + 1 < rows ? load(at + line) : zero()));
    }
  }
#else
  (void)rows, (void)columns, (void)from, (void)line, (void)to_line;
#endif
  return to;
}

}  // namespace
}  // namespace headloom::ops
