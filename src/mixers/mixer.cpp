#include "mixers/mixer.h"

#include "core/shell.h"
#include "core/sizes.h"
#include "mixers/check.h"
#include "ops/causal_conv1d/op.h"

namespace headloom {
namespace {

void check_documents(const Module& module, const Tensor& documents, const Tensor& x) {
  check_ids(module, "documents", documents, x.sym_sizes().slice(0, 2), "[B, T]", x);
}

[[noreturn]] void refuse_documents(const std::string& type) {
  usage_error(type,
              ": documents are packed in a sequence, all of which it mixes, expected none (in a "
              "configuration: task.separate_documents = false).");
}

[[noreturn]] void refuse_both_ways(const std::string& type) {
  usage_error(type, " looks back only, but the model is not causal.");
}

[[noreturn]] void refuse_tensor_parallel(const std::string& type, const char* what,
                                         int64_t processes) {
  usage_error(type, " cannot share out its ", what, ", but 'train.tensor_parallel' is ", processes,
              ", expected 1 (", program_name(), " list mixers says which can).");
}

void check_context_parallel(const LayerShape& shape, const std::string& type, bool can) {
  if (!shape.context_parallel || can) return;
  usage_error(type,
              " cannot share out the positions of a sequence, but 'train.context_parallel' is ",
              shape.context_parallel->size, ", expected 1 (", program_name(),
              " list mixers says which can).");
}

[[noreturn]] void refuse_memory(const std::string& type) {
  usage_error(type, " does not read a memory; cross-attention needs an attention mixer.");
}

[[noreturn]] void refuse_state(const std::string& type) {
  usage_error(type, " has no state for decoding: it reads whole sequences only.");
}

// What `make` makes. Its refusals begin with the mixer's name.
template <typename Make>
auto made(const std::string& type, const Make& make) {
  try {
    return make();
  } catch (const UsageError& error) {
    const std::string said = error.what();
    if (said.starts_with(type)) throw;
    usage_error(type, ": ", said);
  }
}

// A shape that was filled in code; a model's come from its checked configuration.
void check_shape(const std::string& type, const LayerShape& shape) {
  const auto check = [&](const char* name, int64_t value, int64_t low) {
    if (value >= low && value <= kLargestSize) return;
    usage_error(type, ": the layer's ", name, " is ", value, ", expected ", low, " to ",
                kLargestSize, ".");
  };
  check("width", shape.width, 1);
  check("layer", shape.layer, 0);
  check("depth", shape.depth, 1);
  check("max_length", shape.max_length, 1);
  check("short_conv", shape.short_conv, 0);
  if (!(shape.init_std > 0 && std::isfinite(shape.init_std))) {
    usage_error(type, ": the layer's init_std is ", shape.init_std,
                ", expected a finite number above 0.");
  }
  made(type, [&] { check_fields(shape.position, "position"); });
  const std::string& position = shape.position.type;
  if (shape.alone && (position == "learned" || position == "sinusoidal")) {
    usage_error(type, ": position is \"", position,
                "\", which a model adds to its embedding, expected rope, alibi or none for a mixer "
                "outside of a model.");
  }
}

}  // namespace

int64_t LayerShape::share(const char* option, int64_t count) const {
  if (count % processes() == 0) return count / processes();
  usage_error(option, " is ", count, ", which the ", processes(),
              " processes of train.tensor_parallel cannot share equally, expected a multiple of ",
              processes(), ".");
}

int64_t LayerShape::head_dim(const char* mixer, int64_t heads) const {
  if (width % heads != 0) {
    usage_error(mixer, ": heads is ", heads, ", expected a divisor of the model's width = ", width,
                ".");
  }
  return width / heads;
}

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
  if (context.state != nullptr) return next(x, context.state->mixer, context);
  Tensor rows;
  const TensorParallel* const among = tensor_parallel_.get();
  const Tensor in = convolved(read_by_all(x, among), rows, context.documents);
  Tensor y;
  if (among != nullptr && context.memory.defined()) {
    MixerContext own = context;
    own.memory = read_by_all(context.memory, among);
    y = written_by_all(compute(in, own), among);
  } else {
    y = written_by_all(compute(in, context), among);
  }
  // Cross-attention does not count: a branch is what the layer's own mixer adds.
  if (context.auxiliary != nullptr && context.auxiliary->measures_branches &&
      !context.memory.defined()) {
    context.auxiliary->branches[context.layer].output = root_mean_square(y);
  }
  return y;
}

Tensor TokenMixer::convolved(const Tensor& x, Tensor& rows, const Tensor& documents) const {
  if (!short_conv_.defined()) return x;
  Tensor y;
  std::tie(y, rows) = ops::causal_conv1d(
      x, short_conv_, {.bias = {}, .state = rows, .documents = documents, .backend = {}});
  return x + y;
}

