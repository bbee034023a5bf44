// Mamba (Gu & Dao 2023).
#include "core/error.h"
#include "interop/family.h"

namespace headloom {
namespace {

constexpr int64_t kMambaLength = 2048;  // of a configuration that does not say it

int64_t mamba_width(const Settings& c) { return c.count("hidden_size", 768); }
int64_t mamba_inner(const Settings& c) {
  return c.count("intermediate_size", c.count("expand", 2) * mamba_width(c));
}
int64_t mamba_depth(const Settings& c) { return c.count("num_hidden_layers", 32); }

Node mamba_model(const Settings& c) {
  c.only("use_bias", false);
  c.only("use_conv_bias", true);
  c.only("hidden_act", std::vector<std::string>{"silu"});
  const int64_t width = mamba_width(c), inner = mamba_inner(c);
  if (inner % width != 0) {
    usage_error(c.path(), ": 'intermediate_size' is ", inner, ", expected a multiple of ", width,
                ".");
  }
  Node mixer = table({{"type", "mamba"},
                      {"expand", inner / width},
                      {"d_state", c.count("state_size", 16)},
                      {"d_conv", c.count("conv_kernel", 4)}});
  // "auto" is a sixteenth of the width, rounded up; transformers writes the number.
  if (c.is_integer("time_step_rank")) mixer.set("dt_rank", Value(c.count("time_step_rank")));
  return with_layer(table({{"vocabulary", c.count("vocab_size", 50280)},
                           {"max_length", c.count("max_position_embeddings", kMambaLength)},
                           {"width", width},
                           {"depth", mamba_depth(c)},
                           {"position", table({{"type", "none"}})},
                           {"norm", "rms_norm"},
                           {"norm_eps", c.real("layer_norm_epsilon", 1e-5)},
                           {"bias", false},
                           {"tied", c.flag("tie_word_embeddings", true)}}),
                    mixer, table({{"type", "none"}}), table({{"type", "sequential"}}));
}

Rules mamba_rules(const Settings& c) {
  const int64_t inner = mamba_inner(c);
  Rules out = {{.ours = "embedding", .theirs = {"backbone.embeddings.weight"}}};
  add_norm(out, "norm", "backbone.norm_f", false);
  for (int64_t i = 0; i < mamba_depth(c); ++i) {
    const auto theirs = [&](const char* name) {
      return numbered("backbone.layers.{}.mixer.", i) + name;
    };
    add_norm(out, at_layer(i, "mixer_norm"), numbered("backbone.layers.{}.norm", i), false);
    add_linear(out, at_layer(i, "mixer.input"), {theirs("in_proj")}, false);
    out.push_back({.ours = at_layer(i, "mixer.conv"),
                   .theirs = {theirs("conv1d.weight")},
                   .shape = {inner, 1, c.count("conv_kernel", 4)}});
    out.push_back({.ours = at_layer(i, "mixer.conv_bias"), .theirs = {theirs("conv1d.bias")}});
    add_linear(out, at_layer(i, "mixer.select"), {theirs("x_proj")}, false);
    add_linear(out, at_layer(i, "mixer.step"), {theirs("dt_proj")}, true);
    out.push_back({.ours = at_layer(i, "mixer.A_log"), .theirs = {theirs("A_log")}});
    out.push_back({.ours = at_layer(i, "mixer.D"), .theirs = {theirs("D")}});
    add_linear(out, at_layer(i, "mixer.output"), {theirs("out_proj")}, false);
  }
  if (!c.flag("tie_word_embeddings", true)) add_linear(out, "head", {"lm_head"}, false);
  return out;
}

Node mamba_config(const Settings& m) {
  const int64_t width = m.integer("width");
  return table({{"vocab_size", m.integer("vocabulary")},
                {"max_position_embeddings", m.integer("max_length", kMambaLength)},
                {"hidden_size", width},
                {"intermediate_size", width * m.integer("layer.0.mixer.expand", 2)},
                {"expand", m.integer("layer.0.mixer.expand", 2)},
                {"state_size", m.integer("layer.0.mixer.d_state", 16)},
                {"conv_kernel", m.integer("layer.0.mixer.d_conv", 4)},
                {"time_step_rank", m.integer("layer.0.mixer.dt_rank", (width + 15) / 16)},
                {"num_hidden_layers", m.integer("depth")},
                {"layer_norm_epsilon", m.real("norm_eps")},
                {"tie_word_embeddings", m.flag("tied")}});
}

}  // namespace

Family mamba_family() {
  return {.name = "mamba",
          .architecture = "MambaForCausalLM",
          .doc = "Mamba",
          .prefixes = {"backbone."},
          .head = "lm_head.weight",
          .model = mamba_model,
          .rules = mamba_rules,
          .config = mamba_config};
}

}  // namespace headloom
