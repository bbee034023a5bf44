#include "report/summary.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "core/median.h"
#include "core/text.h"
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
  for (const Run* run : runs_with_result(row)) values.push_back(value(*run));
  return stat_of(values);
}

// Why a difference in favour of `a` over `b` is no claim. Failed runs of `b` do not weaken it: they
// would only have made b's mean worse.
std::vector<std::string> caveats(const Row& a, const Row& b) {
  std::vector<std::string> out;
  if (a.failed > 0) out.push_back(failed_runs(a));
  // One of b's makes a's lead larger than it is.
  for (const Row* row : {&a, &b}) {
    if (row->diverged > 0) out.push_back(diverged_runs(*row));
  }
  const auto unequal = [&](double left, double right, const char* what) {
    const double ratio = left / right;
    if (left > 0 && right > 0 && std::abs(ratio - 1) > kSizeTolerance) {
      out.push_back("`" + a.model->label + "` has " + times(ratio) + what);
    }
  };
  if (a.build && b.build) {
    unequal(static_cast<double>(a.build->parameters), static_cast<double>(b.build->parameters),
            " the parameters");
  }
  unequal(a.tokens.mean, b.tokens.mean, " the tokens");
  for (const Row* row : {&a, &b}) {
    const std::string of = " of `" + row->model->label + "`";
    if (row->build && !row->build->train_differences.empty()) {
      out.push_back("training options" + of + ": " + row->build->train_differences);
    }
    if (row->choice && !row->choice->at_edge.empty()) {
      out.push_back(list_of(row->choice->at_edge) + of + " at the edge of its sweep");
    }
  }
  return out;
}

Trend trend_of(const TaskInfo& task, const Row& row) {
  double now = 0, before = 0;
  int count = 0;
  for (const Run* run : runs_with_result(row)) {
    const double wanted = 0.75 * static_cast<double>(run->points.back().step);
    const Point* near = nullptr;
    for (const Point& p : run->points) {
      const auto distance = [&](const Point& q) {
        return std::abs(static_cast<double>(q.step) - wanted);
      };
      if (std::isfinite(p.quality) && (!near || distance(p) < distance(*near))) near = &p;
    }
    // An evaluation near the end or the start says nothing about the last quarter.
    if (static_cast<double>(near->step) < 0.6 / 0.75 * wanted ||
        static_cast<double>(near->step) > 0.9 / 0.75 * wanted) {
      continue;
    }
    before += near->quality;
    now += run->points.back().quality;
    ++count;
  }
  if (count == 0) return Trend::kNotKnown;
  const double gain = (task.lower_is_better ? before - now : now - before) / count;
  const double enough = task.percent ? 0.01 : 0.01 * std::abs(now) / count;
  return gain > enough ? Trend::kMoving : Trend::kPlateau;
}

std::vector<FailedSetting> failed_settings_of(const Comparison& c, const TaskInfo& task,
                                              const ModelInfo& model) {
  std::vector<FailedSetting> out;
  for (const Run& run : c.runs) {
    if (!run.sweep || !is_of(run, model.label, task.name) || !run_failed(run)) continue;
    std::vector<std::string> values;
    for (const SweptValue& v : run.setting) values.push_back(v.key + " = " + v.value);
    const std::string setting = join(values);
    const auto at = std::find_if(out.begin(), out.end(),
                                 [&](const FailedSetting& f) { return f.setting == setting; });
    if (at != out.end()) {
      ++at->runs;
    } else {
      out.push_back({setting, 1, run_problem(run)});
    }
  }
  return out;
}

