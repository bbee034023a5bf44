// A model as data: its kind, embedding, lists of layers, a head.
#pragma once

#include <array>
#include <cmath>

#include "blocks/block.h"
#include "core/differences.h"

namespace headloom {

struct LayerConfig {
  std::shared_ptr<TokenMixerSpec> mixer;
  std::shared_ptr<ChannelMixerSpec> channel;
  std::shared_ptr<BlockSpec> block;
  std::shared_ptr<TokenMixerSpec> cross;  // encoder_decoder: as the mixer when null

  LayerConfig();  // mha, swiglu, sequential
  void fields(Fields& f);
};

// The images of a vision transformer: square patches of a grid.
struct ImageOptions {
  std::optional<int64_t> channels, height, width;  // the task's when absent
  int64_t patch = 4;

  void fields(Fields& f);
  std::array<int64_t, 3> shape() const { return {*channels, *height, *width}; }
  int64_t patches() const { return (*height / patch) * (*width / patch); }
};

// What a model takes from the data it is built for. 0: nothing.
struct DataSizes {
  int64_t vocabulary = 0;
  int64_t length = 0;
  int64_t source_length = 0;
  int64_t classes = 0;
  int64_t segments = 0;
  std::array<int64_t, 3> image = {0, 0, 0};  // channels, height, width
  std::string head = {};                     // of an encoder
};

// The [model] table. Layers repeat down the depth. Which keys there are depends on the kind.
struct ModelConfig {
  std::string kind = "decoder";
  // Absent: the data's.
  std::optional<int64_t> vocabulary;
  std::optional<int64_t> max_length;  // the size of learned positions
  std::optional<int64_t> max_source_length;
  std::optional<int64_t> classes;
  std::optional<std::string> head;  // encoder: "tokens", "label", "tags" or "span"
  ImageOptions image;

  int64_t width = 256;
  int64_t depth = 6;
  std::optional<int64_t> encoder_depth;  // of an encoder_decoder's encoder; depth when absent
  PositionOptions position;
  std::optional<int64_t> segments;  // kinds of segment embeddings; 0: none; absent: the data's
  std::string norm = "rms_norm";
  std::optional<double> norm_eps;  // the norm's own when absent
  bool embedding_norm = false;
  bool embedding_projection = false;  // FNet's dense after it
  bool embedding_scale = false;       // token embeddings times sqrt(C)
  bool final_norm = true;
  bool bias = false;
  bool tied = true;  // output weights are the embedding
  bool output_bias = false;
  bool transform = false;  // BERT's dense, GELU and norm before the output
  std::string transform_activation = "gelu";
  std::string pool = "mean";  // what a label is read from: the first position, or the mean
  bool pooler = false;        // BERT's dense and tanh before the classifier
  double dropout = 0;
  double init_std = 0.02;
  bool equal_init = false;  // token mixers start with outputs as large as plain attention's
  std::vector<LayerConfig> layers{1};
  std::vector<LayerConfig> encoder_layers;  // of an encoder_decoder's encoder; layers when empty

  // The processes that share out the layers of a model that is built; null: this one has all. No
  // option of the model's.
  std::shared_ptr<const TensorParallel> tensor_parallel;
  // And those that share out the positions of every sequence, of which this one has its own alone.
  std::shared_ptr<const ContextParallel> context_parallel;

  // "preset" is read first; the other keys override what it sets. It is not written back.
  void fields(Fields& f);
  LayerShape shape(int64_t layer) const;
  // Of the token embedding. Where it is scaled it is drawn as Vaswani et al. 2017 do, so that what
  // comes out has unit size beside sinusoidal positions.
  double embedding_std() const {
    return embedding_scale ? 1 / std::sqrt(static_cast<double>(width)) : init_std;
  }
  // Fills in what is absent.
  void complete(const DataSizes& data);
  // Whether it scores classes: of an image, a text or each token.
  bool has_classes() const {
    return kind == "vit" || (kind == "encoder" && (head == "label" || head == "tags"));
  }
  // The keys that are absent and complete() fills in: "model.classes".
  std::vector<std::string> open_sizes() const;
  bool is_complete() const { return open_sizes().empty(); }
  // The longest sequence, and the longest source of an encoder_decoder. A model that is built
  // without a task need not say: then 256.
  int64_t length() const { return max_length.value_or(256); }
  int64_t source_length() const { return max_source_length.value_or(256); }
  // Positions of a sequence of `length` tokens: those of an image do not depend on it.
  int64_t positions(int64_t length) const;
};

// The first key, "model.width", in which two models differ that cannot have the same weights. What
// does not belong to the weights may differ: dropout, how weights are drawn, the longest sequence.
std::optional<Difference> difference_of_weights(ModelConfig& before, ModelConfig& after);

// The model `before` where each of its mixers "mha" that is "dcmha" in `after` has become one, with
// the options of its own composition from there: dcmha has all weights of mha, and starts near it.
ModelConfig adapted(ModelConfig& before, ModelConfig& after);

const std::vector<std::string>& model_kinds();

struct ModelPreset {
  std::string name;
  std::string doc;
  std::string source;
  std::string toml;  // a [model] table's content
  // Parameters as published: exact where the model was released, else as the paper rounds them.
  // 0: not published, or of a vocabulary that is not the preset's.
  int64_t published = 0;
};
const std::vector<ModelPreset>& model_presets();

// Sets the channel mixers' hidden widths so that the model has `parameters` parameters within 1%,
// and returns the count reached. Throws UsageError naming what is wrong where that cannot be.
int64_t match_parameters(ModelConfig& config, int64_t parameters);
int64_t count_parameters(const ModelConfig& config);

}  // namespace headloom
