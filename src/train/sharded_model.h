// A model whose parameters the processes share out: each layer's are whole while it computes.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "distributed/parameter_shards.h"
#include "model/model.h"
#include "train/config.h"

namespace headloom {

// With train.shard = "parameters" (ZeRO-3, Rajbhandari et al. 2020; FSDP, Zhao et al. 2023) a
// layer's parameters are collected before its forward and its backward, while the layer before it
// computes, and are freed after it. What does not belong to one layer alone (embeddings, heads, the
// final norm, what layers share) is whole throughout a step. With train.shard = "optimizer" all
// parameters are whole always.
class ShardedModel : private LayerWatcher {
 public:
  // nullptr where `options` share nothing out, or one process is alone. `model` and `group` must
  // outlive it.
  static std::unique_ptr<ShardedModel> make(Model& model, const TrainOptions& options,
                                            Communicator& group);
  ~ShardedModel() override;

  ParameterShards& shards() { return shards_; }
  // How many of a model's parameters are whole at a time with train.shard = "parameters": those of
  // no single layer, and two layers' that are the largest.
  static double whole_at_a_time(const Model& model);

  // While one lives the model can compute. nullptr stands for a model that nobody shares.
  class Use {
   public:
    explicit Use(ShardedModel* model);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    ShardedModel* const model_;
  };

 private:
  ShardedModel(Model& model, bool frees, Communicator& group);
  void begin(int64_t layer, bool backward) override;

  Model& model_;
  // Of each layer, its unit in shards_; nothing for a layer that has no parameters of its own.
  std::vector<std::optional<size_t>> unit_of_;
  ParameterShards shards_;
};

}  // namespace headloom
