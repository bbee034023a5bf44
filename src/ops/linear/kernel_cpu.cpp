// Compiled once for each instruction set, with CPU_CAPABILITY its name.
//
// One row of x takes the weights an output at a time, so that they are read in the order in which
// they lie: four outputs side by side take a twentieth longer. Of more rows, a tile is kOutputs
// rows of the weights times up to kRows rows of x; all tiles of the same weights follow one
// another, so that only the first reads them from memory. Sums are in registers.
#include "ops/kernel/prefetch.h"
#include "ops/kernel/vec.h"
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
constexpr int kPartial = 4;  // sums of one output, for as many products in flight
// Weights are fetched this many bytes ahead, and no less than a tile, whose own rows are in use
// already, in the order in which they lie. Left to the hardware, bfloat16 and int8 come at half the
// memory's bandwidth.
constexpr int64_t kAhead = 8192;

// The first `count` < VL, zeros in the other lanes.
template <typename T>
HL_INLINE vf weights_part(const T* p, int64_t count) {
  T whole[VL] = {};
  std::memcpy(whole, p, static_cast<size_t>(count) * sizeof(T));
  return load(whole);
}

template <int Bytes>
HL_INLINE void fetch(const char* from, bool past_cache) {
  constexpr int kLine = 64;
#pragma GCC unroll 16
  for (int i = 0; i < Bytes; i += kLine) prefetch_once(from + i, past_cache);
}

// O outputs of R rows, the first of them `row` and at x, each from P sums along `in`. T is the type
// of bias and y, W that of the weights, X that of x.
template <int O, int R, int P, typename T, typename W, typename X>
HL_INLINE void tile(const Args& a, const X* x, int64_t output, int64_t row) {
  const int64_t in = a.in;
  const W* w = static_cast<const W*>(a.weight) + output * in;
  const T* bias = static_cast<const T*>(a.bias);
  T* y = static_cast<T*>(a.y);
  constexpr int64_t kSize = sizeof(W);
  const int64_t whole = O > 1 ? O * in * kSize : 0;
  const char* next = reinterpret_cast<const char*>(w) + (whole > kAhead ? whole : kAhead);
  vf sums[P][O][R];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 4
    for (int o = 0; o < O; ++o) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[p][o][r] = zero();
    }
  }
  const auto add = [&](int p, const auto& of_w, const auto& of_x) __attribute__((always_inline)) {
    vf values[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) values[r] = of_x(x + r * in);
#pragma GCC unroll 4
    for (int o = 0; o < O; ++o) {
      const vf weight = of_w(w + o * in);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[p][o][r] = fma(weight, values[r], sums[p][o][r]);
    }
  };
  const auto add_whole = [&](int p, int64_t i) __attribute__((always_inline)) {
    add(
        p, [i](const W* from) __attribute__((always_inline)) { return load(from + i); },
        [i](const X* from) __attribute__((always_inline)) { return load(from + i); });
  };
  int64_t i = 0;
  for (; i + P * VL <= in; i += P * VL) {
    fetch<O * P * VL * kSize>(next + O * i * kSize, a.past_cache);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) add_whole(p, i + p * VL);
  }
  for (; i + VL <= in; i += VL) add_whole(0, i);
  if (i < in) {
    const int64_t left = in - i;
    add(
        0,
        [=](const W* from) __attribute__((always_inline)) { return weights_part(from + i, left); },
        [=](const X* from) __attribute__((always_inline)) { return load_part(from + i, left); });
  }
#pragma GCC unroll 4
  for (int o = 0; o < O; ++o) {
    const float scale = a.scale == nullptr ? 1 : a.scale[output + o];
    const float offset = bias == nullptr ? 0 : widen(bias[output + o]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      vf sum = sums[0][o][r];
#pragma GCC unroll 4
      for (int p = 1; p < P; ++p) sum = sum + sums[p][o][r];
      narrow(scale * hsum(sum) + offset, y + (row + r) * a.out + output + o);
    }
  }
}

template <typename T, typename W, int O>
void outputs(const Args& a, int64_t output) {
  const T* x = static_cast<const T*>(a.x);
  int64_t row = 0;
  for (; row + kRows <= a.rows; row += kRows) {
    tile<O, kRows, 1, T, W>(a, x + row * a.in, output, row);
  }
  for (; row < a.rows; ++row) tile<O, 1, 1, T, W>(a, x + row * a.in, output, row);
}

template <typename T, typename W, typename X>
void one_row(const Args& a, const X* x, int64_t begin, int64_t end) {
  for (int64_t output = begin; output < end; ++output) {
    tile<1, 1, kPartial, T, W>(a, x, output, 0);
  }
}

template <typename T, typename W>
void run(const Args& a, int64_t begin, int64_t end) {
  if (a.rows == 1) {
    // Every output reads the row again: widened once.
    constexpr int64_t kMost = 4096;
    if (sizeof(T) == sizeof(float) || a.in > kMost) {
      return one_row<T, W>(a, static_cast<const T*>(a.x), begin, end);
    }
    float wide[kMost];
    store_scaled(static_cast<const T*>(a.x), a.in, 1, wide);
    return one_row<T, W>(a, wide, begin, end);
  }
  int64_t output = begin;
  for (; output + kOutputs <= end; output += kOutputs) outputs<T, W, kOutputs>(a, output);
  for (; output < end; ++output) outputs<T, W, 1>(a, output);
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

bool HL_KERNEL(pack_integers)(const IntegerArgs& args, int64_t begin, int64_t end) {
  return pack_rows(args, begin, end);
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
