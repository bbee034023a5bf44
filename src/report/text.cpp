#include <algorithm>
#include <sstream>

#include "core/text.h"
#include "report/comparison.h"
#include "report/format.h"
#include "report/scaling.h"
#include "report/summary.h"
#include "report/table.h"

namespace headloom::report {
namespace {

// Breaks at spaces; without the backticks that mark labels for the page.
std::string wrapped(std::string text, size_t width) {
  std::erase(text, '`');
  std::istringstream words(text);
  std::string out, line, word;
  while (words >> word) {
    if (!line.empty() && display_width(line) + 1 + display_width(word) > width) {
      out += line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return out + line + "\n";
}

// A table whose first line is its head and whose first column has texts.
std::string aligned(const std::vector<std::vector<std::string>>& lines) {
  std::vector<size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i)
      widths[i] = std::max(widths[i], display_width(line[i]));
  }
  std::string out;
  for (size_t row = 0; row < lines.size(); ++row) {
    std::string line;
    for (size_t i = 0; i < lines[row].size(); ++i) {
      if (i > 0) line += "  ";
      line += pad(lines[row][i], widths[i], /*right=*/i > 0);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
    if (row == 0) {
      size_t total = 2 * (widths.size() - 1);
      for (const size_t w : widths) total += w;
      for (size_t i = 0; i < total; ++i) out += "─";
      out += "\n";
    }
  }
  return out;
}

// A difference that is no claim.
bool is_lead(const Row& row) {
  const Relation relation = row.against_baseline.relation;
  return relation == Relation::kAhead || relation == Relation::kBehind;
}

// `costs`: whether the models' speeds were measured.
std::string table(const TaskSummary& task, bool costs = true) {
  // Second lines of the page's cells have columns of their own here, where a first line needs them.
  std::vector<std::vector<std::string>> lines(task.rows.size() + 1);
  lines[0].push_back("model");
  for (size_t i = 0; i < task.rows.size(); ++i) lines[i + 1].push_back(task.rows[i].model->label);
  for (const Column& column : result_columns(task)) {
    // The page has the rest.
    const bool verdict = column.title.starts_with("against ");
    const bool both = column.title == "difference" || column.title == "training";
    if (column.cost && !costs) continue;
    if (!verdict && !both && column.css != "result" && column.title != "answers right") continue;
    std::string title = column.title == "training" ? column.note : column.title;
    std::erase(title, '`');
    lines[0].push_back(title);
    if (both) lines[0].push_back(column.title == "training" ? "range" : column.note);
    for (size_t i = 0; i < column.cells.size(); ++i) {
      const Cell& cell = column.cells[i];
      std::string text = cell.text;
      if (verdict && is_lead(task.rows[i])) text += "*";
      std::erase(text, '`');
      lines[i + 1].push_back(text);
      if (both) lines[i + 1].push_back(cell.note);
    }
    if (column.css != "result") continue;
    lines[0].push_back("seeds");
    for (size_t i = 0; i < task.rows.size(); ++i) {
      const Row& row = task.rows[i];
      std::string seeds =
          row.finished < row.planned ? str(row.finished, " of ", row.planned) : str(row.finished);
      if (row.diverged > 0) seeds += str(", ", row.diverged, " diverged");
      lines[i + 1].push_back(seeds);
    }
  }
  return aligned(lines);
}

}  // namespace

std::string to_text(const Comparison& comparison, int width) {
  const Summary summary = summarize(comparison);
  const auto columns = static_cast<size_t>(std::max(width, 40));
  std::string out;
  if (!summary.progress.empty()) out += wrapped(summary.progress, columns) + "\n";
  if (!summary.go_on.empty()) out += "Go on with:\n    " + summary.go_on + "\n\n";
  if (!summary.limits.empty()) out += wrapped(summary.limits, columns) + "\n";
  for (const SizeSeries& series : size_series(comparison, summary)) {
    out += wrapped(series.answer, columns) + "\n" + aligned(scaling_table(series)) + "\n";
  }
  bool leads = false;
  for (const TaskSummary& task : summary.tasks) {
    out += wrapped(task.answer, columns);
    if (!task.recommendation.empty()) out += wrapped(task.recommendation, columns);
    out += "\n" + table(task) + "\n";
    for (const Row& row : task.rows) {
      leads |= is_lead(row);
      for (const Run* run : row.runs) {
        if (const auto& at = run->interruption) {
          out += wrapped(str("interrupted: ", row.model->label, ", seed ", run->seed, ": ",
                             interruption_text(*at), ". Go on with:"),
                         columns) +
                 "    " + at->go_on + "\n\n";  // in one line, to be copied
        }
        const bool failed = run_failed(*run);
        if (!failed && !run_diverged(*run)) continue;
        const std::string what = failed ? "failed: " : "diverged: ";
        const std::string why = failed ? run_problem(*run) : run->warning;
        out +=
            wrapped(str(what, row.model->label, ", seed ", run->seed, ": ", why), columns) + "\n";
      }
    }
    for (const Row& row : task.rows) {
      for (const FailedSetting& failed : row.failed_settings) {
        out += wrapped(str("failed in the sweep: ", row.model->label, ", ",
                           failed_setting_text(failed)),
                       columns) +
               "\n";
      }
    }
    for (const TaskSummary& again : task.robustness) {
      out += wrapped(again.answer, columns) + "\n" + table(again, /*costs=*/false) + "\n";
      for (const Row& row : again.rows) leads |= is_lead(row);
    }
  }
  std::string legend = "± is half the 95% interval of the mean. Differences are paired by seed; ";
  legend += summary.tested == 1 ? "the words are of a paired t test, the one test of this report."
            : summary.tested > 0
                ? str("the words are of a paired t test with Holm's procedure over all ",
                      summary.tested, " tests of this report.")
                : "nothing was tested.";
  if (leads) legend += " * is no claim, for the reasons given.";
  out += wrapped(legend, columns);
  return out;
}

}  // namespace headloom::report
