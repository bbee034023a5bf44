// Products of pairs of bfloat16 by the tile registers of processors with AMX: sixteen times as many
// multiplications a cycle as with vectors. Eight registers hold 16 lines of 64 bytes each; here
// they are always used whole, and what is smaller is copied into memory of that size.
//
// A worker has to hold a TilesInUse while it runs tile_gemm(). Only where has_amx() (capability.h).
#pragma once

#include "ops/kernel/pairs.h"

namespace headloom::ops {
namespace {

constexpr int64_t kTile = 16;  // lines of a tile, and pairs or floats of a line

#if HL_BFLOAT16

// What reads or writes the memory at p, all of it: compilers do not know that instructions on tiles
// do, or how many bytes.
HL_INLINE void touch_memory(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// Sets the shapes of the tile registers for this thread where `wanted`, and puts back at the end
// what was there before: other libraries keep theirs between calls.
class TilesInUse {
 public:
  HL_INLINE explicit TilesInUse(bool wanted) : wanted_(wanted) {
    if (!wanted) return;
    Shapes whole{};
    whole.palette = 1;
    for (int i = 0; i < 8; ++i) {
      whole.line_bytes[i] = 64;
      whole.lines[i] = kTile;
    }
    touch_memory(&before_);
    _tile_storeconfig(&before_);
    touch_memory(&whole);
    _tile_loadconfig(&whole);
  }
  HL_INLINE ~TilesInUse() {
    if (!wanted_) return;
    touch_memory(&before_);
    _tile_loadconfig(&before_);  // zeros release the registers
  }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;

 private:
  struct alignas(64) Shapes {  // as the instruction reads it
    uint8_t palette, start_line, reserved[14];
    uint16_t line_bytes[16];
    uint8_t lines[16];
  };
  bool wanted_;
  Shapes before_;
};

// A tile in memory: where, and bytes from line to line.
struct TileAt {
  const Pair* at;
  int64_t line;
};

// The first `count` elements of a line, at most all 16.
HL_INLINE __mmask16 first_of_line(int64_t count) {
  return static_cast<__mmask16>(count >= kTile ? 0xffff : (1u << count) - 1);
}

// The tile whose first element is `from`, of which `lines` lines and `pairs` pairs of a line are
// there; copied to `whole` with zeros around it where that is not all.
HL_INLINE TileAt whole_tile(const Pair* from, int64_t line, int64_t lines, int64_t pairs,
                            Pair* whole) {
  if (lines >= kTile && pairs >= kTile) return {from, line * 4};
  for (int64_t i = 0; i < kTile; ++i) {
    const __mmask16 there = i < lines ? first_of_line(pairs) : 0;
    _mm512_store_si512(whole + i * kTile, _mm512_maskz_loadu_epi32(there, from + i * line));
  }
  return {whole, kTile * 4};
}

// The sums of 16 kDown rows and 16 kAcross columns of C in tiles 0 (and 1 beside it, 2 and 3 below
// it). `a(i, k)` and `b(k, j)` give the tiles of the factors for k = 0 ... steps - 1.
template <int kDown, int kAcross, typename A, typename B>
HL_INLINE void add_tiles(int64_t steps, const A& a, const B& b) {
  for (int64_t k = 0; k < steps; ++k) {
    const TileAt a0 = a(0, k), a1 = kDown > 1 ? a(1, k) : TileAt{};
    const TileAt b0 = b(k, 0), b1 = kAcross > 1 ? b(k, 1) : TileAt{};
    touch_memory(a0.at);
    _tile_loadd(4, a0.at, a0.line);
    _tile_loadd(6, b0.at, b0.line);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kAcross > 1) {
      _tile_loadd(7, b1.at, b1.line);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kDown > 1) {
      _tile_loadd(5, a1.at, a1.line);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kAcross > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
}

template <int kDown, int kAcross>
HL_INLINE void zero_tiles() {
  _tile_zero(0);
  if constexpr (kAcross > 1) _tile_zero(1);
  if constexpr (kDown > 1) _tile_zero(2);
  if constexpr (kDown > 1 && kAcross > 1) _tile_zero(3);
}
template <int kDown, int kAcross>
HL_INLINE void load_tiles(const float* c, int64_t line) {
  touch_memory(c);
  _tile_loadd(0, c, line * 4);
  if constexpr (kAcross > 1) _tile_loadd(1, c + kTile, line * 4);
  if constexpr (kDown > 1) _tile_loadd(2, c + kTile * line, line * 4);
  if constexpr (kDown > 1 && kAcross > 1) _tile_loadd(3, c + kTile * line + kTile, line * 4);
}
template <int kDown, int kAcross>
HL_INLINE void store_tiles(float* c, int64_t line) {
  _tile_stored(0, c, line * 4);
  if constexpr (kAcross > 1) _tile_stored(1, c + kTile, line * 4);
  if constexpr (kDown > 1) _tile_stored(2, c + kTile * line, line * 4);
  if constexpr (kDown > 1 && kAcross > 1) _tile_stored(3, c + kTile * line + kTile, line * 4);
  touch_memory(c);
}

// gemm_block() for `rows` <= 16 kDown rows and 16 kAcross columns.
template <int kDown, int kAcross, bool ACC>
HL_INLINE void tile_block(int64_t rows, int64_t K, const Pair* A, int64_t lda, const Pair* B,
                          int64_t ldb, float* C, int64_t ldc, float scale) {
  alignas(64) Pair a_whole[2][kTile * kTile], b_whole[2][kTile * kTile];
  const auto a = [&](int i, int64_t k) __attribute__((always_inline)) {
    return whole_tile(A + i * kTile * lda + k * kTile, lda, rows - i * kTile, K - k * kTile,
                      a_whole[i]);
  };
  const auto b = [&](int64_t k, int j) __attribute__((always_inline)) {
    return whole_tile(B + k * kTile * ldb + j * kTile, ldb, K - k * kTile, kTile, b_whole[j]);
  };
  const bool in_place = rows == kDown * kTile && (ACC || scale == 1);
  if (ACC && in_place) {
    load_tiles<kDown, kAcross>(C, ldc);
  } else {
    zero_tiles<kDown, kAcross>();
  }
  add_tiles<kDown, kAcross>((K + kTile - 1) / kTile, a, b);
  if (in_place) return store_tiles<kDown, kAcross>(C, ldc);
  alignas(64) float sums[kDown * kTile][kAcross * kTile];
  store_tiles<kDown, kAcross>(sums[0], kAcross * kTile);
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < kAcross; ++j) {
      float* const c = C + r * ldc + j * kTile;
      const vf sum = load(sums[r] + j * kTile);
      store(c, ACC ? load(c) + sum : sum * bcast(scale));
    }
  }
}

// gemm<ACC, true> (gemm.h) for N a multiple of 16. It fetches nothing ahead: measured, that brings
// nothing here.
template <bool ACC>
void tile_gemm(int64_t M, int64_t N, int64_t K, const Pair* A, int64_t lda, const Pair* B,
               int64_t ldb, float* C, int64_t ldc, float scale) {
  for (int64_t m = 0; m < M; m += 2 * kTile) {
    const int64_t rows = M - m < 2 * kTile ? M - m : 2 * kTile;
    const Pair* const a = A + m * lda;
    float* const c = C + m * ldc;
    int64_t n = 0;
    for (; n + 2 * kTile <= N; n += 2 * kTile) {
      rows > kTile ? tile_block<2, 2, ACC>(rows, K, a, lda, B + n, ldb, c + n, ldc, scale)
                   : tile_block<1, 2, ACC>(rows, K, a, lda, B + n, ldb, c + n, ldc, scale);
    }
    if (n == N) continue;
    rows > kTile ? tile_block<2, 1, ACC>(rows, K, a, lda, B + n, ldb, c + n, ldc, scale)
                 : tile_block<1, 1, ACC>(rows, K, a, lda, B + n, ldb, c + n, ldc, scale);
  }
}

// to[j * to_line + i] = from[i * from_line + j] for 16 x 16 elements of four bytes.
HL_INLINE void transpose_tile(const Pair* from, int64_t from_line, Pair* to, int64_t to_line) {
  __m512i x[16], y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = load(from + i * from_line);
  // Each step swaps one bit of the line's number with one of the column's.
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 16; i += 8) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0x88);
      y[i + 4 + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0xdd);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0x88);
    x[8 + j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * to_line, x[i]);
}

