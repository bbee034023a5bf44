#include "mixers/mixer.h"

#include "mixers/check.h"

namespace headloom {
namespace {

void check_documents(const Module& module, const Tensor& documents, const Tensor& x) {
  check_ids(module, "documents", documents, x.sym_sizes().slice(0, 2), "[B, T]", x);
}

[[noreturn]] void refuse_documents(const std::string& type) {
  usage_error(type, " mixes the whole sequence and cannot keep packed documents apart.");
}

[[noreturn]] void refuse_both_ways(const std::string& type) {
  usage_error(type, " looks back only, but the model is not causal.");
}

[[noreturn]] void refuse_memory(const std::string& type) {
  usage_error(type, " does not read a memory; cross-attention needs an attention mixer.");
}

}  // namespace

Cost linear_cost(const std::string& part, const std::string& formula,
                 const std::vector<std::shared_ptr<Linear>>& maps) {
  Cost out{.part = part, .formula = formula};
  for (const auto& map : maps) {
    if (!map) continue;
    out.parameters += map->weight.numel() + (map->bias.defined() ? map->bias.numel() : 0);
    out.flops_per_token += 2.0 * static_cast<double>(map->weight.numel());
  }
  return out;
}

Tensor TokenMixer::forward(const Tensor& x, const MixerContext& context) {
  check_features(*this, "x", x, width());
  const Tensor& memory = context.memory;
  if (context.documents.defined()) check_documents(*this, context.documents, x);
  if (context.lengths.defined()) check_lengths(*this, "lengths", context.lengths, x);
  if (memory.defined()) {
    if (!traits_.cross_attention) refuse_memory(type());
    check_features(*this, "memory", memory, width());
    if (memory.sym_size(0) != x.sym_size(0) || memory.device() != x.device()) {
      usage_error(what(), ": memory must have the ", x.sym_size(0), " sequences of x, on ",
                  x.device(), "; it has ", memory.sym_size(0), " on ", memory.device(), ".");
    }
    if (context.documents.defined()) {
      usage_error(what(), ": documents are of x's own positions, expected none beside a memory.");
    }
    if (context.memory_lengths.defined()) {
      check_lengths(*this, "the memory's lengths", context.memory_lengths, memory);
    }
  }
  return run(x, context);
}

Tensor TokenMixer::run(const Tensor& x, const MixerContext& context) {
  if (context.documents.defined() && !traits_.documents) refuse_documents(type());
  return context.state ? next(x, context.state->mixer, context) : compute(x, context);
}

Tensor TokenMixer::extend(const Tensor& x, MixerState& state, const MixerContext& context) {
  check_features(*this, "x", x, width());
  const int64_t seen = state.batch();
  if (seen != 0 && x.size(0) != seen) {
    usage_error(what(), ": x must have the ", seen, " sequences of the state; it is ", x.sizes(),
                ".");
  }
  return next(x, state, context);
}

Tensor TokenMixer::next(const Tensor& x, MixerState& state, const MixerContext& context) {
  const Tensor y = compute_next(x, state, context);
  state.position += x.size(1);
  return y;
}

Tensor TokenMixer::compute_next(const Tensor&, MixerState&, const MixerContext&) {
  usage_error(type(), " reads whole sequences only and has no state for decoding.");
}

MixerState TokenMixer::build_cross_cache(const Tensor&, const Tensor&) { refuse_memory(type()); }

Tensor TokenMixer::extend_cross(const Tensor&, MixerState&) { refuse_memory(type()); }

Tensor ChannelMixer::forward(const Tensor& x, const MixerContext& context) {
  check_features(*this, "x", x, width());
  if (context.documents.defined()) check_documents(*this, context.documents, x);
  return compute(x, context);
}

std::shared_ptr<TokenMixer> TokenMixerSpec::build(const LayerShape& shape) const {
  if (shape.cross && !traits().cross_attention) refuse_memory(type());
  if (shape.causal && !traits().causal) {
    usage_error(type(), " mixes the whole sequence, but the model is causal.");
  }
  if (!shape.causal && !traits().bidirectional) refuse_both_ways(type());
  std::shared_ptr<TokenMixer> built = make(shape);
  built->type_ = type();
  built->width_ = shape.width;
  built->traits_ = traits();
  built->causal_ = shape.causal;
  return built;
}

std::shared_ptr<ChannelMixer> ChannelMixerSpec::build(const LayerShape& shape) const {
  if (!shape.causal && !traits().bidirectional) refuse_both_ways(type());
  std::shared_ptr<ChannelMixer> built = make(shape);
  if (built) {
    built->type_ = type();
    built->width_ = shape.width;
  }
  return built;
}

}  // namespace headloom
