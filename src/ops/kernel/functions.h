// Functions of a vector that activations and recurrences need, and sums across lanes.
#pragma once

#include "ops/kernel/vec.h"

namespace headloom::ops {
namespace {

HL_INLINE vf vabs(vf x) { return vmax(x, zero() - x); }

// exp(-|x|): in (0, 1] for every finite x, so that what is built on it cannot overflow.
HL_INLINE vf exp_minus_abs(vf x) { return vexp(zero() - vabs(x)); }

// 1 / (1 + exp(-x)), given e = exp_minus_abs(x).
HL_INLINE vf sigmoid_from(vf x, vf e) {
  const vf one = bcast(1.0f);
  return select(above(zero(), x), e, one) / (one + e);
}
// The same without e, and exactly 0 below -88: SiLU and GELU multiply it by x.
HL_INLINE vf vsigmoid(vf x) {
  const vf one = bcast(1.0f), bound = bcast(-88.0f);
  return select(above(bound, x), zero(), one / (one + vexp(zero() - vmax(bound, x))));
}

// d SiLU / dx, given s = sigmoid(x).
HL_INLINE vf silu_slope(vf x, vf s) { return s * fma(x, bcast(1.0f) - s, bcast(1.0f)); }

// log(1 + e) for e in [0, 1], relative error below 3e-7.
HL_INLINE vf log1p_unit(vf e) {
  // Above sqrt(2) - 1 log 2 + log((1 + e) / 2), so that f stays within [-0.3, 0.42].
  const vm large = above(e, bcast(0.41421356f));
  const vf f = select(large, bcast(0.5f) * (e - bcast(1.0f)), e);
  vf p = bcast(7.0376836292e-2f);  // log(1 + f) = f - f^2 / 2 + f^3 p(f), as in Cephes
  p = fma(p, f, bcast(-1.1514610310e-1f));
  p = fma(p, f, bcast(1.1676998740e-1f));
  p = fma(p, f, bcast(-1.2420140846e-1f));
  p = fma(p, f, bcast(1.4249322787e-1f));
  p = fma(p, f, bcast(-1.6668057665e-1f));
  p = fma(p, f, bcast(2.0000714765e-1f));
  p = fma(p, f, bcast(-2.4999993993e-1f));
  p = fma(p, f, bcast(3.3333331174e-1f));
  const vf square = f * f;
  const vf log = fma(square * f, p, fma(bcast(-0.5f), square, f));
  return log + select(large, bcast(0.69314718f), zero());
}

// log(x) for x in (0, infinity) that is no subnormal, relative error below 3e-7 for x >= 1; NaN for
// NaN and infinity.
HL_INLINE vf vlog(vf x) {
  vf power, part;  // x = part 2^power with part in [1, 2)
#if defined(CPU_CAPABILITY_AVX512)
  power = _mm512_getexp_ps(x);
  part = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i bits = _mm256_castps_si256(x);
  power = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)));
  part = _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff)),
                                             _mm256_set1_epi32(0x3f800000)));
#else
  uint32_t bits[VL];
  float powers[VL];
  std::memcpy(bits, &x, sizeof(bits));
  for (int i = 0; i < VL; ++i) {
    powers[i] = static_cast<float>(static_cast<int>(bits[i] >> 23) - 127);
    bits[i] = (bits[i] & 0x7fffff) | 0x3f800000;
  }
  power = load(powers);
  std::memcpy(&part, bits, sizeof(bits));
#endif
  return fma(power, bcast(0.69314718f), log1p_unit(part - bcast(1.0f))) + (x - x);
}

// log(1 + exp(x)), given e = exp_minus_abs(x).
HL_INLINE vf softplus_from(vf x, vf e) { return vmax(x, zero()) + log1p_unit(e); }

// Lane i of the result is the sum of row i: VL rows of VL values, one after the other.
HL_INLINE vf row_sums(const float* rows) {
#if defined(CPU_CAPABILITY_AVX512)
  vf quarters[4];  // lane group g of quarter i: sums of lanes 4g..4g+3 of rows 4i..4i+3
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const float* p = rows + 4 * i * VL;
    const vf a = load(p), b = load(p + VL), c = load(p + 2 * VL), d = load(p + 3 * VL);
    const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    const __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    quarters[i] =
        _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)) + _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
  }
  const auto halve = [](vf a, vf b) {
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  };
  return halve(halve(quarters[0], quarters[1]), halve(quarters[2], quarters[3]));
#else
  float sums[VL];
  for (int i = 0; i < VL; ++i) sums[i] = hsum(load(rows + i * VL));
  return load(sums);
#endif
}

}  // namespace
}  // namespace headloom::ops
