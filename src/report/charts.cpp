#include "report/charts.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "core/text.h"
#include "report/format.h"

namespace headloom::report {
namespace {

constexpr int kStyles = 12;  // s0 to s12 in style.cpp; s0 is the baseline's

Axis x_axis(const TaskInfo& task, const std::vector<Line>& lines, Along along) {
  double high = 0;
  for (const Line& line : lines) {
    for (const LinePoint& p : line.points) high = std::max(high, p.x);
  }
  const std::string label = along == Along::kSeconds ? "training time"
                            : along == Along::kFlops ? "training FLOPs"
                                                     : "training " + task.unit;
  return make_axis(label, along == Along::kSeconds ? Unit::kSeconds : Unit::kCount, 0,
                   high > 0 ? high : kUnknown);
}

Chart one(std::string drawing, std::string caption) {
  Chart out{{}, std::move(caption)};
  if (!drawing.empty()) out.drawings.push_back(std::move(drawing));
  return out;
}

Data data_of(const std::string& name, const std::string& x, const std::string& y,
             const std::vector<Line>& lines) {
  Data data{name, {"model", x, y, "low", "high"}, {}};
  for (const Line& line : lines) {
    for (const LinePoint& p : line.points) {
      data.rows.push_back({line.label, exact(p.x), exact(p.y), exact(p.low), exact(p.high)});
    }
  }
  return data;
}

// From the lowest value to the highest past the first fifth of the budget: the fall from the
// untrained model would press all that matters into a sliver. Differences are shown with zero.
Axis value_axis(const std::string& label, const std::vector<Line>& lines, double end,
                bool difference = false) {
  double low = difference ? 0 : kUnknown, high = low;
  for (const Line& line : lines) {
    for (const LinePoint& p : line.points) {
      if (!difference) low = std::fmin(low, p.low);
      if (p.x < end / 5 || line.broken) continue;
      high = std::fmax(high, p.high);
      if (difference) low = std::fmin(low, p.low);
    }
  }
  if (!std::isfinite(high)) {
    for (const Line& line : lines) {
      for (const LinePoint& p : line.points) high = std::fmax(high, p.high);
    }
  }
  const bool log = low > 0 && high / low > 30 && !difference;
  const double margin = log ? 0 : 0.06 * (high - low);
  return make_axis(label, Unit::kPlain,
                   low >= 0 && !difference ? std::max(0.0, low - margin) : low - margin,
                   high + margin, log);
}

std::vector<Line> lines_of(const Comparison& c, const TaskSummary& t, Along along,
                           double Point::* y) {
  std::vector<Line> lines;
  double Point::* x = along == Along::kSeconds ? &Point::seconds : &Point::tokens;
  for (const Row& row : t.rows) {
    double scale = 1;
    if (along == Along::kFlops) {
      scale = row.build ? 3 * row.build->flops_per_unit : kUnknown;
      if (!(scale > 0)) continue;
    }
    const int style = style_of(c, row);
    lines.push_back({row.model->label, style, false, mean_curve(row, x, y)});
    for (LinePoint& p : lines.back().points) p.x *= scale;
    for (const Run* run : row.runs) {
      if (!run_failed(*run)) continue;
      Line line{str(row.model->label, " ", run->seed, " ✕"), style, true, {}};
      for (const Point& p : run->points) {
        if (std::isfinite(p.*x) && std::isfinite(p.*y)) {
          line.points.push_back({scale * (p.*x), p.*y, p.*y, p.*y});
        }
      }
      lines.push_back(std::move(line));
    }
  }
  return lines;
}

// A single evaluation is a point, and no curve.
bool any_curve(const std::vector<Line>& lines) {
  return std::any_of(lines.begin(), lines.end(),
                     [](const Line& line) { return line.points.size() > 1; });
}

std::string band_note(const TaskSummary& t) {
  const bool several =
      std::any_of(t.rows.begin(), t.rows.end(), [](const Row& row) { return row.finished > 1; });
  return several ? " Lines are means over the seeds; bands reach from the lowest to the highest."
                 : "";
}

// What the last points of lines are that end where all runs have an evaluation. Runs that stop
// early or that a budget gives other steps go on beyond that.
std::string ends_of(const TaskSummary& t, bool of_each_model) {
  std::set<std::pair<const Row*, double>> ends;
  std::set<const Row*> rows;
  for (const Row& row : t.rows) {
    const Row* const group = of_each_model ? &row : nullptr;
    for (const Run* run : runs_with_result(row)) {
      rows.insert(group);
      ends.emplace(group, std::round(run->points.back().tokens));
    }
  }
  return ends.size() == rows.size() ? "At the end of training: "
                                    : "At the last evaluation that all runs have: ";
}

Chart curve_chart(const Comparison& c, const TaskSummary& t, Along along, double Point::* y,
                  const std::string& what, bool fraction) {
  LineChart chart;
  chart.lines = lines_of(c, t, along, y);
  if (!any_curve(chart.lines)) return {};
  chart.x = x_axis(*t.task, chart.lines, along);
  chart.y = fraction ? make_axis(what, Unit::kPercent, 0, 1)
                     : value_axis(what, chart.lines, chart.x.high);
  if (fraction || y == &Point::quality) {
    for (const Floor& floor : t.task->floors) {
      // The metric may be the share of wrong answers, where the figure has that of the right ones.
      const bool turned = fraction && t.task->lower_is_better;
      chart.levels.push_back({floor.name, turned ? 1 - floor.quality : floor.quality});
    }
  }
  chart.title = capitalized(what) + " against " + chart.x.label + " on " + t.task->name;
  std::vector<std::string> ends;
  for (const Line& line : chart.lines) {
    if (line.points.empty()) continue;
    const double v = line.points.back().y;
    ends.push_back(line.label + " " + (fraction ? percent(v) : fixed(v, 3)));
  }
  chart.description = ends_of(t, /*of_each_model=*/true) + list_of(ends);
  Chart out = one(draw(chart), "<b>" + escape(capitalized(what)) +
                                   "</b> on held-out data against " + escape(chart.x.label) + ".");
  if (along == Along::kTokens) out.caption += escape(band_note(t));
  out.data = data_of(chart.title, chart.x.label, what, chart.lines);
  return out;
}

// The evaluations of two models at equal training, by the tokens or images until then, from every
// seed from which both have finished: only places that all of these seeds have.
std::map<double, PairedPoints> paired_points(const Row& a, const Row& b) {
  // Equal counts may differ in their rounding.
  const auto place = [](const Point& p) { return std::round(p.tokens); };
  std::map<double, PairedPoints> out;
  size_t seeds = 0;
  for (const Run* first : a.runs) {
    const auto second = std::find_if(b.runs.begin(), b.runs.end(), [&](const Run* run) {
      return run->seed == first->seed && has_result(*run);
    });
    if (!has_result(*first) || second == b.runs.end()) continue;
    ++seeds;
    std::map<double, const Point*> places;
    for (const Point& p : (*second)->points) {
      if (std::isfinite(p.quality)) places[place(p)] = &p;
    }
    for (const Point& p : first->points) {
      const auto at = places.find(place(p));
      if (std::isfinite(p.quality) && at != places.end()) {
        out[place(p)].push_back({&p, at->second});
      }
    }
  }
  std::erase_if(out, [&](const auto& entry) { return entry.second.size() != seeds; });
  return out;
}

}  // namespace

std::vector<LinePoint> mean_curve(const Row& row, double Point::* x, double Point::* y) {
  std::vector<const Run*> runs = runs_with_result(row);
  if (runs.empty()) {
    for (const Run* run : row.runs) {
      if (run->state == RunState::kRunning) runs.push_back(run);
    }
  }
  struct AtStep {
    std::vector<double> x, y;
  };
  std::map<int64_t, AtStep> steps;
  for (const Run* run : runs) {
    for (const Point& p : run->points) {
      if (!std::isfinite(p.*x) || !std::isfinite(p.*y)) continue;
      steps[p.step].x.push_back(p.*x);
      steps[p.step].y.push_back(p.*y);
    }
  }
  std::vector<LinePoint> out;
  for (const auto& [step, at] : steps) {
    if (at.y.size() != runs.size()) continue;
    const Stat stat = stat_of(at.y);
    out.push_back({stat_of(at.x).mean, stat.mean, stat.low, stat.high});
  }
  return out;
}

double first_reach(const std::vector<LinePoint>& curve, double level, bool lower_is_better) {
  const double sign = lower_is_better ? 1 : -1;
  for (size_t i = 0; i < curve.size(); ++i) {
    const double over = sign * (curve[i].y - level);
    if (over > 0) continue;
    if (i == 0) return curve[0].x;
    const double before = sign * (curve[i - 1].y - level);
    return curve[i - 1].x + (curve[i].x - curve[i - 1].x) * before / (before - over);
  }
  return kUnknown;
}

int style_of(const Comparison& comparison, const Row& row) {
  const auto index = static_cast<int>(row.model - comparison.models.data());
  return index == 0 ? 0 : 1 + (index - 1) % kStyles;
}

std::string to_csv(const Data& data) {
  std::string out;
  const auto add = [&](const std::vector<std::string>& cells) {
    for (size_t i = 0; i < cells.size(); ++i) {
      std::string cell = cells[i];
      if (cell.find_first_of(",\"\n") != std::string::npos) {
        for (size_t at = 0; (at = cell.find('"', at)) != std::string::npos; at += 2) {
          cell.insert(at, "\"");
        }
        cell = "\"" + cell + "\"";
      }
      out += (i > 0 ? "," : "") + cell;
    }
    out += "\n";
  };
  add(data.columns);
  for (const auto& row : data.rows) add(row);
  return out;
}

std::string to_json(const Data& data) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const auto& row : data.rows) {
    nlohmann::ordered_json object = nlohmann::ordered_json::object();
    for (size_t i = 0; i < row.size(); ++i) {
      const double number = number_in(row[i]);
      // The first column names a model, which may look like a number.
      const bool numeric = i > 0 && std::isfinite(number);
      object[data.columns[i]] = numeric          ? nlohmann::ordered_json(number)
                                : row[i].empty() ? nlohmann::ordered_json(nullptr)
                                                 : nlohmann::ordered_json(row[i]);
    }
    out.push_back(std::move(object));
  }
  return out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

