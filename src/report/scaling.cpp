#include "report/scaling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "core/text.h"
#include "report/format.h"
#include "report/statistics.h"

namespace headloom::report {
namespace {

constexpr int kReplicates = 1000;
constexpr int kReplicateGrid = 10;    // exponents tried first in each replicate
constexpr double kExact = 1e-4;       // nats: an error of a fit that meets every mean
constexpr size_t kGrid = 13;          // points of a drawn fit
constexpr double kNormal = 1.959964;  // the normal distribution's quantile of 97.5%
constexpr double kBeyond = std::numeric_limits<double>::infinity();

bool can_be_fitted(const Run& run) {
  if (!has_result(run)) return false;
  const Point& last = run.points.back();
  return std::isfinite(last.loss) && last.tokens > 0;
}

// The seeds of each size that are compared: those that every model with a result there has
// finished, because a seed may be harder than others.
struct CommonSeeds {
  std::map<const TaskSummary*, std::set<int64_t>> of;
  bool left_out = false;  // some model has more

  explicit CommonSeeds(const std::vector<const TaskSummary*>& tasks) {
    for (const TaskSummary* task : tasks) {
      std::set<int64_t>& common = of[task];
      bool begun = false;
      for (const Row& row : task->rows) {
        std::set<int64_t> own, both;
        for (const Run* run : row.runs) {
          if (can_be_fitted(*run)) own.insert(run->seed);
        }
        if (own.empty()) continue;
        for (const int64_t seed : own) {
          if (!begun || common.contains(seed)) both.insert(seed);
        }
        left_out |= begun && (both.size() < own.size() || both.size() < common.size());
        common = std::move(both);
        begun = true;
      }
    }
  }
};

std::vector<SizePoint> points_of(const std::vector<const TaskSummary*>& tasks,
                                 const CommonSeeds& seeds, const ModelInfo& model) {
  std::vector<SizePoint> points;
  for (const TaskSummary* task : tasks) {
    const Row* const row = task->row_of(model);
    if (row == nullptr || row->build == nullptr) continue;
    SizePoint point{
        .task = task, .parameters = static_cast<double>(row->build->parameters), .tokens = 0};
    for (const Run* run : row->runs) {
      if (!can_be_fitted(*run) || !seeds.of.at(task).contains(run->seed)) continue;
      const Point& last = run->points.back();
      point.tokens += last.tokens;
      point.losses.emplace_back(run->seed, last.loss);
    }
    // The seeds end at different tokens where training stops at an accuracy.
    if (!point.losses.empty()) point.tokens /= static_cast<double>(point.losses.size());
    point.compute = 3 * row->build->flops_per_unit * point.tokens;
    if (point.losses.empty() || !(point.compute > 0) || !(point.parameters > 0)) continue;
    points.push_back(std::move(point));
  }
  std::sort(points.begin(), points.end(),
            [](const SizePoint& a, const SizePoint& b) { return a.compute < b.compute; });
  return points;
}

// Numbers that differ by more than 1%.
size_t distinct(const std::vector<SizePoint>& points, double SizePoint::* number) {
  std::vector<double> values;
  for (const SizePoint& point : points) values.push_back(point.*number);
  std::sort(values.begin(), values.end());
  size_t count = values.empty() ? 0 : 1;
  for (size_t i = 1; i < values.size(); ++i) count += values[i] > 1.01 * values[i - 1];
  return count;
}

// Whether sizes and budgets vary by themselves, so that both exponents can be told apart.
bool is_grid(const std::vector<SizePoint>& points) {
  const size_t sizes = distinct(points, &SizePoint::parameters),
               budgets = distinct(points, &SizePoint::tokens);
  return sizes >= 3 && budgets >= 3 &&
         points.size() >= std::max({size_t{6}, sizes + 1, budgets + 1});
}

// The loss against compute, given the loss at every size. On a grid it is the frontier.
PowerLaw fit(const std::vector<SizePoint>& points, const std::vector<double>& losses, int steps,
             PowerLaw* surface = nullptr) {
  std::vector<std::vector<double>> inputs;
  if (is_grid(points)) {
    double k = 0;  // FLOPs for each parameter and token
    for (const SizePoint& point : points) {
      inputs.push_back({point.parameters, point.tokens});
      k += point.compute / (point.parameters * point.tokens) / static_cast<double>(points.size());
    }
    const PowerLaw law = fit_power_law(inputs, losses, steps);
    if (surface != nullptr) *surface = law;
    return frontier(law, k);
  }
  for (const SizePoint& point : points) inputs.push_back({point.compute});
  return fit_power_law(inputs, losses, steps);
}

Interval interval_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return values[static_cast<size_t>(std::lround(share * static_cast<double>(values.size() - 1)))];
  };
  return {at(0.025), at(0.975)};
}

