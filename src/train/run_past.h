// What a run has been through that its configuration does not say: whose weights it began with, and
// with which configurations its earlier steps were made. Two runs of one configuration and seed can
// differ in it, so a report keeps them apart.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "train/config.h"
#include "train/state.h"

namespace headloom {

// The weights that a run begun by --from began with, as RUN/origin.json has them.
struct Origin {
  std::string folder;  // absolute, of the run that they are from
  int64_t step = 0;
  std::string weights;  // a hash of them
  // A hash of how they were trained, the seed aside: runs that began with the weights of several
  // seeds of one model are runs of one model. Of weights that no run has trained, that of them.
  std::string identity = {};
};

// Of the weights of the run in `folder` that a checkpoint has, whose state was read.
Origin origin_of(const std::string& folder, const TrainState& state);
std::string origin_path(const std::string& run);
void write_origin(const std::string& run, const Origin& origin);
// Nothing of a run that began with weights of its own. Throws Error naming a damaged file.
std::optional<Origin> read_origin(const std::string& run);

// A run's configuration as TOML, as far as all seeds share it.
std::string config_of_all_seeds(RunConfig config);

struct PastEvent {
  std::string key;   // the same for all seeds of a model
  std::string text;  // "weights of `pre` (step 300) at the start"
};
// What has happened to a run that changes its results. `config` is the present one.
std::vector<PastEvent> past_of(const std::string& run, const RunConfig& config);
// "weights of `pre` (step 300) at the start, no other options until step 20 (lr = 1e-05)": what has
// happened to one of two runs alone, as seen from `baseline`.
std::string past_differences(const std::vector<PastEvent>& baseline,
                             const std::vector<PastEvent>& run);

}  // namespace headloom
