#include "report/answer.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "core/text.h"
#include "report/format.h"
#include "report/table.h"

namespace headloom::report {
namespace {

using Rows = std::vector<const Row*>;

std::string name(const Row& row) { return "`" + row.model->label + "`"; }

// "the baseline `mha`" where it is that one.
std::string full_name(const Row& row) {
  return row.baseline ? "the baseline " + name(row) : name(row);
}

// "`a` and `b`", each followed by what `more` says of it.
template <typename More>
std::string names(const Rows& rows, More more) {
  std::vector<std::string> out;
  for (const Row* row : rows) out.push_back(name(*row) + more(*row));
  return list_of(out);
}
std::string names(const Rows& rows) {
  return names(rows, [](const Row&) { return std::string(); });
}

const char* verb(size_t count, const char* one, const char* many) {
  return count == 1 ? one : many;
}

std::string value(const TaskInfo& task, const Row& row) {
  return metric_text(task, row.result) + " " + task.metric;
}

Rows rows_with(const TaskSummary& t, Relation relation) {
  Rows out;
  for (const Row& row : t.rows) {
    if (!row.baseline && row.against_baseline.relation == relation) out.push_back(&row);
  }
  return out;
}

Rows with_results(const TaskSummary& t) {
  Rows out;
  for (const Row& row : t.rows) {
    if (row.finished > 0) out.push_back(&row);
  }
  return out;
}

// "0.030 (95% interval 0.017 to 0.043)".
std::string effect(const TaskInfo& task, const Verdict& verdict) {
  return difference_text(task, verdict.difference.mean) + " (95% interval " +
         interval_text(task, verdict.difference, verdict.difference.mean > 0) + ")";
}

// "a guess among the four blocks (75.0%)".
std::string floor_text(const TaskSummary& t) {
  return t.floor()->name + " (" + metric_text(*t.task, t.floor()->quality) + ")";
}

std::string not_learned(const TaskSummary& t, const Rows& rows) {
  if (rows.empty()) return "";
  return " " +
         names(rows, [&](const Row& r) { return " (" + metric_text(*t.task, r.result) + ")"; }) +
         verb(rows.size(), " is", " are") + " not shown to have learned: " +
         verb(rows.size(), "it does not pass", "none of them passes") +
         " the floor of what is reached without learning, " + floor_text(t) +
         ", by more than chance.";
}

// Of models whose means pass the floor, which their seeds are too few to judge.
std::string not_known(const TaskSummary& t, const Rows& rows) {
  if (rows.empty()) return "";
  return " Whether " +
         names(rows, [&](const Row& r) { return " (" + metric_text(*t.task, r.result) + ")"; }) +
         verb(rows.size(), " has", " have") +
         " learned is not known: " + verb(rows.size(), "its mean passes", "their means pass") +
         " the floor of what is reached without learning, " + floor_text(t) +
         str(", but there are too few seeds to tell that from chance; train from at least ",
             kSeedsForClaim, " seeds.");
}

// " There are too few seeds to compare `a` (1.93, where ...) and `b` with the baseline ...".
std::string too_few_seeds(const TaskSummary& t, const Rows& rows, const Row& baseline) {
  if (rows.empty()) return "";
  int least = rows[0]->against_baseline.difference.count, most = least;
  for (const Row* row : rows) {
    least = std::min(least, row->against_baseline.difference.count);
    most = std::max(most, row->against_baseline.difference.count);
  }
  const auto result = [&](const Row& row) {
    const Verdict& v = row.against_baseline;
    std::string out = " (" + metric_text(*t.task, row.result);
    if (v.difference.count >= 2 && v.difference.mean != 0) {
      if (v.seeds_needed > kSeedsForClaim) {
        out += str(", a difference as large as this takes about ", v.seeds_needed, " seeds");
      } else if (v.seeds_needed < 0) {
        out += ", a difference as small as this takes more than 1,000 seeds or more held-out data";
      }
    }
    return out + ")";
  };
  return " There are too few seeds to compare " + names(rows, result) + " with " +
         full_name(baseline) + " (" + value(*t.task, baseline) +
         "): " + (least == most ? "" : str(least, " to ")) + counted(most, "seed") +
         verb(static_cast<size_t>(most), " is", " are") +
         str(" paired, where a claim takes at least ", kSeedsForClaim, ".");
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

std::string left_out(const TaskSummary& t, const Row& baseline) {
  std::string out;
  for (const Row& row : t.rows) {
    const std::vector<int64_t>& seeds = row.against_baseline.unpaired;
    if (row.baseline || seeds.empty() || row.learning == Learning::kNotLearned) continue;
    // A seed that is still to come is not left out.
    const auto to_come = [](const Row& r) { return r.waiting() + r.running + r.interrupted; };
    if (to_come(row) + to_come(baseline) > 0) continue;
    std::vector<std::string> numbers;
    for (const int64_t seed : seeds) numbers.push_back(str(seed));
    out += verb(seeds.size(), " Seed ", " Seeds ") + list_of(numbers) +
           verb(seeds.size(), " is", " are") + " left out of the comparison of " + name(row) +
           " with " + name(baseline) + ", because only one of the two finished " +
           verb(seeds.size(), "it.", "them.");
  }
  return out;
}

// Whether nothing weakens the comparison with the baseline.
bool on_equal_terms(const Row* row) { return row->against_baseline.caveats.empty(); }

// Of those of the rows that are not on equal terms with the baseline.
std::string unequal_terms(const Rows& rows, const Row& baseline) {
  std::string out;
  for (const Row* row : rows) {
    if (on_equal_terms(row)) continue;
    out += " " + name(*row) + " and " + full_name(baseline) +
           " are not compared on equal terms: " + list_of(row->against_baseline.caveats) + ".";
  }
  return out;
}

// Of the models that are better. The first claim names everything that the later ones leave out.
std::string better_sentences(const TaskSummary& t, const Row& baseline) {
  const Rows better = rows_with(t, Relation::kBetter);
  if (better.empty()) return "";
  const TaskInfo& task = *t.task;
  const Verdict& v = better[0]->against_baseline;
  const bool best = t.best_is_claimed && better[0] == &t.rows.front();
  std::string out =
      " " + name(*better[0]) +
      (best ? " learns best: " : " is better than the baseline " + name(baseline) + ": ") +
      value(task, *better[0]) + " against " + metric_text(task, baseline.result) +
      (best ? " for the baseline " + name(baseline) : "") + ", a difference of " + effect(task, v) +
      ", " + counted(v.difference.count, "seed") + ".";
  for (size_t i = 1; i < better.size(); ++i) {
    out += " " + name(*better[i]) + " is better than " + name(baseline) + ", too, by " +
           effect(task, better[i]->against_baseline) + ".";
  }
  return out;
}

// Of the models that are worse, after the baseline where that is claimed to be the best.
std::string worse_sentences(const TaskSummary& t, const Row& baseline) {
  const Rows worse = rows_with(t, Relation::kWorse);
  std::string out;
  if (!worse.empty() && rows_with(t, Relation::kBetter).empty() && t.best_is_claimed) {
    out += " " + full_name(baseline) + " learns best: " + value(*t.task, baseline) + ".";
  }
  for (const Row* row : worse) {
    const Verdict& v = row->against_baseline;
    out += " " + name(*row) + " is worse than " + full_name(baseline) + ", by " +
           effect(*t.task, v) + ", " + counted(v.difference.count, "seed") + ".";
  }
  return out;
}

// Of the models that are ahead or behind, with what a claim lacks.
std::string lead_sentences(const TaskSummary& t, const Row& baseline) {
  std::string out;
  for (const Relation relation : {Relation::kAhead, Relation::kBehind}) {
    for (const Row* row : rows_with(t, relation)) {
      const Verdict& v = row->against_baseline;
      out += " " + name(*row) + (relation == Relation::kAhead ? " is ahead of " : " is behind ") +
             full_name(baseline) + " by " + effect(*t.task, v) +
             ", but this is no claim: " + list_of(v.caveats) + ".";
    }
  }
  return out;
}

// Of the models that the tests do not tell from the baseline; begins without a capital letter.
std::string no_difference_sentences(const TaskSummary& t, const Row& baseline) {
  const Rows none = rows_with(t, Relation::kNoDifference);
  if (none.empty()) return "";
  const TaskInfo& task = *t.task;
  const auto distance = [&](const Row& row) {
    const Estimate& d = row.against_baseline.difference;
    const bool same = d.mean == 0 && d.half_width == 0;
    return " (" + metric_text(task, row.result) + ", " +
           (same ? "the same at every seed"
                 : "at most " + difference_text(task, largest_difference(task, d)) + " apart") +
           ")";
  };
  return " no difference from " + full_name(baseline) + " (" + metric_text(task, baseline.result) +
         ") is found for " + names(none, distance) + "." + unequal_terms(none, baseline);
}

// Of the models that have learned where the baseline is not shown to have.
std::string learned_sentences(const TaskSummary& t, const Row& baseline) {
  const Rows learned = rows_with(t, Relation::kLearned);
  if (learned.empty()) return "";
  const auto result = [&](const Row& row) {
    return " (" + metric_text(*t.task, row.result) + " " + t.task->metric + ")";
  };
  return " " + names(learned, result) + verb(learned.size(), " has", " have") + " learned, and " +
         full_name(baseline) + " is not shown to have." + unequal_terms(learned, baseline);
}

// How each model stands to the baseline; the first sentence may begin without a capital letter.
std::string against_baseline(const TaskSummary& t, const Row& baseline) {
  return better_sentences(t, baseline) + worse_sentences(t, baseline) +
         lead_sentences(t, baseline) + no_difference_sentences(t, baseline) +
         learned_sentences(t, baseline) +
         too_few_seeds(t, rows_with(t, Relation::kTooFewSeeds), baseline);
}

// The sentence that begins a paragraph: its first letter, or that of the part after `start`.
std::string begun(const std::string& start, std::string sentences) {
  // " There are ..." and " no difference ..." follow a comma here, and a full stop elsewhere.
  if (sentences.starts_with(" There")) sentences[1] = 't';
  if (sentences.starts_with(" Whether")) sentences[1] = 'w';
  bool code = false;  // between `s, where labels are as they are
  for (size_t at = 0; at + 2 < sentences.size(); ++at) {
    if (sentences[at] == '`') code = !code;
    char& next = sentences[at + 2];
    if (code || sentences[at] != '.' || sentences[at + 1] != ' ' || next < 'a' || next > 'z')
      continue;
    next = static_cast<char>(next - 'a' + 'A');
  }
  return start + sentences;
}

// Why the training speeds of the rows cannot be compared, as a sentence; "" where they can be, and
// where a row has none.
std::string why_speeds_are_not_comparable(const Rows& rows) {
  const auto none = [](const Row* row) { return row->tokens_per_second.count == 0; };
  if (std::any_of(rows.begin(), rows.end(), none)) return "";
  std::set<std::string> machines;
  for (const Row* row : rows) {
    if (row->speed == nullptr || stat_of(row->speed->train_tokens_per_second).count == 0) {
      return " Their training speeds were not measured apart from the runs, so none is called the "
             "fastest.";
    }
    machines.insert(row->speed->machine);
  }
  if (machines.size() > 1) {
    return " Their training speeds were not measured together, so none is called the fastest.";
  }
  const auto once = [](const Row* row) { return row->tokens_per_second.count == 1; };
  if (std::any_of(rows.begin(), rows.end(), once)) {
    return " A training speed that was measured once has no spread, so none is called the fastest.";
  }
  return "";
}

// Of the rows, those that measurably train fastest; in words.
std::string training_speed_advice(const TaskInfo& task, const Rows& rows) {
  if (const std::string why = why_speeds_are_not_comparable(rows); !why.empty()) return why;
  const Row* fastest = nullptr;
  for (const Row* row : rows) {
    if (row->tokens_per_second.count == 0) return "";
    if (!fastest || row->tokens_per_second.median > fastest->tokens_per_second.median) {
      fastest = row;
    }
  }
  Rows as_fast, slower;  // the fastest one among the first; slower than that one
  double low_end = 0, high_end = std::numeric_limits<double>::infinity(), lowest = high_end;
  for (const Row* row : rows) {
    if (row->tokens_per_second.high < fastest->tokens_per_second.low) {
      slower.push_back(row);
      continue;
    }
    as_fast.push_back(row);
    lowest = std::min(lowest, row->tokens_per_second.low);
    low_end = std::max(low_end, row->tokens_per_second.low);
    high_end = std::min(high_end, row->tokens_per_second.high);
  }
  if (as_fast.size() > 1) {
    if (low_end > high_end) {
      std::erase(as_fast, fastest);
      return " No training speed is called the fastest: each of " + names(as_fast) +
             " overlaps with " + name(*fastest) + ", but not all overlap with each other.";
    }
    // What is slower than the fastest one may not be slower than another.
    std::erase_if(slower, [&](const Row* row) { return row->tokens_per_second.high < lowest; });
    if (!slower.empty()) {
      std::erase(as_fast, fastest);
      return std::string(" No training speed is called the fastest:") +
             verb(as_fast.size(), " that of ", " those of ") + names(as_fast) +
             verb(as_fast.size(), " overlaps", " overlap") + " that of " + name(*fastest) +
             ", but also" + verb(slower.size(), " that of ", " those of ") + names(slower) +
             ", which" + verb(slower.size(), " is", " are") + " slower than " + name(*fastest) +
             ".";
    }
    if (as_fast.size() == rows.size()) {
      return " The ranges of their training speeds overlap, so speed does not decide either.";
    }
    return " " + names(as_fast) + " train fastest; the ranges of their speeds overlap.";
  }
  const std::string low = grouped(fastest->tokens_per_second.low);
  const std::string high = grouped(fastest->tokens_per_second.high);
  return " " + name(*fastest) + " trains fastest, at " +
         grouped(fastest->tokens_per_second.median) + " " + task.unit + "/s" +
         (low == high ? "." : " (" + low + " to " + high + ").");
}

// Which model has the smaller decoding state, and what it costs in quality.
std::string for_memory(const TaskSummary& t, const Rows& taken) {
  double have = kUnknown, have_whole = kUnknown;
  for (const Row* row : taken) {
    have = std::fmin(have, state_of_row(*row));
    have_whole = std::fmin(have_whole, whole_state_of_row(*row));
  }
  const Row* small = nullptr;
  for (const Row& row : t.rows) {
    const Relation r = row.against_baseline.relation;
    const bool judged = row.baseline || r == Relation::kBetter || r == Relation::kWorse ||
                        r == Relation::kNoDifference || r == Relation::kLearned;
    if (row.finished == 0 || !judged || row.learning == Learning::kNotLearned) continue;
    if (!on_equal_terms(&row)) continue;
    // A state that does not grow may be larger than one that does, at the length of the task.
    if (whole_state_of_row(row) > 0.9 * have_whole) continue;
    if (state_of_row(row) < 0.9 * have && (!small || state_of_row(row) < state_of_row(*small)))
      small = &row;
  }
  if (!small) return "";
  const Verdict& v = small->against_baseline;
  std::string quality;
  switch (v.relation) {
    case Relation::kBetter:
      quality = ", and it is better than the baseline by " + effect(*t.task, v);
      break;
    case Relation::kWorse:
      quality = ", and it is worse than the baseline by " + effect(*t.task, v);
      break;
    case Relation::kNoDifference:
      quality = ", and no difference from the baseline is found (up to " +
                difference_text(*t.task, largest_difference(*t.task, v.difference)) +
                " is possible)";
      break;
    default:
      break;
  }
  return " If decoding memory matters, take " + full_name(*small) +
         ": each token of context adds " + bytes(state_of_row(*small)) + " of state against " +
         bytes(have) + quality + ".";
}

std::string tokens_a_parameter(double ratio) {
  return ratio < 10 ? formatted("%.2g", ratio) : fixed(ratio, 0);
}

// What is said of one task, or of several ("A and B", "all tasks").
struct OnTask {
  std::string what, task;
};

// What is said of several tasks is said once.
std::vector<OnTask> together(const std::vector<OnTask>& said, size_t tasks) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<std::string>> named;
  for (const OnTask& one : said) {
    if (named[one.what].empty()) order.push_back(one.what);
    named[one.what].push_back(one.task);
  }
  std::vector<OnTask> out;
  for (const std::string& what : order) {
    const bool all = tasks > 1 && named[what].size() == tasks;
    out.push_back({what, all ? "all tasks" : list_of(named[what])});
  }
  return out;
}

// "`mha` on A and B".
std::vector<std::string> by_tasks(const std::vector<OnTask>& said, size_t tasks) {
  std::vector<std::string> out;
  for (const OnTask& one : together(said, tasks)) out.push_back(one.what + " on " + one.task);
  return out;
}

// That the models are tiny, by the largest of them, and training short, by the shortest of all.
std::vector<std::string> scale_limits(const Summary& summary) {
  double parameters = kUnknown, ratio = kUnknown, trained = kUnknown;
  for (const TaskSummary& t : summary.tasks) {
    for (const Row* row : with_results(t)) {
      if (!row->build || row->build->parameters <= 0) continue;
      const auto size = static_cast<double>(row->build->parameters);
      parameters = std::fmax(parameters, size);
      const double here = row->tokens.mean / size;
      if (t.task->unit == "tokens" && !(here >= ratio)) {
        ratio = here;
        trained = row->tokens.mean;
      }
    }
  }
  std::vector<std::string> out;
  if (parameters < 1e7) out.push_back("the models are tiny (" + count(parameters) + " parameters)");
  if (ratio < 19.5) {
    out.push_back("training is short (" + count(trained) + " tokens, " + tokens_a_parameter(ratio) +
                  " per parameter, where about 20 are compute-optimal by Hoffmann et al. 2022)");
  }
  return out;
}

// "all models" where the rows are all of the task's, and else their names.
std::string all_or_names(const TaskSummary& t, const Rows& rows) {
  return rows.size() == t.rows.size() && rows.size() > 1 ? "all models" : names(rows);
}

// Which learning curves still move at their ends, or may do so.
std::vector<std::string> curve_limits(const Summary& summary) {
  std::vector<OnTask> moving, unseen;
  for (const TaskSummary& t : summary.tasks) {
    Rows falling, unknown;
    for (const Row* row : with_results(t)) {
      if (row->trend == Trend::kMoving) falling.push_back(row);
      // Runs that end once they are good enough end anywhere between two evaluations.
      if (row->trend == Trend::kNotKnown && t.task->stopping.empty()) unknown.push_back(row);
    }
    if (!falling.empty()) moving.push_back({all_or_names(t, falling), t.task->name});
    if (!unknown.empty()) unseen.push_back({all_or_names(t, unknown), t.task->name});
  }
  const size_t tasks = summary.tasks.size();
  std::vector<std::string> out;
  if (!moving.empty()) {
    out.push_back("curves still move at the end (" + list_of(by_tasks(moving, tasks)) +
                  "), so longer training may change the ranking");
  }
  if (!unseen.empty()) {
    out.push_back("whether curves still move at the end is not known (" +
                  list_of(by_tasks(unseen, tasks)) +
                  "), because no run was evaluated near three quarters of its steps (a smaller "
                  "train.eval_every does that)");
  }
  return out;
}

// Which tasks share a name and not their options, and what it means that runs may end early.
std::vector<std::string> task_limits(const Comparison& c, const Summary& summary) {
  std::vector<std::string> out;
  for (const TaskInfo& task : c.tasks) {
    if (!task.apart.empty()) {
      out.push_back("the task `" + task.name + "` " + task.apart +
                    ", so that the two are not compared");
    }
  }
  std::vector<OnTask> stopping;
  for (const TaskSummary& t : summary.tasks) {
    if (!t.task->stopping.empty()) stopping.push_back({t.task->stopping, t.task->name});
  }
  for (const OnTask& said : together(stopping, summary.tasks.size())) {
    out.push_back("on " + said.task + ", " + said.what);
  }
  return out;
}

// That there are few seeds, and that an interval lacks the held-out data's part.
std::vector<std::string> sample_limits(const Comparison& c, const Summary& summary) {
  std::vector<std::string> out;
  if (static_cast<int>(c.seeds.size()) < kSeedsForClaim) {
    out.push_back(
        (c.seeds.size() == 1 ? "there is one seed" : str("there are ", c.seeds.size(), " seeds")) +
        str(", where a claim takes ", kSeedsForClaim));
  }
  bool error_known = true;
  for (const TaskSummary& t : summary.tasks) {
    for (const Row& row : t.rows) {
      for (const Run* run : runs_with_result(row)) {
        error_known &= std::isfinite(run->points.back().quality_error);
      }
    }
  }
  if (!error_known) {
    out.push_back(
        "the sampling error of the held-out data is unknown, so the intervals leave it out");
  }
  return out;
}

// What the sweep leaves open; `tasks` is how many tasks are reported.
std::vector<std::string> sweep_limits(const Comparison& c, size_t tasks) {
  std::vector<std::string> out;
  // Keys outside [train] have their table's name and a dot in front.
  const auto of_training = [](const std::string& key) { return key.find('.') == key.npos; };
  if (c.models.size() > 1 && std::none_of(c.swept.begin(), c.swept.end(), of_training)) {
    const bool some = std::any_of(c.choices.begin(), c.choices.end(), [&](const Choice& choice) {
      return std::any_of(choice.setting.begin(), choice.setting.end(),
                         [&](const SweptValue& value) { return of_training(value.key); });
    });
    out.push_back(str(some ? "training options were not swept in the same way for every model"
                           : "no training option was swept",
                      ", so that a model that needs a learning rate other than the one it was "
                      "given is at a disadvantage"));
  }
  std::vector<OnTask> edges;
  for (const TaskInfo& task : c.tasks) {
    std::vector<std::string> models;
    size_t choices = 0;
    for (const Choice& choice : c.choices) {
      if (choice.task != task.name) continue;
      ++choices;
      if (!choice.at_edge.empty()) models.push_back("`" + choice.model + "`");
    }
    const bool all = models.size() == choices && choices > 1;
    if (!models.empty()) edges.push_back({all ? "all models" : list_of(models), task.name});
  }
  if (!edges.empty()) {
    out.push_back("the best value of the sweep is at its edge for " +
                  list_of(by_tasks(edges, tasks)));
  }
  for (const std::string& key : c.swept) {
    std::set<std::string> values;
    for (const Run& run : c.runs) {
      for (const SweptValue& v : run.setting) {
        if (run.sweep && v.key == key) values.insert(v.value);
      }
    }
    if (values.size() == 1) out.push_back("a single value of `" + key + "` was tried");
  }
  return out;
}

constexpr double kRounding = 1e-9;

// What would be 0 with so many digits has one digit that is not. Less than a billionth is rounding.
std::string small_text(double size, int digits) {
  return size > kRounding && size < 0.5 * std::pow(10, -digits) ? formatted("%.1g", size)
                                                                : fixed(size, digits);
}

// Decimals of a difference of this size and of its interval, in points.
int digits_of_points(double size) { return size > kRounding && size < 0.001 ? 2 : 1; }

}  // namespace

double largest_difference(const TaskInfo& task, const Estimate& d) {
  const auto [low, high] = interval_ends(task, d, /*difference=*/true);
  return std::max(std::abs(low), std::abs(high));
}

std::string difference_text(const TaskInfo& task, double difference) {
  const double size = std::abs(difference);
  if (task.percent) return small_text(100 * size, digits_of_points(size)) + " points";
  return small_text(size, size < 0.01 ? 4 : 3);
}

std::string interval_text(const TaskInfo& task, const Estimate& d, bool rising) {
  auto [low, high] = interval_ends(task, d, /*difference=*/true);
  if (!rising) std::tie(low, high) = std::pair(-high, -low);
  const auto text = [&](double v) {
    std::string out = task.percent
                          ? small_text(std::abs(100 * v), digits_of_points(std::abs(d.mean)))
                          : small_text(std::abs(v), std::abs(d.mean) < 0.01 ? 4 : 3);
    return (v < -kRounding ? "−" : "") + out;
  };
  return text(low) + " to " + text(high);
}

std::string answer(const TaskSummary& t) {
  const TaskInfo& task = *t.task;
  const std::string on = "On " + task.name + ",";
  const Rows results = with_results(t);
  if (results.empty()) {
    const bool over = std::all_of(t.rows.begin(), t.rows.end(),
                                  [](const Row& row) { return row.failed == row.planned; });
    return on + (over ? " no run gave a result." : " no run has finished yet.") +
           failures(t.rows, "");
  }
  Rows unlearned, undecided;
  for (const Row* row : results) {
    if (row->learning == Learning::kNotLearned) unlearned.push_back(row);
    if (row->learning == Learning::kNotKnown) undecided.push_back(row);
  }
  std::string open = not_known(t, undecided);
  if (results.size() == 1) {
    return on + " " + full_name(*results[0]) + " reaches " + value(task, *results[0]) +
           (t.rows.size() > 1 ? "; nothing else has a result to set beside it." : ".") + open +
           not_learned(t, unlearned) + failures(t.rows, "");
  }
  if (unlearned.size() == results.size()) {
    return on + " no model is shown to have learned." + not_learned(t, unlearned) +
           failures(t.rows, "");
  }
  const Row* baseline = t.baseline();
  std::string out;
  if (baseline->finished == 0) {
    out = begun(on, " the baseline " + name(*baseline) +
                        " has no result, so nothing is compared with it; " +
                        names(results, [&](const Row& r) { return " reaches " + value(task, r); }) +
                        ".");
  } else {
    std::string said = against_baseline(t, *baseline);
    if (said.empty()) said.swap(open);
    if (said.empty()) said = " " + full_name(*baseline) + " has learned.";
    out = begun(on, said);
    const Rows better = rows_with(t, Relation::kBetter);
    if (!better.empty() && !t.best_is_claimed && results.size() - unlearned.size() > 2) {
      out += " Which model is the best of all is not shown.";
    }
  }
  out += open + not_learned(t, unlearned);
  if (baseline->finished > 0) out += left_out(t, *baseline);
  return out + failures(t.rows, out);
}

namespace {

// What the rules of a recommendation look at.
struct Standing {
  const TaskSummary& task;
  const Row& baseline;
  Rows results, learned;  // `learned`: those that are not known not to have

