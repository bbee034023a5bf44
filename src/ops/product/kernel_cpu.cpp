// Compiled once for each instruction set, with CPU_CAPABILITY its name.
#include <algorithm>
#include <cstring>

#include "ops/kernel/pairs.h"
#include "ops/kernel/transpose.h"
#include "ops/product/kernel.h"
#include "ops/product/kernel_tiles.h"

namespace headloom::ops::product_kernel {
namespace {

// Columns of a panel of B: two vectors. Rows of a panel of A: as many as leave registers for those
// two and one value of A.
constexpr int kVectors = 2;
constexpr int64_t kColumns = kVectors * VL;
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRows = 14;
constexpr int64_t kSummed = 768, kSummedAdjacent = 384;
constexpr int64_t kStepsALine = 1;  // steps of a block's sums for each line that is fetched
#elif defined(CPU_CAPABILITY_AVX2) || defined(__aarch64__)
constexpr int kRows = 6;
constexpr int64_t kSummed = 384, kSummedAdjacent = 128;
constexpr int64_t kStepsALine = 4;  // fewer products a step hide less
#else
constexpr int kRows = 4;
constexpr int64_t kSummed = 384, kSummedAdjacent = 128;
constexpr int64_t kStepsALine = 4;
#endif
// Panels of both factors stay in the second level of cache. Each further part of a long sum reads
// and writes all of C once more. Where adjacent rows of A are read from where they are, the lines
// of the cache that a panel of them shares with the next one stay in the first level.
constexpr int64_t kSummedPairs = 4096;
constexpr int64_t kBytesOfA = 256 << 10;
// Lines that are fetched ahead of those that are packed: processors do not foresee them by
// themselves, because few bytes of each are read at a time.
constexpr int64_t kAhead = 16;
// The same where whole lines of a cache are read: one line of 16 floats.
constexpr int64_t kFloatsAhead = 16;

template <typename T>
constexpr bool kPairs = HL_BFLOAT16 && std::is_same_v<T, BFloat16>;
// What a panel is made of: pairs along k where the processor multiplies such, floats elsewhere.
template <typename T>
using Element = std::conditional_t<kPairs<T>, Pair, float>;
// Values along k in one line of a panel.
template <typename T>
constexpr int64_t kDepth = kPairs<T> ? 2 : 1;

// One value, or the pair of it and the next along k, which is 0 where there is none.
HL_INLINE float element(const float* at, int64_t, bool) { return *at; }
template <typename T>
HL_INLINE Element<T> element(const T* at, int64_t next, bool alone) {
  if constexpr (kPairs<T>) {
    const uint32_t high = alone ? 0 : at[next].bits;
    return {at->bits | high << 16};
  } else {
    return widen(*at);
  }
}

// kCount elements of a panel's line, fewer than a vector has. Pairs are made of `row` and `next`.
template <int64_t kCount, typename T>
HL_INLINE void some_of_line(const T* row, const T* next, Element<T>* to) {
  if constexpr (kPairs<T>) {
    T low[VL] = {}, high[VL] = {};
    Pair both[VL];
    std::memcpy(low, row, kCount * sizeof(T));
    std::memcpy(high, next, kCount * sizeof(T));
    store(both, pair_vectors(load(low), load(high)));
    std::memcpy(to, both, kCount * sizeof(Pair));
  } else if constexpr (std::is_same_v<T, float>) {
    std::memcpy(to, row, kCount * sizeof(float));
  } else {
    for (int64_t i = 0; i < kCount; ++i) to[i] = widen(row[i]);
  }
}

// to[l * kWidth + i] = element l of line i, where lines are `outer` apart and the values that are
// summed over `inner`; zeros for i from `count` on.
template <int64_t kWidth, typename T>
void pack_panel(const T* from, int64_t outer, int64_t inner, int64_t count, int64_t depth,
                Element<T>* to) {
  constexpr int64_t kStep = kDepth<T>;
  const int64_t lines = (depth + kStep - 1) / kStep;
  const auto one = [&](int64_t i, int64_t l) __attribute__((always_inline)) {
    const T* at = from + i * outer + l * kStep * inner;
    to[l * kWidth + i] = element(at, inner, l * kStep + 1 >= depth);
  };
  int64_t l = 0;
  if (inner == 1) {
    // Four rows at a time. Bits are moved, not computed with.
    const int64_t four = count / 4 * 4, whole = depth / (4 * kStep) * 4;
    if constexpr (sizeof(T) * kStep == sizeof(float)) {
      if (outer * sizeof(T) % sizeof(float) == 0) {
        const auto floats = [&](int64_t row) {
          return reinterpret_cast<const float*>(from + row * outer);
        };
        const int64_t apart = outer * static_cast<int64_t>(sizeof(T)) / 4;
        auto* const panel = reinterpret_cast<float*>(to);
        transpose<kFloatsAhead>(four, whole, floats(0), apart, panel, kWidth);
        if (count >= 4 && count > four) {
          // The last rows that are no four, with those before them.
          transpose<kFloatsAhead>(4, whole, floats(count - 4), apart, panel + count - 4, kWidth);
        } else {
          for (int64_t i = four; i < count; ++i) {
            for (int64_t line = 0; line < whole; ++line) one(i, line);
          }
        }
        l = whole;
      }
    }
  } else if (outer == 1) {
    for (; l < depth / kStep; ++l) {
      const T* row = from + l * kStep * inner;
      Element<T>* line = to + l * kWidth;
      int64_t i = 0;
      for (int64_t j = 0; j < count; j += 64 / sizeof(T))
        __builtin_prefetch(row + kAhead * inner + j);
      if constexpr (kPairs<T>) {
        for (; i + VL <= count; i += VL) {
          store(line + i, pair_vectors(load(row + i), load(row + inner + i)));
        }
      } else {
        for (; i + VL <= count; i += VL) store(line + i, load(row + i));
      }
      // The rest of a whole panel, whose size is known here.
      if (kWidth % VL != 0 && count == kWidth) {
        some_of_line<kWidth % VL>(row + i, row + inner + i, line + i);
        continue;
      }
      for (; i < count; ++i) one(i, l);
    }
  }
  for (; l < lines; ++l) {
    for (int64_t i = 0; i < count; ++i) one(i, l);
  }
  if (count < kWidth) {
    for (int64_t line = 0; line < lines; ++line) {
      std::fill(to + line * kWidth + count, to + (line + 1) * kWidth, Element<T>{});
    }
  }
}

// Where element l of row i of A is.
enum class Rows {
  kPacked,    // a[l * kRows + i]
  kAdjacent,  // a[l * step + i]: where A is the transpose of a matrix of adjacent values
  kApart,     // a[i * step + l]
};

// The elements l of M rows, for one l after the other.
template <int M, Rows kRowsAre, typename E>
struct Lines {
  const E* at[(M + 2) / 3];  // of every third row: a processor's addresses reach the two behind it
  int64_t step;

