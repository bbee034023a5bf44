// Products with weights of four bits (int4.h has their layout), in integers: a byte of weights
// meets bytes of x, four products in one instruction where weights widened to float32 take sixteen.
//
// So that nothing of x is lost, it is held with 24 bits for each group of inputs (16 where it is
// bfloat16, which has 8, unless a group's values are too far apart): whole numbers of which the
// group's largest is near 2^23, as three (two) planes of signed bytes, the digits to base 256. A
// group's sum of 32 products of a digit and a weight from 0 to 15 fits into 16 bits a lane, and
// that of whole numbers into 32.
#pragma once

#include "ops/kernel/vec.h"
#include "ops/linear/int4.h"
#include "ops/linear/kernel.h"

namespace headloom::ops::linear_kernel {
namespace {

constexpr int64_t kInt4Bytes = kInt4Inputs / 2;  // of a block of weights

// The scale of a group with a smaller largest value may be no normal number.
constexpr float kLeastOfGroup = 1e-25f;

// A group's small values are those below a 16th of its largest. Where the largest meets a 0, a
// result comes from them, so that they have to be held well if they are an eighth or more of all
// values that are not 0.
HL_INLINE bool notable(float small, float all) { return small > 0 && 8 * small >= all; }

// Whether whole numbers hold so many small values, which add up to so many units. These are rounded
// by half a unit, and their mean has to have 127.
HL_INLINE bool held_well(float small, float units) { return 127 * small <= units; }

// Values below so many units can lose more than a 128th of themselves. Where weights are large at
// the inputs whose values are small, results come from those as much as from the others. So at most
// a quarter of all values that are not 0 may be so small.
constexpr float kFewUnits = 64;
HL_INLINE bool mostly_held(float tiny, float all) { return 4 * tiny <= all; }

// The largest magnitude of a group.
struct Group {
  float largest;
  bool fits;  // all are finite, the largest is 0 or has a scale that is a normal number, and small
              // values are held well
};

// To be held by whole numbers up to `whole`. `count` is a multiple of VL.
HL_INLINE Group group_of(const float* values, int64_t count, float whole) {
  uint32_t most = 0;  // the bits of absolute values are in their order, NaN above all
  for (int64_t e = 0; e < count; ++e) {
    uint32_t bits;
    std::memcpy(&bits, values + e, sizeof(bits));
    const uint32_t magnitude = bits & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  float largest;
  std::memcpy(&largest, &most, sizeof(largest));
  const bool finite = most < 0x7f800000 && (most == 0 || largest >= kLeastOfGroup);
  vf sums = zero(), counts = zero(), tiny = zero(), all = zero();
  const vf sixteenth = bcast(largest / 16), few = bcast(largest * (kFewUnits / whole));
  const auto one_where = [](auto where) __attribute__((always_inline)) {
    return select(where, bcast(1.0f), zero());
  };
  for (int64_t e = 0; e < count; e += VL) {
    const vf value = load(values + e), magnitude = vmax(value, zero() - value);
    const vf small = select(above(sixteenth, magnitude), magnitude, zero());
    sums = sums + small;
    counts = counts + one_where(above(small, zero()));
    tiny = tiny + one_where(above(few, magnitude));
    all = all + one_where(above(magnitude, zero()));
  }
  const float small = hsum(counts), not_zero = hsum(all);
  const float zeros = static_cast<float>(count) - not_zero;
  const bool held = mostly_held(hsum(tiny) - zeros, not_zero) &&
                    (!notable(small, not_zero) || held_well(small, hsum(sums) * (whole / largest)));
  return {.largest = largest, .fits = finite && held};
}

// One row of x as blocks. False where a group cannot be held so: nothing useful was written then.
template <int P, typename T>
bool prepare_row(const T* x, int64_t in, char* to) {
  constexpr float kLargest = P == 3 ? 8355600.0f : 32600.0f;  // its digits are within -128 and 127
  for (int64_t first = 0; first < in; first += kInt4Inputs, to += prepared_block(P)) {
    int8_t* const planes = reinterpret_cast<int8_t*>(to);
    int32_t* const start = reinterpret_cast<int32_t*>(to + P * kInt4Inputs);
    float* const scale = reinterpret_cast<float*>(start + kInt4Lanes);
    for (int64_t g = 0; g < kInt4Groups; ++g) {
      float values[kInt4Group] = {};
      const int64_t from = first + g * kInt4Group, left = in - from;
      if (left >= kInt4Group) {
        store_scaled(x + from, kInt4Group, 1, values);
      } else if (left > 0) {
        store_scaled(x + from, left, 1, values);
      }
      const Group of = group_of(values, kInt4Group, kLargest);
      if (!of.fits) return false;
      const float up = of.largest > 0 ? kLargest / of.largest : 0;
      scale[2 * g] = scale[2 * g + 1] = of.largest / kLargest;
      int32_t whole[kInt4Group];
      for (int64_t e = 0; e < kInt4Group; ++e) {
        const float scaled = values[e] * up;
        whole[e] = static_cast<int32_t>(scaled + (scaled < 0 ? -0.5f : 0.5f));
      }
      int32_t sums[8] = {};
      for (int64_t c = 0; c < 4; ++c) {
        for (int64_t j = 0; j < 8; ++j) sums[j] += whole[8 * c + j];
      }
      start[2 * g] = -8 * (sums[0] + sums[1] + sums[2] + sums[3]);
      start[2 * g + 1] = -8 * (sums[4] + sums[5] + sums[6] + sums[7]);
      for (int64_t p = P - 1; p >= 0; --p) {
        int8_t digits[kInt4Group];
        for (int64_t e = 0; e < kInt4Group; ++e) {
          digits[e] = static_cast<int8_t>(whole[e] & 255);
          whole[e] = (whole[e] + 128) >> 8;
        }
        for (int64_t c = 0; c < 4; ++c) {
          std::memcpy(planes + p * kInt4Inputs + c * 64 + g * 8, digits + c * 8, 8);
        }
      }
    }
  }
  return true;
}

// Whole numbers in VL lanes, and the four vectors of weights of a block that belong to them.
#if defined(CPU_CAPABILITY_AVX512)
using vi = __m512i;
HL_INLINE vi load_whole(const void* p) { return _mm512_loadu_si512(p); }
HL_INLINE vi zero_whole() { return _mm512_setzero_si512(); }
HL_INLINE vi add_whole(vi a, vi b) { return _mm512_add_epi32(a, b); }
HL_INLINE vi times_256(vi a) { return _mm512_slli_epi32(a, 8); }
HL_INLINE vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
HL_INLINE vi low_halves(vi a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
HL_INLINE vi high_halves(vi a) { return low_halves(_mm512_srli_epi16(a, 4)); }
// start + sums of four neighbouring products of a weight and a byte of x.
HL_INLINE vi dot_block(vi start, const vi* w, const char* x) {
#if defined(__AVX512VNNI__)
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) start = _mm512_dpbusd_epi32(start, w[c], load_whole(x + 64 * c));
  return start;
#else
  vi sums = _mm512_maddubs_epi16(w[0], load_whole(x));
#pragma GCC unroll 4
  for (int c = 1; c < 4; ++c) {
    sums = _mm512_add_epi16(sums, _mm512_maddubs_epi16(w[c], load_whole(x + 64 * c)));
  }
  return _mm512_add_epi32(start, _mm512_madd_epi16(sums, _mm512_set1_epi16(1)));
#endif
}
// The scales of a vector's groups, each in two lanes.
HL_INLINE vf scales_of(const uint16_t* p) {
  __m128i raw;
  std::memcpy(&raw, p, sizeof(raw));
  const __m512i places = _mm512_set_epi8(15, 14, -1, -1, 15, 14, -1, -1, 13, 12, -1, -1, 13, 12, -1,
                                         -1, 11, 10, -1, -1, 11, 10, -1, -1, 9, 8, -1, -1, 9, 8, -1,
                                         -1, 7, 6, -1, -1, 7, 6, -1, -1, 5, 4, -1, -1, 5, 4, -1, -1,
                                         3, 2, -1, -1, 3, 2, -1, -1, 1, 0, -1, -1, 1, 0, -1, -1);
  return _mm512_castsi512_ps(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(raw), places));
}
constexpr int kInt4Rows = 4;
#elif defined(CPU_CAPABILITY_AVX2)
using vi = __m256i;
HL_INLINE vi load_whole(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
HL_INLINE vi zero_whole() { return _mm256_setzero_si256(); }
HL_INLINE vi add_whole(vi a, vi b) { return _mm256_add_epi32(a, b); }
HL_INLINE vi times_256(vi a) { return _mm256_slli_epi32(a, 8); }
HL_INLINE vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
HL_INLINE vi low_halves(vi a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
HL_INLINE vi high_halves(vi a) { return low_halves(_mm256_srli_epi16(a, 4)); }
HL_INLINE vi dot_block(vi start, const vi* w, const char* x) {
  vi sums = _mm256_maddubs_epi16(w[0], load_whole(x));
#pragma GCC unroll 4
  for (int c = 1; c < 4; ++c) {
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(w[c], load_whole(x + 64 * c)));
  }
  return _mm256_add_epi32(start, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
}
HL_INLINE vf scales_of(const uint16_t* p) {
  int64_t raw;
  std::memcpy(&raw, p, sizeof(raw));
  const __m256i places = _mm256_set_epi8(7, 6, -1, -1, 7, 6, -1, -1, 5, 4, -1, -1, 5, 4, -1, -1, 3,
                                         2, -1, -1, 3, 2, -1, -1, 1, 0, -1, -1, 1, 0, -1, -1);
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(_mm256_set1_epi64x(raw), places));
}
constexpr int kInt4Rows = 2;
#else
using vi = int32_t __attribute__((vector_size(16)));
using vb = uint8_t __attribute__((vector_size(16)));
HL_INLINE vi load_whole(const void* p) {
  vi a;
  std::memcpy(&a, p, sizeof(a));
  return a;
}
HL_INLINE vi zero_whole() { return vi{0, 0, 0, 0}; }
HL_INLINE vi add_whole(vi a, vi b) { return a + b; }
HL_INLINE vi times_256(vi a) { return a << 8; }
HL_INLINE vf to_float(vi a) { return __builtin_convertvector(a, vf); }
HL_INLINE vi low_halves(vi a) { return a & 0x0f0f0f0f; }
HL_INLINE vi high_halves(vi a) { return a >> 4 & 0x0f0f0f0f; }
HL_INLINE vi dot_block(vi start, const vi* w, const char* x) {
  for (int c = 0; c < 4; ++c) {
    vb weights;
    std::memcpy(&weights, w + c, sizeof(weights));
    const auto* const values = reinterpret_cast<const int8_t*>(x + 64 * c);
    for (int i = 0; i < 16; ++i) start[i / 4] += weights[i] * values[i];
  }
  return start;
}
HL_INLINE vf scales_of(const uint16_t* p) {
  const float first = widen(BFloat16{p[0]}), second = widen(BFloat16{p[1]});
  return vf{first, first, second, second};
}
constexpr int kInt4Rows = 2;
#endif

// Adds one block of an output to the sums of R rows, `line` bytes apart: 128 bytes of weights of
// eight groups, and their scales.
template <int P, int R>
HL_INLINE void add_block(const uint8_t* weight, const uint16_t* scale, const char* x, int64_t line,
                         vf (*sums)[R]) {
  constexpr int kParts = kInt4Lanes / VL;
  constexpr int64_t kBytes = 4 * VL;
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    const vi first = load_whole(weight + part * kBytes);
    const vi second = load_whole(weight + kInt4Bytes / 2 + part * kBytes);
    const vi w[4] = {low_halves(first), low_halves(second), high_halves(first),
                     high_halves(second)};
    const vf of_weights = scales_of(scale + part * VL / 2);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const char* const block = x + r * line + part * kBytes;
      const char* const lanes = x + r * line + P * kInt4Inputs + part * kBytes;
      vi whole = zero_whole();
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const vi start = p + 1 < P ? zero_whole() : load_whole(lanes);
        const vi sum = dot_block(start, w, block + p * kInt4Inputs);
        whole = p == 0 ? sum : add_whole(times_256(whole), sum);
      }
      const vf of_x = load(reinterpret_cast<const float*>(lanes + 4 * kInt4Lanes));
      sums[part][r] = fma(to_float(whole), of_weights * of_x, sums[part][r]);
    }
  }
}

