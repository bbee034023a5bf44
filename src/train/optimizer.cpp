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

AdamW::AdamW(const torch::nn::Module& model, const TrainOptions& options, Communicator* group)
    : options_(options),
      group_(options.shard == "optimizer" && group != nullptr && group->size() > 1 ? group
                                                                                   : nullptr) {
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
    group.steps.push_back(at::zeros({}, p.options().dtype(at::kFloat)));
  }
  for (Group& group : groups_) {
    for (const Tensor& p : group.parameters) {
      group.firsts.push_back(elements_);
      elements_ += p.numel();
    }
  }
  for (Group& group : groups_) {
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      const Tensor own = part_of(group.parameters[i].detach(), group.firsts[i]);
      group.means.push_back(at::zeros_like(own));
      group.squares.push_back(at::zeros_like(own));
    }
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

Tensor AdamW::part_of(const Tensor& whole, int64_t first) const {
  if (!shared()) return whole;
  const int64_t begin = part_begin(group_->rank()), end = part_begin(group_->rank() + 1);
  const int64_t low = std::clamp<int64_t>(begin - first, 0, whole.numel());
  const int64_t high = std::clamp<int64_t>(end - first, low, whole.numel());
  return whole.view(-1).narrow(0, low, high - low);
}

Tensor AdamW::joined(const std::vector<Tensor>& parts) const {
  // All give as much: parts differ by one element.
  const int64_t most = (elements_ + group_->size() - 1) / group_->size();
  const Tensor own = at::cat(parts);
  const Tensor padded = at::zeros({most}, own.options());
  padded.narrow(0, 0, own.numel()).copy_(own);
  std::vector<Tensor> all = group_->gather(padded);
  for (int64_t i = 0; i < group_->size(); ++i) {
    Tensor& part = all[static_cast<size_t>(i)];
    part = part.narrow(0, 0, part_begin(i + 1) - part_begin(i));
  }
  return at::cat(all);
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
    std::vector<Tensor> p, g, m, v, s, counted;
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      const Tensor& parameter = group.parameters[i];
      Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      // The fused kernel walks raw memory: a gradient laid out unlike its parameter would be
      // misread.
      if (gradient.strides() != parameter.strides()) {
        gradient = at::empty_like(parameter).copy_(gradient);
      }
      parameter.mutable_grad() = Tensor();
      counted.push_back(group.steps[i]);
      if (group.means[i].numel() == 0) continue;  // another process's
      p.push_back(part_of(parameter, group.firsts[i]));
      g.push_back(part_of(gradient, group.firsts[i]));
      m.push_back(group.means[i]);
      v.push_back(group.squares[i]);
      s.push_back(group.steps[i]);
    }
    if (!counted.empty()) at::_foreach_add_(counted, 1);
    if (p.empty()) continue;
    at::_fused_adamw_(p, g, m, v, {}, s, group.lr * lr, options_.beta1, options_.beta2,
                      group.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false);
  }
  if (!shared()) return norm;
  std::vector<Tensor> parts;
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      parts.push_back(part_of(group.parameters[i], group.firsts[i]));
    }
  }
  const Tensor all = joined(parts);
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      const Tensor& p = group.parameters[i];
      p.copy_(all.narrow(0, group.firsts[i], p.numel()).view(p.sizes()));
    }
  }
  return norm;
}

NamedTensors AdamW::state() const {
  NamedTensors out;
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.names.size(); ++i) {
      if (!shared() || group.means[i].numel() > 0) {
        out.emplace_back("mean." + group.names[i], group.means[i]);
        out.emplace_back("square." + group.names[i], group.squares[i]);
      }
      if (part() == 0) {
        out.emplace_back("steps." + group.names[i], group.steps[i]);
      }
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
  NamedTensors targets;
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.names.size(); ++i) {
      const auto whole = [&](const Tensor& kept) {
        return shared() ? at::empty_like(group.parameters[i]) : kept;
      };
      targets.emplace_back("mean." + group.names[i], whole(group.means[i]));
      targets.emplace_back("square." + group.names[i], whole(group.squares[i]));
      targets.emplace_back("steps." + group.names[i], group.steps[i]);
    }
  }
  std::map<std::string, Tensor> target_of(targets.begin(), targets.end());
  for (auto& [name, tensor] : own) {
    const Tensor& target = target_of[name];
    if (target.defined() && tensor.dim() == 1 && tensor.numel() == target.numel()) {
      tensor = tensor.view(target.sizes());
    }
  }
  copy_tensors(own, targets, path);
  if (!shared()) return;
  auto target = targets.begin();
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.names.size(); ++i, target += 3) {
      group.means[i].copy_(part_of(target[0].second.detach(), group.firsts[i]));
      group.squares[i].copy_(part_of(target[1].second.detach(), group.firsts[i]));
    }
  }
}

}  // namespace headloom
