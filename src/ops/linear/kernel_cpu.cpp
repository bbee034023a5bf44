// Compiled once for each instruction set, with CPU_CAPABILITY its name.
//
// One row of x takes the weights in four runs side by side, or one int8 output after the other. Of
// more rows, a tile is kOutputs rows of the weights times up to kRows rows of x; all tiles of the
// same weights follow one another, so that only the first reads them from memory. Sums are in
// registers, each in the lanes of a vector, and many are added up at once.
#include "ops/kernel/functions.h"
#include "ops/kernel/pairs.h"
#include "ops/kernel/prefetch.h"
#include "ops/linear/kernel.h"
#include "ops/linear/kernel_int4.h"
#include "ops/linear/kernel_integers.h"

namespace headloom::ops::linear_kernel {
namespace {

constexpr int kOutputs = 4;
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRows = 4;
#else
constexpr int kRows = 2;  // 16 registers
#endif
// Weights are fetched this many bytes ahead, and no less than a tile, whose own rows are in use
// already, in the order in which they lie. Left to the hardware, bfloat16 and int8 come at half the
// memory's bandwidth.
constexpr int64_t kAhead = 8192;

// The first `count` < VL, zeros in the other lanes.
template <typename E>
HL_INLINE auto part(const E* p, int64_t count) {
  E whole[VL] = {};
  std::memcpy(whole, p, static_cast<size_t>(count) * sizeof(E));
  return load(whole);
}

template <int Bytes>
HL_INLINE void fetch(const char* from, bool past_cache) {
  constexpr int kLine = 64;
#pragma GCC unroll 16
  for (int i = 0; i < Bytes; i += kLine) prefetch_once(from + i, past_cache);
}

// Rows of weights and of x, each of `size` elements: values that are widened to float, or pairs of
// bfloat16 where the processor multiplies such.
template <typename W, typename X>
struct Operands {
  const W* weight;
  const X* x;
  int64_t size;
  const char* source;  // where the weights are in memory
  bool past_cache;     // as in Args

  // From an output on.
  HL_INLINE Operands from(int64_t output) const {
    Operands m = *this;
    m.weight += output * size;
    m.source += output * size * static_cast<int64_t>(sizeof(W));
    return m;
  }
};
template <typename W, typename X>
HL_INLINE Operands<W, X> operands(const W* weight, const X* x, int64_t size, const Args& a) {
  return {weight, x, size, reinterpret_cast<const char*>(weight), a.past_cache};
}

// Where the O outputs of multiply() lie: one after the other, or `apart` outputs from one another
// and read side by side.
struct Neighbours {
  HL_INLINE int64_t of(int o) const { return o; }
};
struct Runs {
  int64_t apart;
  HL_INLINE int64_t of(int o) const { return o * apart; }
};

// sums[r * line + o * VL ...]: a vector whose lanes add up to output o of row r, each from P sums
// along the rows. An element of the weights is kSource bytes in memory.
template <int O, int R, int P, int kSource, typename W, typename X, typename Place = Neighbours>
HL_INLINE void multiply(const Operands<W, X>& m, float* sums, int64_t line, Place place = {}) {
  constexpr bool kRuns = std::is_same_v<Place, Runs>;
  const int64_t tile = O > 1 ? O * m.size * kSource : 0;
  const int64_t ahead = kRuns ? kAhead / O : tile > kAhead ? tile : kAhead;
  const char* const next = m.source + ahead;
  vf sum[P][R][O];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int o = 0; o < O; ++o) sum[p][r][o] = zero();
    }
  }
  const auto add = [&](int p, const auto& read) __attribute__((always_inline)) {
    decltype(read(m.x)) values[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) values[r] = read(m.x + r * m.size);
#pragma GCC unroll 4
    for (int o = 0; o < O; ++o) {
      const auto weight = read(m.weight + place.of(o) * m.size);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[p][r][o] = fma(weight, values[r], sum[p][r][o]);
    }
  };
  int64_t i = 0;
  const auto whole = [&i](const auto* row) __attribute__((always_inline)) { return load(row + i); };
  while (i + P * VL <= m.size) {
    if constexpr (kRuns) {
#pragma GCC unroll 4
      for (int o = 0; o < O; ++o) {
        fetch<P * VL * kSource>(next + (place.of(o) * m.size + i) * kSource, m.past_cache);
      }
    } else {
      fetch<O * P * VL * kSource>(next + O * i * kSource, m.past_cache);
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p, i += VL) add(p, whole);
  }
  for (; i + VL <= m.size; i += VL) add(0, whole);
  if (i < m.size) {
    add(0,
        [&](const auto* row) __attribute__((always_inline)) { return part(row + i, m.size - i); });
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int o = 0; o < O; ++o) {
#pragma GCC unroll 4
      for (int p = 1; p < P; ++p) sum[0][r][o] = sum[0][r][o] + sum[p][r][o];
      store(sums + r * line + o * VL, sum[0][r][o]);
    }
  }
}

