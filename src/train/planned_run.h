// One run of a comparison: its folder, the file that lets another process train it, and how far it
// has come.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "report/comparison.h"
#include "train/config.h"
#include "train/state.h"

namespace headloom {

// Its state on disk is read once it is planned and after it was trained.
struct PlannedRun {
  std::string path;  // below the comparison's folder: "runs/copy/mha/seed-1"
  Node config;
  std::string label = {};      // of one that was read from a plan
  double bytes_per_token = 0;  // of its task
  report::Run run;             // as far as it is known
  bool begun = false, finished = false;
  int attempts = 0;  // of other processes that ended without a result

  // Neither finished nor given up.
  bool can_run() const;
};

// "copy mha seed 1 lr=0.002", for progress.
std::string label_of(const PlannedRun& planned);

// Writes all that training the run needs, and returns the run's name in the plan: its path and a
// hash of what was written, "runs/copy/mha/seed-1@8f2c64e0a1b3d579".
std::string write_plan_file(const PlannedRun& planned, const std::string& folder);
// Throws UsageError where no run of that name is planned, or another by now.
PlannedRun read_plan_file(const std::string& folder, const std::string& name);
// The plan's runs of a sweep that have begun, as their folders have them. comparison.json does not
// know what commands of the plan have trained since it was written.
std::vector<report::Run> begun_sweep_runs(const std::string& folder);

// Reads what the run's folder has of it.
void refresh(PlannedRun& planned, const std::string& folder);

// Trains the run, or goes on with it, and writes its result. Returns false where it was
// interrupted. Throws UsageError, and FolderInUse where another process trains it.
bool train_run(PlannedRun& planned, const std::string& folder, const std::string& label);

// Removes the run's file in the plan if it was written for another configuration: commands that
// were printed for that one are void.
void drop_outdated_plan(const PlannedRun& planned, const std::string& folder);
// Takes the run as it is in the folder, or moves another one out of the way. `data_now` gives what
// the run would be trained on today. Returns whether the run was there. Throws UsageError where it
// is finished and its data have changed since.
bool adopt_run(PlannedRun& planned, const std::string& folder, const data::Task& task,
               const std::function<std::optional<StoredData>(RunConfig&)>& data_now);

// The run's configuration with absolute paths: it may be trained from another working folder.
Node run_with_absolute_paths(const Node& config);

}  // namespace headloom
