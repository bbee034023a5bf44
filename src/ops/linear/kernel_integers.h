// Products of many rows of bfloat16 with weights of sixteen, eight or four bits, in integers of 16
// bits: with AVX2 alone an instruction multiplies and adds twice as many pairs of those as of
// float32. A second one adds the result to the sums. A Zen 3 starts 1.6 of each in a clock, or two
// products of float32, so that integers are at most 1.6 times as fast.
//
// x is held with 16 bits for each group of inputs, which is 8 bits more than a bfloat16 has: whole
// numbers of which the group's largest is 32600. A row with a group whose values are too far apart
// for that is unfit (held_well() in kernel_int4.h) and is multiplied elsewhere. Weights of eight
// bits are whole numbers already, with a scale for each output. The sums of a group of 256 inputs
// fit into 32 bits: 256 products of 32600 and 127.
//
// Weights in bfloat16 become whole numbers too, with a scale for each 128 inputs. The sums fit
// where the largest weight is 8191 and the magnitudes of x add up to 262000, which is 2047 in the
// mean. With values of a normal distribution the root mean square of the errors of the sums is a
// tenth of that of their rounding to bfloat16. An output whose weights are too far apart is unfit
// as well. Weights of four bits, whose scales change every 32 inputs, become the same: sums that
// are scaled that often would cost a sixth of the time.
//
// A panel holds a few rows of x, or a few outputs of the weights. For each group of inputs it has
// their scales, and then for each two inputs the pairs of all of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ops/kernel/transpose.h"
#include "ops/kernel/vec.h"
#include "ops/linear/int4.h"
#include "ops/linear/kernel.h"
#include "ops/linear/kernel_int4.h"

