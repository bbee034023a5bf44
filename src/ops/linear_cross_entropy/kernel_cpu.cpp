// Compiled once for each instruction set, with CPU_CAPABILITY its name.
//
// Three passes over a row, which the first brings into the second level of cache: the largest
// score, the sum of exponentials, the gradient.
#include <type_traits>

#include "ops/kernel/vec.h"
#include "ops/linear_cross_entropy/kernel.h"

namespace headloom::ops::linear_cross_entropy_kernel {
namespace {

constexpr int kUnroll = 4;           // as many sums, of which one would wait for itself
constexpr int64_t kBlock = 64 * VL;  // scores whose largest is looked for at once

// The vector of scores from class i on; -inf in lanes beyond the last.
template <typename T>
HL_INLINE vf score(const Args& a, const T* row, int64_t i) {
  const int64_t left = a.classes - i;
  if (left >= VL) return load(row + i);
  float some[VL];
  for (int64_t j = 0; j < VL; ++j) some[j] = j < left ? widen(row[i + j]) : -__builtin_inff();
  return load(some);
}

// The largest score and the first class that has it. NaN is passed over: the sum finds it.
template <typename T>
HL_INLINE float largest(const Args& a, const T* row, int64_t* best) {
  float most = -__builtin_inff();
  int64_t from = 0;
  for (int64_t begin = 0; begin < a.classes; begin += kBlock) {
    const int64_t end = begin + kBlock < a.classes ? begin + kBlock : a.classes;
    vf most_of[kUnroll];
#pragma GCC unroll 4
    for (int j = 0; j < kUnroll; ++j) most_of[j] = bcast(-__builtin_inff());
    int64_t i = begin;
    for (; i + kUnroll * VL <= end; i += kUnroll * VL) {
#pragma GCC unroll 4
      for (int j = 0; j < kUnroll; ++j) most_of[j] = vmax(score(a, row, i + j * VL), most_of[j]);
    }
    for (; i < end; i += VL) most_of[0] = vmax(score(a, row, i), most_of[0]);
    const float found = hmax(vmax(vmax(most_of[0], most_of[1]), vmax(most_of[2], most_of[3])));
    if (found > most) {
      most = found;
      from = begin;
    }
  }
  while (from < a.classes - 1 && widen(row[from]) != most) ++from;
  *best = from;
  return most;
}

// `keep`: each exponential takes the place of its score.
template <typename T>
HL_INLINE float sum_of_exponentials(const Args& a, T* row, vf most, bool keep) {
  vf sums[kUnroll] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  const auto add = [&](int64_t at, vf* sum) __attribute__((always_inline)) {
    const vf e = vexp_or_zero(score(a, row, at) - most);
    if (keep) store_some(row + at, e, a.classes - at);
    *sum = *sum + e;
  };
  for (; i + kUnroll * VL <= a.classes; i += kUnroll * VL) {
#pragma GCC unroll 4
    for (int j = 0; j < kUnroll; ++j) add(i + j * VL, &sums[j]);
  }
  for (; i < a.classes; i += VL) add(i, &sums[0]);
  return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename T>
void rows(const Args& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    T* const row = static_cast<T*>(a.scores) + r * a.apart;
    const float most = largest(a, row, a.best + r);
    const float of_target = widen(row[a.targets[r]]);
    // In bfloat16 exponentials would be rounded once more, so they are computed twice.
    const bool keep = a.gradient && std::is_same_v<T, float>;
    const float sum = sum_of_exponentials(a, row, bcast(most), keep);
    a.sums[r] = sum;
    a.below[r] = most - of_target;
    if (!a.gradient) continue;
    const vf part = bcast(1 / sum), most_of_all = bcast(most);
    for (int64_t i = 0; i < a.classes; i += VL) {
      const vf x = score(a, row, i);
      store_some(row + i, part * (keep ? x : vexp_or_zero(x - most_of_all)), a.classes - i);
    }
    float share[VL];
    store(share, part * vexp_or_zero(bcast(of_target) - most_of_all));
    narrow(share[0] - 1, row + a.targets[r]);
  }
}

}  // namespace

void HL_KERNEL(run)(const Args& args, int64_t begin, int64_t end) {
  args.type == Type::kBFloat16 ? rows<BFloat16>(args, begin, end) : rows<float>(args, begin, end);
}

}  // namespace headloom::ops::linear_cross_entropy_kernel
