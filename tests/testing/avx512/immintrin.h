// The instructions of AVX-512 (with BF16 and VNNI) and of AMX that the kernels use, for a processor
// that has AVX2 alone. The build option HEADLOOM_EMULATION puts this header before the compiler's.
// The functions have the compiler's names, and namespace headloom is searched before the global
// one.
//
// Results are those of the processor, but for this: products of pairs of bfloat16 keep subnormal
// numbers, which the processor takes for zero, and sums and maxima of a whole vector may be taken
// in another order. Speed does not matter. An instruction that is missing here does not compile.
#pragma once

#include_next <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// Macros of the compiler.
#undef _mm512_getmant_ps
#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps

// Defined here, because with them the compiler's headers ask for its own functions.
#if defined(HEADLOOM_EMULATE_BF16)
#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1
#endif

#define HL_EMULATED inline __attribute__((always_inline))

namespace headloom {
namespace {

namespace emulation {

using Bytes = int8_t __attribute__((vector_size(64), may_alias));
using Shorts = int16_t __attribute__((vector_size(64), may_alias));
using Ints = int32_t __attribute__((vector_size(64), may_alias));
using Unsigned = uint32_t __attribute__((vector_size(64), may_alias));

template <typename V>
HL_EMULATED V read(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <typename V>
constexpr int kLanes = static_cast<int>(sizeof(V) / sizeof(V{}[0]));

// Lane i is f(i).
template <typename V, typename F>
HL_EMULATED V lanes(F&& f) {
  V v{};
  for (int i = 0; i < kLanes<V>; ++i) v[i] = f(i);
  return v;
}

// f of the lower halves of vectors and of the upper ones.
template <typename F, typename... V>
HL_EMULATED __m512 by_halves(F&& f, const V&... vectors) {
  __m256 halves[2];
  for (int i = 0; i < 2; ++i) {
    halves[i] = f(read<__m256>(reinterpret_cast<const char*>(&vectors) + 32 * i)...);
  }
  return read<__m512>(halves);
}

// Lanes without their bit in the mask are zero, and their memory is not read.
template <typename V>
HL_EMULATED V load(uint64_t mask, const void* p) {
  V v{};
  for (int i = 0; i < kLanes<V>; ++i) {
    auto lane = v[i];
    if (mask >> i & 1)
      std::memcpy(&lane, static_cast<const char*>(p) + i * static_cast<int>(sizeof(lane)),
                  sizeof(lane));
    v[i] = lane;
  }
  return v;
}

// Quarter i is quarter (imm >> 2 i) & 3, of a for the lower two and of b for the upper two.
template <typename V>
HL_EMULATED V quarters(V a, V b, int imm) {
  constexpr int n = kLanes<V> / 4;
  return lanes<V>([&](int i) { return (i < 2 * n ? a : b)[(imm >> (i / n * 2) & 3) * n + i % n]; });
}

// Lanes of a and b in turn: of each quarter the lower half, or the upper one.
template <typename V>
HL_EMULATED V unpacked(V a, V b, bool upper) {
  constexpr int n = kLanes<V> / 4;
  return lanes<V>(
      [&](int i) { return (i % 2 ? b : a)[i / n * n + (upper ? n / 2 : 0) + i % n / 2]; });
}

// To an integer: the nearest one, an even one between two, or the one below.
HL_EMULATED float rounded(float a, int mode) {
  return (mode & 3) == _MM_FROUND_TO_NEG_INF ? std::floor(a) : std::nearbyint(a);
}

HL_EMULATED uint16_t narrowed(float a) {
  const uint32_t bits = std::bit_cast<uint32_t>(a);
  if (std::isnan(a)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  if ((bits & 0x7f800000) == 0)
    return static_cast<uint16_t>(bits >> 16 & 0x8000);  // as the processor has it
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

HL_EMULATED int16_t saturated(int x) {
  return static_cast<int16_t>(x < -32768 ? -32768 : x > 32767 ? 32767 : x);
}

}  // namespace emulation

HL_EMULATED __m512 _mm512_loadu_ps(const void* p) { return emulation::read<__m512>(p); }
HL_EMULATED __m512i _mm512_loadu_si512(const void* p) { return emulation::read<__m512i>(p); }
HL_EMULATED void _mm512_storeu_ps(void* p, __m512 a) { std::memcpy(p, &a, sizeof(a)); }
HL_EMULATED void _mm512_storeu_si512(void* p, __m512i a) { std::memcpy(p, &a, sizeof(a)); }
HL_EMULATED void _mm512_store_si512(void* p, __m512i a) { std::memcpy(p, &a, sizeof(a)); }
HL_EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 m, const void* p) {
  return emulation::load<__m512>(m, p);
}
HL_EMULATED __m512i _mm512_maskz_loadu_epi32(__mmask16 m, const void* p) {
  return (__m512i)emulation::load<emulation::Ints>(m, p);
}
HL_EMULATED __m512i _mm512_maskz_loadu_epi16(__mmask32 m, const void* p) {
  return (__m512i)emulation::load<emulation::Shorts>(m, p);
}
HL_EMULATED __m256i _mm256_maskz_loadu_epi16(__mmask16 m, const void* p) {
  const __m512i whole = _mm512_maskz_loadu_epi16(m, p);
  return emulation::read<__m256i>(&whole);
}
HL_EMULATED void _mm512_mask_storeu_ps(void* p, __mmask16 m, __m512 a) {
  for (int i = 0; i < 16; ++i) {
    const float lane = a[i];
    if (m >> i & 1) std::memcpy(static_cast<char*>(p) + 4 * i, &lane, sizeof(lane));
  }
}

HL_EMULATED __m512 _mm512_set1_ps(float a) { return __m512{} + a; }
HL_EMULATED __m512d _mm512_set1_pd(double a) { return __m512d{} + a; }
HL_EMULATED __m512i _mm512_set1_epi32(int a) { return (__m512i)(emulation::Ints{} + a); }
HL_EMULATED __m512i _mm512_set1_epi16(int16_t a) { return (__m512i)(emulation::Shorts{} + a); }
HL_EMULATED __m512i _mm512_set1_epi8(int8_t a) { return (__m512i)(emulation::Bytes{} + a); }
HL_EMULATED __m512i _mm512_setzero_si512() { return __m512i{}; }
template <typename... T>
HL_EMULATED __m512i _mm512_set_epi16(T... from_last) {
  const int16_t all[] = {static_cast<int16_t>(from_last)...};
  return (__m512i)emulation::lanes<emulation::Shorts>([&](int i) { return all[31 - i]; });
}
template <typename... T>
HL_EMULATED __m512i _mm512_set_epi8(T... from_last) {
  const int8_t all[] = {static_cast<int8_t>(from_last)...};
  return (__m512i)emulation::lanes<emulation::Bytes>([&](int i) { return all[63 - i]; });
}
HL_EMULATED __m512 _mm512_castpd_ps(__m512d a) { return (__m512)a; }
HL_EMULATED __m512d _mm512_castps_pd(__m512 a) { return (__m512d)a; }
HL_EMULATED __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
HL_EMULATED __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }
HL_EMULATED __m128 _mm512_castps512_ps128(__m512 a) { return emulation::read<__m128>(&a); }
HL_EMULATED __m256 _mm512_castps512_ps256(__m512 a) { return emulation::read<__m256>(&a); }
HL_EMULATED __m512 _mm512_zextps256_ps512(__m256 a) {
  __m512 whole{};
  std::memcpy(&whole, &a, sizeof(a));
  return whole;
}

HL_EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return emulation::by_halves([](auto... x) { return _mm256_fmadd_ps(x...); }, a, b, c);
}
HL_EMULATED __m512 _mm512_fmsub_ps(__m512 a, __m512 b, __m512 c) {
  return emulation::by_halves([](auto... x) { return _mm256_fmsub_ps(x...); }, a, b, c);
}
HL_EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) {
  return emulation::by_halves([](auto... x) { return _mm256_max_ps(x...); }, a, b);
}
HL_EMULATED __m512 _mm512_min_ps(__m512 a, __m512 b) {
  return emulation::by_halves([](auto... x) { return _mm256_min_ps(x...); }, a, b);
}
HL_EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) {
    const bool is = predicate == _CMP_GT_OQ ? a[i] > b[i] : std::isnan(a[i]) || std::isnan(b[i]);
    mask |= static_cast<unsigned>(is) << i;
  }
  return static_cast<__mmask16>(mask);
}
HL_EMULATED __m512 _mm512_mask_blend_ps(__mmask16 m, __m512 a, __m512 b) {
  return emulation::lanes<__m512>([&](int i) { return m >> i & 1 ? b[i] : a[i]; });
}
HL_EMULATED __m512 _mm512_maskz_compress_ps(__mmask16 m, __m512 a) {
  __m512 packed{};
  int n = 0;
  for (int i = 0; i < 16; ++i) {
    if (m >> i & 1) packed[n++] = a[i];
  }
  return packed;
}
HL_EMULATED float _mm512_reduce_max_ps(__m512 a) {
  float x = a[0];
  for (int i = 1; i < 16; ++i) x = a[i] > x ? a[i] : x;
  return x;
}
HL_EMULATED float _mm512_reduce_add_ps(__m512 a) {
  float x[16];
  std::memcpy(x, &a, sizeof(x));
  for (int n = 8; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) x[i] += x[i + n];
  }
  return x[0];
}