  HL_INLINE Lines(const E* a, int64_t step) : step(step) {
    constexpr int kStarts = kRowsAre == Rows::kApart ? (M + 2) / 3 : 1;
#pragma GCC unroll 5
    for (int q = 0; q < kStarts; ++q) at[q] = a + 3 * q * step;
  }
  HL_INLINE const E* operator[](int i) const {
    return kRowsAre == Rows::kApart ? at[i / 3] + i % 3 * step : at[0] + i;
  }
  HL_INLINE void next() {
    if constexpr (kRowsAre == Rows::kApart) {
#pragma GCC unroll 5
      for (int q = 0; q < (M + 2) / 3; ++q) ++at[q];
    } else {
      at[0] += kRowsAre == Rows::kPacked ? kRows : step;
    }
  }
};

// What is read from memory after this block, fetched to the second level of cache in the steps of
// its sums. Where rows of A are packed: the following lines of some pieces. Where they are
// adjacent: element l * step of A and of B in step l.
template <typename E>
struct NextBlock {
  static constexpr int64_t kLine = 64;

  const char* line = nullptr;
  int64_t left = 1, lines = 1, gap = -kLine;  // lines in this piece, and in each; bytes between

  const E *a = nullptr, *b = nullptr;
  int64_t a_step = 0, b_step = 0;

