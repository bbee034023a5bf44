// The speed and memory of the models of a comparison, measured apart from their training: one after
// the other in one process, several rounds of all of them, so that a drift of the machine hits all.
#pragma once

#include <string>

#include "data/task.h"
#include "report/comparison.h"
#include "train/config.h"

namespace headloom::bench {

// The median time of some training steps of `config` after a first one; where training sequences
// have several lengths, the mean of those of each. Throws UsageError for another device than the
// CPU.
double step_seconds(const RunConfig& config, const data::Task& task);

// Measures, task by task, the models that have a finished run below `folder`, `rounds` times each,
// and keeps what was measured in the folder (train/speeds.h). A training step has the batch of the
// run, or the part of it that train.accumulate leaves. Its time is the mean over the lengths of
// training sequences, and its memory that of the length that takes most. Decoding continues one
// text from half of the task's length. What is kept of the same configurations is not measured
// again. Returns false where the process is interrupted, and measures nothing of runs on another
// device than the CPU.
bool measure_speeds(const std::string& folder, int64_t rounds,
                    const report::Comparison& comparison);

}  // namespace headloom::bench
