// GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases; weights stored [in, out].
#include "interop/family.h"

namespace headloom {
namespace {

constexpr int64_t kGpt2Length = 1024;  // of a configuration that does not say it

Node gpt2_model(const Settings& c) {
  c.only("scale_attn_weights", true);
  c.only("scale_attn_by_inverse_layer_idx", false);
  c.only("add_cross_attention", false);
  const int64_t width = c.count("n_embd", 768);
  return with_layer(table({{"vocabulary", c.count("vocab_size", 50257)},
                           {"max_length", c.count("n_positions", kGpt2Length)},
                           {"width", width},
                           {"depth", c.count("n_layer", 12)},
                           {"position", table({{"type", "learned"}})},
                           {"norm", "layer_norm"},
                           {"norm_eps", c.real("layer_norm_epsilon", 1e-5)},
                           {"bias", true},
                           {"tied", c.flag("tie_word_embeddings", true)}}),
                    table({{"type", "mha"}, {"heads", c.count("n_head", 12)}}),
                    table({{"type", "mlp"},
                           {"hidden", c.count("n_inner", 4 * width)},
                           {"activation", activation(c, "activation_function", "gelu_new")}}),
                    table({{"type", "sequential"}}));
}

Rules gpt2_rules(const Settings& c) {
  Rules out = {{.ours = "embedding", .theirs = {"transformer.wte.weight"}},
               {.ours = "positions", .theirs = {"transformer.wpe.weight"}}};
  add_norm(out, "norm", "transformer.ln_f", true);
  const Rule transposed = {.transposed = true};
  for (int64_t i = 0; i < c.count("n_layer", 12); ++i) {
    const auto theirs = [&](const char* name) { return numbered("transformer.h.{}.", i) + name; };
    add_norm(out, at_layer(i, "mixer_norm"), theirs("ln_1"), true);
    add_norm(out, at_layer(i, "channel_norm"), theirs("ln_2"), true);
    add_linear(out, at_layer(i, "mixer.qkv"), {theirs("attn.c_attn")}, true, transposed);
    add_linear(out, at_layer(i, "mixer.output"), {theirs("attn.c_proj")}, true, transposed);
    add_linear(out, at_layer(i, "channel.up"), {theirs("mlp.c_fc")}, true, transposed);
    add_linear(out, at_layer(i, "channel.down"), {theirs("mlp.c_proj")}, true, transposed);
  }
  if (!c.flag("tie_word_embeddings", true)) add_linear(out, "head", {"lm_head"}, false);
  return out;
}

Node gpt2_config(const Settings& m) {
  return table({{"vocab_size", m.integer("vocabulary")},
                {"n_positions", m.integer("max_length", kGpt2Length)},
                {"n_embd", m.integer("width")},
                {"n_layer", m.integer("depth")},
                {"n_head", m.integer("layer.0.mixer.heads", 1)},
                {"n_inner", m.integer("layer.0.channel.hidden", 1)},
                {"activation_function", their_activation(m, "layer.0.channel.activation")},
                {"layer_norm_epsilon", m.real("norm_eps")},
                {"tie_word_embeddings", m.flag("tied")}});
}

}  // namespace

Family gpt2_family() {
  return {.name = "gpt2",
          .architecture = "GPT2LMHeadModel",
          .doc = "GPT-2 and what is built like it",
          .prefixes = {"transformer."},
          .ignored = {".attn.bias", ".attn.masked_bias"},
          .head = "lm_head.weight",
          .aliases = {{"hidden_size", "n_embd"},
                      {"max_position_embeddings", "n_positions"},
                      {"num_attention_heads", "n_head"},
                      {"num_hidden_layers", "n_layer"}},
          .model = gpt2_model,
          .rules = gpt2_rules,
          .config = gpt2_config};
}

}  // namespace headloom