HL_EMULATED __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int imm) {
  return emulation::quarters(a, b, imm);
}
HL_EMULATED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int imm) {
  return emulation::quarters(a, b, imm);
}
HL_EMULATED __m512 _mm512_permute_ps(__m512 a, int imm) {
  return emulation::lanes<__m512>([&](int i) { return a[i / 4 * 4 + (imm >> (i % 4 * 2) & 3)]; });
}
HL_EMULATED __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) {
  return emulation::unpacked(a, b, false);
}
HL_EMULATED __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) {
  return emulation::unpacked(a, b, true);
}
HL_EMULATED __m512d _mm512_unpacklo_pd(__m512d a, __m512d b) {
  return emulation::unpacked(a, b, false);
}
HL_EMULATED __m512d _mm512_unpackhi_pd(__m512d a, __m512d b) {
  return emulation::unpacked(a, b, true);
}
HL_EMULATED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
  return emulation::unpacked(a, b, false);
}
HL_EMULATED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
  return emulation::unpacked(a, b, true);
}
HL_EMULATED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) {
  return (__m512i)emulation::unpacked((emulation::Ints)a, (emulation::Ints)b, false);
}
HL_EMULATED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) {
  return (__m512i)emulation::unpacked((emulation::Ints)a, (emulation::Ints)b, true);
}
HL_EMULATED __m512i _mm512_broadcast_i32x4(__m128i a) {
  return emulation::lanes<__m512i>([&](int i) { return a[i % 2]; });
}
HL_EMULATED __m512i _mm512_permutexvar_epi16(__m512i order, __m512i a) {
  const auto from = (emulation::Shorts)order, x = (emulation::Shorts)a;
  return (__m512i)emulation::lanes<emulation::Shorts>([&](int i) { return x[from[i] & 31]; });
}
HL_EMULATED __m512i _mm512_shuffle_epi8(__m512i a, __m512i order) {
  const auto from = (emulation::Bytes)order, x = (emulation::Bytes)a;
  return (__m512i)emulation::lanes<emulation::Bytes>(
      [&](int i) { return from[i] < 0 ? 0 : x[i / 16 * 16 + (from[i] & 15)]; });
}

