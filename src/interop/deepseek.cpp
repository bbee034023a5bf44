// DeepSeekMoE (Dai et al. 2024), the 16B model's layout: LLaMA's attention, experts in all but the
// first layers. Not an architecture of transformers, so it is import only.
#include "core/error.h"
#include "core/sizes.h"
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
  const int64_t heads = c.count("num_attention_heads");
  const Node mixer = table(
      {{"type", "mha"}, {"heads", heads}, {"kv_heads", c.count("num_key_value_heads", heads)}});
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
  Node out = llama_model(c, mixer, 1e-6);
  // Each layer is written out below, before the model's own check of their number.
  if (c.count("num_hidden_layers") > kMostLayers) {
    usage_error(c.path(), ": 'num_hidden_layers' is ", c.count("num_hidden_layers"),
                ", expected at most ", kMostLayers, ".");
  }
  const Node dense = *Settings(out, "").find("layer.0");
  Array layers;
  for (int64_t i = 0; i < c.count("num_hidden_layers"); ++i) {
    Node layer = dense;
    if (has_experts(c, i)) layer.set("channel", moe);
    layers.push_back(std::move(layer));
  }
  out.set("layer", {.value = std::move(layers)});
  return out;
}

Rules deepseek_rules(const Settings& c) {
  const int64_t heads = c.count("num_attention_heads"), dim = c.count("hidden_size") / heads;
  const int64_t groups = c.count("num_key_value_heads", heads);
  const Rule projections = {.rows = {heads * dim, groups * dim, groups * dim}};
  Rules out = llama_rules(c, [&](Rules& all, int64_t i) {
    const auto theirs = [&](const char* name) {
      return numbered("model.layers.{}.self_attn.", i) + name;
    };
    add_linear(all, at_layer(i, "mixer.qkv"),
               {theirs("q_proj"), theirs("k_proj"), theirs("v_proj")}, false, projections);
    add_linear(all, at_layer(i, "mixer.output"), {theirs("o_proj")}, false);
  });
  for (int64_t i = 0; i < c.count("num_hidden_layers"); ++i) {
    if (!has_experts(c, i)) continue;
    const std::string channel = at_layer(i, "channel.");
    std::erase_if(out, [&](const Rule& rule) { return rule.ours.starts_with(channel); });
    const std::string mlp = numbered("model.layers.{}.mlp.", i);
    add_linear(out, channel + "gate", {mlp + "gate"}, false);
    Rule up = {.ours = channel + "up", .stacked = true},
         down = {.ours = channel + "down", .stacked = true};
    for (int64_t e = 0; e < c.count("n_routed_experts"); ++e) {
      const std::string expert = mlp + "experts." + std::to_string(e);
      up.theirs.push_back(expert + ".gate_proj.weight");
      up.theirs.push_back(expert + ".up_proj.weight");
      down.theirs.push_back(expert + ".down_proj.weight");
    }
    out.push_back(up);
    out.push_back(down);
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