template <int P, int R, typename T>
HL_INLINE void int4_tile(const Int4Args& a, int64_t output, int64_t row) {
  constexpr int kParts = kInt4Lanes / VL;
  constexpr int64_t kAhead = 8192;
  const int64_t groups = (a.in + kInt4Group - 1) / kInt4Group;
  const int64_t line = prepared_row(a.in, P);
  const uint8_t* weight = a.weight + output * groups * (kInt4Group / 2);
  const uint16_t* scale = a.scale + output * groups;
  const char* x = a.prepared + row * line;
  vf sums[kParts][R];
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[part][r] = zero();
  }
  int64_t group = 0;
  for (; group + kInt4Groups <= groups; group += kInt4Groups) {
    prefetch_once(weight + kAhead, a.past_cache);
    prefetch_once(weight + kAhead + 64, a.past_cache);
    prefetch_once(scale + kAhead / 16, a.past_cache);
    add_block<P, R>(weight, scale, x, line, sums);
    weight += kInt4Bytes;
    scale += kInt4Groups;
    x += prepared_block(P);
  }
  if (group < groups) {
    const int64_t left = groups - group;
    alignas(64) uint8_t bytes[kInt4Bytes] = {};
    uint16_t scales[kInt4Groups] = {};
    std::memcpy(bytes, weight, static_cast<size_t>(8 * left));
    std::memcpy(bytes + kInt4Bytes / 2, weight + 8 * left, static_cast<size_t>(8 * left));
    std::memcpy(scales, scale, static_cast<size_t>(2 * left));
    add_block<P, R>(bytes, scales, x, line, sums);
  }
  const T* bias = static_cast<const T*>(a.bias);
  const float offset = bias == nullptr ? 0 : widen(bias[output]);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    vf sum = sums[0][r];
