// What a training step learns of its layers beside their output.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>

namespace headloom {

struct Observed {
  // The sum of what the layers want added to the loss; undefined where none wants anything.
  at::Tensor loss;
  // Of each layer with experts, by MixerContext::layer: how many choices each expert got [experts],
  // int64.
  std::map<int64_t, at::Tensor> load;
};

}  // namespace headloom