Row make_row(const Comparison& c, const TaskInfo& task, const ModelInfo& model) {
  Row row;
  row.model = &model;
  row.baseline = &model == &c.models.front();
  row.planned = c.planned ? static_cast<int>(c.seeds.size()) : 0;
  const auto find = [&](const auto& all, auto& found) {
    for (const auto& one : all) {
      if (is_of(one, model.label, task.name)) found = &one;
    }
  };
  find(c.builds, row.build);
  find(c.choices, row.choice);
  find(c.speeds, row.speed);
  for (const int64_t seed : c.seeds) {
    for (const Run& run : c.runs) {
      if (run.sweep || !is_of(run, model.label, task.name) || run.seed != seed) continue;
      row.runs.push_back(&run);
      row.planned += !c.planned;
      row.failed += run_failed(run);
      row.finished += has_result(run);
      row.running += run.state == RunState::kRunning && !run.interruption;
      row.interrupted += run.interruption.has_value();
      row.diverged += run_diverged(run);
    }
  }
  row.failed_settings = failed_settings_of(c, task, model);
  std::vector<double> results;
  double squares = 0;
  for (const Run* run : runs_with_result(row)) {
    results.push_back(run->points.back().quality);
    squares += run->points.back().quality_error * run->points.back().quality_error;
  }
  row.result = estimate(results, std::sqrt(squares / static_cast<double>(results.size())));
  row.quality = stat_of(results);
  row.loss = over_finished(row, [](const Run& r) { return last(r, &Point::loss); });
  row.accuracy = over_finished(row, [](const Run& r) { return last(r, &Point::accuracy); });
  row.tokens = over_finished(row, [](const Run& r) { return last(r, &Point::tokens); });
  row.tokens_per_second = over_finished(row, [](const Run& r) { return r.tokens_per_second; });
  row.peak_memory = over_finished(row, [](const Run& r) { return r.peak_memory_bytes; });
  if (row.speed) {
    const auto measured = [](Stat& stat, const std::vector<double>& rounds) {
      if (const Stat s = stat_of(rounds); s.count > 0) stat = s;
    };
    measured(row.tokens_per_second, row.speed->train_tokens_per_second);
    measured(row.decode_tokens_per_second, row.speed->decode_tokens_per_second);
    measured(row.peak_memory, row.speed->peak_memory_bytes);
  }
  row.trend = trend_of(task, row);
  return row;
}

// The difference of two points on each part of the held-out data is added to `sums`. False where
// the parts of one are not known or are others.
bool add_part_differences(const Point& a, const Point& b, std::vector<double>& sums) {
  const std::vector<double>& left = a.quality_parts;
  const std::vector<double>& right = b.quality_parts;
  if (sums.empty()) sums.resize(left.size());
  if (left.size() < 2 || left.size() != sums.size() || right.size() != sums.size()) return false;
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += left[i] - right[i];
  return true;
}

// The difference of two rows, paired by seed, untested.
Verdict paired(const Row& a, const Row& b) {
  Verdict verdict;
  if (a.finished == 0 || b.finished == 0) return verdict;
  std::map<int64_t, std::pair<const Point*, const Point*>> seeds;
  for (const Run* run : runs_with_result(a)) seeds[run->seed].first = &run->points.back();
  for (const Run* run : runs_with_result(b)) seeds[run->seed].second = &run->points.back();
  PairedPoints pairs;
  for (const auto& [seed, points] : seeds) {
    if (points.first && points.second) {
      pairs.push_back(points);
    } else {
      verdict.unpaired.push_back(seed);
    }
  }
  double own = 0, other = 0;
  for (const auto& [first, second] : pairs) {
    own += first->quality;
    other += second->quality;
  }
  verdict.own_mean = own / static_cast<double>(pairs.size());
  verdict.other_mean = other / static_cast<double>(pairs.size());
  verdict.difference = paired_difference(pairs);
  verdict.p = p_value(verdict.difference, 0);
  return verdict;
}

// Whether a difference of the metric is in favour of the model that it is added to.
bool favours(const TaskInfo& task, double difference) {
  return task.lower_is_better ? difference < 0 : difference > 0;
}

// Whether leaving out unpaired seeds helps `row`: whether its mean over the pairs is better than
// over all of its seeds.
bool is_helped_by_pairs(const TaskInfo& task, const Row& row, double mean_of_pairs) {
  return favours(task, mean_of_pairs - row.result.mean) &&
         std::abs(mean_of_pairs - row.result.mean) > 1e-12 * std::abs(row.result.mean);
}

