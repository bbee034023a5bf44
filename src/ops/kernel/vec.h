// The vector of one instruction set: VL float lanes, a lane mask and the few
// functions kernels need. Everything is in an anonymous namespace: each
// instruction set has its own copy.
//
// vmax and vmin give their second argument where either is NaN, on every instruction set:
// vmax(bound, x) keeps a NaN in x, and vmax(x, best) leaves it out of a maximum that is kept in
// `best`. hmax may or may not give NaN where a lane is NaN; hmax4 writes those of four vectors,
// which takes less than one after the other. above() is false where either is NaN. fold() adds up
// the lanes of VL / kFolded vectors to kFolded lanes for each.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "ops/kernel/inline.h"

namespace headloom::ops {
namespace {

constexpr int kFolded = 4;

// Neighbouring floats that a product takes as one element.
struct TwoFloats {
  float values[2];
};

#if defined(CPU_CAPABILITY_AVX512)
using vf = __m512;
using vm = __mmask16;
constexpr int VL = 16;
HL_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
HL_INLINE void store(float* p, vf a) { _mm512_storeu_ps(p, a); }
HL_INLINE vf bcast(float a) { return _mm512_set1_ps(a); }
HL_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
HL_INLINE vf fms(vf a, vf b, vf c) { return _mm512_fmsub_ps(a, b, c); }
HL_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
HL_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
HL_INLINE vf swap_halves(vf a) { return _mm512_shuffle_f32x4(a, a, 0x4e); }
HL_INLINE vf swap_quarters(vf a) { return _mm512_shuffle_f32x4(a, a, 0xb1); }
HL_INLINE float hmax(vf a) { return _mm512_reduce_max_ps(a); }
HL_INLINE float hsum(vf a) { return _mm512_reduce_add_ps(a); }
HL_INLINE vf fold(const vf* x) {
  const vf a = _mm512_shuffle_f32x4(x[0], x[1], 0x44) + _mm512_shuffle_f32x4(x[0], x[1], 0xee);
  const vf b = _mm512_shuffle_f32x4(x[2], x[3], 0x44) + _mm512_shuffle_f32x4(x[2], x[3], 0xee);
  return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
}
// x.values[0], x.values[1], x.values[0], x.values[1], ...
HL_INLINE vf bcast(const TwoFloats& x) {
  double two;
  std::memcpy(&two, &x, sizeof(two));
  return _mm512_castpd_ps(_mm512_set1_pd(two));
}
// a[0] + a[1], a[2] + a[3], ... in the lower half.
HL_INLINE vf sums_of_two(vf a) {
  return _mm512_maskz_compress_ps(0x5555, a + _mm512_permute_ps(a, 0xb1));
}
HL_INLINE void hmax4(vf a, vf b, vf c, vf d, float* to) {
  const vf ab = vmax(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  const vf cd = vmax(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  vf x = vmax(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  x = vmax(x, _mm512_permute_ps(x, 0x4e));
  x = vmax(x, _mm512_permute_ps(x, 0xb1));
  _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, x)));
}
// The lanes of vector v among the bits of a 64-key block.
HL_INLINE vm lanes(uint64_t bits, int v) { return static_cast<__mmask16>(bits >> (16 * v)); }
HL_INLINE vf select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
HL_INLINE vm above(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
HL_INLINE bool any(vm m) { return m != 0; }
#elif defined(CPU_CAPABILITY_AVX2)
using vf = __m256;
using vm = __m256;
constexpr int VL = 8;
HL_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
HL_INLINE void store(float* p, vf a) { _mm256_storeu_ps(p, a); }
HL_INLINE vf bcast(float a) { return _mm256_set1_ps(a); }
HL_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
HL_INLINE vf fms(vf a, vf b, vf c) { return _mm256_fmsub_ps(a, b, c); }
HL_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
HL_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
HL_INLINE vf swap_halves(vf a) { return _mm256_permute2f128_ps(a, a, 1); }
HL_INLINE vf swap_quarters(vf a) { return _mm256_permute_ps(a, 0x4e); }
HL_INLINE __m128 half_op(__m128 a, __m128 b, bool max) {
  return max ? _mm_max_ps(a, b) : _mm_add_ps(a, b);
}
HL_INLINE float reduce(vf a, bool max) {
  __m128 x = half_op(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1), max);
  x = half_op(x, _mm_movehl_ps(x, x), max);
  return _mm_cvtss_f32(half_op(x, _mm_movehdup_ps(x), max));
}
HL_INLINE float hmax(vf a) { return reduce(a, true); }
HL_INLINE float hsum(vf a) { return reduce(a, false); }
HL_INLINE vf fold(const vf* x) {
  return _mm256_permute2f128_ps(x[0], x[1], 0x20) + _mm256_permute2f128_ps(x[0], x[1], 0x31);
}
HL_INLINE vf bcast(const TwoFloats& x) {
  double two;
  std::memcpy(&two, &x, sizeof(two));
  return _mm256_castpd_ps(_mm256_set1_pd(two));
}
HL_INLINE vf sums_of_two(vf a) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(_mm256_hadd_ps(a, a)), 0xd8));
}
HL_INLINE void hmax4(vf a, vf b, vf c, vf d, float* to) {
  const vf ab = vmax(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  const vf cd = vmax(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
  vf x = vmax(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  x = vmax(x, _mm256_permute_ps(x, 0xb1));  // a a c c b b d d
  x = _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 4, 2, 6, 0, 4, 2, 6));
  _mm_storeu_ps(to, _mm256_castps256_ps128(x));
}
HL_INLINE vm lanes(uint64_t bits, int v) {
  const __m256i one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i word = _mm256_set1_epi32(static_cast<int>((bits >> (8 * v)) & 255));
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(word, one), one));
}
HL_INLINE vf select(vm m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }
HL_INLINE vm above(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
HL_INLINE bool any(vm m) { return _mm256_movemask_ps(m) != 0; }
#else
constexpr int VL = 4;
using vf = float __attribute__((vector_size(16)));
using vm = int32_t __attribute__((vector_size(16)));
HL_INLINE vf load(const float* p) {
  vf a;
  std::memcpy(&a, p, sizeof(a));
  return a;
}
HL_INLINE void store(float* p, vf a) { std::memcpy(p, &a, sizeof(a)); }
HL_INLINE vf bcast(float a) { return vf{a, a, a, a}; }
#if defined(__aarch64__)
HL_INLINE vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
HL_INLINE vf fms(vf a, vf b, vf c) { return vfmaq_f32(-c, a, b); }
#else
HL_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
HL_INLINE vf fms(vf a, vf b, vf c) { return a * b - c; }
#endif
HL_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
HL_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
HL_INLINE vf swap_halves(vf a) { return vf{a[2], a[3], a[0], a[1]}; }
HL_INLINE vf swap_quarters(vf a) { return vf{a[1], a[0], a[3], a[2]}; }
HL_INLINE float hmax(vf a) {
  const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}
HL_INLINE float hsum(vf a) { return (a[0] + a[1]) + (a[2] + a[3]); }
HL_INLINE vf fold(const vf* x) { return x[0]; }
HL_INLINE vf bcast(const TwoFloats& x) {
  return vf{x.values[0], x.values[1], x.values[0], x.values[1]};
}
HL_INLINE vf sums_of_two(vf a) { return vf{a[0] + a[1], a[2] + a[3], 0, 0}; }
HL_INLINE void hmax4(vf a, vf b, vf c, vf d, float* to) {
  to[0] = hmax(a);
  to[1] = hmax(b);
  to[2] = hmax(c);
  to[3] = hmax(d);
}
HL_INLINE vm lanes(uint64_t bits, int v) {
  const int word = static_cast<int>(bits >> (4 * v));
  return vm{-(word & 1), -(word >> 1 & 1), -(word >> 2 & 1), -(word >> 3 & 1)};
}
HL_INLINE vf select(vm m, vf a, vf b) { return m ? a : b; }
HL_INLINE vm above(vf a, vf b) { return a > b; }
HL_INLINE bool any(vm m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }
#endif

HL_INLINE vf load(const TwoFloats* p) { return load(p->values); }

// x + kToInteger rounds x to an integer n, and the low bits of the sum are n + 127, which are the
// exponent bits of the float 2^n.
constexpr float kToInteger = 12582912.0f + 127.0f;  // 1.5 * 2^23 + 127

// p 2^n for the integer n from -126 to 128 that `biased` = n + kToInteger holds too; NaN where p is
// NaN. The product is exact. An addition to the exponent of p would not keep a NaN.
HL_INLINE vf times_power_of_two(vf p, vf n, vf biased) {
#if defined(CPU_CAPABILITY_AVX512)
  (void)biased;
  return _mm512_scalef_ps(p, n);
#elif defined(CPU_CAPABILITY_AVX2)
  (void)n;
  return p * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(biased), 23));
