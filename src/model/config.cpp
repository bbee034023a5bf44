#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "core/sizes.h"
#include "core/text.h"
#include "mixers/without_memory.h"
#include "model/describe.h"

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
  f.optional_variant<TokenMixerSpec>(
      "cross", cross, "cross-attention of an encoder_decoder; absent: as the mixer",
      entry_names(token_mixers()),
      [](const std::string& type) { return make_spec(token_mixers(), "token mixer", type); });
  f.variant<BlockSpec>("block", block, "how the two are joined", entry_names(blocks()),
                       [](const std::string& type) { return make_spec(blocks(), "block", type); });
}

void ImageOptions::fields(Fields& f) {
  f.field("channels", channels, "colours; absent: the task's", between<int64_t>(1, 65536));
  f.field("height", height, "rows; absent: the task's", between<int64_t>(1, 65536));
  f.field("width", width, "columns; absent: the task's", between<int64_t>(1, 65536));
  f.field("patch", patch, "rows and columns of a patch", between<int64_t>(1, 65536));
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
      usage_error("there is no model preset '", *preset, "'", did_you_mean(*preset, names));
    }
    *this = ModelConfig();
    read_fields(parse_toml(found->toml, "preset " + *preset), *this, "model");
  }
  f.field("kind", kind, "what the model is", model_kinds());
  const bool vit = kind == "vit", encoder = kind == "encoder", both = kind == "encoder_decoder",
             reconstructs = kind == "auto_encoder";
  if (vit) {
    f.table("image", image, "the images");
  } else {
    f.field("vocabulary", vocabulary, "tokens; absent: the task's", size_from(1));
    f.field("max_length", max_length, "longest sequence; absent: the task's", size_from(1));
  }
  if (both) {
    f.field("max_source_length", max_source_length, "longest source; absent: the task's",
            size_from(1));
  }
  f.field("width", width, "C, size of the residual stream", size_from(1));
  f.field("depth", depth, "layers", between(int64_t{1}, kMostLayers));
  if (both) {
    f.field("encoder_depth", encoder_depth, "layers of the encoder; absent: depth",
            between(int64_t{1}, kMostLayers));
  }
  f.table("position", position, "positions");
  f.field("norm", norm, "norm of every block", {"rms_norm", "layer_norm", "none"});
  f.field("norm_eps", norm_eps, "of the norms; absent: 1e-6, of layer_norm 1e-5", positive());
  f.field("embedding_norm", embedding_norm, "a norm after the embedding");
  if (embedding_norm && norm == "none") {
    usage_error("'model.embedding_norm' is true, expected false where model.norm is \"none\".");
  }
  if (!reconstructs) f.field("final_norm", final_norm, "a norm after the last layer");
  f.field("bias", bias, "biases in linear maps");
  if (!vit) {
    f.field("embedding_scale", embedding_scale,
            "token embeddings times the root of the width, drawn that much smaller");
  }
  if (!vit && !reconstructs) {
    f.field("tied", tied, "the output weights are the embedding");
    f.field("output_bias", output_bias, "a bias for each token's score");
  }
  if (encoder) {
    f.field("segments", segments, "kinds of segment embeddings; 0: none; absent: the task's",
            size_from(0));
    f.field("head", head,
            "what is predicted: tokens, a label, tags of the tokens or a span; absent: what the "
            "task asks");
    static const Choices kHeads = {"tokens", "label", "tags", "span"};
    if (head && std::find(kHeads.begin(), kHeads.end(), *head) == kHeads.end()) {
      usage_error("'model.head' is \"", *head, "\", expected one of ", join(kHeads), ".");
    }
    f.field("embedding_projection", embedding_projection,
            "a linear map with a bias after the embedding and its norm");
    f.field("transform", transform, "tokens: dense, GELU and norm before the output");
    f.field("transform_activation", transform_activation, "of transform", {"gelu", "gelu_tanh"});
  }
  if (encoder || vit) {
    f.field("classes", classes, "of a label or of tags; absent: the task's", size_from(1));
    f.field("pool", pool,
            vit ? "a label is read from a class token put first, or from the mean of the patches"
                : "a label is read from the first position or from the mean of all",
            {"first", "mean"});
    f.field("pooler", pooler, "label: dense and tanh before the classifier");
  }
  f.field("dropout", dropout, "of the embedding and each branch", fraction());
  f.field("init_std", init_std, "standard deviation of the initial weights", positive());
  f.field(
      "equal_init", equal_init,
      "scales the initial output projection of every token mixer so that its output is as large "
      "as that of plain multi-head attention");
  f.list("layer", layers, "layers; the list repeats down the depth");
  if (layers.empty()) usage_error("'model.layer' is empty, expected at least one layer.");
  if (both) f.list("encoder_layer", encoder_layers, "layers of the encoder; absent: as layer");
}

