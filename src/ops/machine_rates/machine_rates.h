// What a processor can do at best besides matrix products, for the bounds of `headloom bench`: a
// kernel's time is compared with the fastest code there is, not with a library's.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/machine_rates/kernel.h"

namespace headloom::ops {

using machine_rates_kernel::Reading;
// Which of them is the fastest depends on the processor.
constexpr Reading kReadings[] = {Reading::kInOrder, Reading::kPastCache, Reading::kInRuns};

// y = exp(x), `repeats` times, by the exponential of the kernels; each thread does a share that
// stays in its first-level cache. x and y are float32, contiguous, of one size, a multiple of 4096.
void repeated_exponentials(const at::Tensor& x, const at::Tensor& y, int64_t repeats);

// Reads all of x, contiguous float32 of a multiple of 2^18 values, once with all threads, and
// returns their sum.
double read_all(const at::Tensor& x, Reading how);

}  // namespace headloom::ops