  // The share of call `call` of `calls`.
  HL_INLINE void begin(const Pieces& pieces, int64_t call, int64_t calls) {
    if (pieces.count == 0) return;
    lines = (pieces.bytes + kLine - 1) / kLine;
    gap = pieces.apart - lines * kLine;
    const int64_t first = pieces.count * lines * call / calls;
    left = lines - first % lines;
    line = pieces.from + first / lines * pieces.apart + first % lines * kLine;
  }
  HL_INLINE void fetch_line() {
    __builtin_prefetch(line, 0, 2);
    line += kLine;
    if (--left > 0) return;
    line += gap;
    left = lines;
  }
};

// M rows of C and `columns` of the first kUsed vectors of the panel's: the sums stay in registers.
template <int M, int kUsed, Rows kRowsAre, typename E, typename C>
HL_INLINE void block(int64_t lines, const E* a, int64_t step, const E* b, C* c, int64_t c_row,
                     int64_t columns, bool add, const float* scale, const C* bias,
                     NextBlock<E> next) {
  vf sums[M][kUsed];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kUsed; ++j) {
      sums[i][j] = zero();
      // C may not be in a cache, and a line of it is read before it is written.
      __builtin_prefetch(c + i * c_row + j * VL, 1);
    }
  }
  Lines<M, kRowsAre, E> row(a, step);
  for (int64_t l = 0; l < lines; ++l, row.next()) {
    decltype(load(b)) values[kUsed];
#pragma GCC unroll 4
    for (int j = 0; j < kUsed; ++j) values[j] = load(b + l * kColumns + j * VL);
    if constexpr (kRowsAre == Rows::kPacked) {
      __builtin_prefetch(row[0] + lines * kRows);
      if (l % kStepsALine == 0) next.fetch_line();
    }
    if constexpr (kRowsAre == Rows::kAdjacent) {
      __builtin_prefetch(next.a + l * next.a_step, 0, 2);
      __builtin_prefetch(next.b + l * next.b_step, 0, 2);
    }
    // The rows of the next panel lie behind these, often without a gap.
    if constexpr (kRowsAre == Rows::kApart) __builtin_prefetch(a + M * step + M * l);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const auto one = bcast(*row[i]);
#pragma GCC unroll 4
      for (int j = 0; j < kUsed; ++j) sums[i][j] = fma(one, values[j], sums[i][j]);
    }
  }
  if (columns < kUsed * VL) {
    float some[M][kColumns];
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kUsed; ++j) store(some[i] + j * VL, sums[i][j]);
    }
    for (int i = 0; i < M; ++i) finish_row(some[i], c + i * c_row, columns, add, scale, bias);
    return;
  }
#pragma GCC unroll 4
  for (int j = 0; j < kUsed; ++j) {
    const vf factor = scale == nullptr ? bcast(1.0f) : load(scale + j * VL);
    const vf offset = bias == nullptr ? zero() : load(bias + j * VL);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      C* const to = c + i * c_row + j * VL;
      vf sum = sums[i][j] * factor + offset;
      if (add) sum = sum + load(to);
      store(to, sum);
    }
  }
}

template <int kUsed, Rows kRowsAre, typename E, typename C>
void rows(int count, int64_t lines, const E* a, int64_t step, const E* b, C* c, int64_t c_row,
          int64_t columns, bool add, const float* scale, const C* bias, NextBlock<E> next) {
  // NOLINTNEXTLINE(bugprone-switch-missing-default-case): count is 1 to kRows.
  switch (count) {
#define HL_ROWS(n)                                                                             \
  case n:                                                                                      \
    if constexpr ((n) <= kRows)                                                                \
      block<n, kUsed, kRowsAre>(lines, a, step, b, c, c_row, columns, add, scale, bias, next); \
    break;
    HL_ROWS(1)
    HL_ROWS(2)
    HL_ROWS(3)
    HL_ROWS(4)
    HL_ROWS(5)
    HL_ROWS(6)
    HL_ROWS(7)
    HL_ROWS(8)
    HL_ROWS(9)
    HL_ROWS(10)
    HL_ROWS(11)
    HL_ROWS(12)
    HL_ROWS(13)
    HL_ROWS(14)
#undef HL_ROWS
  }
}

template <typename T>
int64_t lines_of(const Block& at) {
  return (at.k1 - at.k0 + kDepth<T> - 1) / kDepth<T>;
}

// How many of the values that are summed over are packed before the next panel's, where the lines
// of several panels are adjacent in memory: such lines are read together, and few at a time,
// because they are often a power of two apart and share their places in the caches.
template <typename T>
int64_t values_at_once(bool adjacent, const Block& at) {
  return adjacent ? 8 * kDepth<T> : at.k1 - at.k0;
}

