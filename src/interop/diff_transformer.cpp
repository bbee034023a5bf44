// Differential Transformer (Ye et al. 2024) by the names of its authors' attention
// (multihead_flashdiff_1.py: q_proj, lambda_q1, subln, ...) in the decoder that they name as its
// shell, YOCO's Transformer (tok_embeddings, layers.N.attention_norm, feed_forward.w1, ...). No
// configuration is published with it: docs/interop.md says which keys are read.
#include "core/error.h"
#include "interop/family.h"

namespace headloom {
namespace {

AttentionSizes diff_transformer_sizes(const Settings& c) {
  AttentionSizes s{};
  s.width = c.count("dim");
  s.depth = c.count("n_layers");
  s.heads = c.count("n_heads");  // with two maps each
  s.groups = c.count("n_kv_heads", s.heads);
  s.dim = s.width / s.heads / 2;
  s.hidden = c.count("hidden_dim");
  return s;
}

Node diff_transformer_model(const Settings& c) {
  // Such a file is written by hand, where a misspelt key would leave its default.
  c.only_keys({"dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size", "norm_eps",
               "rope_theta", "max_seq_len", "pairing", "subln_scale", "tie_word_embeddings",
               "model_type", "architectures"});
  const AttentionSizes s = diff_transformer_sizes(c);
  return with_layer(table({{"vocabulary", c.count("vocab_size")},
                           {"max_length", c.count("max_seq_len", 2048)},
                           {"width", s.width},
                           {"depth", s.depth},
                           {"position", table({{"type", "rope"},
                                               {"base", c.real("rope_theta", 10000.0)},
                                               {"layout", "interleaved"}})},
                           {"norm", "rms_norm"},
                           {"norm_eps", c.real("norm_eps", 1e-5)},
                           {"tied", c.flag("tie_word_embeddings", false)}}),
                    table({{"type", "differential"},
                           {"heads", s.heads},
                           {"kv_heads", s.groups},
                           {"head_dim", s.dim},
                           {"pairing", c.text("pairing", "pair")},
                           {"norm_scale", c.flag("subln_scale", true)}}),
                    table({{"type", "swiglu"}, {"hidden", s.hidden}}),
                    table({{"type", "sequential"}}));
}

Rules diff_transformer_rules(const Settings& c) {
  const AttentionSizes s = diff_transformer_sizes(c);
  const auto attention = [&](Rules& out, int64_t i) {
    const auto theirs = [&](const char* name) { return numbered("layers.{}.", i) + name; };
    const auto ours = [&](const std::string& name) { return at_layer(i, "mixer." + name); };
    add_linear(out, ours("qkv"),
               {theirs("attention.q_proj"), theirs("attention.k_proj"), theirs("attention.v_proj")},
               false, {.rows = {2 * s.heads * s.dim, 2 * s.groups * s.dim, 2 * s.groups * s.dim}});
    add_linear(out, ours("output"), {theirs("attention.out_proj")}, false);
    for (const char* name : {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}) {
      out.push_back({.ours = ours(name), .theirs = {theirs("attention.") + name}});
    }
    if (c.flag("subln_scale", true)) {
      out.push_back({.ours = ours("norm"), .theirs = {theirs("attention.subln.weight")}});
    }
  };
  return original_llama_rules(s.depth, c.flag("tie_word_embeddings", false), attention);
}

}  // namespace

Family diff_transformer_family() {
  return {.name = "diff_transformer",
          .architecture = "Transformer",
          .doc = "Differential Transformer by its authors' names",
          .mark = "layers.0.attention.lambda_q1",
          .model = diff_transformer_model,
          .rules = diff_transformer_rules};
}

}  // namespace headloom