// y of O outputs of R rows, from sums as multiply() writes them, O of each row side by side.
template <int O, int R, typename T>
struct Finish {
  static constexpr int kLanes = (O * R + VL - 1) / VL * VL;
  alignas(64) float sums[kLanes * VL] = {};
  float scale[kLanes] = {}, bias[kLanes] = {};

  HL_INLINE void read_scales(const Args& a, int64_t output, int64_t count) {
    for (int64_t o = 0; o < count; ++o) {
      const float factor = a.scale == nullptr ? 1 : a.scale[output + o];
      const float offset = a.bias == nullptr ? 0 : widen(static_cast<const T*>(a.bias)[output + o]);
      for (int r = 0; r < R; ++r) {
        scale[r * O + o] = factor;
        bias[r * O + o] = offset;
      }
    }
  }
  // `count` outputs of so many rows.
  HL_INLINE void write(const Args& a, int64_t row, int64_t rows, int64_t output,
                       int64_t count) const {
    T lanes[kLanes];
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; i += VL) {
      store(lanes + i, fma(row_sums(sums + i * VL), load(scale + i), load(bias + i)));
    }
    T* const y = static_cast<T*>(a.y) + row * a.out + output;
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(y + r * a.out, lanes + r * O, static_cast<size_t>(count) * sizeof(T));
    }
  }
};

// Outputs begin ... end of R rows, which are all: an output at a time, of a row from P sums.
template <int R, int P, typename T, typename W, typename X>
void by_outputs(const Args& a, const Operands<W, X>& m, int64_t begin, int64_t end) {
  constexpr int O = R == 1 ? VL : kOutputs;
  Finish<O, R, T> of;
  for (int64_t output = begin; output < end; output += O) {
    const int64_t count = end - output < O ? end - output : O;
    of.read_scales(a, output, count);
    for (int64_t o = 0; o < count; ++o) {
      multiply<1, R, P, sizeof(W)>(m.from(output + o), of.sums + o * VL, O * VL);
    }
    of.write(a, 0, R, output, count);
  }
}

// Outputs begin ... end of one row. They are cut into four runs, of which an output each is
// computed at a time. Processors read four runs of memory side by side up to 1.25 times as fast
// as one, while four neighbouring outputs take a twentieth longer. An output has the same bits
// wherever it lies.
template <typename T, typename W, typename X>
void in_runs(const Args& a, const Operands<W, X>& m, int64_t begin, int64_t end) {
  constexpr int kRuns = 4, P = 2;
  const Runs runs{(end - begin) / (kRuns * VL) * VL};
  Finish<VL, 1, T> of[kRuns];
  for (int64_t first = begin; first < begin + runs.apart; first += VL) {
    for (int r = 0; r < kRuns; ++r) of[r].read_scales(a, first + runs.of(r), VL);
    for (int64_t o = 0; o < VL; ++o) {
      float sums[kRuns * VL];
      multiply<kRuns, 1, P, sizeof(W)>(m.from(first + o), sums, 0, runs);
#pragma GCC unroll 4
      for (int r = 0; r < kRuns; ++r) store(of[r].sums + o * VL, load(sums + r * VL));
    }
    for (int r = 0; r < kRuns; ++r) of[r].write(a, 0, 1, first + runs.of(r), VL);
  }
  by_outputs<1, P, T>(a, m, begin + kRuns * runs.apart, end);
}

// O outputs of every row, kRows rows at a time. m.weight is that of `output`.
template <int O, int kSource, typename T, typename W, typename X>
void by_tiles(const Args& a, Operands<W, X> m, int64_t output) {
  Finish<O, kRows, T> of;
  of.read_scales(a, output, O);
  const X* const x = m.x;
  for (int64_t row = 0; row < a.rows;) {
    const int64_t rows = rows_of_block(a.rows - row, kRows);
    m.x = x + row * m.size;
    if (rows == 1) multiply<O, 1, 2, kSource>(m, of.sums, O * VL);
    if (rows == 2) multiply<O, 2, 1, kSource>(m, of.sums, O * VL);
    if constexpr (kRows > 2) {
      if (rows == 3) multiply<O, 3, 1, kSource>(m, of.sums, O * VL);
      if (rows == 4) multiply<O, 4, 1, kSource>(m, of.sums, O * VL);
    }
    of.write(a, row, rows, output, O);
    row += rows;
  }
}

// Calls f.template operator()<O>(output) for all of begin ... end, O outputs at a time.
template <typename F>
HL_INLINE void each_tile(int64_t begin, int64_t end, F&& f) {
  int64_t output = begin;
  for (; output + kOutputs <= end; output += kOutputs) f.template operator()<kOutputs>(output);
  for (; output < end; ++output) f.template operator()<1>(output);
}

