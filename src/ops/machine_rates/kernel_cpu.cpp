// Compiled once for each instruction set, with CPU_CAPABILITY its name.
#include "ops/machine_rates/kernel.h"

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

float HL_KERNEL(sum)(const float* x, int64_t n) {
  vf sums[kAtOnce];
  for (vf& sum : sums) sum = zero();
  for (int64_t i = 0; i + kAtOnce * VL <= n; i += kAtOnce * VL) {
#pragma GCC unroll 4
    for (int j = 0; j < kAtOnce; ++j) sums[j] = sums[j] + load(x + i + j * VL);
  }
  return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace headloom::ops::machine_rates_kernel
