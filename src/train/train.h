// Training one model: the loop behind `headloom train` and each run of `headloom compare`.
#pragma once

#include <string>
#include <vector>

#include "core/config.h"
#include "distributed/communicator.h"
#include "train/metrics.h"
#include "train/result.h"

namespace headloom {

struct TrainControl {
  std::string folder = {};      // the run's folder
  bool resume = false;          // go on from the newest checkpoint, where there is one
  std::string checkpoint = {};  // or from this one: "best", "last" or a step
  std::string from = {};        // the folder of a run whose weights a new run begins with
  std::string from_checkpoint = "best";
  std::string label = {};  // stands before progress lines
  // The run belongs to a comparison, whose code checks its configuration and writes its result.
  bool of_comparison = false;
  Communicator* group = nullptr;  // the processes that share the run; nullptr: there is one
};

struct TrainOutcome {
  int64_t step = 0;
  bool interrupted = false;  // Ctrl-C: saved, can go on
  bool requeue = false;      // by SIGUSR1 to any process (interrupt.h)
  int64_t parameters = 0;
  std::vector<EvalPoint> evaluations;
  std::string unit = "tokens";  // or images
  double seconds = 0;
  RunResult result = {};  // of the first process; what the folder has, where nothing was trained
};

// Runs `config` ([model], [task], [train]) in `control.folder`, which is locked meanwhile. The
// folder gets config.toml (complete), a copy of the tokenizer, metrics.jsonl and checkpoints/. A
// run that goes on may change what may_change() says: the configuration before is then kept beside
// the new one. Progress goes to stderr. Throws UsageError for a bad config and Error for files that
// fail and for a folder in use; a non-finite loss is reported as Error naming the step and the last
// good checkpoint. All processes of control.group call it alike; the first one alone writes and
// shows anything, and the folder is on a disk that all see. Ctrl-C (interrupt.h) finishes the step,
// saves and returns with `interrupted`.
TrainOutcome train(const Node& config, const TrainControl& control);

}  // namespace headloom