LayerShape ModelConfig::shape(int64_t layer) const {
  return {.width = width,
          .layer = layer,
          .depth = depth,
          .max_length = length(),
          .causal = true,
          .bias = bias,
          .norm = norm,
          .norm_eps = norm_eps,
          .init_std = init_std,
          .position = position,
          .tensor_parallel = tensor_parallel,
          .context_parallel = context_parallel};
}

void ModelConfig::complete(const DataSizes& data) {
  const auto fill = [](std::optional<int64_t>& key, int64_t size) {
    if (!key && size > 0) key = size;
  };
  if (kind == "vit") {
    fill(image.channels, data.image[0]);
    fill(image.height, data.image[1]);
    fill(image.width, data.image[2]);
  } else {
    fill(vocabulary, data.vocabulary);
    fill(max_length, data.length);
  }
  if (kind == "encoder_decoder") fill(max_source_length, data.source_length);
  if (kind == "encoder") {
    if (!head && !data.head.empty()) head = data.head;
    if (!segments) segments = data.segments;
  }
  if (has_classes()) fill(classes, data.classes);
}

std::vector<std::string> ModelConfig::open_sizes() const {
  std::vector<std::string> open;
  const auto look = [&](const char* key, bool present) {
    if (!present) open.push_back(str("model.", key));
  };
  if (kind == "vit") {
    look("image.channels", image.channels.has_value());
    look("image.height", image.height.has_value());
    look("image.width", image.width.has_value());
  } else {
    look("vocabulary", vocabulary.has_value());
    look("max_length", max_length.has_value());
  }
  if (kind == "encoder_decoder") look("max_source_length", max_source_length.has_value());
  if (kind == "encoder") {
    look("head", head.has_value());
    look("segments", segments.has_value());
  }
  // Of which only some heads have any.
  if (has_classes() || (kind == "encoder" && !head)) look("classes", classes.has_value());
  return open;
}

int64_t ModelConfig::positions(int64_t length) const {
  return kind == "vit" ? image.patches() + (pool == "first" ? 1 : 0) : length;
}

int64_t count_parameters(const ModelConfig& config) {
  const auto model = build_without_memory(config);
  check_countable(*model);
  return static_cast<int64_t>(parameter_count(*model));
}

std::optional<Difference> difference_of_weights(ModelConfig& before, ModelConfig& after) {
  for (const Difference& d : differences(write_fields(before), write_fields(after))) {
    const bool may_differ = d.key == "dropout" || d.key == "init_std" || d.key == "equal_init" ||
                            d.key == "max_length" || d.key == "max_source_length";
    if (!may_differ) return Difference{"model." + d.key, d.before, d.after};
  }
  return std::nullopt;
}

