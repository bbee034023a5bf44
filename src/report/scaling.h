// Scaling fits: how the loss of every model falls as its size and its training grow together, and
// how much more compute the baseline needs for the same loss.
#pragma once

#include <string>
#include <vector>

#include "report/charts.h"
#include "report/scaling_fit.h"

namespace headloom::report {

inline constexpr size_t kRungsForFit = 3;

// The sizes of a comparison ([[sizes]]) that a model has been trained at.
struct Rung {
  const TaskSummary* task = nullptr;
  double parameters = kUnknown, tokens = kUnknown;  // of a run
  double compute = kUnknown;  // training FLOPs of a run: three times those of the forward pass
  std::vector<std::pair<int64_t, double>> losses{};  // seed, nats a target at the run's end
  double loss() const;                               // the mean
};

// 95% from resampling runs; both NaN where every rung has one seed.
struct Interval {
  double low = kUnknown, high = kUnknown;
};

// What a model's compute is worth at one of its rungs: the factor by which the baseline needs more
// compute for the loss that the model's fit has there.
struct Equivalence {
  double factor = kUnknown;  // unknown where the baseline's fit would have to be extrapolated by
                             // more than one rung
  bool below = false;   // where it is unknown: the fit would have to reach below its first rung
  Interval interval{};  // an end is infinite or 0 where it lies beyond that
};

struct FamilyFit {
  const ModelInfo* model = nullptr;
  std::vector<Rung> rungs{};       // by growing compute
  PowerLaw law{};                  // the loss against compute; no factors with too few rungs, and
                                   // where `surface` does not fall with both
  PowerLaw surface{};              // against parameters and tokens, where the rungs determine it
  bool off_grid = false;           // others have a surface, which these rungs do not determine
  Interval floor{}, exponent{};    // of `law`
  std::vector<Interval> bands{};   // of `law` at Ladder::grid
  std::vector<Equivalence> worth;  // a rung each; empty for the baseline and without a fit

  // What was fitted to the losses.
  const PowerLaw& searched() const { return surface.factors.empty() ? law : surface; }
  // What it has at a rung.
  double fitted_loss(const Rung& rung) const {
    return surface.factors.empty() ? law.at({rung.compute})
                                   : surface.at({rung.parameters, rung.tokens});
  }
};

struct Ladder {
  std::string name{};  // of the task
  std::vector<FamilyFit> families{};
  std::vector<double> grid{};  // FLOPs at which the fits are drawn
  std::string answer{};        // sentences; `code` marks labels
};

// A ladder for each task that has sizes, once a run of it has finished. Fits are by least squares
// on the means of the rungs. Intervals resample the seeds of every rung a thousand times, the same
// ones for all models, and fit again.
std::vector<Ladder> ladders(const Comparison& c, const Summary& summary);

// The loss against compute, with the fits.
Chart scaling_chart(const Comparison& c, const Ladder& ladder);

// The numbers of the fits: a head and a row a model.
std::vector<std::vector<std::string>> scaling_table(const Ladder& ladder);

}  // namespace headloom::report
