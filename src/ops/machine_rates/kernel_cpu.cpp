// Compiled once for each instruction set, with CPU_CAPABILITY its name.
#include "ops/machine_rates/kernel.h"

#include "ops/kernel/prefetch.h"
#include "ops/kernel/vec.h"

namespace headloom::ops::machine_rates_kernel {

// Four vectors at a time, so that no result waits for another.
constexpr int kAtOnce = 4;

void HL_KERNEL(exponentials)(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i + kAtOnce * VL <= n; i += kAtOnce * VL) {
#pragma GCC unroll 4
    for (int j = 0; j < kAtOnce; ++j) store(y + i + j * VL, vexp(load(x + i + j * VL)));
  }
}

float HL_KERNEL(sum)(const float* x, int64_t n, Reading how) {
  vf sums[kAtOnce];
  for (vf& sum : sums) sum = zero();
  if (how == Reading::kPastCache) {
    constexpr int64_t kLine = 16, kAhead = 128 * kLine;
    for (int64_t i = 0; i < n; i += kAtOnce * kLine) {
#pragma GCC unroll 4
      for (int j = 0; j < kAtOnce; ++j) {
        const float* const at = x + i + j * kLine;
        prefetch_once(at + kAhead, /*past_cache=*/true);
#pragma GCC unroll 4
        for (int v = 0; v < kLine; v += VL) sums[j] = sums[j] + load(at + v);
      }
    }
  } else if (how == Reading::kInOrder) {
    for (int64_t i = 0; i + kAtOnce * VL <= n; i += kAtOnce * VL) {
#pragma GCC unroll 4
      for (int j = 0; j < kAtOnce; ++j) sums[j] = sums[j] + load(x + i + j * VL);
    }
  } else {
    constexpr int64_t kLine = 16, kAhead = 64 * kLine;
    const int64_t run = n / kAtOnce;
    for (int64_t i = 0; i < run; i += kLine) {
#pragma GCC unroll 4
      for (int j = 0; j < kAtOnce; ++j) {
        const float* const at = x + j * run + i;
        __builtin_prefetch(at + kAhead, 0, 2);
#pragma GCC unroll 4
        for (int v = 0; v < kLine; v += VL) sums[j] = sums[j] + load(at + v);
      }
    }
  }
  return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace headloom::ops::machine_rates_kernel
