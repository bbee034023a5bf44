#include "bench/requirements.h"

#include <cstdio>

#include "core/problem.h"

namespace headloom::bench {

void Requirements::add(const std::string& what, double target, bool at_least,
                       const Measure& measure) {
  if (!arguments_.wants(what)) return;
  double value = 0;
  try {
    value = measure();
  } catch (const std::exception& error) {
    if (arguments_.json) {
      json_["requirements"].push_back({{"what", what}, {"error", problem_of(error)}});
    } else {
      std::printf("%-72s not measured: %s\n", what.c_str(), problem_of(error).c_str());
    }
    return;
  }
  const bool pass = at_least ? value >= target : value <= target;
  if (arguments_.json) {
    json_["requirements"].push_back({{"what", what},
                                     {"measured", value},
                                     {at_least ? "at_least" : "at_most", target},
                                     {"pass", pass}});
    return;
  }
  if (!begun_) std::printf("\n%-72s %8s\n", "also", "measured");
  begun_ = true;
  std::printf("%-72s %8.3f  %s %s %.2f\n", what.c_str(), value, pass ? "PASS" : "short of",
              at_least ? "at least" : "at most", target);
  std::fflush(stdout);
}

}  // namespace headloom::bench
