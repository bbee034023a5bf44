#include "train/sharded_model.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/platform.h"

namespace headloom {
namespace {

using Impl = const at::TensorImpl*;

// For each layer of the model the parameters that it alone computes with. `rest` gets the others.
std::vector<std::vector<Tensor>> parameters_by_layer(const Model& model,
                                                     std::vector<Tensor>& rest) {
  std::map<Impl, std::set<size_t>> users;
  size_t layers = 0;
  for (const Layers* stack : model.stacks()) {
    for (const Layers::Layer& layer : stack->all()) {
      for (const Tensor& t : layer.block->used_tensors()) {
        users[t.unsafeGetTensorImpl()].insert(layers);
      }
      ++layers;
    }
  }
  std::vector<std::vector<Tensor>> out(layers);
  for (const Tensor& p : model.parameters()) {
    const std::set<size_t>& by = users[p.unsafeGetTensorImpl()];
    (by.size() == 1 ? out[*by.begin()] : rest).push_back(p);
  }
  return out;
}

// The first unit is what belongs to no single layer.
std::vector<std::vector<Tensor>> units_of(const Model& model,
                                          std::vector<std::optional<size_t>>& unit_of) {
  std::vector<std::vector<Tensor>> units(1);
  for (std::vector<Tensor>& layer : parameters_by_layer(model, units[0])) {
    unit_of.emplace_back();
    if (layer.empty()) continue;
    unit_of.back() = units.size();
    units.push_back(std::move(layer));
  }
  return units;
}

}  // namespace

std::unique_ptr<ShardedModel> ShardedModel::make(Model& model, const TrainOptions& options,
                                                 Communicator& group) {
  if (options.shard == "none" || group.size() == 1) return nullptr;
  return std::unique_ptr<ShardedModel>(
      new ShardedModel(model, options.shard == "parameters", group));
}

double ShardedModel::whole_at_a_time(const Model& model) {
  const auto count = [](const std::vector<Tensor>& parameters) {
    double sum = 0;
    for (const Tensor& p : parameters) sum += static_cast<double>(p.numel());
    return sum;
  };
  std::vector<Tensor> rest;
  double largest = 0;
  for (const auto& layer : parameters_by_layer(model, rest)) {
    largest = std::max(largest, count(layer));
  }
  return count(rest) + 2 * largest;
}

ShardedModel::ShardedModel(Model& model, bool frees, Communicator& group)
    : model_(model), shards_(units_of(model, unit_of_), frees, group) {
  if (!frees) return;
  return_freed_memory();  // of parameters and gradients, among which activations stay
  for (Layers* stack : model_.stacks()) stack->watch(this);
}

ShardedModel::~ShardedModel() {
  for (Layers* stack : model_.stacks()) stack->watch(nullptr);
}

void ShardedModel::begin(int64_t layer, bool backward) {
  const auto unit_of = [&](int64_t l) -> std::optional<size_t> {
    if (l < 0 || l >= static_cast<int64_t>(unit_of_.size())) return std::nullopt;
    return unit_of_[static_cast<size_t>(l)];
  };
  const std::optional<size_t> own = unit_of(layer);
  for (size_t unit = 1; unit < shards_.size(); ++unit) {
    if (unit != own && !shards_.released(unit)) shards_.release(unit);
  }
  if (own && shards_.released(*own)) shards_.gather(*own);
  const std::optional<size_t> next = unit_of(backward ? layer - 1 : layer + 1);
  if (next) shards_.request(*next);
}

ShardedModel::Use::Use(ShardedModel* model) : model_(model) {
  if (model_ != nullptr && model_->shards_.frees()) model_->shards_.gather(0);
}

ShardedModel::Use::~Use() {
  if (model_ != nullptr && model_->shards_.frees()) model_->shards_.release();
}

}  // namespace headloom
