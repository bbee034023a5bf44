#include "train/compare.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/files.h"
#include "core/lock.h"
#include "core/text.h"
#include "train/experiment.h"
#include "train/interrupt.h"
#include "train/progress.h"
#include "train/reported.h"
#include "train/run_folder.h"
#include "train/workers.h"

namespace headloom {
namespace {

constexpr int kAttempts = 2;  // of a run whose process ends before it is done
constexpr int kRefused = 2;   // the exit code where a UsageError has ended a process

// "[3/27] " of the run that begins where `unfinished` others have begun and are not finished.
std::string number_of(const Experiment& experiment, size_t unfinished) {
  return str("[", experiment.finished() + unfinished + 1, "/", experiment.planned(), "] ");
}

// Ends the comparison where a run was refused or met an Obstacle, as one without jobs ends.
// The runs that other processes train are saved.
void stop(Workers& workers) {
  workers.interrupt();
  while (workers.running() > 0) workers.wait();
}

void check_not_stopped(const Workers::Ended& ended, const PlannedRun& run, Workers& workers) {
  const bool obstacle = ended.message.ends_with(kWorkerObstacle);
  if (ended.code != kRefused && !obstacle) return;
  stop(workers);
  const char* const stops = " as is said above, so the comparison stops; finished runs are kept.";
  if (obstacle) fail("the run ", label_of(run), " could not be trained,", stops);
  usage_error("the run ", label_of(run), " was refused,", stops);
}

// What is true of the unfinished runs that nobody trains once this process trains none.
void note_interrupted_runs(report::Comparison& comparison, const std::string& folder) {
  for (report::Run& run : comparison.runs) {
    if (run.state != report::RunState::kRunning) continue;
    const std::string path = folder + "/" + run.folder;
    note_interruption(run, path, folder, FolderLock::is_held(path),
                      read_metrics(metrics_path(path)));
  }
  for (report::Comparison& again : comparison.robustness) note_interrupted_runs(again, folder);
}

void note_interrupted_comparison(report::Comparison& comparison, const std::string& folder) {
  note_interrupted_runs(comparison, folder);
  comparison.go_on = command_that_goes_on(folder);
}

// One run after another in this process.
void train_in_turn(Experiment& experiment, const CompareControl& control, CompareOutcome& outcome) {
  for (auto ready = experiment.ready(); !ready.empty(); ready = experiment.ready()) {
    PlannedRun& next = *ready.front();
    const std::string label = number_of(experiment, 0) + label_of(next);
    const bool done = train_run(next, control.folder, label);
    if (!next.run.problem.empty()) Progress(label).line("the run failed: " + next.run.problem);
    experiment.advance();
    outcome = experiment.outcome();
    outcome.interrupted = !done;
    if (!done) note_interrupted_comparison(outcome.comparison, control.folder);
    control.progress(outcome);
    if (!done) return;
  }
}

// Some runs at a time, each in a process of its own.
void train_side_by_side(Experiment& experiment, const CompareControl& control,
                        CompareOutcome& outcome) {
  Workers workers;
  std::set<PlannedRun*> under_way;
  std::map<PlannedRun*, std::string> labels;  // of those that were started; again, it is the same
  const auto tell = [&] {
    outcome = experiment.outcome();
    outcome.interrupted = interrupted();
    if (outcome.interrupted) note_interrupted_comparison(outcome.comparison, control.folder);
    control.progress(outcome);
  };
  while (true) {
    const std::vector<PlannedRun*> ready = experiment.ready();
    for (PlannedRun* next : ready) {
      if (interrupted() || workers.running() >= static_cast<size_t>(control.jobs)) break;
      if (under_way.contains(next)) continue;
      if (!labels.contains(next)) {
        const auto unfinished = std::count_if(labels.begin(), labels.end(),
                                              [](const auto& one) { return !one.first->finished; });
        labels[next] = number_of(experiment, static_cast<size_t>(unfinished));
      }
      workers.start(control.command(write_plan_file(*next, control.folder)), next, labels[next]);
      under_way.insert(next);
    }
    if (workers.running() == 0) {
      // The signal came while no run was trained: before the first, or between two.
      if (!ready.empty() && !outcome.interrupted) tell();
      return;
    }
    const Workers::Ended ended = workers.wait();
    auto& run = *static_cast<PlannedRun*>(ended.owner);
    under_way.erase(&run);
    refresh(run, control.folder);
    if (!run.finished && !interrupted()) check_not_stopped(ended, run, workers);
    if (!run.finished && !interrupted() && ++run.attempts >= kAttempts) {
      // It is not known how good the run would be, so a sweep that it belongs to chooses nothing,
      // and the next call trains it.
      run.begun = true;
      run.run.state = report::RunState::kFailed;
      run.run.problem = str("the process that trained it ", ended.how, ", for the second time",
                            ended.message.empty() ? "." : ": " + ended.message);
    }
    try {
      experiment.advance();
      tell();
    } catch (...) {  // a disk that is full, or a step that has to be timed on another machine
      stop(workers);
      throw;
    }
  }
}

}  // namespace

void ComparedModel::fields(Fields& f) {
  f.field("name", name, "how the report calls it");
  f.field("description", description, "one line for the report");
  f.raw("train", train, "changes to [train], over those of the task");
  f.raw("model", model, "changes to [model]");
  f.raw("mixer", mixer, "changes to every layer's token mixer");
  f.raw("channel", channel, "changes to every layer's channel mixer");
  f.raw("block", block, "changes to every layer's block");
  f.raw("cross", cross, "changes to every layer's cross-attention");
}

void ComparedTask::fields(Fields& f) {
  f.field("name", name, "how the report calls it");
  f.raw("task", task, "the task");
  f.raw("train", train, "changes to [train]");
  f.raw("model", model, "changes to [model]");
}

void ComparedSize::fields(Fields& f) {
  f.field("name", name, "how the report calls it");
  f.raw("model", model, "changes to [model], over those of the task");
  f.raw("train", train, "changes to [train], over those of the task");
}

std::vector<ComparedTask> each_size(const CompareConfig& config) {
  std::vector<ComparedTask> out;
  for (size_t t = 0; t < config.tasks.size(); ++t) {
    const ComparedTask& task = config.tasks[t];
    if (config.sizes.empty()) {
      out.push_back(task);
      out.back().place = t;
    }
    for (const ComparedSize& size : config.sizes) {
      out.push_back({.name = task.name + "-" + size.name,
                     .task = task.task,
                     .train = merged(task.train, size.train),
                     .model = merged(task.model, size.model),
                     .size_of = task.name,
                     .place = t});
    }
  }
  return out;
}

void SpeedOptions::fields(Fields& f) {
  f.field("rounds", rounds,
          "times that the speed and memory of every model are measured after training; 0: never",
          at_least(0));
}

void RobustnessOptions::fields(Fields& f) {
  f.raw("model", model, "what the second initialisation changes in every model's [model]");
}

std::string RobustnessOptions::title() const {
  std::string out = to_toml(model);
  while (!out.empty() && out.back() == '\n') out.pop_back();
  std::replace(out.begin(), out.end(), '\n', ' ');
  return out;
}

void CompareConfig::fields(Fields& f) {
  f.field("title", title, "of the report");
  f.field("seeds", seeds, "each model trains once for every seed", at_least(0));
  f.field("match_parameters", match_parameters,
          "equal parameters within 1% by the channel mixer's width");
  f.field(
      "budget", budget,
      "what the models have equal, as much as train.steps of the first one take: tokens; flops, "
      "by the count of a forward pass; or seconds, by a step's time, which is measured once",
      {"tokens", "flops", "seconds"});
  f.raw("model", model, "what the models share");
  f.raw("train", train, "how all are trained");
  f.raw("sweep", sweep,
        "keys whose value is chosen for each model and task on validation data: lr = [1e-3, 2e-3], "
        "or lr = {from = 1e-4, to = 1e-2, count = 5} at equal factors; keys of [train], or "
        "\"TABLE.KEY\" "
        "of train, mixer, channel, block or model; seeds = [1001] and extensions = 4 by default");
  f.table("speed", speed, "speed and memory, measured apart from training");
  f.table("robustness", robustness,
          "trains every model once more from every seed under a second initialisation, and says "
          "whether the results hold: model = {equal_init = true}");
  f.list("models", models, "the models; the first is the baseline");
  f.list("tasks", tasks, "the tasks");
  f.list("sizes", sizes,
         "every task is trained at every size of the models, and a scaling law is fitted to the "
         "losses; "
         "by default there is one size");
}

CompareOutcome compare(const CompareConfig& config, const CompareControl& control) {
  Experiment experiment(config, control);
  experiment.open();
  CompareOutcome outcome = experiment.outcome();
  control.progress(outcome);
  if (control.jobs > 1) {
    train_side_by_side(experiment, control, outcome);
  } else {
    train_in_turn(experiment, control, outcome);
  }
  // The folder is held until the last file is written.
  if (!outcome.interrupted && control.measure) {
    outcome.interrupted = !control.measure(outcome.comparison);
    if (outcome.interrupted) note_interrupted_comparison(outcome.comparison, control.folder);
    control.progress(outcome);
  }
  return outcome;
}

std::vector<std::string> plan_comparison(const CompareConfig& config,
                                         const CompareControl& control) {
  Experiment experiment(config, control);
  experiment.open();
  if (control.progress) {
    CompareOutcome outcome = experiment.outcome();
    note_interrupted_runs(outcome.comparison, control.folder);
    outcome.comparison.go_on = command_that_plans(control.folder);
    outcome.comparison.by_commands = true;
    control.progress(outcome);
  }
  std::vector<std::string> names;
  for (const PlannedRun* planned : experiment.ready()) {
    names.push_back(write_plan_file(*planned, control.folder));
  }
  return names;
}

report::Run train_planned(const std::string& folder, const std::string& name) {
  PlannedRun planned = read_plan_file(folder, name);
  refresh(planned, folder);
  if (!planned.finished) train_run(planned, folder, label_of(planned));
  return planned.run;
}

}  // namespace headloom