#pragma GCC unroll 4
    for (int part = 1; part < kParts; ++part) sum = sum + sums[part][r];
    narrow(hsum(sum) + offset, static_cast<T*>(a.y) + (row + r) * a.out + output);
  }
}

template <int P, typename T>
void int4_outputs(const Int4Args& a, int64_t begin, int64_t end) {
  for (int64_t output = begin; output < end; ++output) {
    int64_t row = 0;
    for (; row + kInt4Rows <= a.rows; row += kInt4Rows) int4_tile<P, kInt4Rows, T>(a, output, row);
    for (; row < a.rows; ++row) int4_tile<P, 1, T>(a, output, row);
  }
}

template <int P, typename T>
bool int4_rows(const Int4Args& a, int64_t begin, int64_t end) {
  const int64_t line = prepared_row(a.in, P);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.in;
    if (!prepare_row<P>(x, a.in, a.prepared + row * line)) return false;
  }
  return true;
}

// Weights of outputs begin ... end and inputs i0 ... i1, of which the first begins a group.
template <typename T>
void int4_weights(const WidenArgs& a, int64_t begin, int64_t end, int64_t i0, int64_t i1, T* to) {
  const int64_t groups = (a.in + kInt4Group - 1) / kInt4Group;
  for (int64_t output = begin; output < end; ++output, to += i1 - i0) {
    const uint8_t* row = static_cast<const uint8_t*>(a.weight) + output * groups * (kInt4Group / 2);
    for (int64_t i = i0; i < i1; i += kInt4Group) {
      const int64_t group = i / kInt4Group, first = group / kInt4Groups * kInt4Groups;
      const int64_t in_block = groups - first < kInt4Groups ? groups - first : kInt4Groups;
      const uint8_t* bytes = row + first * (kInt4Group / 2) + 8 * (group - first);
      const float scale = widen(BFloat16{a.scale[output * groups + group]});
      float values[kInt4Group];
      for (int64_t half = 0; half < 2; ++half, bytes += 8 * in_block) {
        for (int64_t j = 0; j < 8; ++j) {
          values[8 * half + j] = static_cast<float>((bytes[j] & 15) - 8) * scale;
          values[16 + 8 * half + j] = static_cast<float>((bytes[j] >> 4) - 8) * scale;
        }
      }
      store_scaled(values, i1 - i < kInt4Group ? i1 - i : kInt4Group, 1, to + (i - i0));
    }
  }
}

template <typename T>
void int8_weights(const WidenArgs& a, int64_t begin, int64_t end, int64_t i0, int64_t i1, T* to) {
  for (int64_t output = begin; output < end; ++output, to += i1 - i0) {
    const int8_t* from = static_cast<const int8_t*>(a.weight) + output * a.in + i0;
    int64_t i = 0;
    for (; i + VL <= i1 - i0; i += VL) store(to + i, load(from + i));
    for (; i < i1 - i0; ++i) narrow(static_cast<float>(from[i]), to + i);
  }
}

template <typename T>
void weights(const WidenArgs& a, int64_t begin, int64_t end, int64_t i0, int64_t i1, T* to) {
  a.scale == nullptr ? int8_weights(a, begin, end, i0, i1, to)
                     : int4_weights(a, begin, end, i0, i1, to);
}

}  // namespace
}  // namespace headloom::ops::linear_kernel