template <typename T, typename W, typename X>
void run(const Args& a, const Operands<W, X>& m, int64_t begin, int64_t end) {
  // Int8 weights are read more slowly than memory gives them.
  if (a.rows == 1 && sizeof(W) > 1) return in_runs<T>(a, m, begin, end);
  if (a.rows == 1) return by_outputs<1, 4, T>(a, m, begin, end);
  if (a.rows == 2) return by_outputs<2, 2, T>(a, m, begin, end);
  if constexpr (kRows > 2) {
    if (a.rows == 3) return by_outputs<3, 1, T>(a, m, begin, end);
    if (a.rows == 4) return by_outputs<4, 1, T>(a, m, begin, end);
  }
  each_tile(begin, end,
            [&]<int O>(int64_t output) { by_tiles<O, sizeof(W), T>(a, m.from(output), output); });
}

// Most pairs of a row of int8 weights that is made into pairs once for all rows of x: four such
// rows stay in the first level of cache.
constexpr int64_t kMostPaired = 2048;

// The same for int8 weights and x in bfloat16, where `in` is even: weights become pairs of
// bfloat16, which is exact.
template <typename T>
void run_paired(const Args& a, int64_t begin, int64_t end) {
  Pair pairs[kOutputs * kMostPaired];
  const int64_t size = a.in / 2, whole = a.in / (2 * VL) * (2 * VL);
  each_tile(begin, end, [&]<int O>(int64_t output) {
    const auto* const weight = static_cast<const int8_t*>(a.weight) + output * a.in;
    pair_columns(O, whole, weight, a.in, pairs, size);
    for (int64_t o = 0; o < O && whole < a.in; ++o) {
      int8_t last[2 * VL] = {};
      Pair made[VL];
      std::memcpy(last, weight + o * a.in + whole, static_cast<size_t>(a.in - whole));
      pair_columns(1, 2 * VL, last, 0, made, 0);
      std::memcpy(pairs + o * size + whole / 2, made,
                  static_cast<size_t>(a.in - whole) / 2 * sizeof(Pair));
    }
    by_tiles<O, 2, T>(a,
                      Operands<Pair, Pair>{pairs, static_cast<const Pair*>(a.x), size,
                                           reinterpret_cast<const char*>(weight), a.past_cache},
                      output);
  });
}

template <typename T, typename W>
void run(const Args& a, int64_t begin, int64_t end) {
  const auto* const weight = static_cast<const W*>(a.weight);
  const auto* const x = static_cast<const T*>(a.x);
  if constexpr (HL_BFLOAT16 && std::is_same_v<T, BFloat16>) {
    if (std::is_same_v<W, BFloat16> && a.in % 2 == 0) {
      return run<T>(
          a,
          operands(static_cast<const Pair*>(a.weight), static_cast<const Pair*>(a.x), a.in / 2, a),
          begin, end);
    }
    if (std::is_same_v<W, int8_t> && a.in % 2 == 0 && a.in / 2 <= kMostPaired && a.rows > kRows) {
      return run_paired<T>(a, begin, end);
    }
  }
  if constexpr (sizeof(T) < sizeof(float)) {
    // Every output reads the row again: widened once.
    constexpr int64_t kMost = 4096;
    if (a.rows == 1 && a.in <= kMost) {
      float wide[kMost];
      store_scaled(x, a.in, 1, wide);
      return run<T>(a, operands(weight, static_cast<const float*>(wide), a.in, a), begin, end);
    }
  }
  run<T>(a, operands(weight, x, a.in, a), begin, end);
}

template <typename T>
void run(const Args& a, int64_t begin, int64_t end) {
  return a.weight_type == Type::kInt8 ? run<T, int8_t>(a, begin, end) : run<T, T>(a, begin, end);
}

}  // namespace

void HL_KERNEL(run)(const Args& args, int64_t begin, int64_t end) {
  return args.type == Type::kBFloat16 ? run<BFloat16>(args, begin, end)
                                      : run<float>(args, begin, end);
}

bool HL_KERNEL(prepare_int4)(const Int4Args& args, int64_t begin, int64_t end) {
  if (args.type == Type::kFloat) return int4_rows<3, float>(args, begin, end);
  return args.planes == 2 ? int4_rows<2, BFloat16>(args, begin, end)
                          : int4_rows<3, BFloat16>(args, begin, end);
}

void HL_KERNEL(run_int4)(const Int4Args& args, int64_t begin, int64_t end) {
  if (args.type == Type::kFloat) return int4_outputs<3, float>(args, begin, end);
  args.planes == 2 ? int4_outputs<2, BFloat16>(args, begin, end)
                   : int4_outputs<3, BFloat16>(args, begin, end);
}

void HL_KERNEL(pack_integers)(const IntegerArgs& args, int64_t begin, int64_t end) {
  pack_rows(args, begin, end);
}

void HL_KERNEL(run_integers)(const IntegerArgs& args, int64_t begin, int64_t end, void* packed) {
  multiply_integers(args, begin, end, packed);
}

void HL_KERNEL(widen)(const WidenArgs& args, int64_t begin, int64_t end, int64_t i0, int64_t i1,
                      void* to) {
  return args.type == Type::kBFloat16
             ? weights(args, begin, end, i0, i1, static_cast<BFloat16*>(to))
             : weights(args, begin, end, i0, i1, static_cast<float*>(to));
}

}  // namespace headloom::ops::linear_kernel
