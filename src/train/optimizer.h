// AdamW (Loshchilov & Hutter 2019) through ATen's fused kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <set>

#include "distributed/parameter_shards.h"
#include "storage/safetensors.h"
#include "train/config.h"
#include "train/cut_model.h"

namespace headloom {

// With ParameterShards each process keeps the two moments of its own part of every parameter alone,
// and updates that part (ZeRO-1, Rajbhandari et al. 2020). Parameters that are whole then get the
// parts of the other processes.
class AdamW {
 public:
  // `shards` or `cut`, of which one is null, must outlive it; without either this process has all
  // parameters whole. Throws UsageError for a group of options.groups that names no parameter.
  AdamW(const torch::nn::Module& model, const TrainOptions& options,
        ParameterShards* shards = nullptr, const CutModel* cut = nullptr);
  // Clips, updates and clears the gradients: the parameters', or those of shards->own(). `lr` is
  // that of parameters without a group of their own. Returns the whole gradient's norm before
  // clipping.
  double step(double lr);
  ParameterShards* shards() const { return shards_; }
  const CutModel* cut() const { return cut_; }
  // The state is in parts(), of which this process has part(); a single part is the whole state.
  int64_t part() const { return sharing() != nullptr ? sharing()->rank() : 0; }
  int64_t parts() const { return sharing() != nullptr ? sharing()->size() : 1; }
  // The state under the parameters' names: "mean.NAME", "square.NAME", "steps.NAME". Where it is
  // shared out, this process's elements of each parameter, in a row; the first has all steps.
  NamedTensors state() const;
  // Takes this process's part of a whole state. Throws Error naming the tensor where `state` does
  // not fit the parameters.
  void load(const StoredTensors& state, const std::string& path);

 private:
  struct Group {
    double lr = 1;  // a multiple of step()'s
    double weight_decay = 0;
    std::vector<std::string> names = {};
    std::vector<at::Tensor> whole = {};  // parameters, which need not have memory
    // What this process updates: the parameters, or its parts of them. The moments are made when
    // they are first needed, after a whole model may have been freed.
    std::vector<at::Tensor> parameters = {}, means = {}, squares = {};
    std::vector<at::Tensor> steps = {};  // scalars
  };
  static void make_moments(Group& group);
  double gradient_norm(const std::vector<std::pair<std::string, at::Tensor>>& gradients) const;
  // The processes that have parts of the state; null: this one has all.
  Communicator* sharing() const;

  const TrainOptions options_;
  ParameterShards* const shards_;
  const CutModel* const cut_;
  std::vector<Group> groups_;
  std::set<std::string> buffers_;  // the model's, by name
};

// The name of the parameter whose moment state() names "mean.NAME" or "square.NAME"; any other name
// as it is.
std::string parameter_of(const std::string& name);

// What a stored tensor is copied to: all of it, the elements from `first` on in a row, or what
// `part_of` takes of it.
struct CopyTarget {
  at::Tensor values;
  std::vector<int64_t> shape;  // of the whole tensor
  int64_t first = 0;
  std::function<at::Tensor(const at::Tensor& whole)> part_of = {};
};
// `values` are all of the tensor `name`, or this process's part of it where `cut` has cut that.
CopyTarget copy_target(const std::string& name, const at::Tensor& values, const CutModel* cut);

// Copies tensors into the targets of the same names. Throws Error naming the first that is missing,
// unexpected or of another shape; `path` is for the message.
void copy_tensors(const StoredTensors& from,
                  const std::vector<std::pair<std::string, CopyTarget>>& to,
                  const std::string& path);
// The same of tensors that are whole, or cut by `cut`.
void copy_tensors(const StoredTensors& from, const NamedTensors& to, const std::string& path,
                  const CutModel* cut = nullptr);

}  // namespace headloom
