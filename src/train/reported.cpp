#include "train/reported.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/differences.h"
#include "core/shell.h"
#include "core/text.h"
#include "model/describe.h"
#include "report/format.h"
#include "train/checkpoint.h"
#include "train/evaluate.h"
#include "train/run_folder.h"
#include "train/run_session.h"

namespace headloom {
namespace fs = std::filesystem;

bool is_of_no_consequence(const std::string& key) {
  static const std::set<std::string> keys = {
      "steps",      "seed",  "eval_every",      "checkpoint_every", "device",
      "accumulate", "shard", "tensor_parallel", "context_parallel", "activation_checkpointing"};
  return keys.contains(key);
}

namespace {

// `stops`: a run may stop at an accuracy, and then does so at an evaluation.
bool is_left_out(const std::string& key, bool stops) {
  return is_of_no_consequence(key) && !(stops && key == "eval_every");
}

}  // namespace

std::string train_differences(TrainOptions baseline, TrainOptions run,
                              const std::set<std::string>& chosen) {
  std::vector<std::string> changed;
  const bool stops = baseline.stop_accuracy || run.stop_accuracy;
  for (const Difference& d : differences(write_fields(baseline), write_fields(run))) {
    if (is_left_out(d.key, stops) || chosen.contains("train." + d.key)) continue;
    changed.push_back(d.after.empty() ? "no " + d.key : d.key + " = " + d.after);
  }
  return join(changed);
}

report::Setting conditions_of(const RunConfig& run) {
  report::Setting out = {{"model.width", str(run.model.width)},
                         {"model.depth", str(run.model.depth)}};
  TrainOptions train = run.train;
  const Node written = write_fields(train);
  for (const auto& [key, value] : written.table()) {
    if (is_left_out(key, train.stop_accuracy.has_value())) continue;
    if (key.starts_with("eval_") && key != "eval_every") continue;
    out.push_back({key, inline_toml(value)});
  }
  return out;
}

std::string mixer_sources(const ModelConfig& model) {
  std::vector<std::string> sources;
  for (const LayerConfig& layer : model.layers) {
    for (const TokenMixerEntry& entry : token_mixers()) {
      if (entry.name != layer.mixer->type()) continue;
      if (std::find(sources.begin(), sources.end(), entry.source) == sources.end()) {
        sources.push_back(entry.source);
      }
    }
  }
  return join(sources, "; ");
}

bool is_whole(const TrainOptions& train, const std::vector<EvalPoint>& evaluations) {
  if (evaluations.empty()) return false;
  const EvalPoint& last = evaluations.back();
  return last.step >= train.steps ||
         (train.stop_accuracy && last.validation_accuracy >= *train.stop_accuracy);
}

report::Point report_point(const EvalPoint& p, double bytes_per_token) {
  const bool text = bytes_per_token > 0;
  const double bits = std::log(2.0) * bytes_per_token;
  std::vector<double> parts = text ? p.loss_parts : p.accuracy_parts;
  for (double& part : parts) part = text ? part / bits : 1 - part;
  return {.step = p.step,
          .tokens = static_cast<double>(p.tokens),
          .seconds = p.seconds,
          .train_loss = p.train_loss,
          .loss = p.loss,
          .quality = text ? p.loss / bits : 1 - p.accuracy,
          .quality_error = text ? p.loss_error / bits : p.accuracy_error,
          .quality_parts = std::move(parts),
          .accuracy = text ? report::kUnknown : p.accuracy,
          .expert_load = p.expert_load};
}

report::TaskInfo report_task(const std::string& name, const data::Task& task,
                             data::TaskSpec& options, const TrainOptions& train) {
  const bool text = task.bytes_per_token() > 0;
  report::TaskInfo out{.name = name,
                       .description = task.describe(),
                       .metric = text ? "bits per byte" : "error rate",
                       .unit = work_unit(task).name,
                       .lower_is_better = true,
                       .percent = !text};
  out.options.push_back({"type", options.type()});
  const Node written = write_fields(options);
  for (const auto& [key, value] : written.table()) {
    out.options.push_back({key, inline_toml(value)});
  }
  // A floor in bits per byte would be that of a uniform guess, which no model stays at.
  if (text) return out;
  const std::vector<int64_t> judged =
      sequence_numbers(task, split_named(train.eval_split), train.eval_sequences);
  for (const data::Floor& floor : task.floors_of(judged)) {
    out.floors.push_back({.name = floor.name, .quality = 1 - floor.accuracy});
  }
  return out;
}

std::string stopping_text(const TrainOptions& options) {
  if (!options.stop_accuracy) return "";
  const char* const results =
      options.eval_split == "test" ? "; their results are of other data, the test data"
      : options.eval_split == "all"
          ? ", which is half of the data of their results and makes these a little too good"
          : ", which is also the data of their results and makes these too good";
  return str("runs end once they reach an accuracy of ", report::percent(*options.stop_accuracy),
             " on validation data", results);
}

report::Build report_build(const Model& model, const data::Task& task) {
  const ModelCosts costs = model_costs(model, task.length());
  const TrainingFlops flops = training_flops(model, task);
  const std::optional<MeasuredState> state = measured_state(model, task.length());
  ModelConfig config = model.config();
  report::Build out{.parameters = costs.parameters,
                    .flops_per_token = flops.per_position,
                    .flops_per_unit = flops.per_unit,
                    .state_bytes_per_token = costs.state_bytes_per_token,
                    .mechanism_share = costs.mechanism_share,
                    .config = to_toml(write_fields(config))};
  if (state) out.measured_state_bytes_per_token = state->bytes_per_token;
  if (costs.state_bytes > 0) out.state_bytes = costs.state_bytes;
  return out;
}

void take_result(report::Run& run, const RunResult& result) {
  run.state = result.problem.empty() ? report::RunState::kFinished : report::RunState::kFailed;
  run.problem = result.problem;
  run.warning = result.warning;
  run.tokens_per_second = result.tokens_per_second;
  if (result.peak_memory >= 0) run.peak_memory_bytes = static_cast<double>(result.peak_memory);
}

void note_interruption(report::Run& run, const std::string& folder, const std::string& comparison,
                       bool worked_on, const RunMetrics& metrics) {
  if (run.state != report::RunState::kRunning || worked_on) return;
  if (!fs::exists(folder + "/config.toml")) return;  // it has not begun
  const StepPoint& last = metrics.last_step;
  const std::vector<int64_t> saved = CheckpointStore(folder).steps();
  run.interruption = {.step = last.step, .steps = run_config_in(folder).train.steps};
  if (!saved.empty()) run.interruption->saved_step = saved.back();
  if (!comparison.empty()) {
    run.interruption->go_on = command_that_goes_on(comparison);
    return;
  }
  // With as many processes as it had: a run of another number differs by rounding, or is refused
  // where the processes share out the layers.
  run.interruption->go_on = str("headloom train ", shell_word(folder), " --resume",
                                last.processes > 1 ? str(" --processes ", last.processes) : "");
}

std::string command_that_goes_on(const std::string& comparison) {
  return "headloom compare " + shell_word(comparison);
}

std::string command_that_plans(const std::string& comparison) {
  return command_that_goes_on(comparison) + " --plan";
}

}  // namespace headloom
