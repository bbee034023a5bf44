// GPT-J (Wang & Komatsuzaki 2021): one norm for both branches, rotation in interleaved pairs,
// biases in the MLP and the output alone.
#include <cmath>

#include "interop/family.h"

namespace headloom {
namespace {

constexpr int64_t kGptjLength = 2048;  // of a configuration that does not say it

int64_t gptj_width(const Settings& c) { return c.count("n_embd", 4096); }
int64_t gptj_depth(const Settings& c) { return c.count("n_layer", 28); }

Node gptj_model(const Settings& c) {
  const int64_t width = gptj_width(c), heads = c.count("n_head", 16), dim = width / heads;
  const int64_t rotary = c.integer("rotary_dim", 64);
  if (rotary < 1 || rotary > dim) {
    usage_error(c.path(), ": 'rotary_dim' is ", rotary, c.has("rotary_dim") ? "" : " where absent",
                ", expected 1 to ", dim, ", the size of a head.");
  }
  const double fraction = static_cast<double>(rotary) / static_cast<double>(dim);
  c.only("tie_word_embeddings", false);
  return with_layer(
      table({{"vocabulary", c.count("vocab_size", 50400)},
             {"max_length", c.count("n_positions", kGptjLength)},
             {"width", width},
             {"depth", gptj_depth(c)},
             {"position",
              table({{"type", "rope"}, {"layout", "interleaved"}, {"fraction", fraction}})},
             {"norm", "layer_norm"},
             {"norm_eps", c.real("layer_norm_epsilon", 1e-5)},
             {"bias", false},
             {"tied", false},
             {"output_bias", true}}),
      table({{"type", "mha"}, {"heads", heads}}),
      table({{"type", "mlp"},
             {"hidden", c.count("n_inner", 4 * width)},
             {"activation", activation(c, "activation_function", "gelu_new")},
             {"bias", true}}),
      table({{"type", "parallel"}, {"norms", 1}}));
}

Rules gptj_rules(const Settings& c) {
  Rules out = {{.ours = "embedding", .theirs = {"transformer.wte.weight"}}};
  add_norm(out, "norm", "transformer.ln_f", true);
  for (int64_t i = 0; i < gptj_depth(c); ++i) {
    const auto theirs = [&](const char* name) { return numbered("transformer.h.{}.", i) + name; };
    add_norm(out, at_layer(i, "norm"), theirs("ln_1"), true);
    add_linear(out, at_layer(i, "mixer.qkv"),
               {theirs("attn.q_proj"), theirs("attn.k_proj"), theirs("attn.v_proj")}, false);
    add_linear(out, at_layer(i, "mixer.output"), {theirs("attn.out_proj")}, false);
    add_linear(out, at_layer(i, "channel.up"), {theirs("mlp.fc_in")}, true);
    add_linear(out, at_layer(i, "channel.down"), {theirs("mlp.fc_out")}, true);
  }
  add_linear(out, "head", {"lm_head"}, true);
  return out;
}

Node gptj_config(const Settings& m) {
  const int64_t heads = m.integer("layer.0.mixer.heads", 1);
  const int64_t head_dim = m.integer("width") / heads;
  const auto dim = static_cast<double>(head_dim);
  return table(
      {{"vocab_size", m.integer("vocabulary")},
       {"n_positions", m.integer("max_length", kGptjLength)},
       {"n_embd", m.integer("width")},
       {"n_layer", m.integer("depth")},
       {"n_head", heads},
       {"n_inner", m.integer("layer.0.channel.hidden", 1)},
       {"rotary_dim", static_cast<int64_t>(std::llround(m.real("position.fraction", 1.0) * dim))},
       {"activation_function", their_activation(m, "layer.0.channel.activation")},
       {"layer_norm_epsilon", m.real("norm_eps")},
       {"tie_word_embeddings", false}});
}

}  // namespace

Family gptj_family() {
  return {.name = "gptj",
          .architecture = "GPTJForCausalLM",
          .doc = "GPT-J",
          .prefixes = {"transformer."},
          .ignored = {".attn.bias", ".attn.masked_bias"},
          .aliases = {{"hidden_size", "n_embd"},
                      {"max_position_embeddings", "n_positions"},
                      {"num_attention_heads", "n_head"},
                      {"num_hidden_layers", "n_layer"}},
          .model = gptj_model,
          .rules = gptj_rules,
          .config = gptj_config};
}

}  // namespace headloom
