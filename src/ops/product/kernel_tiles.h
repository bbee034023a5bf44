// Products of bfloat16 by the tile registers of AMX (kernel/tiles.h). Compiled everywhere, and run
// where Args.amx is set.
//
// A panel of B has lines of 32 pairs, as that of the kernel of vectors: [k / 2][32]. A panel of A
// has the tiles of 32 rows one after the other: [k / 32][32][16] pairs. Both have zeros behind k.
// Rows of A that are not there keep what the memory had, which reaches no other row.
#pragma once

#include <algorithm>

#include "ops/kernel/tiles.h"
#include "ops/product/kernel_matrix.h"

namespace headloom::ops::product_kernel {
namespace {

constexpr int64_t kTileRows = 2 * kTile, kTileColumns = 2 * kTile;
constexpr int64_t kTileDepth = 2 * kTile;         // values along k in a tile
constexpr int64_t kTileStep = kTileRows * kTile;  // pairs of a panel, of A or B, for so many
constexpr int64_t kMostTileDepth = 2048;
// A slice of a panel, so many steps along k, and panels that are multiplied with it one after the
// other.
constexpr int64_t kStepsOfSlice = 8, kSumsAtOnce = 4;
// Panels of A that a thread multiplies with one panel of B after the other stay in its cache.
constexpr int64_t kBytesOfTiles = 768 << 10;

HL_INLINE int64_t tile_steps(const Block& at) {
  return (at.k1 - at.k0 + kTileDepth - 1) / kTileDepth;
}

inline Sizes tile_sizes(int64_t k) {
  const int64_t line = kTileRows * static_cast<int64_t>(sizeof(Pair));
  const int64_t depth = std::min(k, kMostTileDepth);
  const int64_t panels = std::max<int64_t>(kBytesOfTiles / (depth / 2 * line + line), 1);
  return {.mr = kTileRows,
          .nr = kTileColumns,
          .kc = kMostTileDepth,
          .kc_adjacent = kMostTileDepth,
          .kr = kTileDepth,
          .mc = panels * kTileRows,
          .a_line = line,
          .b_line = line,
          .pairs = true};
}

#if HL_BFLOAT16
// Up to 16 values as bfloat16, each in the low half of its lane; zeros for i from `count` on.
HL_INLINE __m512i wide_halves(const BFloat16* p, int64_t count) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_of_line(count), p));
}
HL_INLINE __m512i wide_halves(const float* p, int64_t count) {
  return half_bits(_mm512_maskz_loadu_ps(first_of_line(count), p));
}
// Up to 32 values as bfloat16, one after the other.
HL_INLINE __m512i halves(const BFloat16* p, int64_t count) {
  const auto there = count >= kTileDepth ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
  return _mm512_maskz_loadu_epi16(there, p);
}
HL_INLINE __m512i halves(const float* p, int64_t count) {
  const auto some = [&](int64_t first) __attribute__((always_inline)) {
    return _mm512_maskz_loadu_ps(count > first ? first_of_line(count - first) : 0, p + first);
  };
  return (__m512i)_mm512_cvtne2ps_pbh(some(kTile), some(0));
}
HL_INLINE uint32_t bits_at(const BFloat16* p) { return p->bits; }
HL_INLINE uint32_t bits_at(const float* p) {
  BFloat16 rounded;
  narrow(*p, &rounded);
  return rounded.bits;
}

// The tile of 16 lines along k, [pair of k][value], from lines of adjacent values. `values` is how
// many of a line there are, and `depth` how many lines; zeros around them.
template <typename T>
HL_INLINE void across(const T* from, int64_t line, int64_t values, int64_t depth, Pair* to,
                      int64_t to_line) {
  for (int64_t i = 0; i < kTile; ++i) {
    const T* const low = from + 2 * i * line;
    __m512i pairs = _mm512_setzero_si512();
    if (values > 0 && 2 * i < depth) pairs = wide_halves(low, values);
    if (values > 0 && 2 * i + 1 < depth) {
      pairs = _mm512_or_si512(pairs, _mm512_slli_epi32(wide_halves(low + line, values), 16));
    }
    _mm512_storeu_si512(to + i * to_line, pairs);
  }
}