// The compute down to which, and up to which, the fit to these sizes is trusted: a size further, of
// which the distance is the mean of those between sizes.
std::pair<double, double> trusted(const std::vector<SizePoint>& points) {
  const double first = points.front().compute, last = points.back().compute;
  const auto steps = static_cast<double>(distinct(points, &SizePoint::compute) - 1);
  const double step = std::pow(last / first, 1 / steps);
  return {first / step, last * step};
}

// Of the compute at which a model has `loss`. Beyond what is trusted: 0 or infinity.
double worth_of(double loss, double compute, const PowerLaw& baseline,
                const std::pair<double, double>& range) {
  const double needed = inverse(baseline, loss);
  if (needed > range.second) return kBeyond;
  if (needed < range.first) return 0;
  return needed / compute;
}

// By how much the loss may lie beside a model's fit because the fit has another form: the standard
// deviation of the means around it. The seeds are part of it, so that intervals are rather too
// wide.
double misfit(const FamilyFit& family) {
  const PowerLaw& law = family.searched();
  const auto points = static_cast<double>(family.points.size());
  const double unknowns = 1 + 2 * static_cast<double>(law.factors.size());
  return law.error * std::sqrt(points / std::max(points - unknowns, 1.0));
}

bool known(const Interval& interval) { return !std::isnan(interval.low); }

// The law of every family, fitted to one draw of seeds with replacement for each size.
using Replicate = std::vector<PowerLaw>;

// Empty where a size has too few seeds for a claim: draws of a few say too little of others. The
// mean of n drawn ones varies less than that of n others, by the square root of (n - 1) / n. It
// also varies like a normal number, where n seeds ask for Student's t. Both factors widen its
// distance from the mean of all.
std::vector<Replicate> resample(const std::vector<FamilyFit>& families, const CommonSeeds& common) {
  std::vector<Replicate> out;
  std::mt19937_64 random(1);
  for (const FamilyFit& family : families) {
    for (const SizePoint& point : family.points) {
      if (common.of.at(point.task).size() < kSeedsForClaim) return out;
    }
  }
  std::map<const TaskSummary*, double> wider;
  for (const auto& [task, seeds] : common.of) {
    const auto n = static_cast<double>(seeds.size());
    if (n > 1) wider[task] = std::sqrt(n / (n - 1)) * student_t_quantile(0.975, n - 1) / kNormal;
  }
  for (int r = 0; r < kReplicates; ++r) {
    std::map<const TaskSummary*, std::vector<int64_t>> drawn;
    for (const auto& [task, of_task] : common.of) {
      const std::vector<int64_t> seeds(of_task.begin(), of_task.end());
      for (size_t i = 0; i < seeds.size(); ++i) {
        drawn[task].push_back(seeds[random() % seeds.size()]);
      }
    }
    Replicate replicate;
    for (const FamilyFit& family : families) {
      std::vector<double> losses;
      for (const SizePoint& point : family.points) {
        double sum = 0;
        int count = 0;
        for (const int64_t seed : drawn[point.task]) {
          for (const auto& [of, loss] : point.losses) {
            if (of != seed) continue;
            sum += loss;
            ++count;
          }
        }
        const double mean = point.loss();
        losses.push_back(mean + (sum / count - mean) * wider.at(point.task));
      }
      replicate.push_back(family.law.factors.empty() ? PowerLaw{}
                                                     : fit(family.points, losses, kReplicateGrid));
    }
    out.push_back(std::move(replicate));
  }
  return out;
}

