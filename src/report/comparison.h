// What a comparison measured, as plain structs, and the three ways to show it: a self-contained
// HTML page, a table for the terminal, and JSON.
//
// Numbers that were not measured are NaN (or -1 where an integer says so) and are shown as a dash.
// A run that is planned (models x tasks x seeds) but absent from `runs` counts as not started, so a
// report can be written at any time while a comparison is under way. Runs of a sweep are not
// counted among the planned ones and enter no verdict.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace headloom::report {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// One evaluation during a run.
struct Point {
  int64_t step = 0;
  double tokens = 0;             // trained on so far
  double seconds = 0;            // of training so far, evaluation excluded
  double train_loss = kUnknown;  // nats per target token, mean since the last evaluation
  double loss = kUnknown;        // nats per target token on held-out data
  double quality = kUnknown;     // the task's metric (TaskInfo::metric) on held-out data
  // The standard error that `quality` has because the held-out data is a sample: the same metric of
  // other data of the same kind would scatter so.
  double quality_error = kUnknown;
  // The metric of each part of the held-out data, the same parts in every run of a task; empty
  // where it is not known. Their mean may differ a little from `quality`, where parts differ in
  // size.
  std::vector<double> quality_parts{};
  double accuracy = kUnknown;  // fraction of exactly matching answers, where the task has answers
  // The share of all choices that each expert got in training, by layer; empty without experts.
  std::map<int64_t, std::vector<double>> expert_load{};
};

// Where a run stopped that no process works on, though it was to go further.
struct Interruption {
  int64_t step = 0;                     // the last that it made
  int64_t steps = 0;                    // that it was to make
  std::optional<int64_t> saved_step{};  // of the newest checkpoint; none: it begins anew
  std::string go_on{};                  // the command that does: "headloom train RUN --resume"
};

enum class RunState { kRunning, kFinished, kFailed };

// A swept key and one of its values, as the config has them: ("lr", "0.002").
struct SweptValue {
  std::string key{};
  std::string value{};

  bool operator==(const SweptValue&) const = default;
};
using Setting = std::vector<SweptValue>;

// One model trained on one task from one seed. Its result is its last point.
struct Run {
  std::string model{};  // ModelInfo::label
  std::string task{};   // TaskInfo::name
  int64_t seed = 0;
  Setting setting{};  // of the sweep's keys; empty where nothing is swept
  // One of the runs that the setting is chosen by: its points are of validation data. The points of
  // other runs are of what train.eval_split says: test data where something was chosen or may stop
  // a run, else usually all held-out data.
  bool sweep = false;
  std::string folder{};  // of the run, relative to the report; empty where there is none
  RunState state = RunState::kRunning;
  std::optional<Interruption> interruption{};  // of one with the state kRunning alone
  std::string problem{};  // why it failed: "diverged at step 120: the loss became nan"
  std::string warning{};  // of a finished run: why it is to be distrusted (it has diverged)
  std::vector<Point> points{};
  double tokens_per_second = kUnknown;  // of training
  double peak_memory_bytes = kUnknown;
};

struct ModelInfo {
  std::string label{};        // unique: "dcmha"
  std::string description{};  // one line: "dynamically composed heads, rank 2"
  std::string source{};       // the paper: "Xiao et al. 2024", or empty
};

// What a model reaches without having learned: "a uniform guess", "a guess among the values shown".
struct Floor {
  std::string name{};
  double quality = kUnknown;  // in the task's metric
};

struct TaskInfo {
  std::string name{};           // unique: "text"
  std::string description{};    // one sentence
  std::string metric{};         // "bits per byte", "loss", "error rate"
  std::string unit = "tokens";  // what training counts: tokens or images
  bool lower_is_better = true;
  bool percent = false;         // the metric is a fraction, shown in percent
  std::vector<Floor> floors{};  // the best of them last; empty where none is known
  // Every option of the task and its value, as the config has them: ("length", "64"). Tasks that
  // differ in a number alone have figures over it.
  Setting options{};
  // The task that this one is a size of ([[sizes]]); empty without sizes. Tasks of one series
  // differ in the models' sizes and in training alone.
  std::string size_of{};
  // Of a task that has the name of another but for a number: "differs from `text` in `tokenizer`
  // (...)"; else empty.
  std::string apart{};
  // How runs may end before the budget does and what that means for their results; empty where they
  // may not: "runs end at an accuracy of 90% on ...".
  std::string stopping{};
};