// The tile of 16 lines of adjacent values along k, as they are: [line][pair of k].
template <typename T>
HL_INLINE void along(const T* from, int64_t line, int64_t lines, int64_t depth, Pair* to,
                     int64_t to_line) {
  for (int64_t i = 0; i < kTile; ++i) {
    _mm512_storeu_si512(to + i * to_line,
                        i < lines ? halves(from + i * line, depth) : _mm512_setzero_si512());
  }
}

// One tile [value][pair of k], or [pair of k][value] where `columns`, from 16 values that are
// `outer` apart and lie `inner` apart along k.
template <typename T>
HL_INLINE void pack_tile(const T* from, int64_t outer, int64_t inner, int64_t values, int64_t depth,
                         bool columns, Pair* to, int64_t to_line) {
  alignas(64) Pair turned[kTile * kTile];
  if (inner == 1) {
    if (!columns) return along(from, outer, values, depth, to, to_line);
    along(from, outer, values, depth, turned, kTile);
    return transpose_tile(turned, kTile, to, to_line);
  }
  if (outer == 1) {
    if (columns) return across(from, inner, values, depth, to, to_line);
    across(from, inner, values, depth, turned, kTile);
    return transpose_tile(turned, kTile, to, to_line);
  }
  for (int64_t i = 0; i < kTile; ++i) {
    for (int64_t l = 0; l < kTile; ++l) {
      const T* const at = from + i * outer + 2 * l * inner;
      const uint32_t low = i < values && 2 * l < depth ? bits_at(at) : 0;
      const uint32_t high = i < values && 2 * l + 1 < depth ? bits_at(at + inner) : 0;
      to[columns ? l * to_line + i : i * to_line + l].bits = low | high << 16;
    }
  }
}

inline void pack_tile_rows(const Args& args, const Block& at, Pair* to) {
  const int64_t panel = tile_steps(at) * kTileStep;
  for (int64_t m = at.m0; m < at.m1; m += kTileRows, to += panel) {
    for (int64_t i = 0; i < std::min(kTileRows, at.m1 - m); i += kTile) {
      Pair* out = to + i * kTile;
      for (int64_t k = at.k0; k < at.k1; k += kTileDepth, out += kTileStep) {
        pack_tile(place<BFloat16>(args.a, m + i, k), args.a.row, args.a.column, at.m1 - m - i,
                  at.k1 - k, /*columns=*/false, out, kTile);
      }
    }
  }
}

template <typename T>
void pack_tile_columns(const Args& args, const Block& at, Pair* to) {
  const int64_t panel = tile_steps(at) * kTileStep;
  for (int64_t n = at.n0; n < at.n1; n += kTileColumns, to += panel) {
    Pair* out = to;
    for (int64_t k = at.k0; k < at.k1; k += kTileDepth, out += kTileStep) {
      for (int64_t j = 0; j < kTileColumns; j += kTile) {
        const int64_t values = std::max<int64_t>(at.n1 - n - j, 0);
        pack_tile(place<T>(args.b, k, n + (values > 0 ? j : 0)), args.b.column, args.b.row, values,
                  at.k1 - k, /*columns=*/true, out + j, kTileColumns);
      }
    }
  }
}
inline void pack_tile_columns(const Args& args, const Block& at, Pair* to) {
  args.b_float ? pack_tile_columns<float>(args, at, to) : pack_tile_columns<BFloat16>(args, at, to);
}

// A share of the panel that comes next from a farther cache, fetched during a product: some lines
// in each step of its sums.
struct NextPanel {
  const char* at;
  int64_t lines;  // a step
};

// The sums of one panel of A and one of B over `steps`, added to those in `sums` unless this is the
// first part of them.
template <int kDown, int kAcross>
void multiply_panels(int64_t steps, const Pair* a, const Pair* b, NextPanel next, bool first,
                     float* sums) {
  first ? zero_tiles<kDown, kAcross>() : load_tiles<kDown, kAcross>(sums, kTileColumns);
  add_tiles<kDown, kAcross>(
      steps,
      [&](int i, int64_t k) __attribute__((always_inline)) {
        return TileAt{a + k * kTileStep + i * kTile * kTile, kTile * 4};
      },
      [&](int64_t k, int j) __attribute__((always_inline)) {
        if (j == 0) {
          for (int64_t line = 0; line < next.lines; ++line, next.at += 64) {
            __builtin_prefetch(next.at, 0, 2);
          }
        }
        return TileAt{b + k * kTileStep + j * kTile, kTileColumns * 4};
      });
  store_tiles<kDown, kAcross>(sums, kTileColumns);
}