std::string flops_text(double flops) { return count(flops) + " FLOPs"; }

std::string factor_text(double factor) {
  return factor < 0.095 ? formatted("%.2g", factor) : fixed(factor, factor < 99.5 ? 2 : 0);
}

// "1.32 times (95% interval 1.10 to 1.60)".
std::string worth_text(const Equivalence& e) {
  std::string out = std::isnan(e.factor) ? "" : factor_text(e.factor) + " times";
  if (!known(e.interval)) return out;
  const auto end = [](double factor) {
    return factor <= 0          ? "below what the fit knows"
           : std::isinf(factor) ? "beyond what the fit knows"
                                : factor_text(factor);
  };
  const std::string low = end(e.interval.low), high = end(e.interval.high);
  return out + " (95% interval " + low + " to " + high + ")";
}

std::string family_name(const FamilyFit& f) { return "`" + f.model->label + "`"; }

// Why there is no law of the compute although there are results enough for one.
std::string why_without_law(const FamilyFit& f) {
  if (f.off_grid) {
    return family_name(f) +
           " has results at too few sizes and budgets to fit its loss to parameters and data, as "
           "that of others is";
  }
  const bool with_size = f.surface.falls(0), with_data = f.surface.falls(1);
  return "the loss of " + family_name(f) + " falls with " +
         (with_size   ? "more parameters and not with more data"
          : with_data ? "more data and not with more parameters"
                      : "neither more parameters nor more data") +
         ", so that no size is the best for a given compute";
}

// Why what a family's compute is worth at its last size is not determined.
std::string why_undetermined(const FamilyFit& f, const FamilyFit& base) {
  if (!base.law.falls(0)) {
    return "the loss of " + family_name(base) + " does not fall with the compute";
  }
  if (f.law.at({f.points.back().compute}) <= base.law.floor) {
    return "the fit of " + family_name(base) + " stays above that loss";
  }
  return "the fit of " + family_name(base) + " would have to reach more than one size " +
         (f.worth.back().below ? "below its first" : "beyond its last");
}

// What a family's compute is worth at its last size, as a sentence without its full stop.
std::string worth_sentence(const FamilyFit& f, const FamilyFit& base) {
  if (f.law.factors.empty()) return why_without_law(f);
  const Equivalence& top = f.worth.back();
  const std::string at = flops_text(f.points.back().compute);
  if (std::isnan(top.factor)) {
    return "what the compute of " + family_name(f) + " is worth at " + at +
           " is not determined, because " + why_undetermined(f, base);
  }
  std::string out = "the baseline " + family_name(base) + " needs " + worth_text(top) +
                    " the compute of " + family_name(f) + " for its loss at " + at;
  if (known(top.interval) && top.interval.low <= 1 && top.interval.high >= 1) {
    out += ", so that no difference is found";
  }
  return out;
}

// How the loss of a family falls, as a sentence without its full stop.
std::string law_sentence(const FamilyFit& f) {
  if (!f.law.falls(0)) return "the loss of " + family_name(f) + " does not fall with the compute";
  return "the loss of " + family_name(f) + " falls as " + fixed(f.law.floor, 3) + " + " +
         formatted("%.3g", f.law.factors[0]) + " C^-" + fixed(f.law.exponents[0], 3);
}

