// AdamW (Loshchilov & Hutter 2019) through ATen's fused kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <set>

#include "storage/safetensors.h"
#include "train/config.h"

namespace headloom {

class AdamW {
 public:
  // Throws UsageError for a group of options.groups that names no parameter.
  AdamW(const torch::nn::Module& model, const TrainOptions& options);
  // Clips, updates and clears the gradients. `lr` is that of parameters without a group of their
  // own. Returns the gradients' norm before clipping.
  double step(double lr);
  // The state under the parameters' names: "mean.NAME", "square.NAME", "steps".
  NamedTensors state() const;
  // Throws Error naming the tensor where `state` does not fit the parameters.
  void load(const NamedTensors& state, const std::string& path);

 private:
  struct Group {
    double lr = 1;  // a multiple of step()'s
    double weight_decay = 0;
    std::vector<std::string> names = {};
    std::vector<at::Tensor> parameters = {}, means = {}, squares = {}, steps = {};
  };
  const TrainOptions options_;
  std::vector<Group> groups_;
  std::set<std::string> buffers_;  // the model's, by name
};

// Copies tensors into the targets of the same names. Throws Error naming the first that is missing,
// unexpected or of another shape; `path` is for the message.
void copy_tensors(const NamedTensors& from, const NamedTensors& to, const std::string& path);

}  // namespace headloom