// Writes the sums of one panel of A and one of B to C.
template <typename C>
void finish_panels(const float* sums, int64_t rows, int64_t columns, C* c, int64_t c_row, bool add,
                   const float* scale, const C* bias) {
  if (columns == kTileColumns && !add && scale == nullptr && bias == nullptr) {
    for (int64_t r = 0; r < rows; ++r, sums += kTileColumns, c += c_row) {
#pragma GCC unroll 2
      for (int64_t j = 0; j < kTileColumns; j += VL) store(c + j, load(sums + j));
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    finish_row(sums + r * kTileColumns, c + r * c_row, columns, add, scale, bias);
  }
}

template <typename C>
void run_tiles(const Args& args, const Block& at, bool add, const void* packed, void* own_rows,
               bool shared) {
  auto* const a = static_cast<Pair*>(own_rows);
  const auto* const b = static_cast<const Pair*>(packed);
  if (!shared) pack_tile_rows(args, at, a);
  const TilesInUse in_use(true);
  const int64_t steps = tile_steps(at), panel = steps * kTileStep;
  const auto* const bias = add ? nullptr : static_cast<const C*>(args.bias);
  const int64_t down = (at.m1 - at.m0 + kTileRows - 1) / kTileRows;
  const int64_t across = (at.n1 - at.n0 + kTileColumns - 1) / kTileColumns;
  const int64_t slices = (steps + kStepsOfSlice - 1) / kStepsOfSlice;
  // The panels of the outer loop come from a farther cache than those of the inner one. A slice of
  // them stays in the first level of cache while it is multiplied with those of several others.
  const int64_t outer = shared ? down : across, inner = shared ? across : down;
  const int64_t next_lines = (kTileRows + inner - 1) / inner;
  alignas(64) float sums[kSumsAtOnce][kTileRows * kTileColumns];
  for (int64_t o = 0; o < outer; ++o) {
    const auto* next = reinterpret_cast<const char*>((shared ? a : b) + (o + 1) * panel);
    for (int64_t group = 0; group < inner; group += kSumsAtOnce) {
      const int64_t group_end = std::min(group + kSumsAtOnce, inner);
      for (int64_t slice = 0; slice < slices; ++slice) {
        const int64_t begin = steps * slice / slices, end = steps * (slice + 1) / slices;
        for (int64_t i = group; i < group_end; ++i) {
          const int64_t row = shared ? o : i, column = shared ? i : o;
          const int64_t m = at.m0 + row * kTileRows, n = at.n0 + column * kTileColumns;
          const int64_t rows = at.m1 - m, columns = at.n1 - n;
          float* const to = sums[i - group];
          const auto some = rows > kTile
                                ? columns > kTile ? multiply_panels<2, 2> : multiply_panels<2, 1>
                            : columns > kTile ? multiply_panels<1, 2>
                                              : multiply_panels<1, 1>;
          some(end - begin, a + row * panel + begin * kTileStep,
               b + column * panel + begin * kTileStep, {next, o + 1 < outer ? next_lines : 0},
               slice == 0, to);
          next += next_lines * (end - begin) * 64;
          C* const c = static_cast<C*>(args.c) + m * args.c_row + n;
          if (slice + 1 < slices) continue;
          finish_panels(to, std::min(kTileRows, rows), std::min(kTileColumns, columns), c,
                        args.c_row, add, args.scale == nullptr ? nullptr : args.scale + n,
                        bias == nullptr ? nullptr : bias + n);
        }
      }
    }
  }
}
#else
inline void pack_tile_rows(const Args&, const Block&, Pair*) {}
inline void pack_tile_columns(const Args&, const Block&, Pair*) {}
template <typename C>
void run_tiles(const Args&, const Block&, bool, const void*, void*, bool) {}
#endif

}  // namespace
}  // namespace headloom::ops::product_kernel
