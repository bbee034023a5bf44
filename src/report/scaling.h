// Scaling fits: how the loss of every model falls as its size and its training grow together, and
// how much more compute the baseline needs for the same loss.
#pragma once

#include <string>
#include <vector>

#include "report/charts.h"
#include "report/scaling_fit.h"

namespace headloom::report {

inline constexpr size_t kSizesForFit = 3;

// One of a comparison's [[sizes]], and what a model's runs at it gave.
struct SizePoint {
  const TaskSummary* task = nullptr;
  double parameters = kUnknown, tokens = kUnknown;  // of a run
  double compute = kUnknown;  // training FLOPs of a run: three times those of the forward pass
  std::vector<std::pair<int64_t, double>> losses{};  // seed, nats a target at the run's end
  double loss() const;                               // the mean
};

// 95% from resampling runs; both NaN where every size has one seed.
struct Interval {
  double low = kUnknown, high = kUnknown;
};

// What a model's compute is worth at one of its sizes: the factor by which the baseline needs more
// compute for the loss that the model's fit has there.
struct Equivalence {
  double factor = kUnknown;  // unknown where the baseline's fit would have to be extrapolated by
                             // more than one size
  bool below = false;   // where it is unknown: the fit would have to reach below its first size
  Interval interval{};  // an end is infinite or 0 where it lies beyond that
};

struct FamilyFit {
  const ModelInfo* model = nullptr;
  std::vector<SizePoint> points{};  // by growing compute
  PowerLaw law{};                   // the loss against compute; no factors with too few sizes, and
                                    // where `surface` does not fall with both
  PowerLaw surface{};               // against parameters and tokens, where the sizes determine it
  bool off_grid = false;            // others have a surface, which these sizes do not determine
  Interval floor{}, exponent{};    // of `law`
  std::vector<Interval> bands{};   // of `law` at SizeSeries::grid
  std::vector<Equivalence> worth;  // one for each size; empty for the baseline and without a fit

  // What was fitted to the losses.
  const PowerLaw& searched() const { return surface.factors.empty() ? law : surface; }
  // What it has at a size.
  double fitted_loss(const SizePoint& point) const {
    return surface.factors.empty() ? law.at({point.compute})
                                   : surface.at({point.parameters, point.tokens});
  }
};

struct SizeSeries {
  std::string name{};  // of the task
  std::vector<FamilyFit> families{};
  std::vector<double> grid{};  // FLOPs at which the fits are drawn
  std::string answer{};        // sentences; `code` marks labels
};

// A series for each task that has sizes, once a run of it has finished. Fits are by least squares
// on the means of the sizes. Intervals resample the seeds of every size a thousand times, the same
// ones for all models, and fit again.
std::vector<SizeSeries> size_series(const Comparison& c, const Summary& summary);

// The loss against compute, with the fits.
Chart scaling_chart(const Comparison& c, const SizeSeries& series);

// The numbers of the fits: a head and a row a model.
std::vector<std::vector<std::string>> scaling_table(const SizeSeries& series);

}  // namespace headloom::report
