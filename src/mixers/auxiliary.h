// What layers give beside their output: auxiliary losses and statistics.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <functional>
#include <map>

namespace headloom {

struct AuxiliaryOutputs {
  // The sum of what the layers want added to the loss; undefined where none wants anything.
  at::Tensor loss;
  // Of each layer with experts, by MixerContext::layer: how many choices each expert got [experts],
  // int64.
  std::map<int64_t, at::Tensor> load;
  // Sums counts over all processes that train on parts of one batch; empty: there are no others.
  std::function<at::Tensor(const at::Tensor&)> sum_counts = {};
  // Where `measures_branches` is set: of each layer, by MixerContext::layer, the root mean square
  // of what its token mixer puts out and of the residual stream that it is added to.
  struct Branch {
    double output = 0, residual = 0;
  };
  bool measures_branches = false;
  std::map<int64_t, Branch> branches;
};

inline double root_mean_square(const at::Tensor& x) {
  return std::sqrt(x.detach().to(at::kDouble).square().mean().item<double>());
}

}  // namespace headloom
