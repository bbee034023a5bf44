// A report's data from the folders of runs, however they came about: `headloom report RUN...`.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "data/task.h"
#include "model/model.h"
#include "report/comparison.h"
#include "train/compare.h"
#include "train/comparison_file.h"
#include "train/config.h"
#include "train/result.h"
#include "train/run_past.h"

namespace headloom {

// The runs in `folders`: each is a run's or a comparison's, which stands for all of its runs.
//
// Models: runs whose configurations differ in train.seed alone are one, if they have the same past
// (run_past.h). Its label is the name that its comparison gives it, or that of the first run's
// folder. The first model is the baseline.
//
// Comparisons: their models and tasks are in the order of the configuration. Speeds that one has
// measured (train/speeds.h) take the place of those of its runs' own steps. What differs in [train]
// from the baseline's is named, except where each comparison has chosen it by its [sweep]. What a
// sweep has chosen, and whether at an edge, is what comparison.json says. One comparison by itself
// is reported as it reports itself: with the runs that it plans, those of its sweep and those under
// a second initialisation.
//
// A run that has reached neither its last step nor its train.stop_accuracy counts as running while
// a process works on it or on its comparison, and as interrupted otherwise. The report only asks
// for their locks, so a run may begin meanwhile.
//
// The data of every task are read, because its sizes depend on them. Throws UsageError for a run
// that is named twice and Error for a folder that is neither, or whose data are missing.
class RunReport {
 public:
  explicit RunReport(const std::vector<std::string>& folders);
  // As the folders are now.
  report::Comparison read() const;
  // The files whose change changes read().
  std::vector<std::string> files() const;
  // Those that were read when this was made.
  std::vector<std::string> configurations() const;
  // Of each run, whether a process works on it. It changes read() too, and no file where that
  // process was killed.
  std::vector<bool> worked_on() const;

 private:
  struct Run {
    std::string folder;
    report::Run run;  // without its points
    double bytes_per_token;
    TrainOptions train;
    std::vector<PastEvent> past;
    // The folder of its comparison, and what that calls the model and the task; may be empty.
    std::string comparison, model_there, task_there;
    std::string belongs_to;  // the folder of its comparison, also where the run alone is named
  };
  struct Compared {
    std::string folder;
    CompareConfig config;
  };
  const Run* find(const std::string& comparison, const std::string& model,
                  const std::string& task) const;
  const double* bytes_per_token(const std::string& task) const;
  void plan_as(const Compared& compared);
  void add_written(const WrittenComparison& written, report::Comparison& out) const;
  void add_speeds(report::Comparison& out) const;
  void add_choices(const Compared& compared, const WrittenComparison& written,
                   report::Comparison& out) const;
  static void add_sweep(const Compared& compared, const WrittenComparison& written,
                        report::Comparison& out);
  static void add_settings(report::Comparison& out);
  void add_robustness(const Compared& compared, const WrittenComparison& written,
                      report::Comparison& out) const;
  std::map<std::string, std::string> swept_for(const Run& run) const;
  void compare_training();

  std::vector<Run> runs_;
  std::vector<Compared> comparisons_;
  bool alone_ = false;        // one comparison is all that is reported
  report::Comparison empty_;  // without the runs
};

}  // namespace headloom
