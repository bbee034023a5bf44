// Where a training step's time goes.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace headloom::bench {

// What operators of one kind take of a step.
struct StepPart {
  std::string name;                  // "norms"
  bool products = false;             // bound by matrix products, not by memory
  double forward = 0, backward = 0;  // seconds a step; of what is neither, in `forward`
  double bytes = 0;                  // that its operators are given and return, each counted once
};

struct StepProfile {
  std::vector<StepPart> parts;
  double seconds = 0;      // a step, while it is profiled
  double between = 0;      // of these outside of all operators
  double page_faults = 0;  // a step; none where all memory is used again
};

// Runs `step` at least `least` times and for `seconds`, recording each operator: an operator inside
// of one whose part is known counts there.
StepProfile profile_steps(const std::function<void()>& step, double seconds, int least = 3);

}  // namespace headloom::bench
