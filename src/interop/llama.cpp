// LLaMA (Touvron et al. 2023) with grouped queries, Mistral's window (Jiang et al. 2023), and the
// shell that DiffLlama shares.
#include "core/error.h"
#include "interop/family.h"

namespace headloom {
namespace {

constexpr int64_t kLlamaLength = 2048;  // of a configuration that does not say it

// attention_bias and mlp_bias: our one `bias` is both.
bool biased(const Settings& c) {
  const bool attention = c.flag("attention_bias", false), mlp = c.flag("mlp_bias", false);
  if (attention != mlp) {
    usage_error(c.path(), ": 'attention_bias' is ", attention ? "true" : "false",
                " and 'mlp_bias' is ", mlp ? "true" : "false", ", expected both alike.");
  }
  return attention;
}

// Rows of the projections to queries, keys and values.
Rule projections(const Settings& c) {
  const int64_t heads = c.count("num_attention_heads", 32);
  const int64_t dim = c.integer("head_dim", c.count("hidden_size") / heads);
  const int64_t groups = c.count("num_key_value_heads", heads);
  return {.rows = {heads * dim, groups * dim, groups * dim}};
}

Node llama(const Settings& c) {
  c.only_equal("pretraining_tp", 1);
  return llama_model(c, llama_attention(c), 1e-6);
}

Node mistral(const Settings& c) {
  c.only("attention_bias", false);
  Node attention = llama_attention(c);
  const bool windowed = c.has("sliding_window");
  if (windowed) attention.set("window", Value(c.count("sliding_window")));
  c.only_each("layer_types", windowed ? "sliding_attention" : "full_attention");
  return llama_model(c, attention, 1e-6);
}

Rules llama_and_mistral_rules(const Settings& c) {
  const bool bias = biased(c);
  return llama_rules(c, [&](Rules& out, int64_t i) { add_llama_attention(out, c, i, bias, bias); });
}

Node llama_config(const Settings& m) {
  // transformers refuses such a LLaMA although its head_dim would do. It has no such rule for
  // others.
  const int64_t width = m.integer("width"), heads = m.integer("layer.0.mixer.heads", 1);
  if (width % heads != 0) {
    usage_error("model.width is ", width, " and model.layer.0.mixer.heads is ", heads,
                ", expected a width that is a multiple of the heads.");
  }
  Node out = llama_shell_config(m);
  out.set("attention_bias", Value(m.flag("bias")));
  out.set("mlp_bias", Value(m.flag("bias")));
  return out;
}

Node mistral_config(const Settings& m) {
  Node out = llama_shell_config(m);
  out.set("sliding_window", Value(m.integer("layer.0.mixer.window", int64_t{1} << 30)));
  return out;
}

std::vector<std::string> ignored_by_llama() { return {".rotary_emb.inv_freq"}; }

}  // namespace

Node llama_attention(const Settings& c) {
  const int64_t heads = c.count("num_attention_heads", 32);
  Node out = table(
      {{"type", "mha"}, {"heads", heads}, {"kv_heads", c.count("num_key_value_heads", heads)}});
  if (c.has("head_dim")) out.set("head_dim", Value(c.count("head_dim")));
  return out;
}

void add_llama_attention(Rules& rules, const Settings& c, int64_t layer, bool qkv_bias,
                         bool output_bias) {
  const auto theirs = [&](const char* name) {
    return numbered("model.layers.{}.self_attn.", layer) + name;
  };
  add_linear(rules, at_layer(layer, "mixer.qkv"),
             {theirs("q_proj"), theirs("k_proj"), theirs("v_proj")}, qkv_bias, projections(c));
  add_linear(rules, at_layer(layer, "mixer.output"), {theirs("o_proj")}, output_bias);
}

Node llama_model(const Settings& c, Node mixer, double eps) {
  c.only("hidden_act", std::vector<std::string>{"silu"});
  return with_layer(table({{"vocabulary", c.count("vocab_size", 32000)},
                           {"max_length", c.count("max_position_embeddings", kLlamaLength)},
                           {"width", c.count("hidden_size")},
                           {"depth", c.count("num_hidden_layers")},
                           {"position", rope_table(c, "half", 1.0)},
                           {"norm", "rms_norm"},
                           {"norm_eps", c.real("rms_norm_eps", eps)},
                           {"bias", biased(c)},
                           {"tied", c.flag("tie_word_embeddings", false)}}),
                    mixer, table({{"type", "swiglu"}, {"hidden", c.count("intermediate_size")}}),
                    table({{"type", "sequential"}}));
}

Node llama_shell_config(const Settings& m) {
  const int64_t heads = m.integer("layer.0.mixer.heads", 1);
  return table({{"vocab_size", m.integer("vocabulary")},
                {"max_position_embeddings", m.integer("max_length", kLlamaLength)},
                {"hidden_size", m.integer("width")},
                {"intermediate_size", m.integer("layer.0.channel.hidden", 1)},
                {"num_hidden_layers", m.integer("depth")},
                {"num_attention_heads", heads},
                {"num_key_value_heads", m.integer("layer.0.mixer.kv_heads", heads)},
                {"head_dim", m.integer("layer.0.mixer.head_dim", m.integer("width") / heads)},
                {"hidden_act", "silu"},
                {"rms_norm_eps", m.real("norm_eps")},
                {"rope_parameters", rope_parameters(m)},
                {"rope_theta", m.real("position.base", 10000.0)},
                {"tie_word_embeddings", m.flag("tied")}});
}

Rules llama_rules(const Settings& c, const std::function<void(Rules&, int64_t)>& attention) {
  Rules out = {{.ours = "embedding", .theirs = {"model.embed_tokens.weight"}}};
  add_norm(out, "norm", "model.norm", false);
  for (int64_t i = 0; i < c.count("num_hidden_layers"); ++i) {
    const auto theirs = [&](const char* name) { return numbered("model.layers.{}.", i) + name; };
    add_norm(out, at_layer(i, "mixer_norm"), theirs("input_layernorm"), false);
    add_norm(out, at_layer(i, "channel_norm"), theirs("post_attention_layernorm"), false);
    attention(out, i);
    const bool bias = c.flag("mlp_bias", false);
    add_linear(out, at_layer(i, "channel.up"), {theirs("mlp.gate_proj"), theirs("mlp.up_proj")},
               bias);
    add_linear(out, at_layer(i, "channel.down"), {theirs("mlp.down_proj")}, bias);
  }
  if (!c.flag("tie_word_embeddings", false)) add_linear(out, "head", {"lm_head"}, false);
  return out;
}

Rules original_llama_rules(int64_t depth, bool tied,
                           const std::function<void(Rules&, int64_t)>& attention) {
  Rules out = {{.ours = "embedding", .theirs = {"tok_embeddings.weight"}}};
  add_norm(out, "norm", "norm", false);
  if (!tied) add_linear(out, "head", {"output"}, false);
  for (int64_t i = 0; i < depth; ++i) {
    const auto theirs = [&](const char* name) { return numbered("layers.{}.", i) + name; };
    add_norm(out, at_layer(i, "mixer_norm"), theirs("attention_norm"), false);
    add_norm(out, at_layer(i, "channel_norm"), theirs("ffn_norm"), false);
    attention(out, i);
    add_linear(out, at_layer(i, "channel.up"),
               {theirs("feed_forward.w1"), theirs("feed_forward.w3")}, false);
    add_linear(out, at_layer(i, "channel.down"), {theirs("feed_forward.w2")}, false);
  }
  return out;
}

Family llama_family() {
  return {.name = "llama",
          .architecture = "LlamaForCausalLM",
          .doc = "LLaMA 1 to 3 with grouped queries",
          .prefixes = {"model."},
          .ignored = ignored_by_llama(),
          .head = "lm_head.weight",
          .model = llama,
          .rules = llama_and_mistral_rules,
          .config = llama_config};
}

Family mistral_family() {
  return {.name = "mistral",
          .architecture = "MistralForCausalLM",
          .doc = "Mistral: LLaMA with a window",
          .prefixes = {"model."},
          .ignored = ignored_by_llama(),
          .head = "lm_head.weight",
          .defaults = {{"sliding_window", Value(4096)},
                       {"max_position_embeddings", Value(131072)},
                       {"num_key_value_heads", Value(8)}},
          .model = mistral,
          .rules = llama_and_mistral_rules,
          .config = mistral_config};
}

}  // namespace headloom
