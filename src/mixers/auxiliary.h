// What layers give a training step beside their output: auxiliary losses and statistics.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>

namespace headloom {

struct AuxiliaryOutputs {
  // The sum of what the layers want added to the loss; undefined where none wants anything.
  at::Tensor loss;
  // Of each layer with experts, by MixerContext::layer: how many choices each expert got [experts],
  // int64.
  std::map<int64_t, at::Tensor> load;
};

}  // namespace headloom
