// GPT-NeoX and Pythia (Black et al. 2022, Biderman et al. 2023): partial rotation, parallel or
// sequential blocks with two norms; queries, keys and values interleaved by head.
#include <cmath>

#include "interop/family.h"

namespace headloom {
namespace {

constexpr int64_t kGptNeoxLength = 2048;  // of a configuration that does not say it

int64_t gpt_neox_depth(const Settings& c) { return c.count("num_hidden_layers", 44); }

Node gpt_neox_model(const Settings& c) {
  c.only("attention_bias", true);
  const int64_t width = c.count("hidden_size", 6144), heads = c.count("num_attention_heads", 64);
  const int64_t head_dim = width / heads;
  const auto head = static_cast<double>(head_dim);
  const std::string rope = rope_key(c);
  const double share = c.real(rope + ".partial_rotary_factor", c.real("rotary_pct", 0.25));
  Node position = rope_table(c, "half", std::trunc(head * share) / head);
  if (!c.has(rope + ".rope_theta")) {
    position.set("base", Value(c.real("rotary_emb_base", 10000.0)));
  }
  return with_layer(table({{"vocabulary", c.count("vocab_size", 50432)},
                           {"max_length", c.count("max_position_embeddings", kGptNeoxLength)},
                           {"width", width},
                           {"depth", gpt_neox_depth(c)},
                           {"position", position},
                           {"norm", "layer_norm"},
                           {"norm_eps", c.real("layer_norm_eps", 1e-5)},
                           {"bias", true},
                           {"tied", c.flag("tie_word_embeddings", false)}}),
                    table({{"type", "mha"}, {"heads", heads}}),
                    table({{"type", "mlp"},
                           {"hidden", c.count("intermediate_size", 24576)},
                           {"activation", activation(c, "hidden_act", "gelu")}}),
                    c.flag("use_parallel_residual", true)
                        ? table({{"type", "parallel"}, {"norms", 2}})
                        : table({{"type", "sequential"}}));
}

Rules gpt_neox_rules(const Settings& c) {
  const int64_t width = c.count("hidden_size", 6144), heads = c.count("num_attention_heads", 64);
  const int64_t dim = width / heads;
  Rule interleaved;  // theirs (head, of q k v, dimension), ours (of q k v, head, dimension)
  for (int64_t part = 0; part < 3; ++part) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t d = 0; d < dim; ++d) interleaved.order.push_back((h * 3 + part) * dim + d);
    }
  }
  const bool parallel = c.flag("use_parallel_residual", true);
  Rules out = {{.ours = "embedding", .theirs = {"gpt_neox.embed_in.weight"}}};
  add_norm(out, "norm", "gpt_neox.final_layer_norm", true);
  for (int64_t i = 0; i < gpt_neox_depth(c); ++i) {
    const auto theirs = [&](const char* name) { return numbered("gpt_neox.layers.{}.", i) + name; };
    add_norm(out, at_layer(i, parallel ? "norm" : "mixer_norm"), theirs("input_layernorm"), true);
    add_norm(out, at_layer(i, "channel_norm"), theirs("post_attention_layernorm"), true);
    add_linear(out, at_layer(i, "mixer.qkv"), {theirs("attention.query_key_value")}, true,
               interleaved);
    add_linear(out, at_layer(i, "mixer.output"), {theirs("attention.dense")}, true);
    add_linear(out, at_layer(i, "channel.up"), {theirs("mlp.dense_h_to_4h")}, true);
    add_linear(out, at_layer(i, "channel.down"), {theirs("mlp.dense_4h_to_h")}, true);
  }
  if (!c.flag("tie_word_embeddings", false)) add_linear(out, "head", {"embed_out"}, false);
  return out;
}

Node gpt_neox_config(const Settings& m) {
  Node rope = rope_parameters(m);
  rope.set("partial_rotary_factor", Value(m.real("position.fraction", 1.0)));
  return table({{"vocab_size", m.integer("vocabulary")},
                {"max_position_embeddings", m.integer("max_length", kGptNeoxLength)},
                {"hidden_size", m.integer("width")},
                {"num_hidden_layers", m.integer("depth")},
                {"num_attention_heads", m.integer("layer.0.mixer.heads", 1)},
                {"intermediate_size", m.integer("layer.0.channel.hidden", 1)},
                {"hidden_act", their_activation(m, "layer.0.channel.activation")},
                {"layer_norm_eps", m.real("norm_eps")},
                {"use_parallel_residual", m.text("layer.0.block.type") == "parallel"},
                {"rope_parameters", rope},
                {"rotary_pct", m.real("position.fraction", 1.0)},
                {"rotary_emb_base", m.real("position.base", 10000.0)},
                {"tie_word_embeddings", m.flag("tied")}});
}

}  // namespace

Family gpt_neox_family() {
  return {.name = "gpt_neox",
          .architecture = "GPTNeoXForCausalLM",
          .doc = "GPT-NeoX and Pythia, parallel and sequential",
          .prefixes = {"gpt_neox."},
          .ignored = {".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"},
          .head = "embed_out.weight",
          .model = gpt_neox_model,
          .rules = gpt_neox_rules,
          .config = gpt_neox_config};
}

}  // namespace headloom
