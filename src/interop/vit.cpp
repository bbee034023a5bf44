// ViT (Dosovitskiy et al. 2021): patches, a class token, a label.
#include "core/error.h"
#include "core/text.h"
#include "interop/family.h"

namespace headloom {
namespace {

int64_t vit_depth(const Settings& c) { return c.count("num_hidden_layers", 12); }

Node vit_model(const Settings& c) {
  c.only("qkv_bias", true);
  const std::string architecture = c.text("architectures.0", "ViTForImageClassification");
  if (architecture != "ViTForImageClassification") {
    usage_error(c.path(), ": 'architectures' names ", architecture,
                ", expected ViTForImageClassification.");
  }
  const int64_t size = c.count("image_size", 224);
  return with_layer(table({{"image", table({{"channels", c.count("num_channels", 3)},
                                            {"height", size},
                                            {"width", size},
                                            {"patch", c.count("patch_size", 16)}})},
                           {"classes", label_count(c)},
                           {"width", c.count("hidden_size", 768)},
                           {"depth", vit_depth(c)},
                           {"position", table({{"type", "learned"}})},
                           {"norm", "layer_norm"},
                           {"norm_eps", c.real("layer_norm_eps", 1e-12)},
                           {"bias", true},
                           {"pool", "first"}}),
                    table({{"type", "mha"}, {"heads", c.count("num_attention_heads", 12)}}),
                    table({{"type", "mlp"},
                           {"hidden", c.count("intermediate_size", 3072)},
                           {"activation", activation(c, "hidden_act", "gelu")}}),
                    table({{"type", "sequential"}}));
}

Rules vit_rules(const Settings& c) {
  const int64_t width = c.count("hidden_size", 768), patch = c.count("patch_size", 16);
  const int64_t grid = c.count("image_size", 224) / patch;
  const std::string projection = "vit.embeddings.patch_embeddings.projection";
  Rules out = {
      {.ours = "class_token", .theirs = {"vit.embeddings.cls_token"}, .shape = {1, 1, width}},
      {.ours = "positions",
       .theirs = {"vit.embeddings.position_embeddings"},
       .shape = {1, grid * grid + 1, width}},
      {.ours = "patch.weight",
       .theirs = {projection + ".weight"},
       .shape = {width, c.count("num_channels", 3), patch, patch}},
      {.ours = "patch.bias", .theirs = {projection + ".bias"}}};
  add_norm(out, "norm", "vit.layernorm", true);
  add_linear(out, "classifier", {"classifier"}, true);
  for (int64_t i = 0; i < vit_depth(c); ++i) {
    const auto theirs = [&](const char* name) {
      return numbered("vit.encoder.layer.{}.", i) + name;
    };
    add_norm(out, at_layer(i, "mixer_norm"), theirs("layernorm_before"), true);
    add_norm(out, at_layer(i, "channel_norm"), theirs("layernorm_after"), true);
    add_linear(out, at_layer(i, "mixer.qkv"),
               {theirs("attention.attention.query"), theirs("attention.attention.key"),
                theirs("attention.attention.value")},
               true);
    add_linear(out, at_layer(i, "mixer.output"), {theirs("attention.output.dense")}, true);
    add_linear(out, at_layer(i, "channel.up"), {theirs("intermediate.dense")}, true);
    add_linear(out, at_layer(i, "channel.down"), {theirs("output.dense")}, true);
  }
  return out;
}

Node vit_config(const Settings& m) {
  return table({{"num_channels", m.integer("image.channels")},
                {"image_size", m.integer("image.height")},
                {"patch_size", m.integer("image.patch")},
                {"id2label", label_names(m.integer("classes"))},
                {"hidden_size", m.integer("width")},
                {"num_hidden_layers", m.integer("depth")},
                {"num_attention_heads", m.integer("layer.0.mixer.heads", 1)},
                {"intermediate_size", m.integer("layer.0.channel.hidden", 1)},
                {"hidden_act", their_activation(m, "layer.0.channel.activation")},
                {"layer_norm_eps", m.real("norm_eps")}});
}

}  // namespace

Family vit_family() {
  return {.name = "vit",
          .architecture = "ViTForImageClassification",
          .doc = "vision transformer with a class token",
          .kind = "vit",
          .prefixes = {"vit."},
          .ignored = {"pooler.dense.weight", "pooler.dense.bias"},
          .model = vit_model,
          .rules = vit_rules,
          .config = vit_config};
}

}  // namespace headloom
