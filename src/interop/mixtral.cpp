// Mixtral (Jiang et al. 2024): Mistral with experts, whose chosen ones' weights add up to 1.
#include "interop/family.h"

namespace headloom {
namespace {

Node mixtral(const Settings& c) {
  c.only("attention_bias", false);
  Node attention = llama_attention(c);
  if (c.has("sliding_window")) attention.set("window", Value(c.count("sliding_window")));
  Node out = llama_model(c, attention, 1e-5);
  const Node experts = experts_table(c, c.count("intermediate_size"), /*renormalise=*/true);
  out.find("layer")->array().at(0).set("channel", experts);
  return out;
}

Rules mixtral_rules(const Settings& c) {
  Rules out =
      llama_rules(c, [&](Rules& all, int64_t i) { add_llama_attention(all, c, i, false, false); });
  for (int64_t i = 0; i < c.count("num_hidden_layers"); ++i) {
    add_experts(out, at_layer(i, "channel."), numbered("model.layers.{}.block_sparse_moe.", i),
                c.count("num_experts"), {"w1", "w3", "w2"});
  }
  return out;
}

Node mixtral_config(const Settings& m) {
  Node out = llama_shell_config(m);
  set_experts(out, m, "layer.0.channel");
  if (m.has("layer.0.mixer.window")) {
    out.set("sliding_window", Value(m.integer("layer.0.mixer.window")));
  }
  return out;
}

}  // namespace

Family mixtral_family() {
  return {.name = "mixtral",
          .architecture = "MixtralForCausalLM",
          .doc = "Mixtral: Mistral with experts",
          .prefixes = {"model."},
          .ignored = {".rotary_emb.inv_freq"},
          .head = "lm_head.weight",
          .aliases = {{"num_local_experts", "num_experts"}},
          .defaults = {{"max_position_embeddings", Value(131072)},
                       {"num_key_value_heads", Value(8)},
                       {"rope_theta", Value(1e6)},
                       {"num_experts", Value(8)},
                       {"num_experts_per_tok", Value(2)}},
          .model = mixtral,
          .rules = mixtral_rules,
          .config = mixtral_config};
}

}  // namespace headloom