Chart learning_chart(const Comparison& c, const TaskSummary& t, Along along) {
  if (t.task->percent) return curve_chart(c, t, along, &Point::loss, "loss (nats a target)", false);
  return curve_chart(c, t, along, &Point::quality, t.task->metric, false);
}

Chart accuracy_chart(const Comparison& c, const TaskSummary& t) {
  return curve_chart(c, t, Along::kTokens, &Point::accuracy, "answers exactly right", true);
}

Chart gap_chart(const Comparison& c, const TaskSummary& t) {
  const Row& baseline = *t.baseline();
  const std::string base = baseline.model->label;
  LineChart chart;
  for (const Row& row : t.rows) {
    if (row.baseline) continue;
    Line line{row.model->label, style_of(c, row), false, {}};
    for (const auto& [tokens, pairs] : paired_points(row, baseline)) {
      const Estimate e = paired_difference(pairs);
      LinePoint p{tokens, e.mean, e.mean, e.mean};
      if (e.count > 1) {
        p.low = e.low();
        p.high = e.high();
      }
      line.points.push_back(std::move(p));
    }
    chart.lines.push_back(std::move(line));
  }
  if (!any_curve(chart.lines)) return {};
  chart.x = x_axis(*t.task, chart.lines, Along::kTokens);
  chart.y = value_axis("difference from " + base, chart.lines, chart.x.high, true);
  if (t.task->percent) chart.y.unit = Unit::kPoints;
  chart.levels.push_back({"", 0});
  chart.title = "Difference in " + t.task->metric + " from " + base + " on " + t.task->name;
  chart.description = ends_of(t, /*of_each_model=*/false);
  std::vector<std::string> ends;
  for (const Line& line : chart.lines) {
    if (line.points.empty()) continue;
    const double end = line.points.back().y;
    ends.push_back(line.label + " " +
                   (t.task->percent ? fixed(100 * end, 1) + " points" : fixed(end, 3)));
  }
  chart.description += list_of(ends);
  Chart out = one(draw(chart),
                  "<b>Difference from " + rich("`" + base + "`") + "</b> in " +
                      escape(t.task->metric) + " at the same number of " + t.task->unit +
                      ": the mean over the seeds, paired, with its 95% interval as the band; " +
                      (t.task->lower_is_better ? "below" : "above") + " zero is better.");
  out.data = data_of(chart.title, chart.x.label, chart.y.label, chart.lines);
  return out;
}