HL_EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
HL_EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
HL_EMULATED __m512i _mm512_mask_or_epi32(__m512i source, __mmask16 m, __m512i a, __m512i b) {
  const auto both = (emulation::Ints)(a | b), other = (emulation::Ints)source;
  return (__m512i)emulation::lanes<emulation::Ints>(
      [&](int i) { return m >> i & 1 ? both[i] : other[i]; });
}
HL_EMULATED __m512i _mm512_slli_epi32(__m512i a, unsigned n) {
  return (__m512i)((emulation::Unsigned)a << n);
}
HL_EMULATED __m512i _mm512_srli_epi32(__m512i a, unsigned n) {
  return (__m512i)((emulation::Unsigned)a >> n);
}
HL_EMULATED __m512i _mm512_srli_epi16(__m512i a, unsigned n) {
  const auto x = (emulation::Shorts)a;
  return (__m512i)emulation::lanes<emulation::Shorts>(
      [&](int i) { return static_cast<uint16_t>(x[i]) >> n; });
}
HL_EMULATED __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return (__m512i)((emulation::Unsigned)a + (emulation::Unsigned)b);
}
HL_EMULATED __m512i _mm512_add_epi16(__m512i a, __m512i b) {
  return (__m512i)((emulation::Shorts)a + (emulation::Shorts)b);
}
HL_EMULATED __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  const auto x = (emulation::Shorts)a, y = (emulation::Shorts)b;
  return (__m512i)emulation::lanes<emulation::Ints>(
      [&](int i) { return x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1]; });
}
// Of a without signs and b with signs, like the next one.
HL_EMULATED __m512i _mm512_maddubs_epi16(__m512i a, __m512i b) {
  const auto x = (emulation::Bytes)a, y = (emulation::Bytes)b;
  const auto product = [&](int i) { return static_cast<uint8_t>(x[i]) * y[i]; };
  return (__m512i)emulation::lanes<emulation::Shorts>(
      [&](int i) { return emulation::saturated(product(2 * i) + product(2 * i + 1)); });
}
HL_EMULATED __m512i _mm512_dpbusd_epi32(__m512i c, __m512i a, __m512i b) {
  const auto x = (emulation::Bytes)a, y = (emulation::Bytes)b;
  const auto product = [&](int i) { return static_cast<uint8_t>(x[i]) * y[i]; };
  return (__m512i)((emulation::Ints)c + emulation::lanes<emulation::Ints>([&](int i) {
                     return product(4 * i) + product(4 * i + 1) + product(4 * i + 2) +
                            product(4 * i + 3);
                   }));
}