// Gives `verdict`, of `row` against `other`, the relation that the tests allow.
void settle(const TaskInfo& task, const Row& row, const Row& other, Verdict& verdict) {
  if (row.finished == 0 || other.finished == 0) return;
  const bool good = favours(task, verdict.difference.mean);
  verdict.caveats = good ? caveats(row, other) : caveats(other, row);
  const Row& front = good ? row : other;
  if (!verdict.unpaired.empty() &&
      is_helped_by_pairs(task, front, good ? verdict.own_mean : verdict.other_mean)) {
    verdict.caveats.push_back("seeds at which `" + front.model->label +
                              "` is worse are left out, because only one of the two finished them");
  }
  if (row.learning == Learning::kNotLearned) {
    verdict.relation = Relation::kNotLearned;
  } else if (other.learning == Learning::kNotLearned) {
    verdict.relation =
        row.learning == Learning::kLearned ? Relation::kLearned : Relation::kTooFewSeeds;
  } else if (verdict.difference.count < kSeedsForClaim) {
    verdict.relation = Relation::kTooFewSeeds;
  } else if (!(verdict.adjusted_p <= kFalseClaims)) {
    verdict.relation = Relation::kNoDifference;
    // Which of two that are not separated is in front is chance.
    const Row& behind = good ? other : row;
    if (behind.failed > 0) verdict.caveats.push_back(failed_runs(behind));
  } else if (verdict.caveats.empty()) {
    verdict.relation = good ? Relation::kBetter : Relation::kWorse;
  } else {
    verdict.relation = good ? Relation::kAhead : Relation::kBehind;
  }
  if (verdict.relation == Relation::kTooFewSeeds) {
    verdict.seeds_needed = seeds_needed(verdict.difference, kSeedsForClaim);
  }
}

// The p value of the hypothesis that the best row is no better than some other row with a result:
// the largest of its paired comparisons. Unknown where one of them has too few seeds.
double best_p(const TaskSummary& t) {
  double p = kUnknown;
  for (size_t i = 1; i < t.rows.size(); ++i) {
    if (t.rows[i].finished == 0) continue;
    const Verdict verdict = paired(t.rows.front(), t.rows[i]);
    if (verdict.difference.count < kSeedsForClaim) return kUnknown;
    const bool helped =
        !verdict.unpaired.empty() && is_helped_by_pairs(*t.task, t.rows.front(), verdict.own_mean);
    p = std::fmax(p, favours(*t.task, verdict.difference.mean) && !helped ? verdict.p : 1);
  }
  return p;
}

// What the tests of a task allow to say. `best_p` is the adjusted p value of its best_p().
void conclude(TaskSummary& t, double best_p) {
  if (t.rows.empty()) return;
  for (Row& row : t.rows) {
    if (!t.floor() || row.finished == 0) continue;
    const bool past = favours(*t.task, row.result.mean - t.floor()->quality);
    // One run has no interval, and that of a few is so wide that hardly any mean passes the floor
    // by it: what has not passed has not learned, but what has may have been lucky.
    row.learning = !past                               ? Learning::kNotLearned
                   : row.floor_p <= kFalseClaims       ? Learning::kLearned
                   : row.result.count < kSeedsForClaim ? Learning::kNotKnown
                                                       : Learning::kNotLearned;
  }
  const Row* const baseline = t.baseline();
  for (Row& row : t.rows) {
    if (!row.baseline) settle(*t.task, row, *baseline, row.against_baseline);
  }
  const Row& first = t.rows.front();
  bool claimed = first.finished > 0 && first.learning != Learning::kNotLearned &&
                 first.learning != Learning::kNotKnown;
  int rivals = 0;
  for (size_t k = 1; k < t.rows.size(); ++k) {
    const Row& other = t.rows[k];
    // One whose runs are still to come may be better yet.
    if (other.finished == 0) claimed &= other.failed == other.planned;
    if (other.finished == 0 || other.learning == Learning::kNotLearned) continue;
    ++rivals;
    claimed &= caveats(first, other).empty();
    const Relation relation = (first.baseline ? other : first).against_baseline.relation;
    if (first.baseline) claimed &= relation == Relation::kWorse;
    if (!first.baseline && t.rows.size() == 2) claimed &= relation == Relation::kBetter;
    if (!first.baseline && t.rows.size() > 2) claimed &= best_p <= kFalseClaims;
  }
  t.best_is_claimed = claimed && rivals > 0;
}

