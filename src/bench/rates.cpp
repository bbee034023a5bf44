#include "bench/rates.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "bench/timing.h"
#include "ops/product/product.h"

namespace headloom::bench {
namespace {

double best_seconds(const std::function<void()>& f) {
  const Paired timed = time_pairs(f, f, 0.3);
  return std::min(timed.a.low, timed.b.low);
}

}  // namespace

FastestReading fastest_reading(const at::Tensor& x) {
  FastestReading fastest{.how = ops::kReadings[0],
                         .seconds = std::numeric_limits<double>::infinity()};
  for (const ops::Reading how : ops::kReadings) {
    const double seconds = best_seconds([&] { ops::read_all(x, how); });
    if (seconds < fastest.seconds) fastest = {.how = how, .seconds = seconds};
  }
  return fastest;
}

Rates measure_rates(at::ScalarType type) {
  at::NoGradGuard no_grad;
  const int64_t n = 2048;
  const at::Tensor a = at::randn({n, n}).to(type), b = at::randn({n, n}).to(type);
  const at::Tensor c = at::empty({n, n}, a.options());
  double product = std::numeric_limits<double>::infinity();
  for (const std::string& route : ops::routes_worth_timing(c, a, b)) {
    product = std::min(product, best_seconds([&] { ops::product_by(route, c, a, b); }));
  }
  at::Tensor from = at::ones({int64_t{64} << 20});
  at::Tensor to = at::empty_like(from);  // 256 MB each: no cache holds them
  const double bytes = static_cast<double>(from.nbytes());
  // Reading alone is faster than copying, where memory changes direction. So is changing memory in
  // place, as an optimiser does: a line that is only written is often read first.
  const double copied = 2 * bytes / best_seconds([&] { to.copy_(from); });
  const double changed = 2 * bytes / best_seconds([&] { from.neg_(); });
  const double read = bytes / fastest_reading(from).seconds;
  const at::Tensor x = at::randn({int64_t{1} << 16});
  at::Tensor y = at::empty_like(x);
  const double values = static_cast<double>(x.numel());
  const double library = best_seconds([&] { at::exp_out(y, x); });
  const double own = best_seconds([&] { ops::repeated_exponentials(x, y, 16); }) / 16;
  return {.flops = 2.0 * n * n * n / product,
          .bytes = std::max({copied, changed, read}),
          .exponentials = values / std::min(library, own)};
}

}  // namespace headloom::bench