ModelConfig adapted(ModelConfig& before, ModelConfig& after) {
  Node node = write_fields(before);
  const Node wanted = write_fields(after);
  const auto defaults_of = [](const std::string& type) {
    return write_fields(*make_spec(token_mixers(), "token mixer", type));
  };
  const Node plain = defaults_of("mha"), composed = defaults_of("dcmha");
  const auto is = [](const Node* mixer, const char* type) {
    return mixer != nullptr && std::get<std::string>(mixer->find("type")->value) == type;
  };
  for (const char* list : {"layer", "encoder_layer"}) {
    Node* const layers = node.find(list);
    const Node* const others = wanted.find(list);
    if (layers == nullptr || others == nullptr) continue;
    for (size_t i = 0; i < std::min(layers->array().size(), others->array().size()); ++i) {
      for (const char* role : {"mixer", "cross"}) {
        Node* const own = layers->array()[i].find(role);
        const Node* const other = others->array()[i].find(role);
        if (!is(own, "mha") || !is(other, "dcmha")) continue;
        own->set("type", *other->find("type"));
        for (const auto& [key, value] : other->table()) {
          if (composed.find(key) != nullptr && plain.find(key) == nullptr) own->set(key, value);
        }
      }
    }
  }
  ModelConfig out;
  read_fields(node, out, "model");
  return out;
}

int64_t match_parameters(ModelConfig& config, int64_t target) {
  std::vector<HiddenWidth> hidden;
  for (auto* list : {&config.layers, &config.encoder_layers}) {
    for (LayerConfig& layer : *list) {
      const std::optional<HiddenWidth> width = layer.channel->hidden(config.width);
      if (width) hidden.push_back(*width);
    }
  }
  const auto within = [&](int64_t count) {
    return std::abs(static_cast<double>(count - target)) <= 0.01 * static_cast<double>(target);
  };
  // The count with each width times 1 + above / below, rounded to a multiple of `step` that the
  // mixer can have; absent where one is too small. Widths keep their proportions.
  const auto count_with = [&](int64_t above, int64_t below,
                              int64_t step) -> std::optional<int64_t> {
    for (const HiddenWidth& h : hidden) {
      const auto unit = static_cast<double>(std::lcm(h.multiple, step));
      const auto width =
          static_cast<double>(std::max(h.present / h.multiple, int64_t{1}) * h.multiple);
      *h.option =
          std::llround((width + width * static_cast<double>(above) / static_cast<double>(below)) /
                       unit) *
          static_cast<int64_t>(unit);
      if (**h.option < 1) return std::nullopt;
    }
    return count_parameters(config);
  };
  // Parameters are affine in the widths: two counts give the line.
  const int64_t slope = *count_with(1, 1, 1) - *count_with(0, 1, 1);
  const int64_t once = *count_with(0, 1, 1);
  if (slope <= 0) {  // there is none, or no layer has it
    if (within(once)) return once;
    usage_error(
        "the model has ", once, " parameters instead of ", target,
        " and no channel mixer whose width could match them; change its own options, or leave "
        "the parameters unequal with match_parameters = false.");
  }
  // Multiples of 8 suit the vector units; a tiny model may need a finer step to come within 1%.
  for (const int64_t step : {8, 1}) {
    const std::optional<int64_t> count = count_with(target - once, slope, step);
    if (count && within(*count)) return *count;
  }
  std::set<int64_t> nearest;
  for (const HiddenWidth& h : hidden) nearest.insert(**h.option);
  if (*nearest.begin() < 1) {
    usage_error("no hidden width of the channel mixers brings the model to ", target,
                " parameters within 1%: it has more without them; make its other parts smaller, or "
                "leave the parameters unequal with match_parameters = false.");
  }
  std::vector<std::string> names;
  for (const int64_t width : nearest) names.push_back(str(width));
  usage_error(
      "no hidden width of the channel mixers brings the model to ", target,
      " parameters within 1%; the nearest is ", join(names),
      "; use a wider or deeper baseline, in which a unit of this width is a smaller part, or "
      "leave the parameters unequal with match_parameters = false.");
}

}  // namespace headloom
