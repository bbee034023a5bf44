#include "train/scaling.h"

#include <algorithm>

#include "core/error.h"

namespace headloom {

StepCost step_cost(const SharedStep& step, int64_t machines) {
  const auto n = static_cast<double>(machines);
  const double share = 4 * step.parameters * (n - 1) / n;
  StepCost out{.compute = step.flops / step.machine_flops / n, .bytes = 2 * share};
  out.reduce = 2 * share / step.bytes_a_second;
  const double gathers = step.shard == "parameters" ? 2 : step.shard == "optimizer" ? 1 : 0;
  out.bytes += gathers * share;
  out.gather = gathers * share / step.bytes_a_second;
  const double forward = out.compute / 3, backward = 2 * out.compute / 3;
  if (step.shard == "parameters") {
    out.step = std::max(forward, out.gather / 2) + std::max(backward, out.gather / 2 + out.reduce);
  } else {
    out.step = forward + std::max(backward, out.reduce) + out.gather;
  }
  out.efficiency = out.compute / out.step;
  return out;
}

StepCost step_cost(const CutStep& step, int64_t machines) {
  const auto n = static_cast<double>(machines);
  const double alone = (step.layer_flops + step.other_flops) / step.machine_flops;
  StepCost out{.compute = (step.layer_flops / n + step.other_flops) / step.machine_flops,
               .bytes = 2 * step.summed_bytes * (n - 1) / n};
  out.reduce = out.bytes / step.bytes_a_second;
  out.step = out.compute + out.reduce;
  out.efficiency = alone / n / out.step;
  return out;
}

double hidden_up_to(const SharedStep& step) {
  // 2/3 flops / (machine_flops n) = 8 parameters (n - 1) / n / bytes_a_second
  return 1 +
         2.0 / 3 * step.flops / step.machine_flops * step.bytes_a_second / (8 * step.parameters);
}

void check_equal_shares(const TrainOptions& options, int64_t processes) {
  if (options.batch % (options.accumulate * processes) == 0) return;
  usage_error("'train.batch' is ", options.batch, ", which ", processes,
              " processes cannot share equally",
              options.accumulate > 1 ? str(" with train.accumulate = ", options.accumulate) : "",
              ", expected a multiple of ", options.accumulate * processes, ".");
}

}  // namespace headloom