template <typename T>
void pack_columns(const Args& args, const Block& at, void* to) {
  const int64_t panel = lines_of<T>(at) * kColumns;
  const int64_t step = values_at_once<T>(args.b.column == 1, at);
  for (int64_t k = at.k0; k < at.k1; k += step) {
    auto* out = static_cast<Element<T>*>(to) + (k - at.k0) / kDepth<T> * kColumns;
    for (int64_t n = at.n0; n < at.n1; n += kColumns, out += panel) {
      pack_panel<kColumns>(place<T>(args.b, k, n), args.b.column, args.b.row,
                           std::min(kColumns, at.n1 - n), std::min(step, at.k1 - k), out);
    }
  }
}

HL_INLINE int panel_rows(int64_t left) { return static_cast<int>(rows_of_block(left, kRows)); }

// Whether A is multiplied from where it is. That is faster where few columns of C share the work of
// packing, and its lines do not take each other's places in the first level of cache.
template <typename T>
Rows rows_of(const Args& args, const Block& at) {
  constexpr int64_t kFewColumns = 512, kShortLine = 512, kPage = 4096 / sizeof(float);
  if constexpr (std::is_same_v<T, float>) {
    if (at.n1 - at.n0 <= kFewColumns) {
      if (args.a.row == 1 && args.a.column <= kShortLine) return Rows::kAdjacent;
      if (args.a.column == 1 && args.a.row % (kPage / 4) != 0) return Rows::kApart;
    }
  }
  return Rows::kPacked;
}

template <typename T>
void pack_rows(const Args& args, const Block& at, Element<T>* to) {
  const int64_t lines = lines_of<T>(at), step = values_at_once<T>(args.a.row == 1, at);
  for (int64_t k = at.k0; k < at.k1; k += step) {
    auto* out = to + (k - at.k0) / kDepth<T> * kRows;
    for (int64_t m = at.m0; m < at.m1; out += lines * kRows) {
      const int count = panel_rows(at.m1 - m);
      pack_panel<kRows>(place<T>(args.a, m, k), args.a.row, args.a.column, count,
                        std::min(step, at.k1 - k), out);
      m += count;
    }
  }
}

// Rows of A as kRowsAre says: packed at `a`, or where they are. The panels of the outer loop come
// from a farther cache than those of the inner one.
template <typename T, typename C, Rows kRowsAre>
void multiply(const Args& args, const Block& at, bool add, const Element<T>* b, const Element<T>* a,
              bool rows_outside) {
  const int64_t lines = lines_of<T>(at);
  const auto* const bias = add ? nullptr : static_cast<const C*>(args.bias);
  const auto one = [&](int64_t m, int count, int64_t panel, int64_t n) {
    const Element<T>* from = a + panel * lines * kRows;
    int64_t step = kRows;
    if constexpr (kRowsAre != Rows::kPacked) {
      from = place<T>(args.a, m, at.k0);
      step = kRowsAre == Rows::kAdjacent ? args.a.column : args.a.row;
    }
    C* const to = static_cast<C*>(args.c) + m * args.c_row + n;
    const float* const scale = args.scale == nullptr ? nullptr : args.scale + n;
    const C* const offset = bias == nullptr ? nullptr : bias + n;
    const auto some =
        at.n1 - n > VL ? rows<kVectors, kRowsAre, Element<T>, C> : rows<1, kRowsAre, Element<T>, C>;
    NextBlock<Element<T>> next;
    if constexpr (kRowsAre == Rows::kPacked) {
      next.line = reinterpret_cast<const char*>(from);
      const int64_t across = (at.n1 - at.n0 + kColumns - 1) / kColumns;
      next.begin(args.next, panel * across + (n - at.n0) / kColumns,
                 (at.m1 - at.m0 + kRows - 1) / kRows * across);
    }
    if constexpr (kRowsAre == Rows::kAdjacent) {
      // Of A the next panel, or the first one of the sums' next part. A line of the cache that ends
      // in this panel is there already, hence the panel's last row. Of B the columns of the next
      // part that are packed then: two panels of A fetch the two vectors of a panel of B.
      const bool last = m + count == at.m1;
      const int64_t row = (last ? at.m0 : m + count) + kRows - 1;
      next = {.a = place<T>(args.a, row, last ? at.k1 : at.k0),
              .b = place<T>(args.b, at.k1, n + panel % kVectors * VL),
              .a_step = step,
              .b_step = args.b.row};
    }
    some(count, lines, from, step, b + (n - at.n0) * lines, to, args.c_row, at.n1 - n, add, scale,
         offset, next);
  };
  const auto each_panel_of_rows = [&](const auto& run) {
    for (int64_t m = at.m0, panel = 0; m < at.m1; ++panel) {
      const int count = panel_rows(at.m1 - m);
      run(m, count, panel);
      m += count;
    }
  };
  const auto each_panel_of_columns = [&](const auto& run) {
    for (int64_t n = at.n0; n < at.n1; n += kColumns) run(n);
  };
  if (rows_outside) {
    each_panel_of_rows([&](int64_t m, int count, int64_t panel) {
      each_panel_of_columns([&](int64_t n) { one(m, count, panel, n); });
    });
  } else {
    each_panel_of_columns([&](int64_t n) {
      each_panel_of_rows([&](int64_t m, int count, int64_t panel) { one(m, count, panel, n); });
    });
  }
}

