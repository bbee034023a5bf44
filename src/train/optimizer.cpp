#include "train/optimizer.h"

#include <ATen/ATen.h>
#include <fnmatch.h>

#include <algorithm>
#include <cmath>
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

std::string parameter_of(const std::string& name) {
  for (const std::string_view kind : {"mean.", "square."}) {
    if (name.starts_with(kind)) return name.substr(kind.size());
  }
  return name;
}

// Copies the elements from `first` on that `parts` have in a row to the row `to`.
static void copy_elements(const std::vector<Tensor>& parts, int64_t first, const Tensor& to) {
  const Tensor target = to.detach();
  int64_t begin = 0;  // of the part
  for (const Tensor& part : parts) {
    const int64_t end = begin + part.numel();
    const int64_t low = std::max(begin, first), high = std::min(end, first + target.numel());
    if (low < high) {
      target.narrow(0, low - first, high - low)
          .copy_(part.reshape(-1).narrow(0, low - begin, high - low));
    }
    begin = end;
  }
}

// The whole of a tensor that was cut. Throws Error where the parts do not fit each other.
static Tensor joined(const StoredTensor& stored, const std::string& path, const std::string& name) {
  int64_t own = 0;
  for (const int64_t segment : stored.segments) own += segment;
  for (const Tensor& part : stored.parts) {
    const bool fits = stored.dim < part.dim() && part.sizes() == stored.parts[0].sizes() &&
                      part.size(stored.dim) == own;
    require(fits, path, ": tensor '", name, "' has a part of the shape ", part.sizes(),
            ", which state.json does not say.");
  }
  return ParameterCut{.dim = stored.dim, .segments = stored.segments}.joined(stored.parts);
}

void copy_tensors(const StoredTensors& from,
                  const std::vector<std::pair<std::string, CopyTarget>>& to,
                  const std::string& path) {
  std::map<std::string, StoredTensor> present(from.begin(), from.end());
  for (const auto& [name, target] : to) {
    auto found = present.find(name);
    if (found == present.end()) found = present.find(former_name(name));
    require(found != present.end(), path, ": has no tensor '", name, "' that the model expects.");
    std::vector<Tensor> parts = found->second.parts;
    if (!found->second.segments.empty()) parts = {joined(found->second, path, name)};
    int64_t elements = 0;
    for (const Tensor& part : parts) elements += part.numel();
    const bool row = parts[0].dim() == 1 && elements == c10::multiply_integers(target.shape);
    const at::IntArrayRef shape = target.shape;
    require(row || (parts.size() == 1 && parts[0].sizes() == shape), path, ": tensor '", name,
            "' has shape ", parts.size() == 1 ? parts[0].sizes() : at::IntArrayRef(elements),
            ", expected ", shape, ".");
    if (target.part_of || target.values.sizes() == shape) {
      const Tensor whole = (parts.size() == 1 ? parts[0] : at::cat(parts)).view(target.shape);
      target.values.detach().copy_(target.part_of ? target.part_of(whole) : whole);
    } else {
      copy_elements(parts, target.first, target.values);
    }
    present.erase(found);
  }
  require(present.empty(), path, ": has a tensor '", present.empty() ? "" : present.begin()->first,
          "' that the model does not know.");
}

CopyTarget copy_target(const std::string& name, const Tensor& values, const CutModel* cut) {
  CopyTarget out{.values = values, .shape = values.sizes().vec()};
  if (cut != nullptr && cut->is_cut(name)) {
    out.shape = cut->whole_shape(name, values);
    out.part_of = [cut, name](const Tensor& whole) { return cut->part_of(name, whole); };
  }
  return out;
}

void copy_tensors(const StoredTensors& from, const NamedTensors& to, const std::string& path,
                  const CutModel* cut) {
  std::vector<std::pair<std::string, CopyTarget>> targets;
  for (const auto& [name, tensor] : to) {
    targets.emplace_back(name, copy_target(name, tensor, cut));
  }
  copy_tensors(from, targets, path);
}

