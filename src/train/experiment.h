// The runs of a comparison: which there are, which of them are finished, and which can be trained
// next. A sweep's results decide what comes after it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/lock.h"
#include "train/compare.h"
#include "train/planned_run.h"
#include "train/state.h"
#include "train/sweep.h"

namespace headloom {

// The configuration of a comparison as its folder keeps it: the paths of its tasks are absolute, so
// that it goes on from any working folder.
Node with_absolute_paths(Node comparison);

class Experiment {
 public:
  // Checks every combination and writes nothing.
  Experiment(const CompareConfig& config, const CompareControl& control);
  // Takes the folder and looks at the runs that are there.
  void open();

  // Runs that can be trained now, in the order in which they should be, seed by seed.
  std::vector<PlannedRun*> ready();
  // After runs were trained: chooses settings and plans what follows.
  void advance();
  // What there is, and what was found when the experiment was opened.
  CompareOutcome outcome() const;
  size_t planned() const;
  size_t finished() const;

 private:
  // A setting of a sweep under trial, one run for every seed of the sweep.
  struct Trial {
    SweepPoint point;
    std::vector<PlannedRun> runs;
  };
  // A model on a task.
  struct Cell {
    size_t model = 0, task = 0;
    std::vector<Trial> trials;
    std::optional<SweepPoint> chosen;  // the empty setting where nothing is swept
    std::vector<std::string> at_edge;  // Choice::at_edge
    std::string problem;               // why nothing could be chosen
    std::vector<PlannedRun> finals;    // once a setting is chosen
    std::vector<PlannedRun> repeated;  // under the second initialisation, where there is one
  };

  RunConfig built(size_t model, size_t task, const SweepPoint& point, bool second_init = false);
  std::string budget_text();
  void check_second_init(size_t model, size_t task, RunConfig& first);
  void add_task(size_t task);
  void add_model(size_t model, size_t task);
  void set_steps(RunConfig& run, size_t task);
  double cost_of_step(const RunConfig& run, size_t task);
  double seconds_of_step(const RunConfig& run, size_t task);
  void keep_step_seconds() const;
  void note_share(const RunConfig& run, const Cell& cell, const SweepPoint& point);
  void add_trial(Cell& cell, const SweepPoint& point);
  void add_finals(Cell& cell);
  void note_build(const Cell& cell, const RunConfig& run);
  PlannedRun plan(RunConfig run, const Cell& cell, const SweepPoint& point, int64_t seed,
                  bool sweep, const std::string& path);
  const std::optional<StoredData>& data_of_run(RunConfig& config, size_t task);
  void adopt(PlannedRun& planned, size_t task);
  void remove_runs() const;
  void choose(Cell& cell);
  size_t planned_trials() const;
  void add_choices(report::Comparison& out) const;
  void add_trial_runs(report::Comparison& out) const;
  void add_final_runs(report::Comparison& out) const;
  report::Comparison repetition(const report::Comparison& first) const;
  std::string named(size_t model, size_t task) const;
  std::vector<std::string> others() const;
  // `part` is "runs" or "robustness".
  std::string final_path(const char* part, const Cell& cell, int64_t seed) const;

  const CompareConfig config_;  // its tasks are at every size
  const CompareControl& control_;
  const Sweep sweep_;
  // Whether validation data decide anything: a setting, or when a run ends. Results are then those
  // on test data.
  const bool splits_;
  std::optional<FolderLock> lock_;
  // What outcome() begins with; choosing a setting may change its builds, budget, hint and number
  // of runs that are present.
  CompareOutcome outcome_;
  // Held while runs are trained, which share the tokens of their texts (data/packed_text.cpp).
  std::vector<std::shared_ptr<data::Task>> tasks_;
  // Of the baseline on each task: its parameters, its steps, and what one of them costs.
  std::vector<int64_t> parameters_;
  std::vector<double> steps_, costs_;
  double least_share_ = 1;  // of a budget, that a run's whole steps have
  std::string has_least_;   // "`mha` on text"
  std::vector<Cell> cells_;
  std::map<std::string, double> step_seconds_;  // by configuration; kept in the folder
  std::string timed_on_;                        // the machine that those are of
  // By task and seed, as far as they were asked for.
  std::map<std::pair<size_t, int64_t>, std::optional<StoredData>> data_;
  bool opened_ = false, measured_ = false;
};

}  // namespace headloom