namespace {

// One thing that a model costs: the median with the range.
struct Cost {
  double value = kUnknown, low = kUnknown, high = kUnknown;
};

Cost cost_of(const Stat& stat) { return {stat.median, stat.low, stat.high}; }

// The names of the floors that it shows are put into `floors`.
std::string cost_panel(const Comparison& c, const TaskSummary& t, const std::string& label,
                       const std::function<Cost(const Row&)>& cost, std::string (*text)(double),
                       std::set<std::string>& floors) {
  Scatter scatter;
  Extent shown_x, shown_y;
  std::vector<std::string> notes;
  for (const Row& row : t.rows) {
    const Cost x = cost(row);
    if (row.finished == 0 || !(x.value >= 0)) continue;
    Dot dot{.label = row.model->label,
            .style = style_of(c, row),
            .x = x.value,
            .y = row.result.mean,
            .low = row.result.mean,
            .high = row.result.mean,
            .x_low = x.low,
            .x_high = x.high};
    if (row.result.count > 1) {
      std::tie(dot.low, dot.high) = interval_ends(*t.task, row.result, false);
    }
    dot.note = dot.label + ": " + metric_text(*t.task, row.result) + " " + t.task->metric + ", " +
               text(x.value);
    if (x.high > x.low) dot.note += " (" + text(x.low) + " to " + text(x.high) + ")";
    notes.push_back(dot.note);
    shown_x.add(x.low, x.high);
    shown_y.add(dot.low, dot.high);
    scatter.dots.push_back(std::move(dot));
  }
  if (scatter.dots.empty()) return "";
  for (const Floor& floor : t.task->floors) scatter.levels.push_back({"", floor.quality});
  const bool log = shown_x.spans(8);
  const auto [x_low, x_high] = shown_x;
  const auto [y_low, y_high] = shown_y;
  const double x_margin = log ? 0 : std::max(0.12 * shown_x.size(), 0.02 * x_high);
  scatter.x = make_axis(label, Unit::kCount, log ? x_low / 1.3 : std::max(0.0, x_low - x_margin),
                        log ? x_high * 1.3 : x_high + x_margin, log);
  const bool y_log = !t.task->percent && shown_y.spans(30);
  const double margin = std::max(0.14 * shown_y.size(), t.task->percent ? 0.03 : 0.0);
  scatter.y = make_axis(t.task->metric, t.task->percent ? Unit::kPercent : Unit::kPlain,
                        y_log ? y_low / 1.3 : y_low - margin,
                        y_log ? y_high * 1.3 : y_high + margin, y_log);
  if (t.task->percent) {
    scatter.y.low = std::max(scatter.y.low, -0.03);
    scatter.y.high = std::min(scatter.y.high, 1.03);
  }
  for (const Floor& floor : t.task->floors) {
    const double y = floor.quality;
    if (scatter.y.low < y && y <= scatter.y.high) floors.insert(floor.name);
  }
  scatter.title = capitalized(t.task->metric) + " against " + label + " on " + t.task->name;
  scatter.description = join(notes, "; ");
  return draw(scatter);
}

}  // namespace

