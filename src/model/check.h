// Checks of what a user hands to a model; mixers/check.h says how they refuse.
#pragma once

#include "model/model.h"

namespace headloom {

// `tokens` is [B, T] of an integer type, with T of at least 1, each one of the vocabulary's.
void check_tokens(const Model& model, const char* name, const Tensor& tokens);
// `source` passes check_tokens() and has `batch` rows; `lengths`, where defined, are its lengths.
void check_source(const Model& model, const Tensor& source, const Tensor& lengths,
                  const c10::SymInt& batch);
// All that Model::forward() is given.
void check_input(const Model& model, const ModelInput& input);

}  // namespace headloom
