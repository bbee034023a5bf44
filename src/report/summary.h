// What the numbers of a comparison allow one to say.
//
// Spread is the sample standard deviation over the seeds of a model's finished runs. Two models tie
// when their means differ by no more than the larger of their two spreads. A larger difference is
// claimed ("better") only between models with equal parameters (within 1%), equal tokens, at least
// three finished seeds each, no failed run and no diverged one; otherwise it is a lead, reported
// with what is missing.
#pragma once

#include <string>
#include <vector>

#include "report/comparison.h"

namespace headloom::report {

inline constexpr int kSeedsForClaim = 3;
inline constexpr double kSizeTolerance = 0.01;  // of parameters and of tokens

// Over the finite ones of the values given.
struct Stat {
  int count = 0;
  double mean = kUnknown;
  double spread = kUnknown;  // sample standard deviation; unknown below two values
  double low = kUnknown;
  double high = kUnknown;
};
Stat stat_of(const std::vector<double>& values);

enum class Relation { kUnknown, kTie, kBetter, kWorse, kAhead, kBehind };

// How one model stands to another. `caveats` say why a lead is not a claim.
struct Verdict {
  Relation relation = Relation::kUnknown;
  std::vector<std::string> caveats;
};

// One model on one task.
struct Row {
  const ModelInfo* model = nullptr;
  const Build* build = nullptr;  // null where the comparison has none
  bool baseline = false;
  std::vector<const Run*> runs;  // in the order of the seeds
  int planned = 0;               // seeds
  int finished = 0;              // with a finite result
  int failed = 0;
  int running = 0;
  int diverged = 0;  // of the finished
  Stat quality, loss, accuracy, tokens_per_second, peak_memory, tokens;
  Verdict against_baseline;

  int waiting() const { return planned - finished - failed - running; }
};

struct TaskSummary {
  const TaskInfo* task = nullptr;
  std::vector<Row> rows;  // best first; models without a result last
  bool has_accuracy = false;
  std::string answer;  // sentences; `code` marks labels
};

struct Summary {
  std::vector<TaskSummary> tasks;
  int planned = 0, finished = 0, failed = 0, running = 0;
  std::string progress;  // empty once every planned run has finished or failed
};

Summary summarize(const Comparison& comparison);

// Whether `a` is better than `b` on the task.
Verdict compare(const TaskInfo& task, const Row& a, const Row& b);

// "1 failed run of `dcmha`".
std::string failed_runs(const Row& row);
// "1 diverged run of `dcmha`".
std::string diverged_runs(const Row& row);

// A finished run whose last point has no finite metric counts as failed.
bool run_failed(const Run& run);
// A run that finished, but with a warning.
bool run_diverged(const Run& run);
std::string run_problem(const Run& run);

// "1.912", "12.5%", "–" for an unknown metric value of the task.
std::string metric_text(const TaskInfo& task, double value);
// "1.912 ± 0.004"; without the spread where it is unknown.
std::string metric_text(const TaskInfo& task, const Stat& stat);

}  // namespace headloom::report