// How closely the fits meet the means, as a sentence.
std::string error_sentence(const SizeSeries& series, const FamilyFit& base) {
  double error = 0;
  for (const FamilyFit& f : series.families) error = std::max(error, f.searched().error);
  if (base.points.size() == kSizesForFit && error < kExact) {
    return " With three sizes the curves pass through every mean, so that nothing tests their "
           "form.";
  }
  return (base.surface.factors.empty()
              ? " The curves miss the means by up to "
              : " The fits of the loss to parameters and data miss the means by up to ") +
         formatted("%.2g", error) + " nats (root of the mean square).";
}

std::string answer_of(const Comparison& c, const SizeSeries& series, bool resampled) {
  const FamilyFit* base = nullptr;
  std::vector<std::string> short_of;
  for (const FamilyFit& f : series.families) {
    if (f.model == &c.models.front()) base = &f;
    if (f.searched().factors.empty() && !f.off_grid) short_of.push_back(family_name(f));
  }
  std::string out = "On " + series.name + ", ";
  if (!short_of.empty()) {
    return out + "no scaling law is fitted for " + list_of(short_of) + ", as this takes " +
           str(kSizesForFit) + " sizes with results that differ in compute.";
  }
  if (base == nullptr) return out + "the baseline has no result.";
  if (base->law.factors.empty()) return out + why_without_law(*base) + ".";
  std::vector<std::string> said;
  for (const FamilyFit& f : series.families) {
    if (&f != base) said.push_back(worth_sentence(f, *base));
  }
  out += (said.empty() ? law_sentence(*base) : join(said, "; ")) + ".";
  if (!resampled) {
    out += str(" Intervals take at least ", kSeedsForClaim, " seeds of every size and model.");
  }
  return out + error_sentence(series, *base);
}

}  // namespace

double SizePoint::loss() const {
  double sum = 0;
  for (const auto& [seed, loss] : losses) sum += loss;
  return losses.empty() ? kUnknown : sum / static_cast<double>(losses.size());
}

namespace {

// Fits a law to the sizes of every family that has enough of them, without what resampling adds. A
// frontier is that of the best sizes and is not compared with a curve through all sizes.
void add_laws(std::vector<FamilyFit>& families) {
  const bool grid = std::any_of(families.begin(), families.end(),
                                [](const FamilyFit& family) { return is_grid(family.points); });
  for (FamilyFit& family : families) {
    if (distinct(family.points, &SizePoint::compute) < kSizesForFit) continue;
    family.off_grid = grid && !is_grid(family.points);
    if (family.off_grid) continue;
    std::vector<double> losses;
    for (const SizePoint& point : family.points) losses.push_back(point.loss());
    family.law = fit(family.points, losses, 32, &family.surface);
  }
}

// From the least compute of a size to the most, at equal factors.
std::vector<double> grid_of(const std::vector<FamilyFit>& families) {
  Extent compute;
  for (const FamilyFit& family : families) {
    for (const SizePoint& point : family.points) compute.add(point.compute);
  }
  std::vector<double> grid;
  for (size_t i = 0; i < kGrid; ++i) {
    grid.push_back(compute.low *
                   std::pow(compute.high / compute.low, static_cast<double>(i) / (kGrid - 1)));
  }
  return grid;
}

// Adds intervals, and what each family's compute is worth where `based`: the first is the
// baseline's. Curves of another form than the fit would make equal models differ where their sizes
// differ in compute. So every replicate also moves the loss by as much as both fits may be wrong.
void add_resampled(SizeSeries& series, const std::vector<Replicate>& replicates, bool based) {
  const FamilyFit& base = series.families.front();
  for (size_t f = 0; f < series.families.size(); ++f) {
    FamilyFit& family = series.families[f];
    if (family.law.factors.empty()) continue;
    // Unknown where some replicate has no law, or one without what is asked for.
    const auto over = [&](auto&& value) {
      std::vector<double> values;
      for (const Replicate& r : replicates) {
        if (r[f].factors.empty() || (based && r[0].factors.empty())) return Interval{};
        values.push_back(value(r));
      }
      const auto unknown = [](double one) { return std::isnan(one); };
      if (std::any_of(values.begin(), values.end(), unknown)) return Interval{};
      return interval_of(std::move(values));
    };
    family.floor = over([&](const Replicate& r) { return r[f].floor; });
    family.exponent =
        over([&](const Replicate& r) { return r[f].falls(0) ? r[f].exponents[0] : kUnknown; });
    for (const double at : series.grid) {
      family.bands.push_back(over([&](const Replicate& r) { return r[f].at({at}); }));
    }
    if (!based || f == 0) continue;
    const auto range = trusted(base.points);
    std::mt19937_64 random(1);
    std::normal_distribution<double> moved(0, 1);
    const double wrong = std::hypot(misfit(family), misfit(base));
    for (const SizePoint& point : family.points) {
      const std::vector<double> at = {point.compute};
      Equivalence e{.factor = worth_of(family.law.at(at), point.compute, base.law, range)};
      e.below = e.factor == 0;
      if (e.factor == 0 || std::isinf(e.factor)) e.factor = kUnknown;
      e.interval = over([&](const Replicate& r) {
        return worth_of(r[f].at(at) + wrong * moved(random), point.compute, r[0], range);
      });
      family.worth.push_back(e);
    }
  }
}

}  // namespace