// Tests everything that the report states, as one family. Which hypotheses belong to it depends on
// the number of runs and not on what the tests find. Returns how many there are.
int test(const std::vector<TaskSummary*>& tasks) {
  std::vector<double> p;
  std::vector<double*> adjusted;
  const auto add = [&](double value, double& out) {
    if (!std::isfinite(value)) return;
    p.push_back(value);
    adjusted.push_back(&out);
  };
  std::vector<double> best(tasks.size(), kUnknown);
  for (size_t i = 0; i < tasks.size(); ++i) {
    TaskSummary& t = *tasks[i];
    for (Row& row : t.rows) {
      if (t.floor()) add(p_value(row.result, t.floor()->quality), row.floor_p);
      if (!row.baseline && row.against_baseline.difference.count >= kSeedsForClaim) {
        add(row.against_baseline.p, row.against_baseline.adjusted_p);
      }
    }
    // With two models, or the baseline as the best, the comparisons with the baseline say it.
    if (t.rows.size() > 2) add(best_p(t), best[i]);
  }
  const std::vector<double> after = holm(p);
  for (size_t i = 0; i < p.size(); ++i) *adjusted[i] = after[i];
  for (size_t i = 0; i < tasks.size(); ++i) conclude(*tasks[i], best[i]);
  return static_cast<int>(p.size());
}

// Untested.
TaskSummary task_summary(const Comparison& c, const TaskInfo& task, Summary& counts) {
  TaskSummary t;
  t.task = &task;
  for (const ModelInfo& model : c.models) t.rows.push_back(make_row(c, task, model));
  const auto absent = [](const Row& row) { return row.runs.empty(); };
  if (!c.planned && !std::all_of(t.rows.begin(), t.rows.end(), absent)) {
    std::erase_if(t.rows, absent);  // of models that were never meant for this task
    t.rows.front().baseline = true;
  }
  for (Row& row : t.rows) {
    if (!row.baseline) row.against_baseline = paired(row, t.rows.front());
  }
  for (const Row& row : t.rows) {
    counts.planned += row.planned;
    counts.finished += row.finished;
    counts.failed += row.failed;
    counts.running += row.running;
    counts.interrupted += row.interrupted;
    for (const Run* run : row.runs) {
      for (const Point& p : run->points) t.has_accuracy |= std::isfinite(p.accuracy);
    }
  }
  std::stable_sort(t.rows.begin(), t.rows.end(), [&](const Row& a, const Row& b) {
    if (a.finished == 0 || b.finished == 0) return a.finished > 0 && b.finished == 0;
    return task.lower_is_better ? a.quality.mean < b.quality.mean : a.quality.mean > b.quality.mean;
  });
  return t;
}

