// The published checkpoints of DCFormer and DCPythia (Xiao et al. 2024), by the names of their
// PyTorch code. Dynamic weights: dw1 [C, 1, 4, K], qkw [1, 4, K, 2R, H], dd [C, 1, 4H], the order
// of the 4 being pre-query, pre-key, post-query, post-key, as ours. That code also keeps merged
// copies, dw_m [C, 4K + 4H] and qkw_m [4, K, 2RH]: it makes them anew before it runs, but in
// training by that code they alone change. They count where the others are still zero.
#include <ATen/ATen.h>

#include <cmath>

#include "core/error.h"
#include "interop/family.h"

namespace headloom {
namespace {

constexpr int64_t kRank = 2;

AttentionSizes dcformer_sizes(const Settings& c) {
  AttentionSizes s{};
  s.width = c.count("dim", 2560);
  s.depth = c.count("n_layer", 32);
  s.heads = c.count("n_head", 32);
  s.groups = c.integer("n_local_heads", -1) == -1 ? s.heads : c.count("n_local_heads");
  s.dim = std::max<int64_t>(s.width / s.heads, 1);
  // Of DCFormer two thirds of 4 C, rounded up to 256.
  const bool pythia = c.text("model_type", "") == "dcpythia";
  s.hidden =
      c.count("intermediate_size", pythia ? 4 * s.width : (8 * s.width / 3 + 255) / 256 * 256);
  return s;
}

// Windows of the layers that repeat down the depth; 0: global.
std::vector<int64_t> windows_of(const Settings& c) {
  if (!c.has("window_type")) {
    if (c.is_null("window_size")) return {0};
    return {c.integer("window_size", 256), 0};
  }
  c.only("window_type", {"LG", "LGLL", "LGL6"});
  const std::string type = c.text("window_type");
  std::vector<int64_t> out = {256, 0};
  const size_t size = type == "LG" ? 2 : type == "LGLL" ? 4 : 8;
  out.resize(size, 256);
  return out;
}

Node dcformer_mixer(const Settings& c, const AttentionSizes& s, int64_t window) {
  c.only("use_dcmha", true);
  Node out = table({{"type", "dcmha"},
                    {"heads", s.heads},
                    {"kv_heads", s.groups},
                    {"rank", kRank},
                    {"qk_norm", c.flag("use_qk_norm", false)},
                    {"key_wise", true}});
  if (window > 0) out.set("window", Value(window));
  return out;
}

Node with_layers(const Settings& c, Node model, const Node& channel, const Node& block) {
  Array layers;
  for (const int64_t window : windows_of(c)) {
    layers.push_back(table({{"mixer", dcformer_mixer(c, dcformer_sizes(c), window)},
                            {"channel", channel},
                            {"block", block}}));
  }
  model.set("layer", {.value = std::move(layers)});
  return model;
}

Node shell(const Settings& c, double fraction, double base) {
  const AttentionSizes s = dcformer_sizes(c);
  // Some of the published code drops the key-wise branches while decoding alone.
  c.only("query_wise", false);
  c.only("tie_word_embeddings", false);
  return table({{"vocabulary", c.count("vocab_size", 32000)},
                {"max_length", c.count("block_size", 2048)},
                {"width", s.width},
                {"depth", s.depth},
                {"position", table({{"type", "rope"},
                                    {"base", c.real("rope_base", base)},
                                    {"layout", "half"},
                                    {"fraction", fraction}})},
                {"norm_eps", c.real("norm_eps", 1e-5)},
                {"tied", false}});
}

Node dcformer(const Settings& c) {
  Node model = shell(c, 1.0, 500000.0);
  model.set("norm", Value("rms_norm"));
  Node channel = table({{"type", "swiglu"}, {"hidden", dcformer_sizes(c).hidden}});
  if (c.flag("mgate", false)) channel.set("gate_groups", Value(c.count("mgate_dim", 44)));
  return with_layers(c, model, channel, table({{"type", "sequential"}}));
}

Node dcpythia(const Settings& c) {
  const double dim = static_cast<double>(dcformer_sizes(c).dim);
  c.only("use_parallel_residual", true);
  Node model = shell(c, std::trunc(dim * c.real("rotary_pct", 0.25)) / dim, 10000.0);
  model.set("norm", Value("layer_norm"));
  model.set("bias", Value(c.flag("use_linear_bias", true)));
  return with_layers(c, model, table({{"type", "mlp"}, {"hidden", dcformer_sizes(c).hidden}}),
                     table({{"type", "parallel"}, {"norms", 2}}));
}

void attention_rules(Rules& out, const Settings& c, int64_t layer, bool bias) {
  const AttentionSizes s = dcformer_sizes(c);
  const int64_t hidden = 2 * kRank * s.heads;
  const auto theirs = [&](const char* name) {
    return numbered("layers.{}.attention.", layer) + name;
  };
  add_linear(out, at_layer(layer, "mixer.qkv"), {theirs("wqkv")}, bias);
  add_linear(out, at_layer(layer, "mixer.output"), {theirs("wo")}, bias);
  out.push_back({.ours = at_layer(layer, "mixer.w1.weight"),
                 .theirs = {theirs("dyn_w_proj.dw1")},
                 .transposed = true,
                 .shape = {s.width, 1, 4, hidden}});
  out.push_back({.ours = at_layer(layer, "mixer.w2"),
                 .theirs = {theirs("dyn_w_proj.qkw")},
                 .shape = {1, 4, hidden, 2 * kRank, s.heads}});
  out.push_back({.ours = at_layer(layer, "mixer.gate.weight"),
                 .theirs = {theirs("dyn_w_proj.dd")},
                 .transposed = true,
                 .shape = {s.width, 1, 4 * s.heads}});
  if (!c.flag("use_qk_norm", false)) return;
  for (const char* side : {"q_norm", "k_norm"}) {
    out.push_back({.ours = at_layer(layer, std::string("mixer.") + side),
                   .theirs = {theirs(side) + ".scale"}});
  }
}

Rules dcformer_rules(const Settings& c) {
  return original_llama_rules(dcformer_sizes(c).depth, false, [&](Rules& out, int64_t i) {
    attention_rules(out, c, i, false);
    if (!c.flag("mgate", false)) return;
    add_linear(out, at_layer(i, "channel.gate"), {numbered("layers.{}.feed_forward.mg", i)}, false);
  });
}

Rules dcpythia_rules(const Settings& c) {
  const bool bias = c.flag("use_linear_bias", true);
  Rules out = {{.ours = "embedding", .theirs = {"tok_embeddings.weight"}}};
  add_linear(out, "head", {"output"}, false);
  add_norm(out, "norm", "norm", true);
  for (int64_t i = 0; i < dcformer_sizes(c).depth; ++i) {
    const auto theirs = [&](const char* name) { return numbered("layers.{}.", i) + name; };
    add_norm(out, at_layer(i, "norm"), theirs("attention_norm"), true);
    add_norm(out, at_layer(i, "channel_norm"), theirs("ffn_norm"), true);
    attention_rules(out, c, i, bias);
    add_linear(out, at_layer(i, "channel.up"), {theirs("feed_forward.w1")}, bias);
    add_linear(out, at_layer(i, "channel.down"), {theirs("feed_forward.w2")}, bias);
  }
  return out;
}

void prepare(const Settings& c, Weights& weights) {
  const AttentionSizes s = dcformer_sizes(c);
  const int64_t hidden = 2 * kRank * s.heads;
  for (int64_t i = 0; i < s.depth; ++i) {
    const std::string attention = numbered("layers.{}.attention.", i);
    const std::string dynamic = attention + "dyn_w_proj.";
    for (const char* part : {".weight", ".bias"}) {  // as their own code joins them
      if (!weights.has(attention + "wq" + part) || weights.has(attention + "wqkv" + part)) continue;
      std::vector<at::Tensor> rows;
      for (const char* name : {"wq", "wk", "wv"})
        rows.push_back(weights.take(attention + name + part));
      for (const at::Tensor& t : rows) {
        require(t.dim() == rows[0].dim() && t.dim() > 0 && t.size(-1) == rows[0].size(-1),
                weights.path(), ": '", attention, "wq", part, "', wk and wv have shapes ",
                rows[0].sizes(), " and ", t.sizes(), ", expected the same but for the rows.");
      }
      weights.put(attention + "wqkv" + part, at::cat(rows));
    }
    for (const char* name : {"pre_proj.w", "post_proj.w", "sw"}) {
      if (!weights.has(dynamic + name)) continue;
      const at::Tensor matrix = weights.at(dynamic + name).to(at::kFloat);
      const bool plain = matrix.dim() == 3 && matrix.size(1) == s.heads &&
                         matrix.size(2) == s.heads &&
                         matrix.eq(at::eye(s.heads)).all().item<bool>();
      require(plain, weights.path(), ": '", dynamic, name,
              "' is not the identity, expected no static weights.");
    }
    const auto is_zero = [&](const char* name) {
      return weights.has(dynamic + name) && !weights.at(dynamic + name).any().item<bool>();
    };
    if (weights.has(dynamic + "dw_m") && is_zero("dw1") && !is_zero("dw_m")) {
      const at::Tensor merged = weights.at(dynamic + "dw_m"), qkw = weights.at(dynamic + "qkw_m");
      const int64_t first = 4 * hidden;
      require(merged.sizes() == at::IntArrayRef({s.width, first + 4 * s.heads}) &&
                  qkw.sizes() == at::IntArrayRef({4, hidden, hidden}),
              weights.path(), ": '", dynamic, "dw_m' and 'qkw_m' have shapes ", merged.sizes(),
              " and ", qkw.sizes(), ", expected ", at::IntArrayRef({s.width, first + 4 * s.heads}),
              " and ", at::IntArrayRef({4, hidden, hidden}), ".");
      weights.put(dynamic + "dw1", merged.narrow(1, 0, first).reshape({s.width, 1, 4, hidden}));
      weights.put(dynamic + "dd",
                  merged.narrow(1, first, 4 * s.heads).reshape({s.width, 1, 4 * s.heads}));
      weights.put(dynamic + "qkw", qkw.reshape({1, 4, hidden, 2 * kRank, s.heads}));
    }
  }
}

std::vector<std::string> ignored_by_dcformer() {
  return {".dw_m",        ".qkw_m",   ".dyn_w_proj.sw", ".pre_proj.w",
          ".post_proj.w", ".k_cache", ".v_cache",       ".kw_cache"};
}

}  // namespace

Family dcformer_family() {
  return {.name = "dcformer",
          .architecture = "DCFormer",
          .doc = "the published DCFormer checkpoints",
          .ignored = ignored_by_dcformer(),
          .model = dcformer,
          .rules = dcformer_rules,
          .prepare = prepare};
}

Family dcpythia_family() {
  return {.name = "dcpythia",
          .architecture = "DCPythia",
          .doc = "the published DCPythia checkpoints",
          .ignored = ignored_by_dcformer(),
          .model = dcpythia,
          .rules = dcpythia_rules,
          .prepare = prepare};
}

}  // namespace headloom