Chart cost_chart(const Comparison& c, const TaskSummary& t) {
  const std::string& unit = t.task->unit;
  const auto state = [](const Row& row) {
    const double bytes = whole_state_of_row(row);
    return Cost{bytes, bytes, bytes};
  };
  const auto training = [](const Row& row) { return cost_of(row.tokens_per_second); };
  const auto decoding = [](const Row& row) { return cost_of(row.decode_tokens_per_second); };
  Chart out;
  std::set<std::string> floors;
  for (const std::string& drawing :
       {cost_panel(c, t, "training " + unit + " a second", training, grouped, floors),
        cost_panel(c, t, "decoding " + unit + " a second", decoding, grouped, floors),
        cost_panel(c, t, "bytes of state a sequence", state, bytes, floors)}) {
    if (!drawing.empty()) out.drawings.push_back(drawing);
  }
  out.caption = "<b>" + escape(capitalized(t.task->metric)) + " against what it costs.</b> " +
                (t.task->lower_is_better ? "Lower" : "Higher") +
                " is better; so is more speed, and less state. Whiskers are the 95% interval of "
                "the metric and the range of the measured speeds.";
  if (!floors.empty()) {
    out.caption += " Dotted: what can be reached without learning, by " +
                   escape(list_of({floors.begin(), floors.end()})) + ".";
  }
  if (t.floor() && !floors.contains(t.floor()->name)) {
    out.caption += " The best that can be reached without learning, by " + escape(t.floor()->name) +
                   ", is outside of the figure, at " + metric_text(*t.task, t.floor()->quality) +
                   ".";
  }
  out.data = {"Cost and quality on " + t.task->name,
              {"model", t.task->metric, "low", "high", "training per second", "training low",
               "training high", "decoding per second", "decoding low", "decoding high",
               "state bytes a sequence"},
              {}};
  for (const Row& row : t.rows) {
    std::vector<std::string> cells{row.model->label};
    for (const double v :
         {row.result.mean, row.result.low(), row.result.high(), row.tokens_per_second.median,
          row.tokens_per_second.low, row.tokens_per_second.high,
          row.decode_tokens_per_second.median, row.decode_tokens_per_second.low,
          row.decode_tokens_per_second.high, state(row).value}) {
      cells.push_back(exact(v));
    }
    out.data.rows.push_back(std::move(cells));
  }
  return out;
}

