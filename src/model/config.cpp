#include "model/config.h"

#include <cmath>

#include "model/decoder.h"

namespace headloom {

LayerConfig::LayerConfig()
    : mixer(make_spec(token_mixers(), "token mixer", "mha")),
      channel(make_spec(channel_mixers(), "channel mixer", "swiglu")),
      block(make_spec(headloom::blocks(), "block", "sequential")) {}

void LayerConfig::fields(Fields& f) {
  f.variant<TokenMixerSpec>(
      "mixer", mixer, "token mixer", entry_names(token_mixers()),
      [](const std::string& type) { return make_spec(token_mixers(), "token mixer", type); });
  f.variant<ChannelMixerSpec>(
      "channel", channel, "channel mixer", entry_names(channel_mixers()),
      [](const std::string& type) { return make_spec(channel_mixers(), "channel mixer", type); });
  f.variant<BlockSpec>("block", block, "how the two are joined", entry_names(blocks()),
                       [](const std::string& type) { return make_spec(blocks(), "block", type); });
}

void ModelConfig::fields(Fields& f) {
  std::optional<std::string> preset;
  f.field("preset", preset, "start from a named model (headloom list presets)");
  if (preset) {
    std::vector<std::string> names;
    const ModelPreset* found = nullptr;
    for (const ModelPreset& p : model_presets()) {
      names.push_back(p.name);
      if (p.name == *preset) found = &p;
    }
    if (found == nullptr) {
      const std::string near = nearest(*preset, names);
      usage_error("there is no model preset '", *preset, "'",
                  near.empty() ? str("; there are ", join(names), ".")
                               : str("; did you mean '", near, "'?"));
    }
    *this = ModelConfig();
    read_fields(parse_toml(found->toml, "preset " + *preset), *this, "model");
  }
  f.field("kind", kind, "what the model is", {"decoder"});
  f.field("vocabulary", vocabulary, "tokens; absent: the task's", at_least(int64_t{1}));
  f.field("max_length", max_length, "longest sequence; absent: the task's", at_least(int64_t{1}));
  f.field("width", width, "C, size of the residual stream", at_least(int64_t{1}));
  f.field("depth", depth, "layers", at_least(int64_t{1}));
  f.table("position", position, "positions");
  f.field("norm", norm, "norm of every block", {"rms_norm", "layer_norm", "none"});
  f.field("bias", bias, "biases in linear maps");
  f.field("tied", tied, "the output weights are the embedding");
  f.field("dropout", dropout, "of the embedding and each branch", fraction());
  f.field("init_std", init_std, "standard deviation of the initial weights", positive());
  f.list("layer", layers, "layers; the list repeats down the depth");
  if (layers.empty()) usage_error("'model.layer' is empty, expected at least one layer.");
}

LayerShape ModelConfig::shape(int64_t layer) const {
  return {.width = width,
          .layer = layer,
          .depth = depth,
          .max_length = max_length.value_or(256),
          .causal = true,
          .bias = bias,
          .norm = norm,
          .init_std = init_std,
          .position = position};
}

int64_t count_parameters(const ModelConfig& config) {
  int64_t count = 0;
  for (const Tensor& p : Decoder(config).parameters()) count += p.numel();
  return count;
}

int64_t match_parameters(ModelConfig& config, int64_t target) {
  std::vector<std::optional<int64_t>*> hidden;
  for (LayerConfig& layer : config.layers) {
    if (auto* h = layer.channel->hidden()) hidden.push_back(h);
  }
  const auto within = [&](int64_t count) {
    return std::abs(static_cast<double>(count - target)) <= 0.01 * static_cast<double>(target);
  };
  const int64_t present = count_parameters(config);
  if (hidden.empty()) {
    if (within(present)) return present;
    usage_error("the model has ", present, " parameters instead of ", target,
                " and no channel mixer whose width could match them.");
  }
  // Parameters are affine in the hidden width: two counts give the line.
  const auto count_at = [&](int64_t width) {
    for (auto* h : hidden) *h = width;
    return count_parameters(config);
  };
  const int64_t a = config.width;
  const double slope = static_cast<double>(count_at(2 * a) - count_at(a)) / static_cast<double>(a);
  const double exact = static_cast<double>(a) + static_cast<double>(target - count_at(a)) / slope;
  // Multiples of 8 suit the vector units; a tiny model may need a finer step to come within 1%.
  for (const double step : {8.0, 1.0}) {
    const auto width = static_cast<int64_t>(std::llround(exact / step) * step);
    if (width < 1) continue;
    const int64_t count = count_at(width);
    if (within(count)) return count;
  }
  usage_error("no hidden width of the channel mixer brings the model to ", target,
              " parameters within 1% (it would have to be ", static_cast<int64_t>(exact), ").");
}

}  // namespace headloom
