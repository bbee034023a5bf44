// Paired timings: two things in turn in one process, so that a drift of the machine hits both.
#pragma once

#include <functional>
#include <vector>

namespace headloom::bench {

struct Spread {
  double low = 0, median = 0, high = 0;
};
Spread spread_of(const std::vector<double>& values);

struct Paired {
  Spread a, b;   // seconds
  Spread ratio;  // a / b, pair by pair
};

// One warm-up each, then pairs until `seconds` are spent, but at least `least` pairs.
Paired time_pairs(const std::function<void()>& a, const std::function<void()>& b, double seconds,
                  int least = 5);

}  // namespace headloom::bench
