#include "report/answer.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "report/format.h"

namespace headloom::report {
namespace {

std::string name(const Row& row) { return "`" + row.model->label + "`"; }

// "the baseline `mha`" where it is that one.
std::string full_name(const Row& row) {
  return row.baseline ? "the baseline " + name(row) : name(row);
}

std::string names(const std::vector<const Row*>& rows) {
  std::vector<std::string> out;
  for (const Row* row : rows) out.push_back(name(*row));
  return list_of(out);
}

// The clause on what the quality costs; empty for the baseline itself.
std::string speed_clause(const Row& row, const Row& baseline) {
  const double ratio = row.tokens_per_second.mean / baseline.tokens_per_second.mean;
  if (row.baseline || !std::isfinite(ratio)) return "";
  return ", at " + fixed(ratio, 2) + " times its speed";
}

// "ties", "tie".
const char* verb(size_t count, const char* one, const char* many) {
  return count == 1 ? one : many;
}

// What is said of the others, each against the baseline.
std::string rest(const TaskInfo& task, const std::vector<const Row*>& others, const Row& baseline,
                 bool baseline_leads) {
  std::map<Relation, std::vector<const Row*>> by;
  for (const Row* row : others) by[compare(task, *row, baseline).relation].push_back(row);
  std::vector<std::string> parts;
  const std::string base = name(baseline);
  if (const auto& r = by[Relation::kBetter]; !r.empty()) {
    parts.push_back(names(r) + " also " + verb(r.size(), "beats ", "beat ") + base);
  }
  if (const auto& r = by[Relation::kAhead]; !r.empty()) {
    parts.push_back(names(r) + verb(r.size(), " is", " are") + " also ahead of " + base);
  }
  if (const auto& r = by[Relation::kTie]; !r.empty()) {
    parts.push_back(names(r) + verb(r.size(), " ties", " tie") + " with " + base);
  }
  std::vector<const Row*> below = by[Relation::kWorse];
  below.insert(below.end(), by[Relation::kBehind].begin(), by[Relation::kBehind].end());
  if (!below.empty() && !baseline_leads) {
    parts.push_back(names(below) + verb(below.size(), " does", " do") + " worse");
  }
  if (parts.empty()) return "";
  std::string out = " " + parts[0];
  for (size_t i = 1; i < parts.size(); ++i) out += "; " + parts[i];
  return out + ".";
}

// The failures that `said` does not mention yet.
std::string failures(const std::vector<Row>& rows, const std::string& said) {
  std::string out;
  for (const Row& row : rows) {
    if (row.failed == 0 || said.find(failed_runs(row)) != std::string::npos) continue;
    if (row.failed == row.planned) {
      out += " " + std::string(row.planned == 1 ? "The run" : "Every run") + " of " + name(row) +
             " failed.";
    } else {
      out += str(" ", row.failed, " of ", row.planned, " runs of ", name(row), " failed.");
    }
  }
  return out;
}

// Said when a lead does not amount to a claim.
std::string why_no_claim(const std::vector<std::string>& caveats) {
  if (caveats.front().starts_with("one seed")) {
    return " With one seed no spread is known, so this is what was seen and no winner is claimed.";
  }
  return " This is a lead and no claim yet: " + list_of(caveats) + ".";
}

}  // namespace

std::string answer(const TaskSummary& summary) {
  const TaskInfo& task = *summary.task;
  const std::string on = "On " + task.name + ", ";
  std::vector<const Row*> results;
  const Row* baseline = nullptr;
  for (const Row& row : summary.rows) {
    if (row.finished > 0) results.push_back(&row);
    if (row.baseline && row.finished > 0) baseline = &row;
  }
  if (results.empty()) {
    const bool over = std::all_of(summary.rows.begin(), summary.rows.end(),
                                  [](const Row& row) { return row.failed == row.planned; });
    return on + (over ? "no run gave a result." : "no run has finished yet.") +
           failures(summary.rows, "");
  }

  const Row& best = *results.front();
  const auto value = [&](const Row& row) { return metric_text(task, row.quality); };
  const std::string metric = " " + task.metric;
  if (results.size() == 1) {
    return on + full_name(best) + " reaches " + value(best) + metric +
           (summary.rows.size() > 1 ? "; nothing else has a result to set beside it." : ".") +
           failures(summary.rows, "");
  }

  std::vector<const Row*> top{&best}, others;  // top: the best and all that tie with it
  std::vector<std::string> caveats;
  for (size_t i = 1; i < results.size(); ++i) {
    const Verdict verdict = compare(task, best, *results[i]);
    (verdict.relation == Relation::kTie ? top : others).push_back(results[i]);
    for (const std::string& caveat : verdict.caveats) {
      if (std::find(caveats.begin(), caveats.end(), caveat) == caveats.end()) {
        caveats.push_back(caveat);
      }
    }
  }
  const bool baseline_on_top = baseline && std::find(top.begin(), top.end(), baseline) != top.end();
  const bool tie_with_baseline = baseline_on_top && top.size() > 1;
  std::string out = on;
  // A claim over the baseline may stand while one over the others is open.
  const bool beats_baseline =
      baseline && compare(task, best, *baseline).relation == Relation::kBetter;
  if (top.size() == 1) {
    const Row& second = baseline && !best.baseline ? *baseline : *results[1];
    const std::string values = value(best) + metric + " against " + value(second);
    if (!caveats.empty() && beats_baseline) {
      out += full_name(best) + " beats " + full_name(*baseline) + ": " + values;
    } else {
      out += full_name(best) + (caveats.empty() ? " learns best: " : " is ahead: ") + values +
             " for " + (second.baseline ? full_name(second) : "the next, " + name(second));
    }
    out += (second.baseline ? speed_clause(best, second) : "") + ".";
    std::erase(others, &second);
  } else if (tie_with_baseline) {
    std::erase(top, baseline);
    std::vector<std::string> values;
    for (const Row* row : top) values.push_back(value(*row));
    if (!others.empty()) out += "no model beats " + full_name(*baseline) + ": ";
    out += names(top) + verb(top.size(), " ties with ", " tie with ") +
           (others.empty() ? full_name(*baseline) + ": " : "it, ") + list_of(values) + metric +
           " against " + value(*baseline);
    if (!others.empty())
      out += "; " + names(others) + verb(others.size(), " does", " do") + " worse";
    out += ".";
  } else {
    std::vector<std::string> values;
    for (const Row* row : top) values.push_back(value(*row));
    out += names(top) + " tie for best: " + list_of(values) + metric;
    if (baseline) {
      out += " against " + value(*baseline) + " for " + full_name(*baseline);
      std::erase(others, baseline);
    }
    out += ".";
  }
  if (baseline) {
    // Ties are not transitive: what ties with the best may tie with the baseline below it, too.
    if (!baseline_on_top && top.size() > 1)
      others.insert(others.begin(), top.begin() + 1, top.end());
    std::erase_if(others, [&](const Row* row) {
      return std::find(top.begin(), top.end(), row) != top.end() &&
             compare(task, *row, *baseline).relation != Relation::kTie;
    });
    out += rest(task, others, *baseline, baseline_on_top);
  }
  if (!caveats.empty() && !tie_with_baseline) {
    out += beats_baseline ? " That `" + best.model->label +
                                "` is best of all is no claim yet: " + list_of(caveats) + "."
                          : why_no_claim(caveats);
  }
  return out + failures(summary.rows, out);
}

}  // namespace headloom::report