std::vector<Cost> TokenMixer::costs(int64_t length) const {
  std::vector<Cost> out = own_costs(length);
  if (!short_conv_.defined()) return out;
  const int64_t taps = short_conv_.size(1);
  out.push_back({.part = "short convolution",
                 .formula = "(2 W + 1) C",
                 .parameters = short_conv_.numel(),
                 .flops_per_token = static_cast<double>((2 * taps + 1) * width())});
  return out;
}

double TokenMixer::state_bytes(int64_t length) const {
  const double own = own_state_bytes(length);
  if (!short_conv_.defined()) return own;
  return own + 4.0 * static_cast<double>((short_conv_.size(1) - 1) * width());
}

std::shared_ptr<Linear> TokenMixer::output_projection() const {
  for (const auto& child : named_children()) {
    if (child.key() == "output") return std::dynamic_pointer_cast<Linear>(child.value());
  }
  return nullptr;
}

Tensor TokenMixer::extend(const Tensor& x, MixerState& state, const MixerContext& context) {
  check_features(*this, "x", x, width());
  if (!stateful()) refuse_state(type());
  const int64_t seen = state.batch();
  if (seen != 0 && x.size(0) != seen) {
    usage_error(what(), ": x must have the ", seen, " sequences of the state; it is ", x.sizes(),
                ".");
  }
  return next(x, state, context);
}

Tensor TokenMixer::next(const Tensor& x, MixerState& state, const MixerContext& context) {
  const Tensor in = short_conv_.defined() ? convolved(x, state.recurrent["short_conv"], {}) : x;
  const Tensor y = compute_next(in, state, context);
  state.position += x.size(1);
  return newest_of(y, context);
}

Tensor TokenMixer::compute_next(const Tensor&, MixerState&, const MixerContext&) {
  refuse_state(type());
}

MixerState TokenMixer::build_cross_cache(const Tensor&, const Tensor&) { refuse_memory(type()); }

Tensor TokenMixer::extend_cross(const Tensor&, MixerState&) { refuse_memory(type()); }

Tensor ChannelMixer::forward(const Tensor& x, const MixerContext& context) {
  check_features(*this, "x", x, width());
  if (context.documents.defined()) check_documents(*this, context.documents, x);
  return compute(x, context);
}

std::shared_ptr<TokenMixer> TokenMixerSpec::build(const LayerShape& shape) const {
  check_shape(type(), shape);
  if (shape.cross && !traits().cross_attention) refuse_memory(type());
  if (shape.causal && !traits().causal) {
    usage_error(type(), " mixes the whole sequence, but the model is causal.");
  }
  if (!shape.causal && !traits().bidirectional) refuse_both_ways(type());
  if (shape.short_conv > 0 && !shape.causal) {
    usage_error(type(), ": short_conv is ", shape.short_conv,
                ", which looks back only, but the model is not causal, expected 0.");
  }
  if (shape.processes() > 1 && !traits().tensor_parallel) {
    refuse_tensor_parallel(type(), "heads", shape.processes());
  }
  check_context_parallel(shape, type(), traits().context_parallel);
  if (shape.context_parallel && shape.short_conv > 0) {
    usage_error(type(), ": short_conv is ", shape.short_conv, ", but 'train.context_parallel' is ",
                shape.context_parallel->size, ", expected 0 where positions are shared out.");
  }
  std::shared_ptr<TokenMixer> built = made(type(), [&] { return make(shape); });
  built->tensor_parallel_ = shape.tensor_parallel;
  built->context_parallel_ = shape.context_parallel;
  built->type_ = type();
  built->width_ = shape.width;
  built->traits_ = traits();
  built->causal_ = shape.causal;
  if (shape.short_conv > 0) {
    const double bound = 1 / std::sqrt(static_cast<double>(shape.short_conv));
    built->parameter("short_conv", built->short_conv_, at::empty({shape.width, shape.short_conv}));
    draw_uniform(built->short_conv_, bound);
  }
  return built;
}

std::shared_ptr<ChannelMixer> ChannelMixerSpec::build(const LayerShape& shape) const {
  check_shape(type(), shape);
  if (!shape.causal && !traits().bidirectional) refuse_both_ways(type());
  std::shared_ptr<ChannelMixer> built = made(type(), [&] { return make(shape); });
  if (built) {
    if (shape.processes() > 1 && !traits().tensor_parallel) {
      refuse_tensor_parallel(type(), "hidden units", shape.processes());
    }
    check_context_parallel(shape, type(), traits().context_parallel);
    built->tensor_parallel_ = shape.tensor_parallel;
    built->type_ = type();
    built->width_ = shape.width;
  }
  return built;
}

}  // namespace headloom