#else
  (void)n;
  uint32_t __attribute__((vector_size(16))) bits;
  std::memcpy(&bits, &biased, sizeof(bits));
  bits <<= 23;
  vf power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
#endif
}

// 2^r for r in [-0.5, 0.5], relative error below 2e-7 and exact at 0.
HL_INLINE vf exp2_near_zero(vf r) {
  vf p = bcast(0.0013276471781187814f);
  p = fma(p, r, bcast(0.009675541332755264f));
  p = fma(p, r, bcast(0.055507132741514004f));
  p = fma(p, r, bcast(0.24022119723882207f));
  p = fma(p, r, bcast(0.6931469670643591f));
  return fma(p, r, bcast(1.0f));
}

// 2^x, relative error below 2e-7; infinite from 127.5 or 128 on, 2^-126 or less below -126, NaN for
// NaN and perhaps for infinity. Cheaper than exp: where many exponentials share a factor, log2(e)
// goes into that.
HL_INLINE vf vexp2(vf x) {
#if defined(CPU_CAPABILITY_AVX512)
  x = vmax(bcast(-150.0f), x);
  const vf n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(exp2_near_zero(x - n), n);
#else
  x = vmin(bcast(128.0f), vmax(bcast(-126.0f), x));
  const vf biased = x + bcast(kToInteger);
  const vf n = biased - bcast(kToInteger);
  return times_power_of_two(exp2_near_zero(x - n), n, biased);
#endif
}