HL_EMULATED __m512 _mm512_cvtepi32_ps(__m512i a) {
  const auto x = (emulation::Ints)a;
  return emulation::lanes<__m512>([&](int i) { return static_cast<float>(x[i]); });
}
HL_EMULATED __m256i _mm512_cvtepi32_epi16(__m512i a) {
  const auto x = (emulation::Ints)a;
  int16_t low[16];
  for (int i = 0; i < 16; ++i) low[i] = static_cast<int16_t>(x[i]);
  return emulation::read<__m256i>(low);
}
HL_EMULATED __m512i _mm512_cvtepu16_epi32(__m256i a) {
  uint16_t x[16];
  std::memcpy(x, &a, sizeof(x));
  return (__m512i)emulation::lanes<emulation::Ints>([&](int i) { return x[i]; });
}
HL_EMULATED __m512i _mm512_cvtepi8_epi32(__m128i a) {
  int8_t x[16];
  std::memcpy(x, &a, sizeof(x));
  return (__m512i)emulation::lanes<emulation::Ints>([&](int i) { return x[i]; });
}

// a times 2^floor(b), rounded once.
HL_EMULATED __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  return emulation::lanes<__m512>([&](int i) -> float {
    const float x = a[i], y = b[i];
    if (std::isnan(x) || std::isnan(y)) return x + y;
    if (std::isinf(y)) return y > 0 ? x * y : x * 0.0f;  // NaN of 0 and of infinity
    // A float is a multiple of 2^-149 and below 2^128, so that beyond 400 nothing changes.
    const auto power = static_cast<int64_t>(std::floor(y < -400 ? -400.0f : y > 400 ? 400.0f : y));
    return static_cast<float>(x * std::bit_cast<double>(static_cast<uint64_t>(power + 1023) << 52));
  });
}
HL_EMULATED __m512 _mm512_roundscale_ps(__m512 a, int mode) {
  return emulation::lanes<__m512>([&](int i) { return emulation::rounded(a[i], mode); });
}
HL_EMULATED __m512 _mm512_reduce_ps(__m512 a, int mode) {
  return emulation::lanes<__m512>(
      [&](int i) { return std::isinf(a[i]) ? 0.0f : a[i] - emulation::rounded(a[i], mode); });
}
HL_EMULATED __m512 _mm512_getexp_ps(__m512 a) {
  return emulation::lanes<__m512>([&](int i) { return std::logb(a[i]); });
}
// In [1, 2), with the sign of a. A macro, because by the types of its other arguments the
// compiler's function would be found as well.
#define _mm512_getmant_ps(a, interval, sign) mantissas(a)
HL_EMULATED __m512 mantissas(__m512 a) {
  return emulation::lanes<__m512>([&](int i) -> float {
    int power = 0;
    if (std::isnan(a[i])) return a[i];
    return a[i] == 0 || std::isinf(a[i]) ? std::copysign(1.0f, a[i]) : 2 * std::frexp(a[i], &power);
  });
}

