// A model whose layers the processes share out by heads and hidden units (train.tensor_parallel).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "distributed/communicator.h"
#include "model/model.h"
#include "storage/safetensors.h"
#include "train/config.h"

namespace headloom {

// T = train.tensor_parallel, S = train.context_parallel. Ranks with equal r / T (rounded down)
// share the layers and read the same data. Ranks with equal r % T hold the same parameters and
// share the batch; of these, every S in a row share each sequence.
struct RankGrid {
  Communicator& layers;   // those that share out the layers
  Communicator& context;  // those that share the positions of the same sequences
  Communicator& data;     // those that share the batch, these in a row

  // `alone` is a process without others. Throws UsageError where T times S does not divide the
  // number of processes.
  static RankGrid make(const TrainOptions& options, Communicator& all, Communicator& alone);
  // Equal parts of the batch.
  int64_t shares() const { return data.size() / context.size(); }
};

// What the mixers of such a model need to know of `layers`, which must outlive it; null where one
// process has all.
std::shared_ptr<const TensorParallel> tensor_parallel(Communicator& layers);

// The same of `context`.
std::shared_ptr<const ContextParallel> context_parallel(Communicator& context);

// What there is to know and to do about the parts of a model's parameters.
class CutModel {
 public:
  // `model` is built with ModelConfig::tensor_parallel among `layers`, which must outlive this.
  CutModel(const Model& model, Communicator& layers);

  Communicator& layers() const { return layers_; }
  // This process's part of the whole tensor of a parameter's name, or of "mean." and "square." and
  // that name; the tensor itself where it is not cut.
  Tensor part_of(const std::string& name, const Tensor& whole) const;
  std::vector<int64_t> whole_shape(const std::string& name, const Tensor& own) const;
  bool is_cut(const std::string& name) const { return cut(name) != nullptr; }
  const std::map<std::string, ParameterCut>& cuts() const { return cuts_; }
  // What this process writes to a checkpoint: its part of what is cut, and of other tensors, which
  // all have, an equal part of the elements in a row. Shares memory with `own`.
  NamedTensors to_store(const NamedTensors& own) const;
  // After a backward: adds up the gradients of what mixers read whole, of which every process has
  // those of its own heads and units.
  void sum_gradients() const;
  // The norm of the whole gradient.
  double gradient_norm(const std::vector<std::pair<std::string, Tensor>>& own) const;

 private:
  const ParameterCut* cut(const std::string& name) const;

  Communicator& layers_;
  std::map<std::string, ParameterCut> cuts_;
  std::vector<Tensor> read_whole_;
};

}  // namespace headloom
