// What the cases of an operator say of themselves: bounds, the reference's speed, growth.
#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "bench/memory.h"
#include "bench/rates.h"
#include "bench/requirements.h"
#include "core/text.h"

namespace headloom::bench {
namespace {

// Seconds that its products, its memory or its exponentials take at least: the most of the three.
double bound_of(const ops::OpWork& work, const Rates& rates) {
  return std::max(
      {work.flops / rates.flops, work.bytes / rates.bytes, work.exponentials / rates.exponentials});
}

}  // namespace

void bench_family_requirements(const std::vector<ops::OpCase>& cases, const BenchOptions& a,
                               Requirements& rows) {
  std::map<at::ScalarType, Rates> measured;
  const auto rates = [&](at::ScalarType type) -> const Rates& {
    const auto found = measured.find(type);
    return found != measured.end() ? found->second
                                   : measured.emplace(type, measure_rates(type)).first->second;
  };
  for (const ops::OpCase& c : cases) {
    for (const bool training : {false, true}) {
      const char* part = training ? "forward + backward" : "forward";
      // The convolutions and maps of composed attention are bounded in its documentation.
      if (c.training_work.bytes == 0) continue;
      rows.at_most(str(c.op, " ", c.name, ", ", part, ": time over the bound"), c.bound_target,
                   [&] {
                     const double bound = bound_of(training ? c.training_work : c.forward_work,
                                                   rates(c.product_type.value_or(c.dtype)));
                     const auto f = step_of(c, training);
                     return time_pairs(f, f, a.seconds).a.median / bound;
                   });
    }
    if (c.reference_target > 0) {
      rows.at_least(
          str(c.op, " ", c.name, ", forward + backward: reference's time over the kernel's"),
          c.reference_target, [&] {
            return time_pairs(step_of(c, true, "reference"), step_of(c, true), 0, 2).ratio.median;
          });
    }
    if (c.at_length) {
      const int64_t low = 1024, high = 16384;
      const double growth = static_cast<double>(high) / static_cast<double>(low);
      const auto row = [&](const char* what) {
        return str(c.op, " ", c.name, ": ", what, " a position, T=", high, " over T=", low,
                   ", training");
      };
      const auto at = [&](int64_t length) { return step_of(c.at_length(length), true); };
      rows.at_most(row("time"), 1.15, [&] {
        return time_pairs(at(high), at(low), 2 * a.seconds).ratio.median / growth;
      });
      rows.at_most(row("memory"), 1.0,
                   [&] { return peak_bytes(at(high)) / peak_bytes(at(low)) / growth; });
    }
  }
}

}  // namespace headloom::bench