// exp(x) for x <= 88, relative error below 2e-7; below -87 the result is 2^-126
// or less. NaN for NaN and for infinity, but not for any other x.
HL_INLINE vf vexp(vf x) {
  const vf log2e = bcast(1.44269502f);
  x = vmax(bcast(-87.0f), x);
  const vf biased = fma(x, log2e, bcast(kToInteger));
  const vf n = biased - bcast(kToInteger);
  // x log2(e) - n, in (-0.5, 0.5); the second term is what log2(e) loses in
  // float.
  vf r = fms(x, log2e, n);
  r = fma(x, bcast(1.92596303e-8f), r);
  return times_power_of_two(exp2_near_zero(r), n, biased);
}

// exp(x) for x <= 0, or little above, in fewer operations than vexp: its relative error is below
// 2e-7 + 1e-7 |x|, which is little beside a sum of such exponentials that has a 1 in it. Below -87
// the result is 2^-126 or less, also for -infinity; NaN for NaN.
HL_INLINE vf vexp_of_negative(vf x) {
#if defined(CPU_CAPABILITY_AVX512)
  const vf y = x * bcast(1.44269502f);
  const vf r = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 for -infinity
  vf p = bcast(0.001867130515165627f);  // 2^r for r in [0, 1], exact at 0
  p = fma(p, r, bcast(0.009017029777169228f));
  p = fma(p, r, bcast(0.05579991266131401f));
  p = fma(p, r, bcast(0.24016444385051727f));
  p = fma(p, r, bcast(0.6931512951850891f));
  return _mm512_scalef_ps(fma(p, r, bcast(1.0f)), y);  // times 2^floor(y)
#else
  const vf log2e = bcast(1.44269502f);
  x = vmax(bcast(-87.0f), x);
  const vf biased = fma(x, log2e, bcast(kToInteger));
  const vf n = biased - bcast(kToInteger);
  return times_power_of_two(exp2_near_zero(fms(x, log2e, n)), n, biased);
#endif
}