std::vector<SizeSeries> size_series(const Comparison& c, const Summary& summary) {
  std::vector<std::string> names;
  for (const TaskSummary& t : summary.tasks) {
    const std::string& name = t.task->size_of;
    if (!name.empty()) add_once(names, name);
  }
  std::vector<SizeSeries> out;
  for (const std::string& name : names) {
    std::vector<const TaskSummary*> tasks;
    for (const TaskSummary& t : summary.tasks) {
      if (t.task->size_of == name) tasks.push_back(&t);
    }
    SizeSeries series{.name = name};
    const CommonSeeds seeds(tasks);
    for (const ModelInfo& model : c.models) {
      FamilyFit family{.model = &model, .points = points_of(tasks, seeds, model), .worth = {}};
      if (!family.points.empty()) series.families.push_back(std::move(family));
    }
    if (series.families.empty()) continue;
    add_laws(series.families);
    series.grid = grid_of(series.families);
    const std::vector<Replicate> replicates = resample(series.families, seeds);
    const FamilyFit& base = series.families.front();
    add_resampled(series, replicates, base.model == &c.models.front() && !base.law.factors.empty());
    series.answer = answer_of(c, series, !replicates.empty());
    if (seeds.left_out) {
      series.answer += " Seeds that one of the models has not finished are left out for all.";
    }
    out.push_back(std::move(series));
  }
  return out;
}

namespace {

// What is read at the ring of a size.
std::string size_note(const FamilyFit& family, const SizePoint& point) {
  return family.model->label + " on " + point.task->task->name + ": " + fixed(point.loss(), 3) +
         " after " + flops_text(point.compute) + ", " + count(point.parameters) + " parameters, " +
         count(point.tokens) + " " + point.task->task->unit;
}

// The fit of a family that has one, with its band where that is known.
std::vector<LinePoint> fit_curve(const FamilyFit& family, const std::vector<double>& grid) {
  std::vector<LinePoint> out;
  for (size_t i = 0; i < grid.size(); ++i) {
    const double y = family.law.at({grid[i]});
    const Interval& band = family.bands[i];
    out.push_back(
        {grid[i], y, known(band) ? band.low : y, known(band) ? band.high : y,
         "fit of " + family.model->label + ": " + fixed(y, 3) + " at " + flops_text(grid[i])});
  }
  return out;
}

// Joins two sizes of a family without a fit, so that the figure says which model they are of.
std::vector<LinePoint> joined_sizes(const FamilyFit& family) {
  std::vector<LinePoint> out;
  if (family.points.size() > 2) return out;
  for (const SizePoint& point : family.points) {
    out.push_back({point.compute, point.loss(), point.loss(), point.loss()});
  }
  return out;
}

}  // namespace

