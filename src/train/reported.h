// What a report has of one run, task or model, from what training has and leaves.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "data/task.h"
#include "model/model.h"
#include "report/comparison.h"
#include "train/config.h"
#include "train/metrics.h"
#include "train/result.h"

namespace headloom {

// Whether a run has been evaluated after its last step, or at the accuracy that it stops at.
bool is_whole(const TrainOptions& train, const std::vector<EvalPoint>& evaluations);

// A line of metrics.jsonl as the report has it: text is judged by bits per byte, all else by the
// share of wrong answers. `bytes_per_token`: the task's, 0 where it means nothing.
report::Point report_point(const EvalPoint& point, double bytes_per_token);

// A task as the report has it, with its options and its floors on the sequences that runs trained
// so are judged by.
report::TaskInfo report_task(const std::string& name, const data::Task& task,
                             data::TaskSpec& options, const TrainOptions& train);

// What train.stop_accuracy means for the results of runs (TaskInfo::stopping); empty without it.
std::string stopping_text(const TrainOptions& options);
// The same of runs that differ in it.
constexpr const char* kSomeStop =
    "some runs end once they reach their train.stop_accuracy on validation data";

// What a model is and costs on a task, as the report has it; without the labels of the two. The
// model may be without memory.
report::Build report_build(const Model& model, const data::Task& task);

// The papers of the model's token mixers.
std::string mixer_sources(const ModelConfig& model);

// Whether a key of [train], "eval_every", may differ between models that are compared. Unequal
// steps are seen in the tokens.
bool is_of_no_consequence(const std::string& key);

// "lr = 0.001, no clip": where `run` is trained otherwise than `baseline`, but for options that
// change no result and for those in `chosen`, such as "train.lr".
std::string train_differences(TrainOptions baseline, TrainOptions run,
                              const std::set<std::string>& chosen = {});

// The width, the depth and the keys of [train] that decide a result (report::Build::conditions).
// The steps are not among them: the tokens of training say more.
report::Setting conditions_of(const RunConfig& run);

// Puts the state and the costs of a run that has ended, as its result says, into `run`.
void take_result(report::Run& run, const RunResult& result);

// Says in `run` where it stopped, if it is unfinished and no process works on it. `folder` is its
// own, of which `metrics` were read, and `comparison` that of the comparison it belongs to, or "".
void note_interruption(report::Run& run, const std::string& folder, const std::string& comparison,
                       bool worked_on, const RunMetrics& metrics);

// "headloom compare FOLDER", and the same with "--plan"
std::string command_that_goes_on(const std::string& comparison);
std::string command_that_plans(const std::string& comparison);

}  // namespace headloom