namespace headloom::ops::linear_kernel {
namespace {

#if defined(CPU_CAPABILITY_AVX2)

constexpr int kVectors = kIntegerOutputs / VL;
constexpr int64_t kMostOfGroup = kInt8Group;
constexpr float kMostOfX = 32600;       // of its whole numbers
constexpr float kMostOfWeights = 8191;  // of those in bfloat16 and of four bits,
constexpr float kSumOfX = 262000;       // and of the magnitudes of x that meet them

// Two whole numbers of 16 bits, the earlier input in the low half.
using TwoInputs = uint32_t;

// Whether a group with this largest value has a scale. Sums of larger ones, which are scaled by the
// weights' scale first, may be infinite before they have that of x.
HL_INLINE bool has_scale(float largest) { return largest >= kLeastOfGroup && largest <= 1e32f; }

// A group of one row of x or of the weights: whole numbers up to `most`, of which the magnitudes
// add up to no more than `sum` if that is not 0, and what they are to be multiplied with. False
// where that cannot be.
HL_INLINE bool whole_numbers(const BFloat16* x, int64_t count, int64_t group, float most, float sum,
                             int16_t* whole, float* scale) {
  constexpr int64_t kStep = 16;  // values of one vector, of which a group has some
  BFloat16 padded[kMostOfGroup];
  if (count < group) {
    std::fill(std::copy_n(x, count, padded), padded + group, BFloat16{});
    x = padded;
  }
  // The bits of absolute values are in their order, NaN above all.
  const auto magnitudes = [&](int64_t i) __attribute__((always_inline)) {
    return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)),
                            _mm256_set1_epi16(0x7fff));
  };
  __m256i largest_of_lanes = _mm256_setzero_si256();
  for (int64_t i = 0; i < group; i += kStep) {
    largest_of_lanes = _mm256_max_epu16(largest_of_lanes, magnitudes(i));
  }
  const __m128i largest_of_eight = _mm_max_epu16(_mm256_castsi256_si128(largest_of_lanes),
                                                 _mm256_extracti128_si256(largest_of_lanes, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(largest_of_eight, _mm_set1_epi16(-1)));
  const int bits = 0xffff ^ _mm_extract_epi16(least, 0);
  const float largest = widen(BFloat16{static_cast<uint16_t>(bits)});
  if (bits == 0) {
    std::fill(whole, whole + group, int16_t{0});
    *scale = 0;
    return true;
  }
  if (!has_scale(largest)) return false;
  // Values at even places, and those at odd ones, of sixteen neighbours.
  const auto evens = [](__m256i v) __attribute__((always_inline)) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
  };
  const auto odds = [](__m256i v) __attribute__((always_inline)) {
    return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(~0xffff)));
  };
  if (sum != 0) {
    vf all = zero();
    for (int64_t i = 0; i < group; i += kStep) {
      all = all + (evens(magnitudes(i)) + odds(magnitudes(i)));
    }
    most = std::min(most, sum * (largest / hsum(all)));
  }
  const vf up = bcast(most / largest);
  const __m256i sixteenth = _mm256_set1_epi16(static_cast<int16_t>(std::ceil(most / 16)));
  // Of each lane: how many small values there are, 0 among them, what they add up to, how many are
  // next to nothing, and how many are 0. Counts are below 0.
  __m256i below = _mm256_setzero_si256(), of_small = below, tiny = below, zeros = below;
  for (int64_t i = 0; i < group; i += kStep) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    const __m256i even = _mm256_cvtps_epi32(evens(v) * up), odd = _mm256_cvtps_epi32(odds(v) * up);
    const __m256i both = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(whole + i), both);
    const __m256i magnitude = _mm256_abs_epi16(both);
    const __m256i is_small = _mm256_cmpgt_epi16(sixteenth, magnitude);
    below = _mm256_add_epi16(below, is_small);
    tiny = _mm256_add_epi16(
        tiny, _mm256_cmpgt_epi16(_mm256_set1_epi16(static_cast<int16_t>(kFewUnits)), magnitude));
    of_small = _mm256_add_epi32(
        of_small, _mm256_madd_epi16(_mm256_and_si256(magnitude, is_small), _mm256_set1_epi16(1)));
    zeros = _mm256_add_epi16(zeros, _mm256_cmpeq_epi16(magnitudes(i), _mm256_setzero_si256()));
  }
  const auto added = [](__m256i of_lanes) { return hsum(_mm256_cvtepi32_ps(of_lanes)); };
  const auto count_of = [&](__m256i negative) __attribute__((always_inline)) {
    return added(_mm256_madd_epi16(negative, _mm256_set1_epi16(-1)));
  };
  const float none = count_of(zeros), small = count_of(below) - none;
  const float all = static_cast<float>(group) - none;
  *scale = largest / most;
  return mostly_held(count_of(tiny) - none, all) &&
         (!notable(small, all) || held_well(small, added(of_small)));
}

void pack_rows(const IntegerArgs& a, int64_t begin, int64_t end) {
  const int64_t group = a.group, lines = group / 2;
  const float sum = a.row_scale == nullptr ? kSumOfX : 0;
  for (int64_t panel = begin; panel < end; ++panel) {
    auto* to = reinterpret_cast<TwoInputs*>(a.packed_x + panel * a.panel_bytes(kIntegerRows));
    for (int64_t i = 0; i < a.in; i += group, to += kIntegerRows * lines) {
      auto* const scales = reinterpret_cast<float*>(to);
      to += kIntegerRows;
      for (int64_t r = 0; r < kIntegerRows; ++r) {
        const int64_t row = kIntegerRows * panel + r;
        int16_t whole[kMostOfGroup];
        scales[r] = 0;
        const bool fits =
            row < a.rows &&
            whole_numbers(static_cast<const BFloat16*>(a.x) + row * a.in + i,
                          std::min(group, a.in - i), group, kMostOfX, sum, whole, scales + r);
        if (!fits) {
          if (row < a.rows) a.unfit_rows[row] = 1;
          std::fill(whole, whole + group, int16_t{0});
        }
        for (int64_t l = 0; l < lines; ++l) {
          std::memcpy(to + l * kIntegerRows + r, whole + 2 * l, sizeof(TwoInputs));
        }
      }
    }
  }
}

