#include "model/layers.h"

#include <algorithm>

#include "mixers/recording.h"
#include "mixers/without_memory.h"
#include "model/activation_checkpoint.h"
#include "model/branches.h"

namespace headloom {
namespace {

// What `spec` builds from a LayerShape or BlockParts; its errors say which layer they are about,
// and the type once.
template <typename SpecType, typename From>
auto built(const SpecType& spec, const From& from, const std::string& place) {
  try {
    return spec.build(from);
  } catch (const UsageError& error) {
    std::string said = error.what();
    const std::string name = spec.type() + ": ";
    if (said.starts_with(name)) said.erase(0, name.size());
    usage_error(place, " (", spec.type(), "): ", said);
  }
}

std::shared_ptr<TokenMixer> built_cross(const LayerConfig& layer, LayerShape shape,
                                        int64_t memory_length, const std::string& place) {
  shape.cross = true;
  shape.short_conv = 0;
  shape.causal = false;  // the whole memory is there from the start
  shape.max_length = memory_length;
  // Without options of its own, cross-attention is a mixer of the layer's kind.
  const TokenMixerSpec& spec = layer.cross ? *layer.cross : *layer.mixer;
  const std::string key = layer.cross ? ".cross" : ".mixer as cross (set cross to another)";
  if (!layer.block->traits().cross_attention) {
    usage_error(place, ".block (", layer.block->type(),
                ") has no place for cross-attention, expected another block.");
  }
  return built(spec, shape, place + key);
}

// What `build` makes of the layer. With tensor parallelism this process's part of it, whose values
// are those of the whole one: random numbers are drawn as one process draws them.
template <typename Build>
auto cut(const LayerShape& shape, const Build& build) {
  if (shape.processes() == 1) return build(shape);
  auto part = [&] {
    const WithoutValues none;
    return build(shape);
  }();
  if (!part || WithoutMemory::on()) return part;
  LayerShape all = shape;
  all.tensor_parallel = nullptr;
  const auto cuts = parameter_cuts(*part);
  const auto whole = named_tensors(*build(all)), own = named_tensors(*part);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < own.size(); ++i) {
    const auto how = cuts.find(own[i].first);
    Tensor value = whole[i].second;
    if (how != cuts.end()) value = how->second.part_of(value, shape.rank(), shape.processes());
    own[i].second.detach().copy_(value);
  }
  return part;
}

// Whether nothing after the token mixer keeps a state, so that it can be left out where nobody
// wants its outputs.
bool ends_without_state(const Layers::Layer& layer) {
  return !layer.cross && !(layer.channel && layer.channel->state_bytes() > 0);
}

}  // namespace

Layers::Layers(Module& owner, const ModelConfig& config, const LayersPlan& plan) : plan_(plan) {
  const auto shared = std::make_shared<std::map<std::string, Tensor>>();
  for (int64_t i = 0; i < plan.depth; ++i) {
    const size_t entry = static_cast<size_t>(i) % plan.list.size();
    const LayerConfig& from = plan.list[entry];
    LayerShape shape = config.shape(i);
    shape.depth = plan.depth;
    shape.max_length = plan.max_length;
    shape.causal = plan.causal;
    shape.shared = shared;
    shape.short_conv = from.block->short_conv;
    const std::string place = str("model.", plan.key, "[", entry, "]");
    Layer layer;
    layer.mixer = cut(shape, [&](const LayerShape& of) {
      auto mixer = built(*from.mixer, of, place + ".mixer");
      if (config.equal_init && of.processes() == 1) equalize(*mixer, of, place + ".mixer");
      return mixer;
    });
    if (plan.memory_length) {
      layer.cross = cut(shape, [&](const LayerShape& of) {
        return built_cross(from, of, *plan.memory_length, place);
      });
    } else if (from.cross && (plan.part.empty() || plan.key == "encoder_layer")) {
      usage_error(place, ".cross is ", from.cross->type(), ", but cross-attention belongs to ",
                  plan.part.empty() ? "kind = \"encoder_decoder\"." : "the decoder, model.layer.");
    }
    layer.channel = cut(shape, [&](const LayerShape& of) {
      return built(*from.channel, of, place + ".channel");
    });
    const BlockParts parts{.shape = shape,
                           .mixer = layer.mixer,
                           .channel = layer.channel,
                           .cross = layer.cross,
                           .dropout = config.dropout,
                           .mixer_type = from.mixer->type()};
    layer.block = built(*from.block, parts, place + ".block");
    owner.register_module("layer" + std::to_string(i), layer.block);
    layers_.push_back(std::move(layer));
  }
  if (config.final_norm) {
    norm_ = owner.register_module(
        "norm", std::make_shared<Norm>(config.norm, config.width, config.norm_eps));
  }
}

std::string Layers::place(size_t layer) const {
  return str(plan_.part, plan_.part.empty() ? "" : ".", "layer", layer);
}

bool Layers::stateful() const {
  return std::all_of(layers_.begin(), layers_.end(),
                     [](const Layer& layer) { return layer.mixer->stateful(); });
}

Tensor Layers::forward(Tensor x, const MixerContext& context,
                       std::vector<LayerState>* states) const {
  MixerContext own = context;
  for (size_t i = 0; i < layers_.size(); ++i) {
    own.layer = plan_.first + static_cast<int64_t>(i);
    const int64_t count = states == nullptr ? 0 : x.size(1);
    if (states != nullptr) own.state = &(*states)[i];
    own.newest = i + 1 == layers_.size() && ends_without_state(layers_[i]) ? context.newest : std::nullopt;
    // A layer sums its own gradients of the memory, so that checkpointing changes no order.
    if (context.memory.defined()) own.memory = at::alias(context.memory);
    const std::shared_ptr<Block>& block = layers_[i].block;
    if (context.auxiliary != nullptr && context.auxiliary->measures_branches) {
      context.auxiliary->branches[own.layer].residual = root_mean_square(x);
    }
    if (context.recording != nullptr) {
      context.recording->enter(place(i));
      context.recording->put("input", x);
    }
    if (watcher_ != nullptr) watcher_->begin(own.layer, /*backward=*/false);
    const bool again = context.activation_checkpointing && context.recording == nullptr &&
                       at::GradMode::is_enabled() && x.requires_grad();
    x = again ? checkpointed(block, x, own) : block->forward(x, own);
    if (states != nullptr) own.state->channel.position += count;
    if (watcher_ != nullptr && x.requires_grad()) {
      x.register_hook([watcher = watcher_, layer = own.layer](const Tensor&) {
        watcher->begin(layer, /*backward=*/true);
      });
    }
    if (context.recording != nullptr) context.recording->put("output", x);
  }
  x = newest_of(x, context);
  return norm_ ? norm_->forward(x) : x;
}

}  // namespace headloom
