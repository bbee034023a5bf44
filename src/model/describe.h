// What a model costs, part by part.
#pragma once

#include "model/model.h"

namespace headloom {

struct ModelCosts {
  std::vector<Cost> parts;  // equal parts of all layers added up
  int64_t parameters = 0;
  int64_t active_parameters = 0;     // those that work for a token: without experts not chosen
  double flops_per_token = 0;        // forward, at the given length
  double mechanism_share = 0;        // of the forward FLOPs, added over plain attention
  double mechanism_parameters = 0;   // likewise of the parameters
  double state_bytes_per_token = 0;  // decoding state each token of context adds, float32
};

// Costs of a position at sequence length `length` (that of an image is its own); an
// encoder-decoder's of a target's, with a source of the same length.
ModelCosts model_costs(const Model& model, int64_t length);

}  // namespace headloom