// Sixteen bytes of weights as whole numbers.
HL_INLINE void store_wide(__m128i bytes, int16_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_cvtepi8_epi16(bytes));
}

// Fetches what is packed after a group of weights: the next group of this output, or the first of
// its successor in the next panel. Processors do not foresee such short pieces. A row of weights
// takes `row` bytes, and the group begins at byte `at` of it and takes `bytes`.
HL_INLINE void fetch_next_group(const IntegerArgs& a, int64_t output, int64_t row, int64_t at,
                                int64_t bytes) {
  const bool last = at + bytes >= row;
  const char* const from = static_cast<const char*>(a.weight) +
                           (last ? (output + kIntegerOutputs) * row : output * row + at + bytes);
  for (int64_t e = 0; e < bytes; e += 64) __builtin_prefetch(from + e);
}

// The whole numbers of 32 weights of four bits that are multiplied with `factor`. The first eight
// bytes of them are at `first` and the others at `second`, as int4.h says.
HL_INLINE void store_int4(const uint8_t* first, const uint8_t* second, float factor, int16_t* to) {
  // What each of the 16 codes becomes, as its low bytes and its high ones.
  const vf codes = _mm256_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1), up = bcast(factor);
  const __m256i below = _mm256_cvtps_epi32(codes * up);
  const __m256i above = _mm256_cvtps_epi32((codes + bcast(8.0f)) * up);
  const __m128i eight =
      _mm_packs_epi32(_mm256_castsi256_si128(below), _mm256_extracti128_si256(below, 1));
  const __m128i others =
      _mm_packs_epi32(_mm256_castsi256_si128(above), _mm256_extracti128_si256(above, 1));
  const __m128i byte = _mm_set1_epi16(255), four = _mm_set1_epi8(15);
  const __m128i low = _mm_packus_epi16(_mm_and_si128(eight, byte), _mm_and_si128(others, byte));
  const __m128i high = _mm_packus_epi16(_mm_srli_epi16(eight, 8), _mm_srli_epi16(others, 8));
  const auto half = [](const uint8_t* from) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  };
  const __m128i both = _mm_unpacklo_epi64(half(first), half(second));
  auto* const out = reinterpret_cast<__m128i*>(to);
  for (const int64_t h : {0, 1}) {
    const __m128i which = _mm_and_si128(h == 0 ? both : _mm_srli_epi16(both, 4), four);
    const __m128i lows = _mm_shuffle_epi8(low, which), highs = _mm_shuffle_epi8(high, which);
    _mm_storeu_si128(out + 2 * h, _mm_unpacklo_epi8(lows, highs));
    _mm_storeu_si128(out + 2 * h + 1, _mm_unpackhi_epi8(lows, highs));
  }
}

// Some groups of four bits of one output, from input i on, with one scale. False where theirs are
// too far apart.
HL_INLINE bool int4_weights(const IntegerArgs& a, int64_t output, int64_t i, int16_t* to,
                            float* scale) {
  const int64_t groups = (a.in + kInt4Group - 1) / kInt4Group, begin = i / kInt4Group;
  const int64_t first = begin / kInt4Groups * kInt4Groups;
  const int64_t in_block = std::min(groups - first, kInt4Groups);
  const int64_t count = std::min(groups - begin, a.group / kInt4Group);
  const uint16_t* const scales = a.group_scale + output * groups + begin;
  const auto factor = [&](int64_t g) { return widen(BFloat16{scales[g]}); };
  float largest = 0, least = std::numeric_limits<float>::infinity();
  bool finite = true;
  for (int64_t g = 0; g < count; ++g) {
    const float magnitude = std::abs(factor(g));
    finite = finite && magnitude < std::numeric_limits<float>::infinity();  // and no NaN
    largest = std::max(largest, magnitude);
    if (magnitude > 0) least = std::min(least, magnitude);
  }
  *scale = 0;
  std::fill(to + count * kInt4Group, to + a.group, int16_t{0});
  if (finite && largest == 0) {
    std::fill(to, to + count * kInt4Group, int16_t{0});
    return true;
  }
  // A code of a group with the largest scale is 1023 units, and one of any other at least 128, as
  // held_well() asks of small values.
  if (!finite || !has_scale(8 * largest) || 8 * least < largest) return false;
  *scale = 8 * largest / kMostOfWeights;
  const float up = kMostOfWeights / (8 * largest);
  const uint8_t* from = static_cast<const uint8_t*>(a.weight) +
                        (output * groups + first) * (kInt4Group / 2) + 8 * (begin - first);
  for (int64_t g = 0; g < count; ++g, from += 8, to += kInt4Group) {
    store_int4(from, from + 8 * in_block, factor(g) * up, to);
  }
  return true;
}

