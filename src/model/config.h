// A model as data: embedding, a list of layers, a head.
#pragma once

#include "blocks/block.h"

namespace headloom {

struct LayerConfig {
  std::shared_ptr<TokenMixerSpec> mixer;
  std::shared_ptr<ChannelMixerSpec> channel;
  std::shared_ptr<BlockSpec> block;

  LayerConfig();  // mha, swiglu, sequential
  void fields(Fields& f);
};

// The [model] table. Layers repeat down the depth.
struct ModelConfig {
  std::string kind = "decoder";
  std::optional<int64_t> vocabulary;  // the task's when absent
  std::optional<int64_t> max_length;  // the task's when absent; the size of learned positions
  int64_t width = 256;
  int64_t depth = 6;
  PositionOptions position;
  std::string norm = "rms_norm";
  bool bias = false;
  bool tied = true;  // output weights are the embedding
  double dropout = 0;
  double init_std = 0.02;
  std::vector<LayerConfig> layers{1};

  // "preset" is read first; the other keys override what it sets. It is not written back.
  void fields(Fields& f);
  LayerShape shape(int64_t layer) const;
};

struct ModelPreset {
  std::string name;
  std::string doc;
  std::string source;
  std::string toml;  // a [model] table's content
};
const std::vector<ModelPreset>& model_presets();

// Sets the channel mixers' hidden widths so that the model has `parameters` parameters within 1%,
// and returns the count reached. Throws UsageError naming what is wrong where that cannot be.
int64_t match_parameters(ModelConfig& config, int64_t parameters);
int64_t count_parameters(const ModelConfig& config);

}  // namespace headloom
