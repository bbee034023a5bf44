#include "report/summary.h"

#include <algorithm>
#include <cmath>

#include "report/answer.h"
#include "report/format.h"

namespace headloom::report {
namespace {

double last(const Run& run, double Point::* value) {
  return run.points.empty() ? kUnknown : run.points.back().*value;
}

template <typename Value>
Stat over_finished(const Row& row, Value value) {
  std::vector<double> values;
  for (const Run* run : row.runs) {
    if (run->state == RunState::kFinished && !run_failed(*run)) values.push_back(value(*run));
  }
  return stat_of(values);
}

// Why a lead of `a` over `b` is no claim yet. Failed runs of `b` do not weaken it: they would only
// have made b's mean worse.
std::vector<std::string> caveats(const Row& a, const Row& b) {
  std::vector<std::string> out;
  const Row& fewer = a.finished < b.finished ? a : b;
  // Failed runs say already why seeds are missing.
  if (fewer.finished < kSeedsForClaim && !(&fewer == &a && a.failed > 0)) {
    std::string seeds = fewer.finished == 1 ? "one seed" : str(fewer.finished, " seeds");
    if (a.finished != b.finished) seeds += " of `" + fewer.model->label + "`";
    out.push_back(seeds);
  }
  if (a.failed > 0) out.push_back(failed_runs(a));
  // One of b's makes a's lead larger than it is.
  for (const Row* row : {&a, &b}) {
    if (row->diverged > 0) out.push_back(diverged_runs(*row));
  }
  const auto unequal = [&](double left, double right, const char* what) {
    const double ratio = left / right;
    if (left > 0 && right > 0 && std::abs(ratio - 1) > kSizeTolerance) {
      out.push_back(times(ratio) + what);
    }
  };
  if (a.build && b.build) {
    unequal(static_cast<double>(a.build->parameters), static_cast<double>(b.build->parameters),
            " the parameters");
  }
  unequal(a.tokens.mean, b.tokens.mean, " the tokens");
  return out;
}

Row make_row(const Comparison& c, const TaskInfo& task, const ModelInfo& model) {
  Row row;
  row.model = &model;
  row.baseline = &model == &c.models.front();
  row.planned = c.planned ? static_cast<int>(c.seeds.size()) : 0;
  for (const Build& build : c.builds) {
    if (build.model == model.label && build.task == task.name) row.build = &build;
  }
  for (const int64_t seed : c.seeds) {
    for (const Run& run : c.runs) {
      if (run.model != model.label || run.task != task.name || run.seed != seed) continue;
      row.runs.push_back(&run);
      row.planned += !c.planned;
      row.failed += run_failed(run);
      row.finished += run.state == RunState::kFinished && !run_failed(run);
      row.running += run.state == RunState::kRunning;
      row.diverged += run_diverged(run);
    }
  }
  row.quality = over_finished(row, [](const Run& r) { return last(r, &Point::quality); });
  row.loss = over_finished(row, [](const Run& r) { return last(r, &Point::loss); });
  row.accuracy = over_finished(row, [](const Run& r) { return last(r, &Point::accuracy); });
  row.tokens = over_finished(row, [](const Run& r) { return last(r, &Point::tokens); });
  row.tokens_per_second = over_finished(row, [](const Run& r) { return r.tokens_per_second; });
  row.peak_memory = over_finished(row, [](const Run& r) { return r.peak_memory_bytes; });
  return row;
}

}  // namespace

Stat stat_of(const std::vector<double>& values) {
  Stat stat;
  double sum = 0;
  for (const double v : values) {
    if (!std::isfinite(v)) continue;
    stat.low = stat.count ? std::min(stat.low, v) : v;
    stat.high = stat.count ? std::max(stat.high, v) : v;
    sum += v;
    ++stat.count;
  }
  if (stat.count == 0) return stat;
  stat.mean = sum / stat.count;
  if (stat.count < 2) return stat;
  double squares = 0;
  for (const double v : values) {
    if (std::isfinite(v)) squares += (v - stat.mean) * (v - stat.mean);
  }
  stat.spread = std::sqrt(squares / (stat.count - 1));
  return stat;
}

bool run_failed(const Run& run) {
  if (run.state == RunState::kFailed) return true;
  return run.state == RunState::kFinished && !std::isfinite(last(run, &Point::quality));
}

bool run_diverged(const Run& run) {
  return run.state == RunState::kFinished && !run_failed(run) && !run.warning.empty();
}

std::string run_problem(const Run& run) {
  if (!run.problem.empty()) return run.problem;
  if (run.state == RunState::kFailed) return "failed without a message";
  if (run.points.empty()) return "finished without an evaluation";
  return str("the last evaluation gave ", run.points.back().quality, ", which is not finite");
}

std::string failed_runs(const Row& row) {
  return str(row.failed, row.failed == 1 ? " failed run of `" : " failed runs of `",
             row.model->label, "`");
}

std::string diverged_runs(const Row& row) {
  return str(row.diverged, row.diverged == 1 ? " diverged run of `" : " diverged runs of `",
             row.model->label, "`");
}

Verdict compare(const TaskInfo& task, const Row& a, const Row& b) {
  Verdict verdict;
  if (a.finished == 0 || b.finished == 0) return verdict;
  const double gain = (a.quality.mean - b.quality.mean) * (task.lower_is_better ? -1 : 1);
  double spread = 0;
  for (const Row* row : {&a, &b}) {
    if (row->quality.count >= 2) spread = std::max(spread, row->quality.spread);
  }
  // Rounding in the means must not turn equal runs into a difference.
  const double rounding = 1e-9 * std::max(std::abs(a.quality.mean), std::abs(b.quality.mean));
  if (std::abs(gain) <= std::max(spread, rounding)) {
    verdict.relation = Relation::kTie;
    return verdict;
  }
  verdict.caveats = gain > 0 ? caveats(a, b) : caveats(b, a);
  if (verdict.caveats.empty()) {
    verdict.relation = gain > 0 ? Relation::kBetter : Relation::kWorse;
  } else {
    verdict.relation = gain > 0 ? Relation::kAhead : Relation::kBehind;
  }
  return verdict;
}

Summary summarize(const Comparison& c) {
  Summary summary;
  for (const TaskInfo& task : c.tasks) {
    TaskSummary t;
    t.task = &task;
    for (const ModelInfo& model : c.models) t.rows.push_back(make_row(c, task, model));
    for (Row& row : t.rows) row.against_baseline = compare(task, row, t.rows.front());
    for (const Row& row : t.rows) {
      summary.planned += row.planned;
      summary.finished += row.finished;
      summary.failed += row.failed;
      summary.running += row.running;
      for (const Run* run : row.runs) {
        for (const Point& p : run->points) t.has_accuracy |= std::isfinite(p.accuracy);
      }
    }
    std::stable_sort(t.rows.begin(), t.rows.end(), [&](const Row& a, const Row& b) {
      if (a.finished == 0 || b.finished == 0) return a.finished > 0 && b.finished == 0;
      return task.lower_is_better ? a.quality.mean < b.quality.mean
                                  : a.quality.mean > b.quality.mean;
    });
    t.answer = answer(t);
    summary.tasks.push_back(std::move(t));
  }
  const int done = summary.finished + summary.failed;
  if (done < summary.planned) {
    summary.progress =
        str("In progress: ", summary.finished, " of ", summary.planned, " runs have finished");
    if (summary.running > 0) summary.progress += str(", ", summary.running, " under way");
    if (summary.failed > 0) summary.progress += str(", ", summary.failed, " failed");
    summary.progress += ". What follows rests on the finished ones.";
  }
  return summary;
}

std::string metric_text(const TaskInfo& task, double value) {
  return task.percent ? percent(value) : fixed(value, 3);
}

std::string metric_text(const TaskInfo& task, const Stat& stat) {
  if (stat.count < 2) return metric_text(task, stat.mean);
  if (task.percent) return fixed(100 * stat.mean, 1) + " ± " + percent(stat.spread);
  return fixed(stat.mean, 3) + " ± " + fixed(stat.spread, 3);
}

}  // namespace headloom::report