// A group of one output's weights, which begins at input i, and its scale.
HL_INLINE float weights_of_group(const IntegerArgs& a, int64_t output, int64_t i, int16_t* to) {
  const int64_t count = std::min(a.group, a.in - i);
  if (a.row_scale != nullptr) {
    const auto* const from = static_cast<const int8_t*>(a.weight) + output * a.in + i;
    fetch_next_group(a, output, a.in, i, a.group);
    int64_t e = 0;
    for (; e + 16 <= count; e += 16) {
      store_wide(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + e)), to + e);
    }
    for (; e < count; ++e) to[e] = from[e];
    std::fill(to + count, to + a.group, int16_t{0});
    const float scale = a.row_scale[output];
    if (scale != 0 && !has_scale(std::abs(scale) * 127)) a.unfit_outputs[output] = 1;
    return scale;
  }
  float scale = 0;
  bool fits;
  if (a.group_scale != nullptr) {
    const int64_t row = (a.in + kInt4Group - 1) / kInt4Group * (kInt4Group / 2);
    fetch_next_group(a, output, row, i / 2, a.group / 2);
    fits = int4_weights(a, output, i, to, &scale);
  } else {
    const auto* const from = static_cast<const BFloat16*>(a.weight) + output * a.in + i;
    fetch_next_group(a, output, 2 * a.in, 2 * i, 2 * a.group);
    fits = whole_numbers(from, count, a.group, kMostOfWeights, 0, to, &scale);
  }
  if (!fits) {
    a.unfit_outputs[output] = 1;
    std::fill(to, to + a.group, int16_t{0});
  }
  return scale;
}

// The outputs of one panel, of which there may be fewer.
void pack_outputs(const IntegerArgs& a, int64_t begin, TwoInputs* to) {
  const int64_t lines = a.group / 2, count = std::min(kIntegerOutputs, a.out - begin);
  int16_t rows[kIntegerOutputs * kMostOfGroup];
  // Of outputs that there are not.
  std::fill(rows + count * a.group, rows + kIntegerOutputs * a.group, int16_t{0});
  for (int64_t i = 0; i < a.in; i += a.group, to += lines * kIntegerOutputs) {
    auto* const scales = reinterpret_cast<float*>(to);
    std::fill(scales, scales + kIntegerOutputs, 0.0f);
    to += kIntegerOutputs;
    for (int64_t o = 0; o < count; ++o) {
      scales[o] = weights_of_group(a, begin + o, i, rows + o * a.group);
    }
    transpose(kIntegerOutputs, lines, reinterpret_cast<const float*>(rows), lines,
              reinterpret_cast<float*>(to), kIntegerOutputs);
  }
}

// sum += the sums of two neighbouring products. By intrinsics GCC begins with all products of a
// line, and has no registers left for the sums.
HL_INLINE void add_products(__m256i a, __m256i b, __m256i& sum) {
  __m256i products;
  asm("vpmaddwd %[b], %[a], %[products]\n\tvpaddd %[products], %[sum], %[sum]"
      : [sum] "+x"(sum), [products] "=&x"(products)
      : [a] "x"(a), [b] "x"(b));
}