HL_INLINE vf zero() { return bcast(0.0f); }

// vexp_of_negative for what is rounded to bfloat16, or summed with such: the relative error is
// below 1e-4 + 1e-7 |x|, a 20th of that rounding.
HL_INLINE vf vexp_to_be_rounded(vf x) {
#if defined(CPU_CAPABILITY_AVX512)
  const vf y = x * bcast(1.44269502f);
  const vf r = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vf p = bcast(0.0770671f);  // 2^r for r in [0, 1], exact at 0
  p = fma(p, r, bcast(0.22764494f));
  p = fma(p, r, bcast(0.69511682f));
  return _mm512_scalef_ps(fma(p, r, bcast(1.0f)), y);
#else
  return vexp_of_negative(x);
#endif
}

// vexp(x), and exactly 0 below -87: where a weight of 2^-126 would be taken for a sum of its own.
HL_INLINE vf vexp_or_zero(vf x) { return select(above(bcast(-87.0f), x), zero(), vexp(x)); }

// What a sum of weights divides by: the sum, or 1 where nothing has any weight.
HL_INLINE vf divisor(vf sum) {
  return select(above(sum, zero()), sum, bcast(1.0f) + (sum - sum));  // NaN stays
}

// 1 / sigmoid(x) = 1 + e^-x; below -80 as at -80.
HL_INLINE vf sigmoid_inverse(vf x) { return bcast(1.0f) + vexp(zero() - vmax(bcast(-80.0f), x)); }

// A bfloat16 in memory; arithmetic is in float.
struct BFloat16 {
  uint16_t bits;
};
HL_INLINE float widen(float x) { return x; }
HL_INLINE float widen(int8_t x) { return static_cast<float>(x); }
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

// VL consecutive values as float, and back.
HL_INLINE vf load(const BFloat16* p) {
#if defined(CPU_CAPABILITY_AVX512)
  __m256i half;
  std::memcpy(&half, p, sizeof(half));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
#elif defined(CPU_CAPABILITY_AVX2)
  __m128i half;
  std::memcpy(&half, p, sizeof(half));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
#else
  return vf{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
#endif
}
HL_INLINE vf load(const int8_t* p) {
#if defined(CPU_CAPABILITY_AVX512)
  __m128i eighth;
  std::memcpy(&eighth, p, sizeof(eighth));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(eighth));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return vf{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
#endif
}
#if defined(CPU_CAPABILITY_AVX2)
// The bfloat16 of each lane.
HL_INLINE __m128i narrowed(vf a) {
  const __m256i bits = _mm256_castps_si256(a), high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  __m256i out = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  out = _mm256_srli_epi32(out, 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(64));
  out = _mm256_blendv_epi8(out, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
  return _mm_packus_epi32(_mm256_castsi256_si128(out), _mm256_extracti128_si256(out, 1));
}
#endif
HL_INLINE void store(BFloat16* p, vf a) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh(a);
  std::memcpy(p, &half, sizeof(half));
#elif defined(CPU_CAPABILITY_AVX512)
  const __m512i bits = _mm512_castps_si512(a), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  __m512i out = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  out = _mm512_srli_epi32(out, 16);
  out = _mm512_mask_or_epi32(out, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), high,
                             _mm512_set1_epi32(64));
  const __m256i half = _mm512_cvtepi32_epi16(out);
  std::memcpy(p, &half, sizeof(half));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i half = narrowed(a);
  std::memcpy(p, &half, sizeof(half));
#else
  for (int i = 0; i < VL; ++i) narrow(a[i], p + i);
#endif
}

