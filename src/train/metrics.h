// The lines of a run's metrics.jsonl: its steps and its evaluations. Free of torch.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace headloom {

// The share of all choices that each expert got, by the layer's index.
using ExpertLoad = std::map<int64_t, std::vector<double>>;

// What a process that shares a run with others has used so far.
struct RankUse {
  int64_t peak_memory = -1;  // bytes above what it held before; -1: not measured
  double waiting = 0;        // seconds in which it waited for the others
};

// One evaluation on held-out data.
struct EvalPoint {
  int64_t step = 0;
  int64_t tokens = 0;           // trained on so far
  double seconds = 0;           // of training so far
  double loss = 0;              // nats a target token, held out
  double accuracy = 0;          // of target tokens or whole sequences, as the task says
  double train_loss = 0;        // mean since the evaluation before
  ExpertLoad expert_load = {};  // likewise, in training; empty without experts
  // The standard errors of loss and accuracy (Evaluation); NaN where they are not known.
  double loss_error = std::numeric_limits<double>::quiet_NaN();
  double accuracy_error = std::numeric_limits<double>::quiet_NaN();
  // Loss and accuracy of parts of the held-out data (Evaluation); empty where they are not known.
  std::vector<double> loss_parts = {}, accuracy_parts = {};
  // By which train.stop_accuracy ends a run; NaN where that is not set.
  double validation_accuracy = std::numeric_limits<double>::quiet_NaN();
  // By rank; empty where one process trains, and where it is read from the file.
  std::vector<RankUse> ranks = {};
};

// One training step: a line of metrics.jsonl.
struct StepPoint {
  int64_t step = 0;
  double loss = 0, lr = 0, gradient_norm = 0, seconds = 0;
  std::optional<double> balance_loss = {};  // of layers with experts; not part of `loss`
  int64_t processes = 1;                    // that shared it
  ExpertLoad expert_load = {};              // kept until the next evaluation, not written
};

// The sum over steps of what each expert got, since an evaluation.
struct SummedLoad {
  ExpertLoad sum;
  int64_t steps = 0;
};

class Metrics {
 public:
  // Opens RUN/metrics.jsonl; "" for no file: then the points are only kept. Lines of steps after
  // `step` (of a run that went on past its last checkpoint) are dropped. `load`: the load() of that
  // step, which the file does not have.
  Metrics(std::string path, int64_t step, SummedLoad load = {});
  void add(const StepPoint& point);
  void add(const EvalPoint& point);
  // Has the file's lines on the disk, also where the power fails.
  void sync() const;
  // All of these include what was before a resume.
  const std::vector<EvalPoint>& evaluations() const { return evaluations_; }
  const std::vector<double>& step_seconds() const { return step_seconds_; }
  // Mean training loss of the steps since the last evaluation.
  double mean_loss() const;
  // Of the run's first step; absent before it.
  std::optional<double> first_loss() const { return first_loss_; }
  const SummedLoad& load() const { return load_; }
  // Mean expert load since the last evaluation (or since a resume, where the checkpoint is of a
  // version that did not keep it).
  ExpertLoad mean_load() const;

 private:
  void append(const std::string& line);
  void remember(const StepPoint& point);
  void remember(const EvalPoint& point);
  std::string path_;
  std::vector<EvalPoint> evaluations_;
  std::vector<double> step_seconds_, losses_;
  std::optional<double> first_loss_;
  SummedLoad load_;
};

// What RUN/metrics.jsonl says of a run.
struct RunMetrics {
  std::vector<EvalPoint> evaluations;
  StepPoint last_step;  // step 0 where there is none, with the processes that began the run
};
// A line that is no JSON object is left out and, unless the run was interrupted in it, named on
// stderr. Nothing where there is no file.
RunMetrics read_metrics(const std::string& path);

// With which metrics.jsonl begins: the number of processes where several begin the run. Whoever
// goes on with it needs as many, also where it ends before its first step.
std::string first_line_of_metrics(int64_t processes);

}  // namespace headloom
