#include "report/across.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "core/text.h"
#include "report/format.h"

namespace headloom::report {
namespace {

using Members = std::vector<const TaskSummary*>;

double option(const TaskSummary& t, const std::string& key) {
  for (const SweptValue& v : t.task->options) {
    if (v.key == key) return number_in(v.value);
  }
  return kUnknown;
}

// What tasks must have in common to be compared over the key; without a key, over any numbers.
std::string rest_of(const TaskSummary& t, const std::string& key) {
  std::string out = str(t.task->metric, "\n", t.task->unit);
  for (const SweptValue& v : t.task->options) {
    if (v.key == "eval_sequences") continue;
    const bool free = key.empty() ? std::isfinite(number_in(v.value)) : v.key == key;
    out += "\n" + v.key + (free ? "" : " = " + v.value);
  }
  return out;
}

// In the order in which the first of each was configured.
std::vector<Members> parted(const Members& tasks, const std::string& key) {
  std::vector<Members> out;
  std::map<std::string, size_t> place;
  for (const TaskSummary* t : tasks) {
    const auto [at, added] = place.emplace(rest_of(*t, key), out.size());
    if (added) out.emplace_back();
    out[at->second].push_back(t);
  }
  std::erase_if(out, [](const Members& members) { return members.size() < 2; });
  return out;
}

// The numbers in which the tasks differ.
std::vector<std::string> differing(const Members& tasks) {
  std::vector<std::string> keys;
  for (const SweptValue& v : tasks[0]->task->options) {
    const bool same = std::all_of(tasks.begin(), tasks.end(), [&](const TaskSummary* t) {
      return option(*t, v.key) == option(*tasks[0], v.key);
    });
    if (!same && v.key != "eval_sequences" && std::isfinite(number_in(v.value))) {
      keys.push_back(v.key);
    }
  }
  return keys;
}

bool grows(const Members& tasks, const std::string& key) {
  for (size_t i = 1; i < tasks.size(); ++i) {
    if (!(option(*tasks[i], key) > option(*tasks[i - 1], key))) return false;
  }
  return true;
}

TaskGroup group_by(Members tasks, const std::string& key) {
  std::stable_sort(tasks.begin(), tasks.end(), [&](const TaskSummary* a, const TaskSummary* b) {
    return option(*a, key) < option(*b, key);
  });
  TaskGroup group{.key = key, .tasks = tasks, .values = {}};
  for (const TaskSummary* t : tasks) group.values.push_back(option(*t, key));
  return group;
}

bool turned(const TaskGroup& g) {
  return g.tasks[0]->task->percent && g.tasks[0]->task->lower_is_better;
}

// The keys whose values differ between two of a model's builds.
std::set<std::string> differing_conditions(const Build& a, const Build& b) {
  std::map<std::string, std::string> first, second;
  for (const SweptValue& v : a.conditions) first.emplace(v.key, v.value);
  for (const SweptValue& v : b.conditions) second.emplace(v.key, v.value);
  std::set<std::string> keys;
  for (const auto& [one, other] : {std::pair(&first, &second), std::pair(&second, &first)}) {
    for (const auto& [key, value] : *one) {
      const auto same = other->find(key);
      if (same == other->end() || same->second != value) keys.insert(key);
    }
  }
  return keys;
}

// As the figure shows it: error rates become accuracies, and their differences change sign.
LinePoint shown(const TaskGroup& g, double x, const Estimate& e, bool difference) {
  LinePoint p{x, e.mean, e.mean, e.mean};
  if (e.count > 1) std::tie(p.low, p.high) = interval_ends(*g.tasks[0]->task, e, difference);
  if (!turned(g)) return p;
  const double one = difference ? 0 : 1;
  return {x, one - p.y, one - p.high, one - p.low};
}

// "58.0% (56.0% to 60.0%)", "−35.00 points (−36.10 to −33.90)", "1.934 (1.930 to 1.938)".
std::string point_text(const TaskGroup& g, const LinePoint& p, bool difference) {
  const bool share = g.tasks[0]->task->percent;
  const auto text = [&](double value) {
    const double scaled = share ? 100 * value : value;
    if (difference) return signed_text(value, fixed(std::abs(scaled), share ? 2 : 4));
    return fixed(scaled, share ? 1 : 3) + (share ? "%" : "");
  };
  std::string out = text(p.y) + (share && difference ? " points" : "");
  if (p.high > p.low) out += " (" + text(p.low) + " to " + text(p.high) + ")";
  return out;
}

// "length 64, pairs 4".
std::string place_text(const TaskGroup& g, size_t i) {
  std::string out = g.key + " " + formatted("%.6g", g.values[i]);
  for (const std::string& key : g.with) {
    out += ", " + key + " " + formatted("%.6g", option(*g.tasks[i], key));
  }
  return out;
}

// The models with a result on a task, in the order of the configuration.
std::vector<Line> lines_of(const Comparison& c, const TaskGroup& g, bool difference) {
  std::vector<Line> lines;
  for (const ModelInfo& model : c.models) {
    Line line{.label = model.label, .dotted = true};
    for (size_t i = 0; i < g.tasks.size(); ++i) {
      const Row* row = g.tasks[i]->row_of(model);
      if (!row || row->finished == 0 || (difference && row->baseline)) continue;
      // Runs that were not planned may have another baseline on this task.
      if (difference && !g.tasks[i]->row_of(c.models.front())) continue;
      line.style = style_of(c, *row);
      const Estimate& e = difference ? row->against_baseline.difference : row->result;
      if (!std::isfinite(e.mean)) continue;
      LinePoint p = shown(g, g.values[i], e, difference);
      p.note = model.label + " at " + place_text(g, i) + ": " + point_text(g, p, difference);
      line.points.push_back(std::move(p));
    }
    if (!line.points.empty()) lines.push_back(std::move(line));
  }
  return lines;
}

std::vector<Line> floors_of(const TaskGroup& g) {
  std::vector<Line> lines;
  for (size_t i = 0; i < g.tasks.size(); ++i) {
    for (const Floor& floor : g.tasks[i]->task->floors) {
      auto line = std::find_if(lines.begin(), lines.end(),
                               [&](const Line& one) { return one.label == floor.name; });
      if (line == lines.end()) {
        line = lines.insert(lines.end(), Line{.label = floor.name});
      }
      const double y = turned(g) ? 1 - floor.quality : floor.quality;
      line->points.push_back({g.values[i], y, y, y});
    }
  }
  return lines;
}

// Over the points with their whiskers, and over zero where differences are shown.
Axis y_axis(const std::string& label, const TaskGroup& g, const std::vector<Line>& lines,
            const std::vector<Line>& floors, bool difference) {
  const bool share = g.tasks[0]->task->percent;
  Extent y;
  if (difference || share) y.add(0);
  y.add(lines);
  y.add(floors);
  const double margin = 0.08 * y.size();
  if (share && !difference)
    return make_axis(label, Unit::kPercent, 0, std::min(1.0, y.high + margin));
  return make_axis(label, share ? Unit::kPoints : Unit::kPlain, y.low - margin, y.high + margin);
}

// The axis of the number with some room at both ends, and the points of different models moved
// apart a little, so that whiskers do not hide each other.
Axis spread(const TaskGroup& g, std::vector<Line>& lines) {
  const bool log = g.values.front() > 0 && g.values.back() / g.values.front() > 3;
  const double low = log ? std::log(g.values.front()) : g.values.front();
  const double high = log ? std::log(g.values.back()) : g.values.back();
  const double room = 0.05 * (high - low);
  const auto value = [&](double at) { return log ? std::exp(at) : at; };
  for (size_t i = 0; i < lines.size(); ++i) {
    const double middle = 0.5 * static_cast<double>(lines.size() - 1);
    const double step = std::min(0.012, 0.06 / static_cast<double>(lines.size())) * (high - low);
    for (LinePoint& p : lines[i].points) {
      p.x = value((log ? std::log(p.x) : p.x) + (static_cast<double>(i) - middle) * step);
    }
  }
  std::string label = g.key;
  if (!g.with.empty()) label += " (with " + list_of(g.with) + ")";
  Axis axis = make_axis(label, Unit::kPlain, value(low - room), value(high + room), log);
  axis.places = g.values;
  return axis;
}

std::string draw_panel(const std::string& title, const TaskGroup& g, std::vector<Line> lines,
                       const std::string& y_label, bool difference) {
  LineChart chart;
  chart.title = title;
  std::vector<std::string> notes;
  for (const Line& line : lines) {
    for (const LinePoint& p : line.points) notes.push_back(p.note);
  }
  chart.description = join(notes, "; ");
  if (!difference) chart.floors = floors_of(g);
  chart.y = y_axis(y_label, g, lines, chart.floors, difference);
  chart.x = spread(g, lines);
  chart.lines = std::move(lines);
  if (difference) chart.levels.push_back({"", 0});
  return draw(chart);
}

// Whether some model has a result on two of the tasks: else there is nothing to go along.
bool any_line(const TaskGroup& group) {
  std::map<const ModelInfo*, int> results;
  for (const TaskSummary* t : group.tasks) {
    for (const Row& row : t->rows) {
      if (row.finished > 0 && ++results[row.model] > 1) return true;
    }
  }
  return false;
}

}  // namespace

std::vector<std::string> also_different(const Comparison& c, const TaskGroup& group) {
  std::set<std::string> keys;
  Extent tokens;  // of the model with the widest range
  bool stops = false;
  for (const TaskSummary* t : group.tasks) stops |= !t->task->stopping.empty();
  for (const ModelInfo& model : c.models) {
    const Build* first = nullptr;
    Extent own, steps;
    for (const TaskSummary* t : group.tasks) {
      const Row* row = t->row_of(model);
      if (!row || row->finished == 0) continue;
      if (std::isfinite(row->tokens.median)) own.add(row->tokens.median);
      for (const Run* run : row->runs) {
        if (!run->points.empty()) steps.add(static_cast<double>(run->points.back().step));
      }
      if (!row->build) continue;
      if (first) keys.merge(differing_conditions(*first, *row->build));
      if (!first) first = row->build;
    }
    // Equal steps of longer sequences have more tokens, and an equal budget of tokens fewer steps.
    const bool more = !own.empty() && own.spans(1.05) && steps.spans(1);
    if (more && (tokens.empty() || own.spans(tokens.high / tokens.low))) tokens = own;
  }
  for (const std::string& key : c.swept) keys.erase(key);
  std::vector<std::string> out;
  for (const std::string& key : keys) out.push_back("`" + key + "`");
  if (!stops && !tokens.empty()) {
    out.push_back(str("the ", group.tasks[0]->task->unit, " of training (", count(tokens.low),
                      " to ", count(tokens.high), ")"));
  }
  return out;
}

std::vector<TaskGroup> task_groups(const Summary& summary) {
  Members all;
  for (const TaskSummary& t : summary.tasks) {
    if (!t.task->options.empty()) all.push_back(&t);
  }
  std::vector<TaskGroup> groups;
  for (const Members& alike : parted(all, "")) {
    const std::vector<std::string> keys = differing(alike);
    if (keys.empty()) continue;
    TaskGroup whole = group_by(alike, keys[0]);
    if (std::all_of(keys.begin(), keys.end(),
                    [&](const std::string& key) { return grows(whole.tasks, key); })) {
      whole.with.assign(keys.begin() + 1, keys.end());
      groups.push_back(std::move(whole));
      continue;
    }
    for (const std::string& key : keys) {
      for (const Members& members : parted(alike, key)) {
        TaskGroup group = group_by(members, key);
        if (grows(group.tasks, key)) groups.push_back(std::move(group));
      }
    }
  }
  std::erase_if(groups, [](const TaskGroup& group) { return !any_line(group); });
  return groups;
}

std::string shown_metric(const TaskGroup& group) {
  return turned(group) ? "accuracy" : group.tasks[0]->task->metric;
}

Chart difficulty_chart(const Comparison& c, const TaskGroup& g) {
  const std::vector<Line> results = lines_of(c, g, false), differences = lines_of(c, g, true);
  const std::string metric = shown_metric(g);
  std::vector<std::string> names;
  for (const TaskSummary* t : g.tasks) names.push_back(t->task->name);
  const std::string title = capitalized(metric) + " against " + g.key + " on " + list_of(names);
  Chart out;
  out.drawings.push_back(draw_panel(title, g, results, metric, false));
  out.caption = "<b>" + escape(capitalized(metric)) + "</b> against " + rich("`" + g.key + "`") +
                ": means over the seeds with their 95% intervals.";
  if (!floors_of(g).empty()) out.caption += " Dotted: what can be reached without learning.";
  if (!differences.empty()) {
    const std::string base = c.models.front().label;
    out.drawings.push_back(draw_panel("Difference from " + base + " in " + title, g, differences,
                                      "difference from " + base, true));
    const bool higher = turned(g) || !g.tasks[0]->task->lower_is_better;
    out.caption += " Beside it: the difference from " + rich("`" + base + "`") +
                   ", paired by seed, with its 95% interval; " + (higher ? "above" : "below") +
                   " zero is better.";
  }
  out.data = {
      title,
      {"model", g.key, metric, "low", "high", "difference", "difference low", "difference high"},
      {}};
  for (const Line& line : results) {
    const auto other = std::find_if(differences.begin(), differences.end(),
                                    [&](const Line& one) { return one.label == line.label; });
    for (const LinePoint& p : line.points) {
      std::vector<std::string> cells{line.label, exact(p.x), exact(p.y), exact(p.low),
                                     exact(p.high)};
      LinePoint d{p.x, kUnknown, kUnknown, kUnknown};
      if (other != differences.end()) {
        for (const LinePoint& q : other->points) {
          if (q.x == p.x) d = q;
        }
      }
      for (const double v : {d.y, d.low, d.high}) cells.push_back(exact(v));
      out.data.rows.push_back(std::move(cells));
    }
  }
  for (const Line& floor : floors_of(g)) {
    for (const LinePoint& p : floor.points) {
      out.data.rows.push_back({floor.label, exact(p.x), exact(p.y), "", "", "", "", ""});
    }
  }
  return out;
}

Chart state_chart(const Comparison& c, const TaskGroup& g) {
  const std::string metric = shown_metric(g);
  LineChart chart;
  Data data{"", {"model", "task", g.key, "state bytes", metric, "low", "high"}, {}};
  std::vector<std::string> notes;
  Extent states;
  for (const ModelInfo& model : c.models) {
    Line line{.label = model.label, .dotted = true};
    for (size_t i = 0; i < g.tasks.size(); ++i) {
      const TaskSummary& t = *g.tasks[i];
      const Row* row = t.row_of(model);
      if (!row || row->finished == 0 || !row->build || !(row->build->state_bytes > 0)) continue;
      line.style = style_of(c, *row);
      const double state = row->build->state_bytes;
      LinePoint p = shown(g, state, row->result, false);
      p.note = model.label + " on " + t.task->name + ": " + point_text(g, p, false) + ", " +
               bytes(state) + " of state";
      notes.push_back(p.note);
      states.add(state);
      data.rows.push_back({model.label, t.task->name, exact(g.values[i]), exact(state), exact(p.y),
                           exact(p.low), exact(p.high)});
      line.points.push_back(std::move(p));
    }
    if (!line.points.empty()) chart.lines.push_back(std::move(line));
  }
  if (chart.lines.empty()) return {};
  chart.x = make_axis("bytes of state a sequence", Unit::kCount, states.low / 1.2,
                      states.high * 1.2, true);
  chart.y = y_axis(metric, g, chart.lines, {}, false);
  chart.title = capitalized(metric) + " against state on " + g.tasks[0]->task->name + " to " +
                g.tasks.back()->task->name + " by " + g.key;
  chart.description = join(notes, "; ");
  data.name = chart.title;
  Chart out;
  out.drawings.push_back(draw(chart));
  out.caption = "<b>" + escape(capitalized(metric)) +
                " against the decoding state</b> of a whole sequence: a point for each task, with "
                "its 95% interval, and a line through the tasks by growing " +
                rich("`" + g.key + "`") + ". Less state is better.";
  out.data = std::move(data);
  return out;
}

}  // namespace headloom::report