// Which setting a sweep chose for a model on a task, by the mean quality on validation data.
struct Choice {
  std::string model{};
  std::string task{};
  Setting setting{};
  // The keys whose chosen value is the smallest or largest that was tried, after the sweep was
  // extended.
  std::vector<std::string> at_edge{};
};

// What was measured apart from training, models in turn in one process: one value a round.
struct Speed {
  std::string model{};
  std::string task{};
  std::string machine{};  // on which
  std::vector<double> train_tokens_per_second{};
  std::vector<double> decode_tokens_per_second{};  // empty where the model does not decode
  std::vector<double> peak_memory_bytes{};         // of a training step
};

// A model as built for a task: sizes differ between tasks with their vocabularies and budgets.
struct Build {
  std::string model{};
  std::string task{};
  int64_t parameters = -1;
  double flops_per_token = kUnknown;        // of training, forward: products and attention; of an
                                            // image's patch
  double flops_per_unit = kUnknown;         // the same, of what Point::tokens counts
  double state_bytes_per_token = kUnknown;  // decoding state that each token of context adds
  double measured_state_bytes_per_token = kUnknown;  // the same, of a state that read a text
  // The decoding state of a whole sequence of the task, which may be constant in its length;
  // unknown where the model does not decode from a state.
  double state_bytes = kUnknown;
  // Of a token, the measured one where there is one.
  double state() const {
    return std::isnan(measured_state_bytes_per_token) ? state_bytes_per_token
                                                      : measured_state_bytes_per_token;
  }
  double mechanism_share =
      kUnknown;  // fraction of the forward FLOPs that the mechanism adds over plain attention
  std::string config{};  // complete TOML of the model
  // What decides the model's result besides the task: its width and depth, and the keys of [train].
  // ("model.width", "64"), ("batch", "32"). Empty where it is not known.
  Setting conditions{};
  // The keys of [train] that differ from the baseline's because the config says so: "weight_decay =
  // 0". What a sweep chose is not among them.
  std::string train_differences{};
};

// Whether a run, choice, speed or build is of this model on this task.
template <typename One>
bool is_of(const One& one, const std::string& model, const std::string& task) {
  return one.model == model && one.task == task;
}

struct Comparison {
  std::string title{};
  std::vector<ModelInfo> models{};  // the first is the baseline
  std::vector<TaskInfo> tasks{};
  std::vector<int64_t> seeds{};  // of the runs that are reported
  // Every model trains on every task from every seed. False: nothing is expected but the runs that
  // are there.
  bool planned = true;
  std::vector<std::string> swept{};    // keys: "lr"; empty where nothing is swept
  std::vector<int64_t> sweep_seeds{};  // of the runs that choose
  int sweep_planned = 0;               // of those runs, as far as the sweep has been extended
  std::vector<Choice> choices{};       // those made so far
  std::vector<Build> builds{};
  std::vector<Run> runs{};
  std::vector<Speed> speeds{};
  // None, or one: the same models on the same tasks from the same seeds with the same settings, but
  // under a second initialisation, which its title says: "equal_init = true". It tells whether what
  // is said of the first holds, and is of use for nothing else.
  std::vector<Comparison> robustness{};
  std::string budget{};  // one sentence: "Every run trains on 4.9M tokens ..."
  std::vector<std::pair<std::string, std::string>>
      machine{};          // ("Processor", "..."), ("Threads", "2"), ...
  std::string config{};   // complete TOML of the comparison
  std::string command{};  // what reproduces it
  // Where no process works on the comparison or a run of it: the command that goes on with it.
  std::string go_on{};
  // That command prints those that train its runs, which may wait for their turn somewhere else.
  bool by_commands = false;
  std::string date{};
};

// One HTML file: inline style and SVG, nothing fetched, light and dark.
std::string to_html(const Comparison& comparison);
// For a terminal: per task the answer in a sentence and an aligned table. `width` wraps the
// sentences.
std::string to_text(const Comparison& comparison, int width = 100);
// Everything in the struct plus means, spreads and verdicts. Numbers that are not finite become
// null.
std::string to_json(const Comparison& comparison);

}  // namespace headloom::report
