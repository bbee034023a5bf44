#include "report/charts.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "core/text.h"
#include "report/format.h"

namespace headloom::report {
namespace {

constexpr int kStyles = 12;  // s0 to s12 in style.cpp; s0 is the baseline's

std::string capitalized(std::string text) {
  if (!text.empty()) text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
  return text;
}

Axis x_axis(const TaskInfo& task, const std::vector<Line>& lines, double Point::* x) {
  double high = 0;
  for (const Line& line : lines) {
    for (const LinePoint& p : line.points) high = std::max(high, p.x);
  }
  const bool time = x == &Point::seconds;
  return make_axis(time ? "training time" : "training " + task.unit,
                   time ? Unit::kSeconds : Unit::kCount, 0, high > 0 ? high : kUnknown);
}

// From the lowest value to the highest past the first fifth of the budget: the fall from the
// untrained model would press all that matters into a sliver.
Axis value_axis(const std::string& label, const std::vector<Line>& lines, double end,
                bool difference = false) {
  double low = kUnknown, high = kUnknown;
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

std::vector<Line> lines_of(const Comparison& c, const TaskSummary& t, double Point::* x,
                           double Point::* y) {
  std::vector<Line> lines;
  for (const Row& row : t.rows) {
    const int style = style_of(c, row);
    lines.push_back({row.model->label, style, false, mean_curve(row, x, y)});
    for (const Run* run : row.runs) {
      if (!run_failed(*run)) continue;
      Line line{str(row.model->label, " ", run->seed, " ✕"), style, true, {}};
      for (const Point& p : run->points) {
        if (std::isfinite(p.*x) && std::isfinite(p.*y)) {
          line.points.push_back({p.*x, p.*y, p.*y, p.*y});
        }
      }
      lines.push_back(std::move(line));
    }
  }
  return lines;
}

std::string band_note(const TaskSummary& t) {
  const bool several =
      std::any_of(t.rows.begin(), t.rows.end(), [](const Row& row) { return row.finished > 1; });
  return several ? " Lines are means over the seeds; bands reach from the lowest to the highest."
                 : "";
}

Chart curve_chart(const Comparison& c, const TaskSummary& t, double Point::* x, double Point::* y,
                  const std::string& what, bool fraction) {
  const bool time = x == &Point::seconds;
  LineChart chart;
  chart.lines = lines_of(c, t, x, y);
  chart.x = x_axis(*t.task, chart.lines, x);
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
  chart.description = "At the end of training: ";
  std::vector<std::string> ends;
  for (const Line& line : chart.lines) {
    if (line.points.empty()) continue;
    const double v = line.points.back().y;
    ends.push_back(line.label + " " + (fraction ? percent(v) : fixed(v, 3)));
  }
  chart.description += list_of(ends);
  Chart out{to_svg(chart), "<b>" + escape(capitalized(what)) + "</b> on held-out data against " +
                               (time ? "training time." : t.task->unit + " trained on.")};
  if (!time) out.caption += escape(band_note(t));
  return out;
}

}  // namespace

std::vector<LinePoint> mean_curve(const Row& row, double Point::* x, double Point::* y) {
  std::vector<const Run*> runs;
  for (const Run* run : row.runs) {
    if (run->state == RunState::kFinished && !run_failed(*run)) runs.push_back(run);
  }
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

Chart learning_chart(const Comparison& c, const TaskSummary& t, double Point::* x) {
  if (t.task->percent) return curve_chart(c, t, x, &Point::loss, "loss (nats a target)", false);
  return curve_chart(c, t, x, &Point::quality, t.task->metric, false);
}

Chart accuracy_chart(const Comparison& c, const TaskSummary& t) {
  return curve_chart(c, t, &Point::tokens, &Point::accuracy, "answers exactly right", true);
}

Chart gap_chart(const Comparison& c, const TaskSummary& t) {
  const auto mean = [](const Row& row) { return mean_curve(row, &Point::tokens, &Point::quality); };
  const std::string base = c.models.front().label;
  std::vector<LinePoint> reference;
  for (const Row& row : t.rows) {
    if (row.baseline) reference = mean(row);
  }
  LineChart chart;
  for (const Row& row : t.rows) {
    Line line{row.model->label, style_of(c, row), false, {}};
    for (const LinePoint& p : mean(row)) {
      // Equal budgets evaluate at equal token counts; where they do not, there is nothing to
      // subtract.
      const auto same = std::find_if(reference.begin(), reference.end(), [&](const LinePoint& r) {
        return std::abs(r.x - p.x) <= 1e-6 * (1 + std::abs(p.x));
      });
      if (same == reference.end()) continue;
      line.points.push_back({p.x, p.y - same->y, p.low - same->y, p.high - same->y});
    }
    chart.lines.push_back(std::move(line));
  }
  chart.x = x_axis(*t.task, chart.lines, &Point::tokens);
  chart.y = value_axis("difference to " + base, chart.lines, chart.x.high, true);
  chart.title = "Difference in " + t.task->metric + " to " + base + " on " + t.task->name;
  chart.description = "At the end of training: ";
  std::vector<std::string> ends;
  for (const Line& line : chart.lines) {
    if (!line.points.empty()) ends.push_back(line.label + " " + fixed(line.points.back().y, 3));
  }
  chart.description += list_of(ends);
  return {to_svg(chart), "<b>Difference to " + rich("`" + base + "`") + "</b> in " +
                             escape(t.task->metric) + " at the same number of " + t.task->unit +
                             "; " + (t.task->lower_is_better ? "below" : "above") +
                             " zero is better."};
}

Chart cost_chart(const Comparison& c, const TaskSummary& t) {
  Scatter scatter;
  double x_low = kUnknown, x_high = kUnknown, y_low = kUnknown, y_high = kUnknown, state = 0;
  bool states_differ = false;
  for (const Row& row : t.rows) {
    if (row.finished == 0 || !std::isfinite(row.tokens_per_second.mean)) continue;
    Dot dot{.label = row.model->label,
            .style = style_of(c, row),
            .x = row.tokens_per_second.mean,
            .y = row.quality.mean,
            .low = row.quality.low,
            .high = row.quality.high};
    if (row.build && row.build->state() > 0) {
      dot.size = row.build->state();
      states_differ |= state > 0 && dot.size != state;
      state = std::max(state, dot.size);
    }
    dot.note = dot.label + ": " + metric_text(*t.task, row.result) + " " + t.task->metric + ", " +
               grouped(dot.x) + " " + t.task->unit + "/s";
    if (std::isfinite(dot.size)) dot.note += ", " + bytes(dot.size) + " of state a token";
    x_low = std::fmin(x_low, dot.x);
    x_high = std::fmax(x_high, dot.x);
    y_low = std::fmin(y_low, dot.low);
    y_high = std::fmax(y_high, dot.high);
    scatter.dots.push_back(dot);
  }
  for (Dot& dot : scatter.dots) dot.size = states_differ ? dot.size / state : kUnknown;
  const bool log = x_high / x_low > 8;
  const double x_margin = log ? 0 : std::max(0.12 * (x_high - x_low), 0.02 * x_high);
  scatter.x =
      make_axis("training " + t.task->unit + " a second", Unit::kCount,
                log ? x_low / 1.3 : x_low - x_margin, log ? x_high * 1.3 : x_high + x_margin, log);
  const bool y_log = !t.task->percent && y_low > 0 && y_high / y_low > 30;
  const double margin = std::max(0.14 * (y_high - y_low), t.task->percent ? 0.03 : 0.0);
  scatter.y = make_axis(t.task->metric, t.task->percent ? Unit::kPercent : Unit::kPlain,
                        y_log ? y_low / 1.3 : y_low - margin,
                        y_log ? y_high * 1.3 : y_high + margin, y_log);
  if (t.task->percent) {
    scatter.y.low = std::max(scatter.y.low, -0.03);
    scatter.y.high = std::min(scatter.y.high, 1.03);
  }
  scatter.title = capitalized(t.task->metric) + " against training speed on " + t.task->name;
  std::vector<std::string> notes;
  for (const Dot& dot : scatter.dots) notes.push_back(dot.note);
  scatter.description = join(notes, "; ");
  std::string caption =
      "<b>" + escape(capitalized(t.task->metric)) + " against training speed.</b> ";
  caption += t.task->lower_is_better ? "Better is down and to the right. "
                                     : "Better is up and to the right. ";
  caption += states_differ
                 ? "The circle's area is the decoding state that each token of context adds. "
                 : "";
  caption += "Whiskers reach from the lowest seed to the highest.";
  return {to_svg(scatter), caption};
}

Chart expert_chart(const TaskSummary& t, const Row& row) {
  // Which expert is which differs between seeds: the experts of a layer are put in order of their
  // load, and then the seeds' are averaged.
  struct Layer {
    std::vector<std::vector<double>> seeds;
  };
  std::map<int64_t, Layer> layers;
  for (const Run* run : row.runs) {
    if (run->points.empty() || run_failed(*run)) continue;
    for (auto [layer, shares] : run->points.back().expert_load) {
      std::sort(shares.begin(), shares.end(), std::greater<>());
      auto& seeds = layers[layer].seeds;
      if (seeds.empty() || seeds[0].size() == shares.size()) seeds.push_back(shares);
    }
  }
  if (layers.empty()) return {};
  constexpr size_t kMostLines = 8;
  const size_t every = (layers.size() + kMostLines - 1) / kMostLines;
  LineChart chart;
  size_t experts = 0, index = 0;
  double highest = 0;
  std::vector<std::string> notes;
  for (const auto& [layer, loads] : layers) {
    if (index++ % every != 0) continue;
    Line line{str("layer ", layer), 1 + static_cast<int>(chart.lines.size()) % kStyles, false, {}};
    const size_t count = loads.seeds[0].size();
    for (size_t i = 0; i < count; ++i) {
      std::vector<double> shares;
      for (const auto& seed : loads.seeds) shares.push_back(seed[i]);
      const Stat stat = stat_of(shares);
      line.points.push_back({static_cast<double>(i + 1), stat.mean, stat.low, stat.high});
      highest = std::max(highest, stat.high);
    }
    experts = std::max(experts, count);
    notes.push_back(str(line.label, " from ", percent(line.points.back().y), " to ",
                        percent(line.points.front().y)));
    chart.lines.push_back(std::move(line));
  }
  const double equal = 1 / static_cast<double>(experts);
  chart.lines.push_back(
      {"equal",
       0,
       false,
       {{1, equal, equal, equal}, {static_cast<double>(experts), equal, equal, equal}}});
  chart.x = make_axis("experts, the busiest first", Unit::kPlain, 1,
                      static_cast<double>(std::max<size_t>(experts, 2)));
  chart.y = make_axis("share of the choices", Unit::kPercent, 0, std::max(highest, 2 * equal));
  chart.title = "Expert load of " + row.model->label + " on " + t.task->name;
  chart.description = "Share of all choices an expert gets: " + list_of(notes);
  std::string caption = "<b>Expert load</b> of " + rich("`" + row.model->label + "`") +
                        ": the share of all choices in training that each expert got since the "
                        "evaluation before the last, layer by layer.";
  if (every > 1) caption += str(" One layer of ", every, " is shown.");
  return {to_svg(chart), caption};
}

std::string seeds_strip(const Comparison& c, const TaskSummary& t, const Row& row) {
  Strip strip;
  strip.style = style_of(c, row);
  double low = kUnknown, high = kUnknown;
  for (const Row& r : t.rows) {
    if (r.finished == 0) continue;
    low = std::fmin(low, std::fmin(r.quality.low, r.result.low()));
    high = std::fmax(high, std::fmax(r.quality.high, r.result.high()));
    if (r.baseline) strip.reference = r.result.mean;
  }
  strip.low = low;
  strip.high = high;
  for (const Run* run : row.runs) {
    if (run->state == RunState::kFinished && !run_failed(*run)) {
      strip.values.push_back(run->points.back().quality);
    }
  }
  strip.mean = row.result.mean;
  strip.half_width = row.result.half_width;
  std::vector<std::string> values;
  for (const double v : strip.values) values.push_back(metric_text(*t.task, v));
  strip.title = row.model->label + ": " + (values.empty() ? "no result" : list_of(values));
  return to_svg(strip);
}

}  // namespace headloom::report