template <typename T, typename C>
void run(const Args& args, const Block& at, bool add, const void* packed, void* rows, bool shared) {
  auto* const a = static_cast<Element<T>*>(rows);
  const auto* const b = static_cast<const Element<T>*>(packed);
  if (shared) return multiply<T, C, Rows::kPacked>(args, at, add, b, a, /*rows_outside=*/true);
  const Rows rows_are = rows_of<T>(args, at);
  if constexpr (std::is_same_v<T, float>) {
    if (rows_are == Rows::kAdjacent)
      return multiply<T, C, Rows::kAdjacent>(args, at, add, b, nullptr, /*rows_outside=*/true);
    if (rows_are == Rows::kApart)
      return multiply<T, C, Rows::kApart>(args, at, add, b, nullptr, /*rows_outside=*/false);
  }
  pack_rows<T>(args, at, a);
  multiply<T, C, Rows::kPacked>(args, at, add, b, a, /*rows_outside=*/false);
}

template <typename T>
Sizes sizes() {
  const int64_t kc = kPairs<T> ? kSummedPairs : kSummed;
  const int64_t a_line = kRows * static_cast<int64_t>(sizeof(Element<T>));
  const int64_t panels = std::max<int64_t>(kBytesOfA / (kc / kDepth<T> * a_line), 1);
  return {.mr = kRows,
          .nr = kColumns,
          .kc = kc,
          .kc_adjacent = kSummedAdjacent,
          .kr = kDepth<T>,
          .mc = panels * kRows,
          .a_line = a_line,
          .b_line = kColumns * static_cast<int64_t>(sizeof(Element<T>)),
          .pairs = kPairs<T>};
}

}  // namespace

Sizes HL_KERNEL(sizes)(Type type, bool amx, int64_t k) {
  if (amx) return tile_sizes(k);
  return type == Type::kBFloat16 ? sizes<BFloat16>() : sizes<float>();
}

bool HL_KERNEL(reads_rows)(const Args& args, const Block& block) {
  return !args.amx && args.type == Type::kFloat && rows_of<float>(args, block) != Rows::kPacked;
}

void HL_KERNEL(pack_rows)(const Args& args, const Block& block, void* to) {
  if (args.amx) return pack_tile_rows(args, block, static_cast<Pair*>(to));
  if (args.type == Type::kFloat) return pack_rows<float>(args, block, static_cast<float*>(to));
  return pack_rows<BFloat16>(args, block, static_cast<Element<BFloat16>*>(to));
}

void HL_KERNEL(pack_columns)(const Args& args, const Block& block, void* to) {
  if (args.amx) return pack_tile_columns(args, block, static_cast<Pair*>(to));
  return args.type == Type::kBFloat16 ? pack_columns<BFloat16>(args, block, to)
                                      : pack_columns<float>(args, block, to);
}

void HL_KERNEL(run)(const Args& args, const Block& block, bool add, const void* b, void* a,
                    bool shared) {
  if (args.amx) {
    return args.out_type == Type::kFloat ? run_tiles<float>(args, block, add, b, a, shared)
                                         : run_tiles<BFloat16>(args, block, add, b, a, shared);
  }
  if (args.type == Type::kFloat) return run<float, float>(args, block, add, b, a, shared);
  return args.out_type == Type::kFloat ? run<BFloat16, float>(args, block, add, b, a, shared)
                                       : run<BFloat16, BFloat16>(args, block, add, b, a, shared);
}

}  // namespace headloom::ops::product_kernel
