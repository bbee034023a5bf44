// Qwen2 (Qwen Team 2024) is LLaMA with biases of the queries, keys and values. Qwen3 (Qwen Team
// 2025) has norms of the query and key heads instead, and a variant with experts.
#include <optional>

#include "core/error.h"
#include "interop/family.h"

namespace headloom {
namespace {

// Whether some layers have a window.
bool is_windowed(const Settings& c) {
  return c.flag("use_sliding_window", false) && c.has("sliding_window");
}

// Whether layer i of such a model does.
bool has_window(const Settings& c, int64_t i) {
  if (!c.has("layer_types")) return i >= c.integer("max_window_layers", 28);
  const std::string type = str("layer_types.", i);
  c.only(type, {"sliding_attention", "full_attention"});
  return c.text(type) == "sliding_attention";
}

// LLaMA with windows in some layers.
Node with_windows(const Settings& c, const Node& mixer) {
  Node out = llama_model(c, mixer, 1e-6);
  if (!is_windowed(c)) {
    c.only_each("layer_types", "full_attention");
    return out;
  }
  c.only_of_size("layer_types", c.count("num_hidden_layers"));
  const Value window(c.count("sliding_window"));
  write_out_layers(out, c, [&](int64_t i, Node& layer) {
    if (has_window(c, i)) layer.find("mixer")->set("window", window);
  });
  return out;
}

Node shell_config_with_windows(const Settings& m) {
  Node out = llama_shell_config(m);
  Array types;
  std::optional<int64_t> window;
  for (int64_t i = 0; i < m.integer("depth"); ++i) {
    const std::string key = str("layer.", i, ".mixer.window");
    if (m.has(key)) window = m.integer(key);
    types.push_back(Value(m.has(key) ? "sliding_attention" : "full_attention"));
  }
  out.set("use_sliding_window", Value(window.has_value()));
  if (window) out.set("sliding_window", Value(*window));
  out.set("layer_types", {.value = std::move(types)});
  return out;
}

Node qwen2(const Settings& c) {
  Node mixer = llama_attention(c);
  mixer.set("qkv_bias", Value(true));
  return with_windows(c, mixer);
}

Rules qwen2_rules(const Settings& c) {
  return llama_rules(c,
                     [&](Rules& out, int64_t i) { add_llama_attention(out, c, i, true, false); });
}

Node qwen3_attention(const Settings& c) {
  c.only("attention_bias", false);
  // That of our norms of queries and keys; their files say it of all norms.
  if (c.real("rms_norm_eps", 1e-6) != 1e-6) {
    usage_error(c.path(), ": 'rms_norm_eps' is ", c.real("rms_norm_eps"), ", expected 1e-06.");
  }
  Node out = llama_attention(c);
  out.set("qk_norm", Value(true));
  return out;
}

Node qwen3(const Settings& c) { return with_windows(c, qwen3_attention(c)); }

Rules qwen3_rules(const Settings& c) {
  return llama_rules(c, [&](Rules& out, int64_t i) {
    add_llama_attention(out, c, i, false, false);
    for (const char* norm : {"q_norm", "k_norm"}) {
      out.push_back({.ours = at_layer(i, "mixer.") + norm,
                     .theirs = {numbered("model.layers.{}.self_attn.", i) + norm + ".weight"}});
    }
  });
}

// Whether layer i has experts.
bool has_qwen_experts(const Settings& c, int64_t i) {
  for (int64_t k = 0; c.has(str("mlp_only_layers.", k)); ++k) {
    if (c.integer(str("mlp_only_layers.", k)) == i) return false;
  }
  return (i + 1) % c.count("decoder_sparse_step", 1) == 0;
}

Node qwen3_moe(const Settings& c) {
  Node attention = qwen3_attention(c);
  if (is_windowed(c)) attention.set("window", Value(c.count("sliding_window")));
  const Node experts =
      experts_table(c, c.count("moe_intermediate_size", 768), c.flag("norm_topk_prob", false));
  Node out = llama_model(c, attention, 1e-6);
  write_out_layers(out, c, [&](int64_t i, Node& layer) {
    if (has_qwen_experts(c, i)) layer.set("channel", experts);
  });
  return out;
}

Rules qwen3_moe_rules(const Settings& c) {
  Rules out = qwen3_rules(c);
  for (int64_t i = 0; i < c.count("num_hidden_layers"); ++i) {
    if (!has_qwen_experts(c, i)) continue;
    add_experts(out, at_layer(i, "channel."), numbered("model.layers.{}.mlp.", i),
                c.count("num_experts"));
  }
  return out;
}

Node qwen3_moe_config(const Settings& m) {
  Node out = llama_shell_config(m);
  Array plain;
  std::optional<int64_t> expert;
  for (int64_t i = 0; i < m.integer("depth"); ++i) {
    const std::string channel = str("layer.", i, ".channel");
    if (m.text(channel + ".type") == "moe") {
      if (!expert) expert = i;
    } else {
      plain.push_back(Value(i));
      out.set("intermediate_size", Value(m.integer(channel + ".hidden", 1)));
    }
  }
  if (!expert) usage_error("no layer has a channel mixer of type 'moe', expected some.");
  const std::string channel = str("layer.", *expert, ".channel");
  set_experts(out, m, channel);
  out.set("moe_intermediate_size", Value(m.integer(channel + ".hidden", 1)));
  out.set("norm_topk_prob", Value(m.flag(channel + ".renormalise", false)));
  out.set("mlp_only_layers", {.value = std::move(plain)});
  const bool windowed = m.has("layer.0.mixer.window");
  out.set("use_sliding_window", Value(windowed));
  if (windowed) out.set("sliding_window", Value(m.integer("layer.0.mixer.window")));
  return out;
}

std::vector<std::pair<std::string, Node>> defaults_of_qwen() {
  return {{"vocab_size", Value(151936)},
          {"max_position_embeddings", Value(32768)},
          {"num_key_value_heads", Value(32)},
          {"sliding_window", Value(4096)}};
}

}  // namespace

Family qwen2_family() {
  return {.name = "qwen2",
          .architecture = "Qwen2ForCausalLM",
          .doc = "Qwen2 and Qwen2.5: LLaMA with biases of queries, keys and values",
          .prefixes = {"model."},
          .head = "lm_head.weight",
          .defaults = defaults_of_qwen(),
          .model = qwen2,
          .rules = qwen2_rules,
          .config = shell_config_with_windows};
}

Family qwen3_family() {
  auto defaults = defaults_of_qwen();
  defaults.emplace_back("head_dim", Value(128));
  return {.name = "qwen3",
          .architecture = "Qwen3ForCausalLM",
          .doc = "Qwen3: LLaMA with norms of queries and keys",
          .prefixes = {"model."},
          .head = "lm_head.weight",
          .defaults = defaults,
          .model = qwen3,
          .rules = qwen3_rules,
          .config = shell_config_with_windows};
}

Family qwen3_moe_family() {
  return {.name = "qwen3_moe",
          .architecture = "Qwen3MoeForCausalLM",
          .doc = "Qwen3 with experts",
          .prefixes = {"model."},
          .head = "lm_head.weight",
          .aliases = {{"num_local_experts", "num_experts"}},
          .defaults = {{"vocab_size", Value(151936)},
                       {"max_position_embeddings", Value(32768)},
                       {"num_key_value_heads", Value(4)},
                       {"sliding_window", Value(4096)},
                       {"num_experts", Value(128)},
                       {"num_experts_per_tok", Value(8)}},
          .model = qwen3_moe,
          .rules = qwen3_moe_rules,
          .config = qwen3_moe_config};
}

}  // namespace headloom