AdamW::AdamW(const torch::nn::Module& model, const TrainOptions& options, ParameterShards* shards,
             const CutModel* cut)
    : options_(options), shards_(shards), cut_(cut) {
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
    group.whole.push_back(p);
    group.parameters.push_back(shards_ != nullptr ? shards_->own(p) : p);
    group.steps.push_back(at::zeros({}, p.options().dtype(at::kFloat)));
  }
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) continue;
    std::string names;
    for (const auto& item : model.named_parameters()) {
      if (names.size() < 120) names += (names.empty() ? "" : ", ") + item.key();
    }
    usage_error(
        "'train.group[", i, "].parameters' is \"", options.groups[i].parameters,
        "\", which names no parameter that is in no earlier group; the model's parameters are ",
        names, ", ...");
  }
}

void AdamW::make_moments(Group& group) {
  if (!group.means.empty()) return;
  for (const Tensor& p : group.parameters) {
    group.means.push_back(at::zeros_like(p.detach()));
    group.squares.push_back(at::zeros_like(p.detach()));
  }
}

Communicator* AdamW::sharing() const {
  if (shards_ != nullptr) return &shards_->group();
  return cut_ != nullptr ? &cut_->layers() : nullptr;
}

double AdamW::gradient_norm(const std::vector<std::pair<std::string, Tensor>>& named) const {
  if (cut_ != nullptr) return cut_->gradient_norm(named);
  std::vector<Tensor> gradients;
  for (const auto& [name, gradient] : named) gradients.push_back(gradient);
  const Tensor norms = at::stack(at::_foreach_norm(gradients));
  if (shards_ == nullptr) return at::linalg_vector_norm(norms).item<double>();
  const Tensor squares = norms.to(at::kDouble).square().sum();
  shards_->group().sum({squares});
  return std::sqrt(squares.item<double>());
}

double AdamW::step(double lr) {
  at::NoGradGuard no_grad;
  std::vector<Tensor> gradients;
  std::vector<std::pair<std::string, Tensor>> named;
  for (const Group& group : groups_) {
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      const Tensor gradient = group.parameters[i].grad();
      if (!gradient.defined()) continue;
      gradients.push_back(gradient);
      named.emplace_back(group.names[i], gradient);
    }
  }
  if (gradients.empty()) return 0;
  const double norm = gradient_norm(named);
  if (options_.clip > 0 && norm > options_.clip) {
    at::_foreach_mul_(gradients, options_.clip / (norm + 1e-6));
  }
  for (Group& group : groups_) {
    make_moments(group);
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
      if (parameter.numel() == 0) continue;  // other processes have its elements
      p.push_back(parameter);
      g.push_back(gradient);
      m.push_back(group.means[i]);
      v.push_back(group.squares[i]);
      s.push_back(group.steps[i]);
    }
    if (!counted.empty()) at::_foreach_add_(counted, 1);
    if (p.empty()) continue;
    at::_fused_adamw_(p, g, m, v, {}, s, group.lr * lr, options_.beta1, options_.beta2,
                      group.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false);
  }
  if (shards_ != nullptr) shards_->refresh();
  return norm;
}

NamedTensors AdamW::state() const {
  NamedTensors out;
  // A copy of each group: before the first step zeros stand for the moments, which are made only
  // when they are needed.
  for (Group group : groups_) {
    make_moments(group);
    for (size_t i = 0; i < group.names.size(); ++i) {
      if (group.means[i].numel() > 0) {
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

void AdamW::load(const StoredTensors& state, const std::string& path) {
  // In earlier versions some of the buffers were parameters, which no gradient reached.
  StoredTensors own = state;
  std::erase_if(own, [&](const auto& item) {
    return buffers_.contains(item.first.substr(item.first.find('.') + 1));
  });
  std::vector<std::pair<std::string, CopyTarget>> targets;
  for (Group& group : groups_) {
    make_moments(group);
    for (size_t i = 0; i < group.names.size(); ++i) {
      const auto add = [&](const std::string& kind, const Tensor& values) {
        const std::string name = kind + group.names[i];
        CopyTarget target = copy_target(name, values, cut_);
        if (shards_ != nullptr) {
          target.shape = group.whole[i].sizes().vec();
          target.first = shards_->first_of(group.whole[i]);
        }
        targets.emplace_back(name, std::move(target));
      };
      add("mean.", group.means[i]);
      add("square.", group.squares[i]);
      const std::string steps = "steps." + group.names[i];
      targets.emplace_back(steps, copy_target(steps, group.steps[i], nullptr));
    }
  }
  copy_tensors(own, targets, path);
}

}  // namespace headloom