// The first `count` < VL values (none where it is negative), zeros in the other lanes; and back.
template <typename T>
HL_INLINE vf load_part(const T* p, int64_t count) {
  float lanes_of[VL] = {};
  for (int64_t i = 0; i < count; ++i) lanes_of[i] = widen(p[i]);
  return load(lanes_of);
}
template <typename T>
HL_INLINE void store_part(T* p, vf a, int64_t count) {
  float lanes_of[VL];
  store(lanes_of, a);
  for (int64_t i = 0; i < count; ++i) narrow(lanes_of[i], p + i);
}

#if defined(CPU_CAPABILITY_AVX512)
HL_INLINE vm first_lanes(int64_t count) {
  return static_cast<vm>(count <= 0 ? 0 : (1u << count) - 1);
}
HL_INLINE vf load_part(const float* p, int64_t count) {
  if (count == 8) return _mm512_zextps256_ps512(_mm256_loadu_ps(p));
  return _mm512_maskz_loadu_ps(first_lanes(count), p);
}
HL_INLINE void store_part(float* p, vf a, int64_t count) {
  if (count == 8) return _mm256_storeu_ps(p, _mm512_castps512_ps256(a));
  _mm512_mask_storeu_ps(p, first_lanes(count), a);
}
#elif defined(CPU_CAPABILITY_AVX2)
HL_INLINE vf load_part(const float* p, int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i first = _mm256_set1_epi32(static_cast<int>(count));
  return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(first, lane));
}
// In pieces of four, two and one: a masked store takes many times as long on processors of AMD.
HL_INLINE void store_part(float* p, vf a, int64_t count) {
  __m128 x = _mm256_castps256_ps128(a);
  if (count >= 4) {
    _mm_storeu_ps(p, x);
    x = _mm256_extractf128_ps(a, 1);
    p += 4;
    count -= 4;
  }
  if (count >= 2) {
    std::memcpy(p, &x, 8);
    x = _mm_movehl_ps(x, x);
    p += 2;
    count -= 2;
  }
  if (count > 0) *p = _mm_cvtss_f32(x);
}
HL_INLINE vf load_part(const BFloat16* p, int64_t count) {
  uint64_t four[2] = {0, 0};
  int i = 0;
  if (count >= 4) {
    std::memcpy(four, p, 8);
    p += 4;
    count -= 4;
    i = 1;
  }
  for (int64_t j = 0; j < count; ++j) four[i] |= static_cast<uint64_t>(p[j].bits) << (16 * j);
  const __m128i half = _mm_set_epi64x(static_cast<int64_t>(four[1]), static_cast<int64_t>(four[0]));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
HL_INLINE void store_part(BFloat16* p, vf a, int64_t count) {
  const __m128i half = narrowed(a);
  auto four = static_cast<uint64_t>(_mm_cvtsi128_si64(half));
  if (count >= 4) {
    std::memcpy(p, &four, 8);
    four = static_cast<uint64_t>(_mm_extract_epi64(half, 1));
    p += 4;
    count -= 4;
  }
  for (int64_t j = 0; j < count; ++j, four >>= 16) p[j].bits = static_cast<uint16_t>(four);
}
#endif

// Of `count` values that are left, more than VL or none among them, those of one vector.
template <typename T>
HL_INLINE vf load_some(const T* p, int64_t count) {
  return count >= VL ? load(p) : load_part(p, count);
}
template <typename T>
HL_INLINE void store_some(T* p, vf a, int64_t count) {
  count >= VL ? store(p, a) : store_part(p, a, count);
}

// to[i] = scale * from[i], i < n, in the type of `to`.
template <typename From, typename T>
HL_INLINE void store_scaled(const From* from, int64_t n, float scale, T* to) {
  for (int64_t i = 0; i < n; i += VL) {
    store_some(to + i, bcast(scale) * load_some(from + i, n - i), n - i);
  }
}

}  // namespace
}  // namespace headloom::ops
