#include "train/cut_model.h"

#include <ATen/ATen.h>

#include <cmath>
#include <set>

#include "distributed/parameter_shards.h"
#include "train/optimizer.h"

namespace headloom {
namespace {

// The parameters of the model's mixers that are not cut.
std::vector<Tensor> uncut_of_mixers(const Model& model) {
  std::vector<Tensor> out;
  std::set<const at::TensorImpl*> seen;
  const auto add = [&](const auto& mixer) {
    if (!mixer) return;
    const auto cuts = parameter_cuts(*mixer);
    for (const auto& item : mixer->named_parameters()) {
      if (cuts.contains(item.key())) continue;
      if (seen.insert(item.value().unsafeGetTensorImpl()).second) out.push_back(item.value());
    }
  };
  for (const Layers* stack : model.stacks()) {
    for (const Layers::Layer& layer : stack->all()) {
      add(layer.mixer);
      add(layer.cross);
      add(layer.channel);
    }
  }
  return out;
}

}  // namespace

RankGrid RankGrid::make(const TrainOptions& options, Communicator& all, Communicator& alone) {
  const int64_t t = options.tensor_parallel, s = options.context_parallel, n = all.size();
  const auto check = [&](const char* option, int64_t value, int64_t processes) {
    if (processes % value == 0) return;
    usage_error("'train.", option, "' is ", value, ", which does not divide the ", processes,
                processes == 1 ? " process" : " processes",
                processes == n ? " of this run" : " with the same part of the layers",
                ", expected a divisor.");
  };
  check("tensor_parallel", t, n);
  check("context_parallel", s, n / t);
  std::vector<int64_t> layers, context, data;
  const int64_t own = all.rank();
  for (int64_t r = 0; r < n; ++r) {
    if (r / t == own / t) layers.push_back(r);
    if (r % t != own % t) continue;
    data.push_back(r);
    if (r / (s * t) == own / (s * t)) context.push_back(r);
  }
  const auto part = [&](const char* name, const std::vector<int64_t>& ranks) -> Communicator& {
    return ranks.size() == 1 ? alone : all.part(name, ranks);
  };
  return {.layers = part("layers", layers),
          .context = part("context", context),
          .data = t == 1 ? all : part("data", data)};
}

std::shared_ptr<const TensorParallel> tensor_parallel(Communicator& layers) {
  if (layers.size() == 1) return nullptr;
  return std::make_shared<TensorParallel>(
      TensorParallel{.size = layers.size(), .rank = layers.rank(), .sum = [&](const Tensor& t) {
                       layers.sum({t});
                     }});
}

std::shared_ptr<const ContextParallel> context_parallel(Communicator& context) {
  if (context.size() == 1) return nullptr;
  return std::make_shared<ContextParallel>(ContextParallel{
      .size = context.size(),
      .rank = context.rank(),
      .sum = [&](const Tensor& t) { context.sum({t}); },
      .gather = [&](const Tensor& own) { return context.gather(own); },
      .start_shift = [&](const Tensor& own,
                         const Tensor& other) { return context.start_shift(own, other); }});
}

CutModel::CutModel(const Model& model, Communicator& layers)
    : layers_(layers), cuts_(parameter_cuts(model)), read_whole_(uncut_of_mixers(model)) {}

const ParameterCut* CutModel::cut(const std::string& name) const {
  const auto found = cuts_.find(parameter_of(name));
  return found != cuts_.end() ? &found->second : nullptr;
}

Tensor CutModel::part_of(const std::string& name, const Tensor& whole) const {
  const ParameterCut* const how = cut(name);
  return how == nullptr ? whole : how->part_of(whole, layers_.rank(), layers_.size());
}

std::vector<int64_t> CutModel::whole_shape(const std::string& name, const Tensor& own) const {
  const ParameterCut* const how = cut(name);
  return how == nullptr ? own.sizes().vec() : how->whole_shape(own.sizes(), layers_.size());
}

NamedTensors CutModel::to_store(const NamedTensors& own) const {
  NamedTensors out;
  for (const auto& [name, tensor] : own) {
    if (tensor.dim() == 0 && layers_.rank() != 0) continue;
    const bool whole = is_cut(name) || tensor.dim() == 0;
    const Tensor stored = whole ? tensor : owned_elements(tensor, layers_.rank(), layers_.size());
    if (stored.numel() > 0) out.emplace_back(name, stored);
  }
  return out;
}

void CutModel::sum_gradients() const {
  std::vector<Tensor> gradients;
  for (const Tensor& p : read_whole_) {
    if (p.grad().defined()) gradients.push_back(p.grad());
  }
  layers_.sum(gradients);
}

double CutModel::gradient_norm(const std::vector<std::pair<std::string, Tensor>>& own) const {
  const Tensor squares = at::zeros({2}, at::kDouble);
  for (const auto& [name, gradient] : own) {
    squares[is_cut(name) ? 0 : 1] += at::linalg_vector_norm(gradient).to(at::kDouble).square();
  }
  // What is not cut is the same everywhere: the first process's counts.
  const std::vector<Tensor> all = layers_.gather(squares);
  Tensor sum = all[0][1].clone();
  for (const Tensor& one : all) sum += one[0];
  return std::sqrt(sum.item<double>());
}

}  // namespace headloom
