#include "bench/timing.h"

#include <algorithm>

#include "core/clock.h"
#include "core/median.h"

namespace headloom::bench {
namespace {

double seconds_of(const std::function<void()>& f) {
  const double start = seconds_now();
  f();
  return seconds_now() - start;
}

}  // namespace

Spread spread_of(const std::vector<double>& values) {
  if (values.empty()) return {};
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  return {.low = *low, .median = median(values), .high = *high};
}

Paired time_pairs(const std::function<void()>& a, const std::function<void()>& b, double seconds,
                  int least) {
  a();
  b();
  std::vector<double> as, bs, ratios;
  double spent = 0;
  while (static_cast<int>(as.size()) < least || (spent < seconds && as.size() < 1000)) {
    as.push_back(seconds_of(a));
    bs.push_back(seconds_of(b));
    ratios.push_back(as.back() / bs.back());
    spent += as.back() + bs.back();
  }
  return {.a = spread_of(as), .b = spread_of(bs), .ratio = spread_of(ratios)};
}

}  // namespace headloom::bench
