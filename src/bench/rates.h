// What this machine does in a second, for bounds.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/machine_rates/machine_rates.h"

namespace headloom::bench {

// With the threads it is given.
struct Rates {
  double flops, bytes, exponentials;
};

// The fastest code there is for each: the best route of products; memory that is read, copied or
// changed in place; and ATen's exponential or that of the kernels. The best of a few runs, because
// a rate is a bound, and whatever else ran only lowers it. `type`: of the products.
Rates measure_rates(at::ScalarType type);

// The way to read x that takes the least time, and that time; x as read_all() wants it, and too
// large for a cache.
struct FastestReading {
  ops::Reading how;
  double seconds;
};
FastestReading fastest_reading(const at::Tensor& x);

}  // namespace headloom::bench
