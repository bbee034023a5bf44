#include "model/autoregressive.h"

#include <algorithm>
#include <numeric>

#include "core/differences.h"
#include "core/sizes.h"

namespace headloom {
namespace {

// The first key in which the configurations of two models, as text, differ.
Difference first_difference(const std::string& before, const std::string& after) {
  return differences(parse_toml(before, "a state"), parse_toml(after, "a state")).at(0);
}

}  // namespace

int64_t DecoderState::bytes() const {
  int64_t sum = 0;
  for (const LayerState& layer : layers) sum += layer.bytes();
  return sum;
}

int64_t DecoderState::batch() const {
  for (const LayerState& layer : layers) {
    const int64_t found = std::max(layer.mixer.batch(), layer.cross.batch());
    if (found > 0) return found;
  }
  return 0;
}

void DecoderState::reserve(int64_t positions) {
  require(positions >= 0 && positions <= kLargestSize, "memory cannot be reserved for ", positions,
          " positions, expected 0 to ", kLargestSize, ".");
  position.capacity = positions;
  for (LayerState& layer : layers) layer.mixer.position.capacity = positions;
}

DecoderState DecoderState::select(const Tensor& rows) const {
  DecoderState out{.position = position.select(rows), .model = model};
  for (const LayerState& layer : layers) out.layers.push_back(layer.select(rows));
  return out;
}

void DecoderState::keep(const std::vector<int64_t>& which) {
  const auto count = static_cast<int64_t>(which.size());
  const int64_t present = batch();
  for (int64_t b = 0; b < count; ++b) {
    const int64_t from = which[static_cast<size_t>(b)];
    require((from == b || from >= count) && from < present, "sequence ", b, " of ", count,
            " cannot become sequence ", from, " of the ", present, " in place.");
  }
  for (LayerState& layer : layers) layer.keep(which);
  position = position.select(at::tensor(at::IntArrayRef(which), at::kLong));
}

void DecoderState::add(const std::vector<DecoderState>& others) {
  require(!others.empty(), "there are no decoding states to join.");
  if (layers.empty()) {
    layers.resize(others[0].layers.size());
    model = others[0].model;
  }
  for (const DecoderState& other : others) {
    if (other.model == model) continue;
    const Difference between = first_difference(model, other.model);
    fail("decoding states cannot be joined: one is of a model with ", between.was(),
         ", another of a model with ", between.is(), ".");
  }
  std::vector<int64_t> own(static_cast<size_t>(layers.empty() ? 0 : layers[0].mixer.batch()));
  std::iota(own.begin(), own.end(), 0);
  size_t added = 0;
  try {
    for (; added < layers.size(); ++added) {
      std::vector<const LayerState*> parts;
      for (const DecoderState& other : others) parts.push_back(&other.layers[added]);
      layers[added].add(parts);
    }
  } catch (...) {  // there is no memory for this one: those before it become what they were
    if (own.empty()) {
      *this = {};
      throw;
    }
    for (size_t i = 0; i < added; ++i) layers[i].keep(own);
    throw;
  }
  if (!layers.empty()) position = layers[0].mixer.position;
}

DecoderState DecoderState::alias() const {
  DecoderState out{.position = position, .model = model};
  for (const LayerState& layer : layers) out.layers.push_back(layer.alias());
  return out;
}

DecoderState DecoderState::join(const std::vector<DecoderState>& parts) {
  DecoderState out;
  out.add(parts);
  return out;
}

AutoregressiveModel::AutoregressiveModel(const ModelConfig& config)
    : Model(config), text_(to_toml(write_fields(config_))) {}

void AutoregressiveModel::convert_weights(at::ScalarType type) {
  for (const auto& module : modules()) {
    if (auto* linear = dynamic_cast<Linear*>(module.get())) linear->convert(type);
  }
  head().convert(type);
}

DecoderState AutoregressiveModel::initial_state(const CachePolicy& policy,
                                                const Source& source) const {
  policy.checked();
  DecoderState out{.model = text_};
  const auto& layers = decoder_layers().all();
  bool taken = false;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto refuse = [&](const std::string& why) {
      usage_error("layer ", i, " (", config_.layers[i % config_.layers.size()].mixer->type(), ") ",
                  why);
    };
    if (!layers[i].mixer->stateful())
      refuse("has no state for decoding, expected a mixer with one.");
    try {
      out.layers.push_back({.mixer = layers[i].mixer->initial_state(policy)});
    } catch (const UsageError& error) {
      refuse(error.what());
    }
    taken = taken || out.layers.back().mixer.policy == policy;
  }
  if (!taken && !policy.evicts()) {
    usage_error("keys and values are to be kept in ", policy.dtype,
                ", but no layer keeps keys and values, expected no type for them.");
  }
  if (!taken) {
    usage_error("the cache policy is ", policy.text(),
                ", but no layer keeps keys and values that it could forget, expected \"full\".");
  }
  const at::Device device = decoder_embedding().table().device();
  const auto there = [&](const Tensor& t) { return t.defined() ? t.to(device) : t; };
  read_source({.tokens = there(source.tokens), .lengths = there(source.lengths)}, out.layers);
  return out;
}

Tensor AutoregressiveModel::extend(const Tensor& tokens, DecoderState& state,
                                   std::optional<int64_t> newest) const {
  at::NoGradGuard no_grad;
  const bool integers = at::isIntegralType(tokens.scalar_type(), /*includeBool=*/false);
  if (tokens.dim() != 2 || tokens.size(1) == 0 || !integers) {
    usage_error(what(), ": tokens has shape ", tokens.sizes(), " and type ", tokens.scalar_type(),
                ", expected integers [B, n] of at least one position.");
  }
  if (state.layers.empty()) state = initial_state();
  if (state.model != text_) {
    const Difference between = first_difference(state.model, text_);
    usage_error(what(), ": the state is of a model with ", between.was(), ", expected ",
                between.is(), ".");
  }
  const int64_t batch = state.batch();
  if (batch != 0 && batch != tokens.size(0)) {
    usage_error(what(), ": tokens has ", tokens.size(0),
                (tokens.size(0) == 1 ? " sequence" : " sequences"), ", expected the ", batch,
                " that the state has seen.");
  }
  // Refused before the first layer has read the tokens.
  const int64_t length = state.position.longest + tokens.size(1);
  for (const auto& layer : decoder_layers().all()) {
    const int64_t longest = layer.mixer->longest().value_or(length);
    if (length > longest) {
      usage_error(layer.mixer->what(), ": it has weights for ", longest,
                  " positions (model.max_length), but the sequence has ", length, ".");
    }
  }
  const at::Device device = decoder_embedding().table().device();
  const Tensor x = decoder_embedding().forward(tokens.to(device), {}, false, state.position);
  state.position += tokens.size(1);
  MixerContext context;
  context.newest = newest;
  context.padding_mask = state.position.padding_mask(state.position.longest, x.device());
  return decoder_layers().forward(x, context, &state.layers);
}

}  // namespace headloom