namespace {

// The value that a setting gives to `key`; "" where it gives none.
std::string value_of(const Setting& setting, const std::string& key) {
  for (const SweptValue& v : setting) {
    if (v.key == key) return v.value;
  }
  return "";
}

// The values of a key that the sweep has tried on a task, and their places on an axis.
struct TriedValues {
  std::vector<std::string> values;  // in the order in which they were first tried
  bool numeric = true;              // else a value's place is its number in this order
  Extent numbers;

  TriedValues(const Comparison& c, const TaskSummary& t, const std::string& key) {
    for (const Run& run : c.runs) {
      const std::string value = value_of(run.setting, key);
      if (!run.sweep || run.task != t.task->name || value.empty()) continue;
      add_once(values, value);
      numeric &= std::isfinite(number_in(value));
      numbers.add(number_in(value));
    }
  }
  double place(const std::string& value) const {
    if (numeric) return number_in(value);
    return static_cast<double>(std::find(values.begin(), values.end(), value) - values.begin());
  }
};

// What a model has reached at each value of a key: of each setting the mean over the seeds, then
// the best of the settings that share the value. A setting with a failed run has no mean and is
// never chosen.
struct SweptRow {
  std::map<double, LinePoint> best;  // by place
  int failed = 0;                    // settings

  SweptRow(const Comparison& c, const TaskSummary& t, const Row& row, const std::string& key,
           const TriedValues& tried) {
    struct OfSetting {
      Setting setting;
      std::vector<double> results;
      bool failed = false;
    };
    std::vector<OfSetting> all;
    for (const Run& run : c.runs) {
      if (!run.sweep || !is_of(run, row.model->label, t.task->name)) continue;
      if (value_of(run.setting, key).empty() || run.state == RunState::kRunning) continue;
      auto at = std::find_if(all.begin(), all.end(),
                             [&](const OfSetting& one) { return one.setting == run.setting; });
      if (at == all.end()) at = all.insert(at, {run.setting, {}});
      if (run_failed(run)) {
        at->failed = true;
      } else {
        at->results.push_back(run.points.back().quality);
      }
    }
    const double sign = t.task->lower_is_better ? 1 : -1;
    for (const OfSetting& one : all) {
      if (one.failed) {
        ++failed;
        continue;
      }
      const Stat stat = stat_of(one.results);
      const double x = tried.place(value_of(one.setting, key));
      const auto at = best.find(x);
      if (at == best.end() || sign * stat.mean < sign * at->second.y) {
        best[x] = {x, stat.mean, stat.low, stat.high};
      }
    }
  }
};

// The axis of the key: numbers, or the values that were tried by their names.
Axis swept_axis(const std::string& key, const TriedValues& tried) {
  if (tried.numeric) {
    return make_axis(key, Unit::kPlain, tried.numbers.low, tried.numbers.high,
                     tried.numbers.spans(4));
  }
  Axis axis = make_axis(key, Unit::kPlain, 0, static_cast<double>(tried.values.size() - 1));
  axis.names = tried.values;
  return axis;
}

}  // namespace

