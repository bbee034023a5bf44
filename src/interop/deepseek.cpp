// DeepSeekMoE (Dai et al. 2024), the 16B model's layout: LLaMA's attention, experts in all but the
// first layers. Not an architecture of transformers, so it is import only.
#include "interop/family.h"

namespace headloom {
namespace {

// Whether layer i has experts.
bool has_experts(const Settings& c, int64_t i) {
  return i >= c.integer("first_k_dense_replace", 0) && i % c.count("moe_layer_freq", 1) == 0;
}

Node deepseek_model(const Settings& c) {
  c.only("attention_bias", false);
  c.only("scoring_func", std::vector<std::string>{"softmax"});
  // Of one expert alone the score stays as it is.
  const int64_t active = c.count("num_experts_per_tok");
  const Node moe = table({{"type", "moe"},
                          {"hidden", c.count("moe_intermediate_size")},
                          {"routed", c.count("n_routed_experts")},
                          {"shared", c.integer("n_shared_experts", 0)},
                          {"active", active},
                          {"renormalise", active > 1 && c.flag("norm_topk_prob", false)},
                          {"scaling", c.real("routed_scaling_factor", 1.0)},
                          {"balance", c.real("aux_loss_alpha", 0.001)}});
  Node out = llama_model(c, llama_attention(c), 1e-6);
  write_out_layers(out, c, [&](int64_t i, Node& layer) {
    if (has_experts(c, i)) layer.set("channel", moe);
  });
  return out;
}

Rules deepseek_rules(const Settings& c) {
  Rules out =
      llama_rules(c, [&](Rules& all, int64_t i) { add_llama_attention(all, c, i, false, false); });
  for (int64_t i = 0; i < c.count("num_hidden_layers"); ++i) {
    if (!has_experts(c, i)) continue;
    const std::string channel = at_layer(i, "channel.");
    const std::string mlp = numbered("model.layers.{}.mlp.", i);
    add_experts(out, channel, mlp, c.count("n_routed_experts"));
    if (c.integer("n_shared_experts", 0) == 0) continue;
    add_linear(out, channel + "shared_up",
               {mlp + "shared_experts.gate_proj", mlp + "shared_experts.up_proj"}, false);
    add_linear(out, channel + "shared_down", {mlp + "shared_experts.down_proj"}, false);
  }
  return out;
}

}  // namespace

Family deepseek_family() {
  return {.name = "deepseek",
          .architecture = "DeepseekForCausalLM",
          .doc = "DeepSeekMoE",
          .prefixes = {"model."},
          .ignored = {".rotary_emb.inv_freq"},
          .model = deepseek_model,
          .rules = deepseek_rules};
}

}  // namespace headloom