// Sets progress and go_on by the counts of runs.
void describe_progress(const Comparison& c, Summary& summary) {
  const int done = summary.finished + summary.failed;
  if (done >= summary.planned) return;
  // Of a comparison that stands still the runs that have not begun wait for it, too.
  const bool stopped =
      summary.running == 0 && (summary.interrupted > 0 || (!c.go_on.empty() && !c.by_commands));
  summary.progress = str(stopped ? "Interrupted: " : "In progress: ", summary.finished, " of ",
                         summary.planned, " runs have finished");
  if (summary.running > 0) summary.progress += str(", ", summary.running, " under way");
  if (summary.interrupted > 0) {
    summary.progress +=
        str(", ", summary.interrupted, summary.interrupted == 1 ? " was" : " were", " interrupted");
  }
  if (summary.failed > 0) summary.progress += str(", ", summary.failed, " failed");
  summary.progress += ".";
  if (c.sweep_planned > 0) {
    const auto tried = std::count_if(c.runs.begin(), c.runs.end(), [](const Run& run) {
      return run.sweep && run.state != RunState::kRunning;
    });
    summary.progress += str(" Of the ", c.sweep_planned, " runs that choose ", list_of(c.swept),
                            ", ", tried, tried == 1 ? " has" : " have", " ended.");
  }
  // It stands between two runs, so that none of them says how it goes on.
  if (summary.running == 0 && summary.interrupted == 0) summary.go_on = c.go_on;
  if (c.by_commands && !summary.go_on.empty()) {
    summary.progress +=
        " Runs that are still to come are trained by the commands that --plan prints.";
  }
  if (summary.finished > 0) summary.progress += " What follows rests on the finished ones.";
}

}  // namespace

const Row* TaskSummary::baseline() const {
  const auto found =
      std::find_if(rows.begin(), rows.end(), [](const Row& row) { return row.baseline; });
  return found != rows.end() ? &*found : nullptr;
}

const Row* TaskSummary::row_of(const ModelInfo& model) const {
  const auto found = std::find_if(rows.begin(), rows.end(),
                                  [&](const Row& row) { return row.model->label == model.label; });
  return found != rows.end() ? &*found : nullptr;
}

Stat stat_of(const std::vector<double>& values) {
  std::vector<double> finite;
  std::copy_if(values.begin(), values.end(), std::back_inserter(finite),
               [](double v) { return std::isfinite(v); });
  Stat stat;
  stat.count = static_cast<int>(finite.size());
  if (finite.empty()) return stat;
  std::sort(finite.begin(), finite.end());
  stat.median = median(finite);
  stat.mean = std::accumulate(finite.begin(), finite.end(), 0.0) / stat.count;
  stat.low = finite.front();
  stat.high = finite.back();
  return stat;
}

Estimate paired_difference(const PairedPoints& seeds) {
  std::vector<double> differences, parts;
  double first_squares = 0, second_squares = 0;
  bool parts_known = true, parts_differ = false;
  for (const auto& [first, second] : seeds) {
    for (const Point* point : {first, second}) {
      const std::vector<double>& of = point->quality_parts;
      parts_differ |= std::any_of(of.begin(), of.end(), [&](double v) { return v != of[0]; });
    }
    differences.push_back(first->quality - second->quality);
    first_squares += first->quality_error * first->quality_error;
    second_squares += second->quality_error * second->quality_error;
    parts_known = parts_known && add_part_differences(*first, *second, parts);
  }
  const auto count = static_cast<double>(seeds.size());
  double error =
      independent_error(std::sqrt(first_squares / count), std::sqrt(second_squares / count));
  double df = std::numeric_limits<double>::infinity();
  // What makes a part of the data hard for both models cancels in the differences of the parts.
  // They say nothing of other data where each model is always right or always wrong. Where models
  // err alike on parts that differ, the models are the same.
  if (parts_known && !parts.empty()) {
    for (double& part : parts) part /= count;
    double of_parts = standard_error(parts);
    if (of_parts < 1e-12 * std::abs(parts[0])) of_parts = 0;  // rounding of equal differences
    if (of_parts > 0 || (parts[0] == 0 && parts_differ)) {
      error = of_parts;
      df = static_cast<double>(parts.size() - 1);
    }
  }
  return estimate(differences, error, df);
}

bool run_failed(const Run& run) {
  if (run.state == RunState::kFailed) return true;
  return run.state == RunState::kFinished && !std::isfinite(last(run, &Point::quality));
}

bool has_result(const Run& run) { return run.state == RunState::kFinished && !run_failed(run); }

std::vector<const Run*> runs_with_result(const Row& row) {
  std::vector<const Run*> out;
  std::copy_if(row.runs.begin(), row.runs.end(), std::back_inserter(out),
               [](const Run* run) { return has_result(*run); });
  return out;
}