Chart sweep_chart(const Comparison& c, const TaskSummary& t, const std::string& key) {
  const TriedValues tried(c, t, key);
  if (tried.values.empty()) return {};
  LineChart chart;
  std::vector<std::string> ends;
  int failed = 0;
  for (const Row& row : t.rows) {
    const SweptRow swept(c, t, row, key, tried);
    failed += swept.failed;
    Line line{row.model->label, style_of(c, row), false, {}};
    for (const auto& [x, point] : swept.best) line.points.push_back(point);
    if (row.choice) {
      const std::string chosen = value_of(row.choice->setting, key);
      const auto at = chosen.empty() ? swept.best.end() : swept.best.find(tried.place(chosen));
      if (at != swept.best.end()) {
        const auto& edges = row.choice->at_edge;
        const bool edge = std::find(edges.begin(), edges.end(), key) != edges.end();
        chart.marks.push_back({line.style, at->first, at->second.y, edge,
                               line.label + ": " + key + " = " + chosen + " was chosen" +
                                   (edge ? ", at the edge of what was tried" : "")});
        ends.push_back(line.label + " " + chosen + (edge ? " (at the edge)" : ""));
      }
    }
    chart.lines.push_back(std::move(line));
  }
  chart.x = swept_axis(key, tried);
  Extent y;
  y.add(chart.lines);
  const bool y_log = !t.task->percent && y.spans(30);
  const double margin = y_log ? 0 : 0.06 * y.size();
  chart.y = make_axis(t.task->metric, t.task->percent ? Unit::kPercent : Unit::kPlain,
                      y.low - margin, y.high + margin, y_log);
  for (const Floor& floor : t.task->floors) chart.levels.push_back({floor.name, floor.quality});
  chart.title =
      capitalized(t.task->metric) + " on validation data against " + key + " on " + t.task->name;
  chart.description = ends.empty() ? "Nothing has been chosen yet" : "Chosen: " + list_of(ends);
  Chart out =
      one(draw(chart), "<b>The sweep of " + rich("`" + key + "`") +
                           "</b>: " + escape(t.task->metric) + " on validation data" +
                           (c.swept.size() > 1 ? ", the other swept keys at their best" : "") +
                           ". A ring marks the chosen value, a square one at the edge of what was "
                           "tried.");
  if (failed > 0) {
    out.caption += str(" ", counted(failed, "setting"), " with failed runs ",
                       failed == 1 ? "is" : "are", " not drawn.");
  }
  out.data = data_of(chart.title, key, t.task->metric, chart.lines);
  if (!tried.numeric) {
    for (auto& row : out.data.rows) row[1] = tried.values[static_cast<size_t>(number_in(row[1]))];
  }
  return out;
}