HL_EMULATED __m256bh _mm512_cvtneps_pbh(__m512 a) {
  uint16_t halves[16];
  for (int i = 0; i < 16; ++i) halves[i] = emulation::narrowed(a[i]);
  return emulation::read<__m256bh>(halves);
}
HL_EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 upper, __m512 lower) {
  uint16_t halves[32];
  for (int i = 0; i < 16; ++i) {
    halves[i] = emulation::narrowed(lower[i]);
    halves[16 + i] = emulation::narrowed(upper[i]);
  }
  return emulation::read<__m512bh>(halves);
}
// c plus the products of the upper halves and of the lower ones, each rounded.
HL_EMULATED __m512 _mm512_dpbf16_ps(__m512 c, __m512bh a, __m512bh b) {
  const auto upper = [](__m512bh x) { return (__m512)((emulation::Unsigned)x & 0xffff0000u); };
  const auto lower = [](__m512bh x) { return (__m512)((emulation::Unsigned)x << 16); };
  return _mm512_fmadd_ps(lower(a), lower(b), _mm512_fmadd_ps(upper(a), upper(b), c));
}

// Eight registers of 16 lines of 64 bytes, which the kernels always use whole.
struct EmulatedTiles {
  unsigned char shapes[64];
  __m512i lines[8][16];
};
static thread_local EmulatedTiles emulated_tiles{};

HL_EMULATED void _tile_storeconfig(void* p) { std::memcpy(p, emulated_tiles.shapes, 64); }
HL_EMULATED void _tile_loadconfig(const void* p) { std::memcpy(emulated_tiles.shapes, p, 64); }
HL_EMULATED void _tile_loadd(int tile, const void* p, int64_t line) {
  for (int i = 0; i < 16; ++i)
    std::memcpy(&emulated_tiles.lines[tile][i], static_cast<const char*>(p) + i * line, 64);
}
HL_EMULATED void _tile_stored(int tile, void* p, int64_t line) {
  for (int i = 0; i < 16; ++i)
    std::memcpy(static_cast<char*>(p) + i * line, &emulated_tiles.lines[tile][i], 64);
}
HL_EMULATED void _tile_zero(int tile) { std::memset(emulated_tiles.lines[tile], 0, 16 * 64); }
inline void _tile_dpbf16ps(int to, int a, int b) {
  EmulatedTiles& t = emulated_tiles;
  for (int i = 0; i < 16; ++i) {
    __m512 sums = (__m512)t.lines[to][i];
    for (int k = 0; k < 16; ++k) {
      const __m512i pair = _mm512_set1_epi32(((emulation::Ints)t.lines[a][i])[k]);
      sums = _mm512_dpbf16_ps(sums, (__m512bh)pair, (__m512bh)t.lines[b][k]);
    }
    t.lines[to][i] = (__m512i)sums;
  }
}

}  // namespace
}  // namespace headloom