double state_of_row(const Row& row) { return row.build ? row.build->state() : kUnknown; }
double whole_state_of_row(const Row& row) { return row.build ? row.build->state_bytes : kUnknown; }

bool run_diverged(const Run& run) { return has_result(run) && !run.warning.empty(); }

std::string run_problem(const Run& run) {
  if (!run.problem.empty()) return run.problem;
  if (run.state == RunState::kFailed) return "failed without a message";
  if (run.points.empty()) return "finished without an evaluation";
  const double last_value = run.points.back().quality;
  // The sign of a NaN means nothing.
  return str("the last evaluation gave ", std::isnan(last_value) ? "nan" : str(last_value),
             ", which is not finite");
}

std::string failed_setting_text(const FailedSetting& failed) {
  return failed.setting + (failed.runs > 1 ? str(" (", failed.runs, " runs)") : "") + ": " +
         failed.problem;
}

std::string interruption_text(const Interruption& at) {
  std::string out = at.step > 0 ? str("after step ", at.step, " of ", at.steps)
                                : str("before its first step of ", at.steps);
  if (at.saved_step) return out + str("; step ", *at.saved_step, " is saved");
  return out + (at.step > 0 ? "; nothing is saved, so it begins anew" : "");
}

std::string failed_runs(const Row& row) {
  return counted(row.failed, "failed run") + " of `" + row.model->label + "`";
}

std::string diverged_runs(const Row& row) {
  return counted(row.diverged, "diverged run") + " of `" + row.model->label + "`";
}

Summary summarize(const Comparison& c) {
  Summary summary;
  for (const TaskInfo& task : c.tasks) {
    summary.tasks.push_back(task_summary(c, task, summary));
    for (const Comparison& again : c.robustness) {
      summary.tasks.back().robustness.push_back(
          task_summary(again, again.tasks[static_cast<size_t>(&task - c.tasks.data())], summary));
    }
  }
  std::vector<TaskSummary*> tested;
  for (TaskSummary& t : summary.tasks) {
    tested.push_back(&t);
    for (TaskSummary& again : t.robustness) tested.push_back(&again);
  }
  summary.tested = test(tested);
  for (TaskSummary& t : summary.tasks) {
    t.answer = answer(t);
    t.recommendation = recommendation(t);
    for (TaskSummary& again : t.robustness) {
      again.answer = robustness_answer(t, again, c.robustness.front().title);
    }
  }
  summary.limits = limits(c, summary);
  describe_progress(c, summary);
  return summary;
}

// Decimals of a metric that is no share. A task may be solved down to a thousandth of a bit.
static int metric_decimals(double value) { return value != 0 && std::abs(value) < 0.01 ? 5 : 3; }

std::string metric_text(const TaskInfo& task, double value) {
  return task.percent ? percent(value) : fixed(value, metric_decimals(value));
}

std::string metric_text(const TaskInfo& task, const Estimate& result) {
  if (result.count < 2) return metric_text(task, result.mean);
  if (task.percent) {
    // From two seeds the interval may be wider than all that is possible.
    const bool wide = result.half_width > 1;
    return fixed(100 * result.mean, 1) +
           (wide ? "% ± over 100%" : " ± " + percent(result.half_width));
  }
  const int decimals = metric_decimals(result.mean);
  return fixed(result.mean, decimals) + " ± " + fixed(result.half_width, decimals);
}

std::pair<double, double> interval_ends(const TaskInfo& task, const Estimate& e, bool difference) {
  if (!task.percent) return {e.low(), e.high()};
  return {std::max(e.low(), difference ? -1.0 : 0.0), std::min(e.high(), 1.0)};
}

std::string trend_text(const TaskInfo& task, Trend trend) {
  if (trend == Trend::kNotKnown) return "";
  if (trend == Trend::kPlateau) return "on a plateau";
  return task.lower_is_better ? "still falling" : "still rising";
}

}  // namespace headloom::report
