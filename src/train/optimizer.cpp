#include "train/optimizer.h"

#include <ATen/ATen.h>
#include <fnmatch.h>

#include <algorithm>
#include <map>

#include "mixers/nn.h"

namespace headloom {

using at::Tensor;

// The name that a tensor has in checkpoints written before it got this one; "" for none.
static std::string former_name(const std::string& name) {
  // RWKV's logarithms of the rates were called as the rates are.
  constexpr std::string_view kNow = "mixer.time_decay", kThen = "mixer.decay";
  if (!name.ends_with(kNow)) return "";
  return name.substr(0, name.size() - kNow.size()) + std::string(kThen);
}

void copy_tensors(const NamedTensors& from, const NamedTensors& to, const std::string& path) {
  std::map<std::string, Tensor> present(from.begin(), from.end());
  for (const auto& [name, target] : to) {
    auto found = present.find(name);
    if (found == present.end()) found = present.find(former_name(name));
    require(found != present.end(), path, ": has no tensor '", name, "' that the model expects.");
    require(found->second.sizes() == target.sizes(), path, ": tensor '", name, "' has shape ",
            found->second.sizes(), ", expected ", target.sizes(), ".");
    target.detach().copy_(found->second);
    present.erase(found);
  }
  require(present.empty(), path, ": has a tensor '", present.empty() ? "" : present.begin()->first,
          "' that the model does not know.");
}

AdamW::AdamW(const torch::nn::Module& model, const TrainOptions& options) : options_(options) {
  const std::set<std::string> decayed = decayed_parameters(model);
  for (const auto& item : model.named_buffers()) buffers_.insert(item.key());
  std::vector<bool> used(options.groups.size());
  // Those without a group of their own: with weight decay and without.
  groups_ = {{.weight_decay = options.weight_decay}, {.weight_decay = 0}};
  std::map<std::pair<double, double>, size_t> places;  // of own rates and decays in groups_
  for (const auto& item : model.named_parameters()) {
    const Tensor& p = item.value();
    size_t index = decayed.contains(item.key()) ? 0 : 1;
    for (size_t i = 0; i < options.groups.size(); ++i) {
      const ParameterGroup& own = options.groups[i];
      if (::fnmatch(own.parameters.c_str(), item.key().c_str(), 0) != 0) continue;
      used[i] = true;
      const double decay = own.weight_decay.value_or(groups_[index].weight_decay);
      const auto [place, fresh] = places.try_emplace({own.lr, decay}, groups_.size());
      if (fresh) groups_.push_back({.lr = own.lr, .weight_decay = decay});
      index = place->second;
      break;
    }
    Group& group = groups_[index];
    group.names.push_back(item.key());
    group.parameters.push_back(p);
    group.means.push_back(at::zeros_like(p));
    group.squares.push_back(at::zeros_like(p));
    group.steps.push_back(at::zeros({}, p.options().dtype(at::kFloat)));
  }
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) continue;
    std::string names;
    for (const auto& item : model.named_parameters()) {
      if (names.size() < 120) names += (names.empty() ? "" : ", ") + item.key();
    }
    usage_error(
        "'train.group[", i + 1, "].parameters' is \"", options.groups[i].parameters,
        "\", which names no parameter that is in no earlier group; the model's parameters are ",
        names, ", ...");
  }
}

double AdamW::step(double lr) {
  at::NoGradGuard no_grad;
  std::vector<Tensor> gradients;
  for (const Group& group : groups_) {
    for (const Tensor& p : group.parameters) {
      if (p.grad().defined()) gradients.push_back(p.grad());
    }
  }
  if (gradients.empty()) return 0;
  const double norm =
      at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients))).item<double>();
  if (options_.clip > 0 && norm > options_.clip) {
    at::_foreach_mul_(gradients, options_.clip / (norm + 1e-6));
  }
  for (Group& group : groups_) {
    std::vector<Tensor> p, g, m, v, s;
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      const Tensor& parameter = group.parameters[i];
      Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      // The fused kernel walks raw memory: a gradient laid out unlike its parameter would be
      // misread.
      if (gradient.strides() != parameter.strides()) {
        gradient = at::empty_like(parameter).copy_(gradient);
      }
      p.push_back(parameter);
      g.push_back(gradient);
      m.push_back(group.means[i]);
      v.push_back(group.squares[i]);
      s.push_back(group.steps[i]);
      parameter.mutable_grad() = Tensor();
    }
    if (p.empty()) continue;
    at::_foreach_add_(s, 1);
    at::_fused_adamw_(p, g, m, v, {}, s, group.lr * lr, options_.beta1, options_.beta2,
                      group.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false);
  }
  return norm;
}

NamedTensors AdamW::state() const {
  NamedTensors out;
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.names.size(); ++i) {
      out.emplace_back("mean." + group.names[i], group.means[i]);
      out.emplace_back("square." + group.names[i], group.squares[i]);
      out.emplace_back("steps." + group.names[i], group.steps[i]);
    }
  }
  return out;
}

void AdamW::load(const NamedTensors& state, const std::string& path) {
  // Runs of before had what is a buffer now as a parameter, which no gradient reached.
  NamedTensors own = state;
  std::erase_if(own, [&](const auto& item) {
    return buffers_.contains(item.first.substr(item.first.find('.') + 1));
  });
  copy_tensors(own, this->state(), path);
}

}  // namespace headloom
