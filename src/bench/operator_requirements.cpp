// What the cases of an operator say of themselves: bounds, the reference's speed, growth.
#include <ATen/ATen.h>

#include <map>

#include "bench/memory.h"
#include "bench/rates.h"
#include "bench/requirements.h"
#include "core/text.h"

namespace headloom::bench {
namespace {

struct Bound {
  double seconds = 0;
  const char* what = "";
};

Bound bound_of(const ops::OpWork& work, const Rates& rates) {
  Bound bound;
  for (const Bound& b : {Bound{work.flops / rates.flops, "matrix products"},
                         Bound{work.bytes / rates.bytes, "memory"},
                         Bound{work.exponentials / rates.exponentials, "exponentials"}}) {
    if (b.seconds > bound.seconds) bound = b;
  }
  return bound;
}

}  // namespace

void bench_family_requirements(const std::vector<ops::OpCase>& cases, const BenchOptions& a,
                               Requirements& rows) {
  std::map<at::ScalarType, Rates> rates;
  for (const ops::OpCase& c : cases) {
    for (const bool training : {false, true}) {
      const char* part = training ? "forward + backward" : "forward";
      // The convolutions and maps of composed attention are bounded in its documentation.
      if (c.training_work.bytes == 0) continue;
      const at::ScalarType type = c.product_type.value_or(c.dtype);
      if (rates.count(type) == 0) rates[type] = measure_rates(type);
      const Bound bound = bound_of(training ? c.training_work : c.forward_work, rates[type]);
      rows.at_most(str(c.name, ", ", part, ": time over the bound of ", bound.what), c.bound_target,
                   [&] {
                     const auto f = step_of(c, training);
                     return time_pairs(f, f, a.seconds).a.median / bound.seconds;
                   });
    }
    if (c.reference_target > 0) {
      rows.at_least(
          str(c.name, ", forward + backward: reference's time over the kernel's"),
          c.reference_target, [&] {
            return time_pairs(step_of(c, true, "reference"), step_of(c, true), 0, 2).ratio.median;
          });
    }
    if (c.at_length) {
      const int64_t low = 1024, high = 16384;
      const double growth = static_cast<double>(high) / static_cast<double>(low);
      const auto brief = step_of(c.at_length(low), true),
                 lengthy = step_of(c.at_length(high), true);
      const auto row = [&](const char* what) {
        return str(c.op, " ", c.name, ": ", what, " a position, T=", high, " over T=", low,
                   ", training");
      };
      rows.at_most(row("time"), 1.15,
                   [&] { return time_pairs(lengthy, brief, 2 * a.seconds).ratio.median / growth; });
      rows.at_most(row("memory"), 1.0,
                   [&] { return peak_bytes(lengthy) / peak_bytes(brief) / growth; });
    }
  }
}

}  // namespace headloom::bench