// One panel of x with one of the weights.
HL_INLINE void block(const IntegerArgs& a, const TwoInputs* x, const TwoInputs* w, int64_t row,
                     int64_t output) {
  float sums[kIntegerRows][kIntegerOutputs] = {};
  const int64_t lines = a.group / 2;
  for (int64_t i = 0; i < a.in; i += a.group) {
    const auto* const of_x = reinterpret_cast<const float*>(x);
    const auto* const of_w = reinterpret_cast<const float*>(w);
    x += kIntegerRows;
    w += kIntegerOutputs;
    __m256i whole[kIntegerRows][kVectors];
#pragma GCC unroll 6
    for (auto& line : whole) {
#pragma GCC unroll 6
      for (__m256i& v : line) v = _mm256_setzero_si256();
    }
#pragma GCC unroll 2
    for (int64_t l = 0; l < lines; ++l, x += kIntegerRows, w += kIntegerOutputs) {
      __m256i weights[kVectors];
#pragma GCC unroll 6
      for (int j = 0; j < kVectors; ++j) {
        weights[j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + j * VL));
      }
#pragma GCC unroll 6
      for (int r = 0; r < kIntegerRows; ++r) {
        const __m256i one = _mm256_set1_epi32(static_cast<int>(x[r]));
#pragma GCC unroll 6
        for (int j = 0; j < kVectors; ++j) {
          add_products(one, weights[j], whole[r][j]);
        }
      }
    }
#pragma GCC unroll 6
    for (int j = 0; j < kVectors; ++j) {
      // One after the other: the product of two scales may be too small for a normal number.
      const vf scale = load(of_w + j * VL);
#pragma GCC unroll 6
      for (int r = 0; r < kIntegerRows; ++r) {
        float* const sum = sums[r] + j * VL;
        store(sum, fma(_mm256_cvtepi32_ps(whole[r][j]) * scale, bcast(of_x[r]), load(sum)));
      }
    }
  }
  const auto* const bias = static_cast<const BFloat16*>(a.bias);
  const int64_t rows = std::min(kIntegerRows, a.rows - row);
  for (int64_t r = 0; r < rows; ++r) {
    auto* const y = static_cast<BFloat16*>(a.y) + (row + r) * a.out + output;
    for (int64_t j = 0; j < std::min(kIntegerOutputs, a.out - output); j += VL) {
      vf sum = load(sums[r] + j);
      if (bias != nullptr) sum = sum + load_some(bias + output + j, a.out - output - j);
      store_some(y + j, sum, a.out - output - j);
    }
  }
}

void multiply_integers(const IntegerArgs& a, int64_t begin, int64_t end, void* packed) {
  const int64_t panel = a.panel_bytes(kIntegerOutputs) / static_cast<int64_t>(sizeof(TwoInputs));
  auto* const weights = static_cast<TwoInputs*>(packed);
  for (int64_t o = begin; o < end; o += kIntegerOutputs) {
    pack_outputs(a, o, weights + (o - begin) / kIntegerOutputs * panel);
  }
  for (int64_t row = 0; row < a.rows; row += kIntegerRows) {
    const char* const x = a.packed_x + row / kIntegerRows * a.panel_bytes(kIntegerRows);
    for (int64_t o = begin; o < end; o += kIntegerOutputs) {
      block(a, reinterpret_cast<const TwoInputs*>(x),
            weights + (o - begin) / kIntegerOutputs * panel, row, o);
    }
  }
}

#else

// Elsewhere integers are no faster than what weights are widened to.
void pack_rows(const IntegerArgs&, int64_t, int64_t) {}
void multiply_integers(const IntegerArgs&, int64_t, int64_t, void*) {}

#endif

}  // namespace
}  // namespace headloom::ops::linear_kernel
