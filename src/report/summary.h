// What the numbers of a comparison allow one to say.
//
// Everything a report states about models is tested (report/statistics.h): that a model has learned
// (its mean against the task's best floor), that a model is better or worse than the baseline (the
// difference paired by seed), and that the best model of a task is better than every other (the
// largest of its p values, one hypothesis). All these of all tasks are one family, and Holm's
// procedure keeps the probability of one or more false statements in a report at 5% or less. The
// intervals are 95% intervals, each by itself.
//
// A comparison with the baseline is tested from five paired seeds on. A difference is claimed
// ("better", "worse") only between models with equal parameters (within 1%), equal tokens, equal
// training options, a sweep whose choice is not at an edge, no failed run of the better one and no
// diverged run of either. Otherwise the model is "ahead" or "behind", with what is missing.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "report/comparison.h"
#include "report/statistics.h"

namespace headloom::report {

inline constexpr int kSeedsForClaim = 5;
inline constexpr double kFalseClaims = 0.05;    // at most, of a report
inline constexpr double kSizeTolerance = 0.01;  // of parameters and of tokens

// Over the finite ones of the values given.
struct Stat {
  int count = 0;
  double mean = kUnknown;
  double median = kUnknown;
  double low = kUnknown;
  double high = kUnknown;
};
Stat stat_of(const std::vector<double>& values);

enum class Relation {
  kNoResult,      // one of the two has no result
  kNotLearned,    // the model has not passed the floor
  kLearned,       // the model has passed the floor and the baseline has not
  kTooFewSeeds,   // fewer than five seeds that both models finished
  kNoDifference,  // none found
  kBetter,
  kWorse,
  kAhead,  // a difference with caveats
  kBehind,
};

// How one model stands to another.
struct Verdict {
  Relation relation = Relation::kNoResult;
  Estimate difference{};          // of the metric, paired by seed: this model's minus the other's
  double p = kUnknown;            // two-sided, by itself
  double adjusted_p = kUnknown;   // among all of the report; unknown where it was not tested
  int seeds_needed = -1;          // for a difference as large as this one; -1: more than 1000, or
                                  // unknown
  std::vector<int64_t> unpaired;  // seeds that only one of the two has finished
  double own_mean = kUnknown, other_mean = kUnknown;  // over the seeds that both have
  std::vector<std::string> caveats;                   // why a difference is not a claim
};

// kNotKnown: the mean passes the floor, from too few seeds to say that this is more than chance.
enum class Learning { kNoFloor, kNotKnown, kLearned, kNotLearned };

// How a curve ends. Compared are the last evaluation and the one nearest to three quarters of the
// steps, each as the mean over the seeds. The curve still moves where the metric has improved by
// more than 1% of its value since then, or by more than one point where it is a percentage.
enum class Trend { kNotKnown, kMoving, kPlateau };

// The runs of a sweep that failed with one setting. The setting counts as infinitely bad.
struct FailedSetting {
  std::string setting;  // "lr = 1e7"
  int runs = 0;
  std::string problem;  // of the first
};

// One model on one task.
struct Row {
  const ModelInfo* model = nullptr;
  const Build* build = nullptr;    // null where the comparison has none
  const Choice* choice = nullptr;  // null where nothing was swept
  const Speed* speed = nullptr;    // null where it was not measured apart from training
  bool baseline = false;
  std::vector<const Run*> runs;  // in the order of the seeds
  int planned = 0;               // seeds
  int finished = 0;              // with a finite result
  int failed = 0;
  int running = 0;  // a process works on it
  int interrupted = 0;
  int diverged = 0;  // of the finished
  std::vector<FailedSetting> failed_settings;
  Estimate result{};  // the metric's mean over the seeds, with the error of the evaluation data
  Stat quality, loss, accuracy, tokens, tokens_per_second, peak_memory;
  // tokens_per_second and peak_memory are over the rounds of `speed`, else over the runs. Decoding
  // speed is only over the rounds.
  Stat decode_tokens_per_second;
  Learning learning = Learning::kNoFloor;
  double floor_p = kUnknown;  // of the hypothesis that the mean is the floor; adjusted
  Trend trend = Trend::kNotKnown;
  Verdict against_baseline;

  int waiting() const { return planned - finished - failed - running - interrupted; }
};

struct TaskSummary {
  const TaskInfo* task = nullptr;
  std::vector<Row> rows;  // best first; models without a result last
  bool has_accuracy = false;
  // Whether the first row is better than every other one that has learned.
  bool best_is_claimed = false;
  std::string answer;          // sentences; `code` marks labels
  std::string recommendation;  // sentences, from claims alone
  // None, or one: the task in Comparison::robustness. Its verdicts are in the same family of tests.
  // Its `answer` is one sentence: whether the ranking and the claims of this one hold.
  std::vector<TaskSummary> robustness;

  // The row of the baseline, where there are rows.
  const Row* baseline() const;
  // The row of the model with this one's label, which may be of another comparison; null for none.
  const Row* row_of(const ModelInfo& model) const;
  const Floor* floor() const { return task->floors.empty() ? nullptr : &task->floors.back(); }
};

struct Summary {
  std::vector<TaskSummary> tasks;
  int planned = 0, finished = 0, failed = 0, running = 0, interrupted = 0;
  int tested = 0;        // hypotheses in the family
  std::string progress;  // empty once every planned run has finished or failed
  std::string go_on;     // the command that goes on, where no interrupted run names it
  std::string limits;    // what is small, early or not swept about the experiment
};

Summary summarize(const Comparison& comparison);

// What two models differ by in the metric, the first minus the second: two points a seed, both of
// runs from that seed and with a finite metric.
using PairedPoints = std::vector<std::pair<const Point*, const Point*>>;
Estimate paired_difference(const PairedPoints& seeds);

// "lr = 1e7 (3 runs): diverged at step 2: the loss became nan".
std::string failed_setting_text(const FailedSetting& failed);
// "1 failed run of `dcmha`".
std::string failed_runs(const Row& row);
// "after step 137 of 400; step 100 is saved".
std::string interruption_text(const Interruption& at);
// The decoding state of a row's model: what a token of context adds, and the whole of a sequence of
// the task's length, in bytes. Unknown where the model is not described or does not decode.
double state_of_row(const Row& row);
double whole_state_of_row(const Row& row);
// "1 diverged run of `dcmha`".
std::string diverged_runs(const Row& row);

// A finished run whose last point has no finite metric counts as failed.
bool run_failed(const Run& run);
// A finished run that has one: its last point's metric is its result.
bool has_result(const Run& run);
// The runs of a row that have a result, in the order of the seeds.
std::vector<const Run*> runs_with_result(const Row& row);
// A run that finished, but with a warning.
bool run_diverged(const Run& run);
std::string run_problem(const Run& run);

// "1.912", "12.5%", "–" for an unknown metric value of the task.
std::string metric_text(const TaskInfo& task, double value);
// "1.912 ± 0.004", half the 95% interval; without it where it is unknown.
std::string metric_text(const TaskInfo& task, const Estimate& result);

// The ends of the 95% interval of a result, or of a difference of two. The interval of a few seeds
// may reach beyond what a share can be: it ends there.
std::pair<double, double> interval_ends(const TaskInfo& task, const Estimate& e, bool difference);

// "still falling", "still rising", "on a plateau" or "".
std::string trend_text(const TaskInfo& task, Trend trend);

}  // namespace headloom::report
