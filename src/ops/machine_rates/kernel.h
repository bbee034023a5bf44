// The two loops whose speed bounds what kernels can do, as fast as they can be written. Free of
// torch.
#pragma once

#include <cstdint>

namespace headloom::ops::machine_rates_kernel {

// y[i] = exp(x[i]) by the exponential of Headloom's kernels. n is a multiple of 64.
using Exponentials = void(const float* x, float* y, int64_t n);
Exponentials exponentials_DEFAULT, exponentials_AVX2, exponentials_AVX512, exponentials_AVX512_BF16;

// How all values are read: in their order, in their order while lines ahead are fetched past the
// second-level cache, or in four runs side by side that fetch ahead.
enum class Reading { kInOrder, kPastCache, kInRuns };

// The sum of all values, which only reads them. n is a multiple of 256.
using Sum = float(const float* x, int64_t n, Reading how);
Sum sum_DEFAULT, sum_AVX2, sum_AVX512, sum_AVX512_BF16;

}  // namespace headloom::ops::machine_rates_kernel
