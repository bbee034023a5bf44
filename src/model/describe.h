// What a model costs, part by part.
#pragma once

#include <limits>

#include "model/model.h"

namespace headloom {

// The model of any size for its shapes alone (mixers/without_memory.h): it never runs.
std::shared_ptr<Model> build_without_memory(const ModelConfig& config);

struct ModelCosts {
  std::vector<Cost> parts;  // equal parts of all layers added up
  int64_t parameters = 0;
  int64_t active_parameters = 0;    // those that work for a token: without experts not chosen
  double flops_per_token = 0;       // forward, at the given length
  double mechanism_share = 0;       // of the forward FLOPs, added over plain attention
  double mechanism_parameters = 0;  // likewise of the parameters
  // Decoding state of one sequence at that length, float32, and what each token of its second half
  // adds to it. NaN where the model does not decode from a state.
  double state_bytes = std::numeric_limits<double>::quiet_NaN();
  double state_bytes_per_token = std::numeric_limits<double>::quiet_NaN();
};

// Costs of a position at sequence length `length` (that of an image is its own); an
// encoder-decoder's of a target's, with a source of the same length. The model may be without
// memory. Throws UsageError where there are too many parameters to be counted.
ModelCosts model_costs(const Model& model, int64_t length);
// What ModelCosts::flops_per_token is called: "FLOPs a token", of images "FLOPs a position".
std::string flops_name(const ModelConfig& config);

// What a decoder's state really holds, in the model's own types.
struct MeasuredState {
  int64_t length = 0;
  double bytes = 0, bytes_per_token = 0;  // as in ModelCosts, at that length
};

// Has every layer read `length` positions, or kMeasuredPositions where that is fewer. A model that
// is without memory is built anew for it. Absent where a model has no state, more than
// kMeasuredParameters or weights that do not fit this process: it is described without being run.
std::optional<MeasuredState> measured_state(const Model& model, int64_t length);
constexpr int64_t kMeasuredPositions = 512, kMeasuredParameters = 500'000'000;

}  // namespace headloom
