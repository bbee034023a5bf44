// AdamW (Loshchilov & Hutter 2019) through ATen's fused kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <set>

#include "distributed/communicator.h"
#include "storage/safetensors.h"
#include "train/config.h"

namespace headloom {

// With options.shard = "optimizer" each process of the group keeps the two moments of its part of
// the parameters alone, updates that part and gets the others' (ZeRO-1, Rajbhandari et al. 2020).
// The parts are equal numbers of elements, to one, wherever that cuts a tensor.
class AdamW {
 public:
  // `group` must outlive it; without one, this process is alone. Throws UsageError for a group of
  // options.groups that names no parameter.
  AdamW(const torch::nn::Module& model, const TrainOptions& options, Communicator* group = nullptr);
  // Clips, updates and clears the gradients, which all processes have whole. `lr` is that of
  // parameters without a group of their own. Returns the gradients' norm before clipping.
  double step(double lr);
  // The state is in parts(), of which this process has part(); a single part is the whole state.
  int64_t part() const { return shared() ? group_->rank() : 0; }
  int64_t parts() const { return shared() ? group_->size() : 1; }
  // The state under the parameters' names: "mean.NAME", "square.NAME", "steps.NAME". Where it is
  // shared out, this process's elements of each parameter, in a row; the first has all steps.
  NamedTensors state() const;
  // Takes this process's part of a whole state, whose tensors may be rows of their elements. Throws
  // Error naming the tensor where `state` does not fit the parameters.
  void load(const NamedTensors& state, const std::string& path);

 private:
  struct Group {
    double lr = 1;  // a multiple of step()'s
    double weight_decay = 0;
    std::vector<std::string> names = {};
    std::vector<at::Tensor> parameters = {};
    // As the parameters; where they are shared out, this process's elements of each, in a row.
    std::vector<at::Tensor> means = {}, squares = {};
    std::vector<at::Tensor> steps = {};  // scalars
    std::vector<int64_t> firsts = {};    // of each parameter's elements among all
  };
  bool shared() const { return group_ != nullptr; }
  int64_t part_begin(int64_t rank) const { return elements_ * rank / group_->size(); }
  // This process's elements of the parameter or gradient `whole`, whose first is `first` among all.
  at::Tensor part_of(const at::Tensor& whole, int64_t first) const;
  // The elements of all parameters, of which each process gives its own.
  at::Tensor joined(const std::vector<at::Tensor>& parts) const;

  const TrainOptions options_;
  Communicator* group_ = nullptr;  // where the state is shared out
  int64_t elements_ = 0;           // of all parameters
  std::vector<Group> groups_;
  std::set<std::string> buffers_;  // the model's, by name
};

// Copies tensors into the targets of the same names. Throws Error naming the first that is missing,
// unexpected or of another shape; `path` is for the message.
void copy_tensors(const NamedTensors& from, const NamedTensors& to, const std::string& path);

}  // namespace headloom