namespace {

// The shares that a layer's experts get, the busiest first: one list a seed, equally long.
using SeedsLoads = std::vector<std::vector<double>>;

// By layer. Which expert is which differs between seeds, so that they are put in order of their
// load before the seeds' are averaged.
std::map<int64_t, SeedsLoads> expert_loads(const Row& row) {
  std::map<int64_t, SeedsLoads> layers;
  for (const Run* run : row.runs) {
    if (run->points.empty() || run_failed(*run)) continue;
    for (auto [layer, shares] : run->points.back().expert_load) {
      std::sort(shares.begin(), shares.end(), std::greater<>());
      auto& seeds = layers[layer];
      if (seeds.empty() || seeds[0].size() == shares.size()) seeds.push_back(shares);
    }
  }
  return layers;
}

// The mean shares of a layer's experts, each with its range over the seeds.
std::vector<LinePoint> load_curve(const SeedsLoads& seeds) {
  std::vector<LinePoint> out;
  for (size_t i = 0; i < seeds[0].size(); ++i) {
    std::vector<double> shares;
    for (const auto& seed : seeds) shares.push_back(seed[i]);
    const Stat stat = stat_of(shares);
    out.push_back({static_cast<double>(i + 1), stat.mean, stat.low, stat.high});
  }
  return out;
}

// The share that each of so many experts has if all get the same.
double even_share(size_t experts) { return 1 / static_cast<double>(experts); }

// A level line at the even share for each number of experts that a layer has.
std::vector<Line> even_lines(const std::set<size_t>& counts) {
  std::vector<Line> out;
  for (const size_t count : counts) {
    const double even = even_share(count);
    const std::string which = counts.size() > 1 ? str(" of ", count) : "";
    out.push_back({"equal" + which,
                   0,
                   false,
                   {{1, even, even, even}, {static_cast<double>(count), even, even, even}}});
  }
  return out;
}

}  // namespace

Chart expert_chart(const TaskSummary& t, const Row& row) {
  const std::map<int64_t, SeedsLoads> layers = expert_loads(row);
  if (layers.empty()) return {};
  constexpr size_t kMostLines = 8;
  const size_t every = (layers.size() + kMostLines - 1) / kMostLines;
  LineChart chart;
  size_t index = 0;
  std::set<size_t> counts;  // of experts in a layer
  double highest = 0;
  std::vector<std::string> notes;
  for (const auto& [layer, seeds] : layers) {
    if (index++ % every != 0) continue;
    Line line{str("layer ", layer), 1 + static_cast<int>(chart.lines.size()) % kStyles, false,
              load_curve(seeds)};
    for (const LinePoint& p : line.points) highest = std::max(highest, p.high);
    counts.insert(line.points.size());
    notes.push_back(str(line.label, " from ", percent(line.points.back().y), " to ",
                        percent(line.points.front().y)));
    chart.lines.push_back(std::move(line));
  }
  for (Line& line : even_lines(counts)) chart.lines.push_back(std::move(line));
  const size_t fewest = *counts.begin(), most = *counts.rbegin();
  chart.x = make_axis("experts, the busiest first", Unit::kPlain, 1,
                      static_cast<double>(std::max<size_t>(most, 2)));
  chart.y = make_axis("share of the choices", Unit::kPercent, 0,
                      std::max(highest, 2 * even_share(fewest)));
  chart.title = "Expert load of " + row.model->label + " on " + t.task->name;
  chart.description = "Share of all choices an expert gets: " + list_of(notes);
  std::string caption = "<b>Expert load</b> of " + rich("`" + row.model->label + "`") +
                        ": the share of all choices in training that each expert got since the "
                        "evaluation before the last, layer by layer.";
  if (every > 1) caption += str(" One layer of ", every, " is shown.");
  Chart out = one(draw(chart), caption);
  out.data = data_of(chart.title, "expert", "share", chart.lines);
  out.data.columns[0] = "layer";
  return out;
}

std::string seeds_strip(const Comparison& c, const TaskSummary& t, const Row& row) {
  Strip strip;
  strip.style = style_of(c, row);
  Extent shown;
  for (const Row& r : t.rows) {
    if (r.finished == 0) continue;
    shown.add(r.quality.low, r.quality.high);
    shown.add(r.result.low(), r.result.high());
    if (r.baseline) strip.reference = r.result.mean;
  }
  strip.low = shown.low;
  strip.high = shown.high;
  for (const Run* run : runs_with_result(row)) {
    strip.values.push_back(run->points.back().quality);
  }
  strip.mean = row.result.mean;
  strip.half_width = row.result.half_width;
  std::vector<std::string> values;
  for (const double v : strip.values) values.push_back(metric_text(*t.task, v));
  strip.title = row.model->label + ": " + (values.empty() ? "no result" : list_of(values));
  return draw(strip);
}

}  // namespace headloom::report