Chart scaling_chart(const Comparison& c, const SizeSeries& series) {
  LineChart chart;
  chart.title = "Loss against compute on " + series.name;
  Chart out;
  out.data = {chart.title,
              {"model", "task", "parameters", "tokens", "FLOPs", "loss", "loss of the fit"},
              {}};
  std::vector<std::string> said;
  Extent losses;
  bool fitted = false, has_bands = false;
  for (const FamilyFit& family : series.families) {
    const int style = style_of(c, *family.points[0].task->row_of(*family.model));
    const bool has_law = !family.law.factors.empty();
    Line line{.label = family.model->label,
              .style = style,
              .points = has_law ? fit_curve(family, series.grid) : joined_sizes(family)};
    for (const LinePoint& p : line.points) losses.add(p.y);
    for (const SizePoint& point : family.points) {
      const std::string note = size_note(family, point);
      said.push_back(note);
      chart.marks.push_back({.style = style, .x = point.compute, .y = point.loss(), .note = note});
      losses.add(point.loss());
      out.data.rows.push_back(
          {family.model->label, point.task->task->name, exact(point.parameters),
           exact(point.tokens), exact(point.compute), exact(point.loss()),
           family.searched().factors.empty() ? "" : exact(family.fitted_loss(point))});
    }
    fitted = fitted || has_law;
    has_bands = has_bands || std::any_of(family.bands.begin(), family.bands.end(), known);
    if (!line.points.empty()) chart.lines.push_back(std::move(line));
  }
  chart.description = join(said, "; ");
  chart.x = make_axis("training FLOPs", Unit::kCount, series.grid.front() / 1.15,
                      series.grid.back() * 1.15, true);
  const double margin = losses.size() > 0 ? 0.08 * losses.size() : 0.02 * std::abs(losses.high);
  chart.y =
      make_axis("loss (nats a target)", Unit::kPlain, losses.low - margin, losses.high + margin);
  out.drawings.push_back(draw(chart));
  out.caption =
      str("<b>Loss against compute</b>, in nats a target: a ring for the mean of every size",
          fitted ? ", and the fitted power law of models with three sizes"
                 : ". A fit takes three sizes",
          has_bands ? " with the 95% band that resampling the seeds gives." : ".");
  return out;
}

std::vector<std::vector<std::string>> scaling_table(const SizeSeries& series) {
  std::vector<std::vector<std::string>> lines{{"model", "sizes", "L(C) = E + a C^-b: E", "b",
                                               "error of the fit",
                                               "compute worth at the last size"}};
  const auto with = [](double value, const Interval& interval) {
    std::string out = fixed(value, 3);
    if (known(interval))
      out += " (" + fixed(interval.low, 3) + " to " + fixed(interval.high, 3) + ")";
    return out;
  };
  // E is at least 0. An interval that ends there on both sides says nothing about what E is.
  const auto floor = [&](const FamilyFit& f) {
    const bool at_bound = f.law.floor == 0 && f.floor.high == 0;
    return at_bound ? std::string("0, its bound") : with(f.law.floor, f.floor);
  };
  const auto exponent = [&](const FamilyFit& f) {
    if (!f.law.falls(0)) return std::string("none, the loss does not fall");
    return with(f.law.exponents[0], f.exponent) +
           (f.searched().at_bound() ? ", at a bound of the search" : "");
  };
  for (const FamilyFit& f : series.families) {
    const bool fitted = !f.law.factors.empty();
    std::string worth = kDash;
    if (!f.worth.empty()) {
      worth = std::isnan(f.worth.back().factor) ? "not determined" : worth_text(f.worth.back());
    }
    lines.push_back({f.model->label, str(f.points.size()), fitted ? floor(f) : std::string(kDash),
                     fitted ? exponent(f) : std::string(kDash),
                     fitted ? formatted("%.2g", f.law.error) : std::string(kDash), worth});
  }
  return lines;
}

}  // namespace headloom::report