// Neighbouring rows, turned: to[i][r] = (from[2 r][i], from[2 r + 1][i]) for i < columns, a
// multiple of 16, with zeros after the last row up to a multiple of 32 rows.
HL_INLINE const Pair* turn_rows(int64_t rows, int64_t columns, const float* from, int64_t line,
                                Pair* to, int64_t to_line) {
  alignas(64) Pair some[kTile * kTile];
  for (int64_t r = 0; r < rows; r += 2 * kTile) {
    for (int64_t c = 0; c < columns; c += kTile) {
      for (int64_t i = 0; i < kTile; ++i) {
        const int64_t low = r + 2 * i;
        const float* const at = from + low * line + c;
        store(some + i * kTile, pair_vectors(low < rows ? load(at) : zero(),
                                             low + 1 < rows ? load(at + line) : zero()));
      }
      transpose_tile(some, kTile, to + c * to_line + r / 2, to_line);
    }
  }
  return to;
}

#else
class TilesInUse {
 public:
  HL_INLINE explicit TilesInUse(bool) {}
};
template <bool ACC>
HL_INLINE void tile_gemm(int64_t, int64_t, int64_t, const Pair*, int64_t, const Pair*, int64_t,
                         float*, int64_t, float) {}
HL_INLINE const Pair* turn_rows(int64_t, int64_t, const float*, int64_t, Pair* to, int64_t) {
  return to;
}
#endif

}  // namespace
}  // namespace headloom::ops
