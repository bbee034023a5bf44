// Models x tasks x seeds at equal parameters and an equal budget, with settings that are chosen on
// validation data.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/fields.h"
#include "report/comparison.h"
#include "train/config.h"

namespace headloom {

// One of the models compared: what it changes in the shared configuration.
struct ComparedModel {
  std::string name;
  std::string description;
  // Merged over [train], over [model], and over each layer's tables.
  Node train, model, mixer, channel, block, cross;

  void fields(Fields& f);
};

struct ComparedTask {
  std::string name;
  Node task, train, model;  // [task], and what is merged over [train] and [model]
  // What each_size() made it of: a task's name and its place in the configuration.
  std::string size_of = {};
  size_t place = 0;

  void fields(Fields& f);
};

// [[sizes]]: every task is trained at every size, as tasks named "TASK-SIZE". A scaling law is
// fitted to them.
struct ComparedSize {
  std::string name;
  Node model, train;  // merged over those of the task

  void fields(Fields& f);
};

// [speed]: what is measured after the runs.
struct SpeedOptions {
  int64_t rounds = 5;

  void fields(Fields& f);
};

// [robustness]: every model trains once more from every seed, with the setting that was chosen for
// it and a second initialisation.
struct RobustnessOptions {
  Node model;  // merged over every model's [model]; empty: nothing is repeated

  void fields(Fields& f);
  bool empty() const { return model.table().empty(); }
  std::string title() const;  // "equal_init = true"
};

// The file `headloom compare` reads.
struct CompareConfig {
  std::string title = "Comparison";
  std::vector<int64_t> seeds = {1, 2, 3};
  bool match_parameters = true;  // to the first model's, within 1%, by the channel mixer's width
  // What the models have equal: "tokens", "flops" or "seconds", those of the baseline's
  // train.steps.
  std::string budget = "tokens";
  Node model, train;  // shared
  Node sweep;         // Sweep::read()
  SpeedOptions speed;
  RobustnessOptions robustness;
  std::vector<ComparedModel> models;
  std::vector<ComparedTask> tasks;
  std::vector<ComparedSize> sizes;

  void fields(Fields& f);
};

// The tasks at every size; those of the configuration where it has no sizes.
std::vector<ComparedTask> each_size(const CompareConfig& config);

struct CompareOutcome {
  // Its runs are those that were begun. The machine, the complete TOML, the command and the date
  // are the caller's to add.
  report::Comparison comparison;
  bool interrupted = false;
  // Runs, and those of them that are there, perhaps unfinished. A sweep that is extended plans
  // more.
  size_t planned = 0, present = 0;
  // What is said of the configuration before its runs begin: TrainOptions::long_warmup() of the
  // first run that has something to say.
  std::string hint;
  // Folders of runs that are there and not asked for, "runs/copy/mha/seed-1": of models, tasks,
  // seeds and settings that are left out, and of configurations that have changed. They stay as
  // they are.
  std::vector<std::string> left_out;
};

struct CompareControl {
  std::string folder;
  bool fresh = false;                                        // remove its runs first
  std::function<void(const CompareOutcome&)> progress = {};  // called first, then after each run
  int64_t jobs = 1;                                          // processes that train side by side
  // The command that calls train_planned() for a run, given its name; for more than one job.
  std::function<std::vector<std::string>(const std::string& run)> command = {};
  // Measures, apart from training, what is reported of the models; called once all runs are done.
  // Returns whether it was not interrupted.
  std::function<bool(const report::Comparison&)> measure = {};
  // Seconds of one training step, measured; for a budget of seconds.
  std::function<double(const RunConfig&, const data::Task&)> step_seconds = {};
};

// Checks every combination before training any, then runs seed by seed in the folder, which is
// locked meanwhile: first what a sweep asks for, then each model with the setting that was chosen
// for it. A run that is there with the same configuration is not repeated; one with another is set
// aside and trained anew. Throws UsageError for a bad configuration and Error for a folder in use;
// a run that fails is recorded and the others go on. A run whose process ends before it is done is
// taken up once more.
CompareOutcome compare(const CompareConfig& config, const CompareControl& control);

// The names of all runs that can be trained now and are not finished: the path below the folder and
// a hash of the configuration, "runs/copy/mha/seed-1@8f2c64e0a1b3d579". While settings are chosen,
// those are runs of the sweep; another call tells what comes after them. Writes a file for each, by
// which train_planned() trains it.
std::vector<std::string> plan_comparison(const CompareConfig& config,
                                         const CompareControl& control);

// Trains one run that was planned in the comparison's folder, or goes on with it, and leaves its
// result there. Returns the run; a run that was interrupted has the state kRunning. Throws
// UsageError for a name that is not planned, as after a change of the configuration.
report::Run train_planned(const std::string& folder, const std::string& name);

}  // namespace headloom