  const Row& first() const { return task.rows.front(); }
};

// What a rule says after "For TASK and this budget, ", where it applies.
using Advice = std::optional<std::string>;

std::string nothing_because(const std::string& why) {
  return "nothing is recommended, because " + why;
}

Advice where_learning_is_not_shown(const Standing& s) {
  if (s.learned.empty()) return nothing_because("no model is shown to have learned.");
  if (s.first().learning != Learning::kNotLearned) return {};
  return nothing_because(full_name(s.first()) +
                         " has the best mean and is not shown to have learned.");
}

Advice where_one_has_learned(const Standing& s) {
  if (s.learned.size() != 1 || s.learned[0]->learning != Learning::kLearned) return {};
  const Row& alone = *s.learned[0];
  std::vector<std::string> caveats = alone.against_baseline.caveats;
  for (const Row* other : alone.baseline ? s.results : Rows()) {
    for (const std::string& caveat : other->against_baseline.caveats) add_once(caveats, caveat);
  }
  if (!caveats.empty()) {
    return nothing_because(
        full_name(alone) +
        " alone is shown to have learned, but not on equal terms: " + list_of(caveats) + ".");
  }
  return "take " + full_name(alone) + ", because it alone is shown to have learned.";
}

Advice where_one_is_the_best(const Standing& s) {
  if (!s.task.best_is_claimed) return {};
  const char* const others = s.results.size() > s.learned.size()     ? " that has learned."
                             : s.task.rows.size() > s.results.size() ? " that has a result."
                                                                     : " here.";
  return "take " + full_name(s.first()) + ", because it is better than every other model" + others +
         for_memory(s.task, {&s.first()});
}

Advice where_some_are_better(const Standing& s) {
  Rows better = rows_with(s.task, Relation::kBetter);
  const bool claimed = !better.empty();
  if (!claimed) {
    const Rows all = rows_with(s.task, Relation::kLearned);
    std::copy_if(all.begin(), all.end(), std::back_inserter(better), on_equal_terms);
    if (better.empty() && !all.empty()) {
      return nothing_because(names(all) + verb(all.size(), " is", " are") +
                             " not compared with the baseline on equal terms.");
    }
  }
  if (better.empty()) return {};
  const std::string baseline = name(s.baseline);
  if (better.size() == 1) {
    return "take " + name(*better[0]) +
           (claimed ? ", because it alone is shown to be better than the baseline " + baseline
                    : ", because it has learned and the baseline is not shown to have") +
           "." + for_memory(s.task, better);
  }
  return "take one of " + names(better) +
         (claimed ? ", because they are better than the baseline " + baseline
                  : ", because they have learned and the baseline is not shown to have") +
         "; which of them is better is not shown, so take the cheapest." +
         training_speed_advice(*s.task.task, better) + for_memory(s.task, better);
}

Advice where_some_are_ahead(const Standing& s) {
  const Rows ahead = rows_with(s.task, Relation::kAhead);
  if (ahead.empty()) return {};
  return nothing_because(names(ahead) + verb(ahead.size(), " is", " are") +
                         " ahead of the baseline " + name(s.baseline) + ", but this is no claim.");
}

Advice where_some_are_not_separated(const Standing& s) {
  const Rows all = rows_with(s.task, Relation::kNoDifference);
  if (all.empty()) return {};
  Rows tied;
  std::copy_if(all.begin(), all.end(), std::back_inserter(tied), on_equal_terms);
  const bool equal = !tied.empty();
  if (!equal) tied = all;
  double most = 0;
  for (const Row* row : tied) {
    most = std::max(most, largest_difference(*s.task.task, row->against_baseline.difference));
  }
  tied.insert(tied.begin(), &s.baseline);
  const std::string still = names(tied) +
                            " are not separated (a difference from the baseline of up to " +
                            difference_text(*s.task.task, most) + " is still possible)";
  if (!equal) return nothing_because(still + " and not compared on equal terms.");
  return still + ", so take the cheapest." + training_speed_advice(*s.task.task, tied) +
         for_memory(s.task, tied);
}

Advice where_seeds_are_too_few(const Standing& s) {
  if (rows_with(s.task, Relation::kTooFewSeeds).empty() &&
      s.baseline.learning != Learning::kNotKnown) {
    return {};
  }
  return nothing_because(str("a claim takes at least ", kSeedsForClaim, " seeds."));
}

Advice otherwise_the_baseline(const Standing& s) {
  return "take the baseline " + name(s.baseline) +
         ", because no other model is shown to be better." + for_memory(s.task, {&s.baseline});
}

}  // namespace

std::string recommendation(const TaskSummary& t) {
  Standing s{.task = t, .baseline = *t.baseline(), .results = with_results(t), .learned = {}};
  if (s.results.size() < 2 || s.baseline.finished == 0) return "";
  for (const Row* row : s.results) {
    if (row->learning != Learning::kNotLearned) s.learned.push_back(row);
  }
  for (const auto rule : {where_learning_is_not_shown, where_one_has_learned, where_one_is_the_best,
                          where_some_are_better, where_some_are_ahead, where_some_are_not_separated,
                          where_seeds_are_too_few, otherwise_the_baseline}) {
    if (const Advice advice = rule(s))
      return "For " + t.task->name + " and this budget, " + *advice;
  }
  return "";
}

namespace {

// Why nothing can be said of a second initialisation; empty where every run has a result.
std::string missing_results(const TaskSummary& summary, const TaskSummary& again) {
  bool unfinished = false;
  int failed = 0;
  std::vector<std::string> failing;
  for (const Row& row : again.rows) {
    const Row& first = *summary.row_of(*row.model);
    for (const Row* of : {&row, &first}) unfinished |= of->finished + of->failed < of->planned;
    failed += row.failed + first.failed;
    if (row.failed + first.failed > 0) failing.push_back(name(row));
  }
  if (unfinished) return "not every run has finished.";
  if (failing.empty()) return "";
  return failed == 1 ? str("a run of ", join(failing), " failed.")
                     : str("runs of ", join(failing), " failed.");
}

// What is claimed of the first initialisation, and what of it does not hold under the second.
struct Claims {
  int made = 0;
  std::vector<std::string> gone = {};
};

Claims claims_of(const TaskSummary& summary, const TaskSummary& again) {
  Claims out;
  for (const Row& row : summary.rows) {
    const Relation relation = row.against_baseline.relation;
    // Where the baseline has not learned, the relation says it.
    if (row.learning == Learning::kLearned && relation != Relation::kLearned) {
      ++out.made;
      const Learning now = again.row_of(*row.model)->learning;
      if (now != Learning::kLearned) {
        out.gone.push_back(str("that ", name(row), " has learned",
                               now == Learning::kNotKnown ? " (unknown under the second)" : ""));
      }
    }
    const bool claim = relation == Relation::kBetter || relation == Relation::kWorse ||
                       relation == Relation::kLearned;
    if (row.baseline || !claim) continue;
    ++out.made;
    const Relation now = again.row_of(*row.model)->against_baseline.relation;
    if (now == relation) continue;
    out.gone.push_back(str(name(row), " (", relation_text(relation), ", then ",
                           now == Relation::kNoResult ? "unknown" : relation_text(now), ")"));
  }
  // Of two models the claim against the baseline says which is the best.
  if (summary.best_is_claimed && summary.rows.size() > 2) {
    ++out.made;
    const Row& best = summary.rows.front();
    if (!again.best_is_claimed || best.model->label != again.rows.front().model->label) {
      out.gone.push_back(str("that ", name(best), " is the best"));
    }
  }
  return out;
}

// Models with equal results have no order that could change.
bool same_order(const TaskSummary& summary, const TaskSummary& again) {
  const auto order = [](const TaskSummary& t, const Row& a, const Row& b) {
    const double first = t.row_of(*a.model)->quality.mean;
    const double second = t.row_of(*b.model)->quality.mean;
    return (first > second) - (first < second);
  };
  for (const Row& a : again.rows) {
    for (const Row& b : again.rows) {
      if (order(summary, a, b) * order(again, a, b) < 0) return false;
    }
  }
  return true;
}

bool nobody_has_learned(const TaskSummary& t) {
  return std::all_of(t.rows.begin(), t.rows.end(),
                     [](const Row& row) { return row.learning == Learning::kNotLearned; });
}

std::string names_of(const TaskSummary& t) {
  std::vector<std::string> out;
  for (const Row& row : t.rows) out.push_back(name(row));
  return join(out);
}

}  // namespace

std::string robustness_answer(const TaskSummary& summary, const TaskSummary& again,
                              const std::string& changes) {
  const std::string begin = str("Under a second initialisation (", changes, ")");
  if (const std::string why = missing_results(summary, again); !why.empty()) {
    return begin + " it is not known whether the results hold, because " + why;
  }
  if (nobody_has_learned(summary) && nobody_has_learned(again)) {
    return begin + " no model is shown to have learned, as under the first.";
  }
  const bool same = same_order(summary, again);
  std::string out =
      begin + (same ? " the ranking holds"
                    : str(" the ranking is ", names_of(again), " instead of ", names_of(summary)));
  const auto [claims, gone] = claims_of(summary, again);
  if (claims == 0) {
    return out + (same ? ", and" : ";") + " there was no claim that could fail to hold.";
  }
  out += same == gone.empty() ? ", and " : ", but ";
  if (gone.empty()) {
    return out + (claims == 1   ? "the one claim holds."
                  : claims == 2 ? "both claims hold."
                                : str("all ", claims, " claims hold."));
  }
  return out + str(gone.size(), " of ", counted(claims, "claim"), verb(gone.size(), " does", " do"),
                   " not hold: ", join(gone, "; "), ".");
}

std::string limits(const Comparison& c, const Summary& summary) {
  if (summary.finished == 0) return "";
  std::vector<std::string> out;
  for (const std::vector<std::string>& said :
       {scale_limits(summary), curve_limits(summary), task_limits(c, summary),
        sweep_limits(c, summary.tasks.size()), sample_limits(c, summary)}) {
    out.insert(out.end(), said.begin(), said.end());
  }
  if (out.empty()) return "";
  return "What limits this: " + join(out, "; ") + ".";
}

}  // namespace headloom::report
