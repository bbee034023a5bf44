#include "report/table.h"

#include <algorithm>
#include <cmath>

#include "core/text.h"
#include "report/answer.h"
#include "report/charts.h"
#include "report/format.h"

namespace headloom::report {
namespace {

double parameters(const Row& row) {
  return row.build && row.build->parameters >= 0 ? static_cast<double>(row.build->parameters)
                                                 : kUnknown;
}
double flops_of_token(const Row& row) { return row.build ? row.build->flops_per_token : kUnknown; }
double flops_of_image(const Row& row) { return row.build ? row.build->flops_per_unit : kUnknown; }

// "39,800 to 40,200"; empty for a single value.
std::string range_note(const Stat& stat, std::string (*text)(double)) {
  if (stat.count < 2) return "";
  const std::string low = text(stat.low), high = text(stat.high);
  return low == high ? "every time" : low + " to " + high;
}

// What was measured several times: the median with the range.
Column ranged(const TaskSummary& task, const std::string& title, const std::string& note,
              Stat Row::* value, std::string (*text)(double)) {
  Column column{title, note, "ranged", {}};
  if (std::all_of(task.rows.begin(), task.rows.end(),
                  [&](const Row& row) { return (row.*value).count == 0; })) {
    return column;
  }
  for (const Row& row : task.rows) {
    column.cells.push_back({text((row.*value).median), range_note(row.*value, text), ""});
  }
  return column;
}

// "0.61×"; within a thousandth of 1 it is "same".
std::string ratio_note(double value, double base) {
  const double ratio = value / base;
  if (!std::isfinite(ratio)) return "";
  return std::abs(ratio - 1) < 0.0005 ? "same" : times(ratio);
}

Column measured(const TaskSummary& task, const std::string& title, const std::string& note,
                double (*value)(const Row&), std::string (*text)(double)) {
  Column column{title, note, "", {}};
  double base = kUnknown;
  bool any = false;
  for (const Row& row : task.rows) {
    if (row.baseline) base = value(row);
    any |= std::isfinite(value(row)) && value(row) >= 0;
  }
  if (!any) return column;
  for (const Row& row : task.rows) {
    const double v = value(row);
    column.cells.push_back({text(v), row.baseline ? "" : ratio_note(v, base), ""});
  }
  return column;
}

Column result_column(const TaskSummary& task) {
  Column column{task.task->metric,
                task.task->lower_is_better ? "lower is better" : "higher is better",
                "result",
                {}};
  for (const Row& row : task.rows) {
    if (row.finished == 0 && row.failed > 0) {
      column.cells.push_back({"failed", str(row.failed, " of ", row.planned, " seeds"), "failed"});
    } else {
      column.cells.push_back({metric_text(*task.task, row.result), row_state(row), ""});
    }
  }
  return column;
}

Column verdict_column(const TaskSummary& task, const std::string& baseline) {
  Column column{"against `" + baseline + "`", "", "left", {}};
  for (const Row& row : task.rows) {
    const Verdict& verdict = row.against_baseline;
    const Relation relation = verdict.relation;
    if (row.baseline) {
      const bool stuck = row.learning == Learning::kNotLearned;
      column.cells.push_back({stuck ? "not past the floor" : "baseline", "", ""});
      continue;
    }
    const bool good = relation == Relation::kBetter, bad = relation == Relation::kWorse;
    column.cells.push_back({relation_text(relation), "", good ? "better" : bad ? "worse" : ""});
    // Of a model that has not learned nothing else is said.
    if (relation == Relation::kNotLearned) continue;
    column.cells.back().note = join(verdict.caveats);
  }
  return column;
}

// The paired difference from the baseline with its interval.
Column difference_column(const TaskSummary& task) {
  Column column{"difference", "95% interval", "", {}};
  bool any = false;
  for (const Row& row : task.rows) {
    const Verdict& verdict = row.against_baseline;
    Cell cell{row.baseline ? "" : kDash, "", ""};
    const bool judged = !row.baseline && verdict.relation != Relation::kNoResult &&
                        verdict.relation != Relation::kNotLearned &&
                        verdict.relation != Relation::kLearned;
    if (judged && std::isfinite(verdict.difference.mean)) {
      any = true;
      cell.text = signed_text(verdict.difference.mean,
                              difference_text(*task.task, verdict.difference.mean));
      if (verdict.difference.count > 1) {
        cell.note = interval_text(*task.task, verdict.difference, true);
      }
    }
    column.cells.push_back(cell);
  }
  if (!any) column.cells.clear();
  return column;
}

Column trend_column(const TaskSummary& task) {
  Column column{"at the end", "", "left", {}};
  bool any = false;
  for (const Row& row : task.rows) {
    const std::string text = trend_text(*task.task, row.trend);
    any |= !text.empty();
    column.cells.push_back({text.empty() ? kDash : text, "", ""});
  }
  if (!any) column.cells.clear();
  return column;
}

// The steps after which a run first has nine answers of ten right: the median and the range.
Column steps_column(const TaskSummary& task) {
  Column column{"steps to 90%", "right", "ranged", {}};
  if (!task.has_accuracy) return column;
  // A run that was evaluated once may have been as good long before.
  bool any_curve = false;
  for (const Row& row : task.rows) {
    std::vector<double> steps;
    for (const Run* run : row.runs) {
      any_curve |= run->points.size() > 1;
      const auto found = std::find_if(run->points.begin(), run->points.end(),
                                      [](const Point& p) { return p.accuracy >= 0.9; });
      if (found != run->points.end()) steps.push_back(static_cast<double>(found->step));
    }
    const Stat stat = stat_of(steps);
    std::string note = range_note(stat, grouped);
    if (stat.count > 0 && stat.count < static_cast<int>(row.runs.size())) {
      note = str(stat.count, " of ", row.runs.size(), " runs");
    }
    column.cells.push_back({grouped(stat.median), note, ""});
  }
  if (!any_curve) column.cells.clear();
  return column;
}

// How much of the baseline's data a model needs to reach the baseline's result. The time that this
// takes is not given: it would be a ratio of speeds without its range.
Column reach_column(const TaskSummary& task, const Row& baseline) {
  Column column{"to match `" + baseline.model->label + "`", task.task->unit, "", {}};
  if (task.task->percent || baseline.finished == 0) return column;
  // Where every model was evaluated once, all of them would match it "at most" at the end.
  bool any = false, any_curve = false;
  for (const Row& row : task.rows) {
    Cell cell{row.baseline ? "" : kDash, "", ""};
    const std::vector<LinePoint> own = mean_curve(row, &Point::tokens, &Point::quality);
    any_curve |= own.size() > 1;
    const double reached = first_reach(own, baseline.result.mean, task.task->lower_is_better);
    if (!row.baseline && row.finished > 0 && std::isfinite(reached)) {
      // Before its first evaluation nothing is known.
      cell.text =
          (reached == own.front().x ? "at most " : "") + times(reached / baseline.tokens.mean);
      any = true;
    }
    column.cells.push_back(cell);
  }
  if (!any || !any_curve) column.cells.clear();
  return column;
}

}  // namespace

const char* relation_text(Relation relation) {
  switch (relation) {
    case Relation::kNotLearned:
      return "not past the floor";
    case Relation::kLearned:
      return "has learned";
    case Relation::kTooFewSeeds:
      return "too few seeds";
    case Relation::kNoDifference:
      return "no difference found";
    case Relation::kBetter:
      return "better";
    case Relation::kWorse:
      return "worse";
    case Relation::kAhead:
      return "ahead";
    case Relation::kBehind:
      return "behind";
    case Relation::kNoResult:
      break;
  }
  return kDash;
}

std::string row_state(const Row& row) {
  if (row.finished == row.planned && row.diverged == 0) return "";
  std::vector<std::string> parts;
  if (row.finished > 0 && row.finished < row.planned) {
    parts.push_back(str(row.finished, " of ", row.planned, " seeds"));
  }
  if (row.diverged > 0) parts.push_back(str(row.diverged, " diverged"));
  if (row.failed > 0) parts.push_back(str(row.failed, " failed"));
  if (row.finished == 0 && row.running > 0) parts.push_back("running");
  if (row.finished == 0 && row.interrupted > 0) parts.push_back("interrupted");
  if (parts.empty()) parts.push_back("not started");
  return join(parts);
}

std::vector<Column> result_columns(const TaskSummary& task) {
  std::vector<Column> columns{result_column(task)};
  const bool several = task.rows.size() > 1;
  if (several) {
    columns.push_back(verdict_column(task, task.baseline()->model->label));
    columns.push_back(difference_column(task));
  }
  columns.push_back(trend_column(task));
  if (several) columns.push_back(reach_column(task, *task.baseline()));
  columns.push_back(steps_column(task));
  if (task.has_accuracy && !task.task->percent) {
    Column accuracy{"answers right", "", "", {}};
    for (const Row& row : task.rows) accuracy.cells.push_back({percent(row.accuracy.mean), "", ""});
    columns.push_back(accuracy);
  }
  const size_t quality = columns.size();
  columns.push_back(
      ranged(task, "training", task.task->unit + "/s", &Row::tokens_per_second, grouped));
  columns.push_back(
      ranged(task, "decoding", task.task->unit + "/s", &Row::decode_tokens_per_second, grouped));
  columns.push_back(measured(task, "parameters", "", parameters, count));
  columns.push_back(task.task->unit == "images"
                        ? measured(task, "FLOPs", "an image", flops_of_image, count)
                        : measured(task, "FLOPs", "a token", flops_of_token, count));
  columns.push_back(measured(task, "state", "a token", state_of_row, bytes));
  columns.push_back(measured(task, "whole state", "a sequence", whole_state_of_row, bytes));
  columns.push_back(ranged(task, "memory", "peak", &Row::peak_memory, bytes));
  for (size_t i = quality; i < columns.size(); ++i) columns[i].cost = true;
  std::erase_if(columns, [](const Column& column) { return column.cells.empty(); });
  return columns;
}

}  // namespace headloom::report
