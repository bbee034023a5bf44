// What a training step costs where several machines share it: an estimate in closed form.
#pragma once

#include <cstdint>

#include "train/config.h"

namespace headloom {

// A step that one machine can do alone.
struct SharedStep {
  double flops = 0;           // forward and backward
  double parameters = 0;      // whose gradients are reduced, 4 bytes each
  double machine_flops = 0;   // of a machine, in a second
  double bytes_a_second = 0;  // that a machine sends, and receives at the same time
  bool shard_optimizer = false;
};

struct StepCost {
  double compute = 0;  // seconds
  double bytes = 0;    // that each machine sends
  // Seconds that the gradients take on the network. They leave while the backward goes on, which is
  // two thirds of `compute`.
  double reduce = 0;
  double gather = 0;      // seconds until everybody has the updated parameters, after the optimiser
  double step = 0;        // seconds: compute / 3 + max(2 compute / 3, reduce) + gather
  double efficiency = 0;  // of the machines' compute: the step of one, over `machines` such steps
};

// Gradients are summed by a ring, in which each of N machines sends 2 (N - 1) / N of them
// (Patarasuk and Yuan 2009); train.shard = "optimizer" adds (N - 1) / N of the parameters.
// Latencies, and what a machine waits for slower ones, are not counted.
StepCost step_cost(const SharedStep& step, int64_t machines);

// Up to this number of machines (not whole) the sums of gradients are hidden behind the backward:
// 2 compute / 3 = reduce. A step of more machines is bound by the network.
double hidden_up_to(const SharedStep& step);

// Throws UsageError where `processes` cannot share each piece of a batch equally.
void check_equal_shares(const TrainOptions& options, int64_t processes);

}  // namespace headloom
