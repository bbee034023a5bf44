// The folder of a run that is trained: who may write it, whether the run begins or goes on, and
// what the folder then says of it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/differences.h"
#include "core/lock.h"
#include "train/checkpoint.h"
#include "train/progress.h"
#include "train/state.h"
#include "train/train.h"

namespace headloom {

// What tells whether the data of a run have changed; nothing where they are generated. `task` is
// what `config` builds with its seed.
std::optional<StoredData> data_of(RunConfig& config, const data::Task& task);
// "FOLDER: the data of 'task.paths' are not those that the run was trained on (20 tokens, now 30)":
// where the run in `folder` was trained on other data than `now`, those of `task`. "" where they
// are the same, or one of the two is not known.
std::string changed_data(const std::string& folder, RunConfig& config, const data::Task& task,
                         const std::optional<StoredData>& stored,
                         const std::optional<StoredData>& now);
// Where there is such a change, warns on standard error that what is now held out may have been
// trained on. `config` names the run's own data.
void say_what_changed(const std::string& folder, RunConfig& config, const data::Task& task);
// Throws UsageError where there is such a change.
void check_same_data(const std::string& folder, bool of_comparison, RunConfig& config,
                     const data::Task& task, const std::optional<StoredData>& stored,
                     const std::optional<StoredData>& now);

class RunSession {
 public:
  // Locks the folder where it is there, and refuses what cannot be trained before anything that
  // takes long: a run that is present and was not to go on, a checkpoint without an optimiser, data
  // that are missing. Takes from the run, or from the one to begin with, what `config` leaves open.
  RunSession(const TrainControl& control, RunConfig& config, Progress& progress);

  // Begins the run, or goes on from its checkpoint: fills `model` and `optimizer`, writes the
  // folder's configuration. `config` is complete, and `task` is what it builds. Throws UsageError
  // where the run has been trained on other data.
  TrainState open(Model& model, AdamW& optimizer, const data::Task& task);

 private:
  void lock();
  bool goes_on() const;
  std::string which() const;
  [[noreturn]] void refuse_present() const;
  TrainState begin(Model& model, AdamW& optimizer, const data::Task& task);
  void check_from() const;
  void check_may_change(const Difference& d) const;
  std::vector<Difference> changes_since(int64_t from, const std::vector<Difference>& asked);
  void check_something_left(int64_t from) const;
  TrainState go_on(Model& model, AdamW& optimizer, const data::Task& task);
  void forget_best(const std::vector<Difference>& changes, TrainState& state) const;
  void restate(int64_t step);

  const TrainControl control_;
  RunConfig& config_;
  Progress& progress_;
  const CheckpointStore store_;
  std::optional<std::string> comparison_;  // that the run belongs to
  std::optional<FolderLock> comparison_lock_, lock_;
};

}  // namespace headloom
