// What a training step costs where several machines share it: an estimate in closed form.
#pragma once

#include <cstdint>
#include <string>

#include "train/config.h"

namespace headloom {

// A step that one machine can do alone.
struct SharedStep {
  double flops = 0;           // forward and backward
  double parameters = 0;      // whose gradients are reduced, 4 bytes each
  double machine_flops = 0;   // of a machine, in a second
  double bytes_a_second = 0;  // that a machine sends, and receives at the same time
  std::string shard = "none";  // train.shard
};

struct StepCost {
  double compute = 0;  // seconds
  double bytes = 0;    // that each machine sends
  // Seconds that the gradients take on the network. They leave while the backward goes on, which is
  // two thirds of `compute`.
  double reduce = 0;
  // Seconds in which the parts of the parameters are collected. With train.shard = "optimizer" that
  // is once, after the optimiser; with "parameters" twice, during the forward and the backward.
  double gather = 0;
  double step = 0;        // seconds
  double efficiency = 0;  // of the machines' compute: the step of one, over `machines` such steps
};

// Gradients are summed by a ring, in which each of N machines sends 2 (N - 1) / N of them
// (Patarasuk and Yuan 2009). To collect the parameters it sends (N - 1) / N of them. A step is
//   none, optimizer: compute / 3 + max(2 compute / 3, reduce) + gather;
//   parameters: max(compute / 3, gather / 2) + max(2 compute / 3, gather / 2 + reduce).
// Latencies, and what a machine waits for slower ones, are not counted.
StepCost step_cost(const SharedStep& step, int64_t machines);

// A step whose layers the machines share out (train.tensor_parallel).
struct CutStep {
  double layer_flops = 0;     // forward and backward, of all layers
  double other_flops = 0;     // of what every machine computes: embeddings and heads
  double summed_bytes = 0;    // of all sums of the mixers' outputs and of their inputs' gradients
  double machine_flops = 0;   // of a machine, in a second
  double bytes_a_second = 0;  // that a machine sends, and receives at the same time
};
// Nothing is computed while the machines sum, so a step is compute + reduce.
StepCost step_cost(const CutStep& step, int64_t machines);

// Up to this number of machines (not whole) the sums of gradients are hidden behind the backward:
// 2 compute / 3 = reduce. A step of more machines is bound by the network.
double hidden_up_to(const SharedStep& step);

// Throws UsageError where `processes` cannot share each piece of a batch equally.
void check_equal_shares(const TrainOptions& options, int64_t processes);

}  // namespace headloom
