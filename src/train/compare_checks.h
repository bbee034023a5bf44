// What the configuration of a comparison must not say, whatever its models and tasks are.
#pragma once

#include <vector>

#include "train/compare.h"
#include "train/sweep.h"

namespace headloom {

// Whether validation data decide anything: a setting, or when a run ends.
bool asks_validation_data(const CompareConfig& config, const Sweep& sweep);

// All of these throw UsageError naming the entry or the key.

// Where a name cannot be a folder's or stands twice, where seeds are not different ones, where a
// key of [train] has no effect, and where [sweep] and [robustness] set the same key. `at_sizes` is
// the same configuration with its tasks at every size.
void check_comparison(const CompareConfig& config, const CompareConfig& at_sizes,
                      const Sweep& sweep);
// Where a key is swept that the configuration's other keys need at one value, or set themselves.
void check_swept_keys(const CompareConfig& config, const Sweep& sweep);
// Where a model has 'train.steps', which follow from the budget.
void check_no_own_steps(const std::vector<ComparedModel>& models);
// Where [robustness] is there and changes nothing.
void check_robustness_not_empty(const RobustnessOptions& robustness);

}  // namespace headloom
