// DiffLlama: differential attention (Ye et al. 2024) in LLaMA's shell. Its map j is paired with map
// j + H/2 and its value head g joined with g + G/2; here pairs are neighbours. No scale in the
// heads' norm.
#include "core/error.h"
#include "interop/family.h"

namespace headloom {
namespace {

struct DiffllamaSizes {
  int64_t maps, keys, dim;  // query maps, key heads
};

DiffllamaSizes diffllama_sizes(const Settings& c) {
  const int64_t heads = c.count("num_attention_heads", 32);
  return {.maps = heads,
          .keys = c.count("num_key_value_heads", heads),
          .dim = c.integer("head_dim", c.count("hidden_size") / heads)};
}

Node diffllama_model(const Settings& c) {
  c.only("attention_bias", false);
  const DiffllamaSizes s = diffllama_sizes(c);
  for (const auto& [key, count] :
       {std::pair("num_attention_heads", s.maps), std::pair("num_key_value_heads", s.keys)}) {
    if (count % 2 != 0)
      usage_error(c.path(), ": '", key, "' is ", count, ", expected an even number.");
  }
  // The heads' norm has this eps in the paper, whatever the others have.
  if (c.real("rms_norm_eps", 1e-5) != 1e-5) {
    usage_error(c.path(), ": 'rms_norm_eps' is ", c.real("rms_norm_eps"), ", expected 1e-05.");
  }
  return llama_model(c,
                     table({{"type", "differential"},
                            {"heads", s.maps / 2},
                            {"kv_heads", s.keys / 2},
                            {"head_dim", s.dim},
                            {"norm_scale", false}}),
                     1e-5);
}

Rules diffllama_rules(const Settings& c) {
  const DiffllamaSizes s = diffllama_sizes(c);
  Rule paired;
  paired.rows = {s.maps * s.dim, s.keys * s.dim, s.keys * s.dim};
  int64_t first = 0;
  for (const int64_t heads : {s.maps, s.keys, s.keys}) {
    for (int64_t pair = 0; pair < heads / 2; ++pair) {
      for (const int64_t head : {pair, pair + heads / 2}) {
        for (int64_t d = 0; d < s.dim; ++d) paired.order.push_back(first + head * s.dim + d);
      }
    }
    first += heads * s.dim;
  }
  return llama_rules(c, [&](Rules& out, int64_t i) {
    const auto theirs = [&](const char* name) {
      return numbered("model.layers.{}.self_attn.", i) + name;
    };
    add_linear(out, at_layer(i, "mixer.qkv"),
               {theirs("q_proj"), theirs("k_proj"), theirs("v_proj")}, false, paired);
    add_linear(out, at_layer(i, "mixer.output"), {theirs("o_proj")}, false);
    for (const char* name : {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}) {
      out.push_back({.ours = at_layer(i, std::string("mixer.") + name), .theirs = {theirs(name)}});
    }
  });
}

Node diffllama_config(const Settings& m) {
  const int64_t heads = m.integer("layer.0.mixer.heads", 1);
  Node out = llama_shell_config(m);
  out.set("num_attention_heads", Value(2 * heads));  // theirs are maps, ours pairs of them
  out.set("num_key_value_heads", Value(2 * m.integer("layer.0.mixer.kv_heads", heads)));
  out.set("head_dim", Value(m.integer("layer.0.mixer.head_dim", m.integer("width") / (2 * heads))));
  return out;
}

}  // namespace

Family diffllama_family() {
  return {.name = "diffllama",
          .architecture = "DiffLlamaForCausalLM",
          .doc = "differential attention in LLaMA's shell",
          .prefixes = {"model."},
          .ignored = {".rotary_emb.inv_freq"},
          .head = "lm_head.weight",
          .model = diffllama_model,
          .rules = diffllama_rules,
          .config = diffllama_config};
}

}  // namespace headloom
