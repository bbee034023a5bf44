// Multi-Token Attention (Golovneva et al. 2025) by the names of its authors' code, which is built
// on Lingua: params.json and consolidated.pth. Its baselines, talking heads and plain attention,
// are the same code with other switches; LLaMA's original files have the same names as the latter.
#include <algorithm>
#include <tuple>

#include "core/error.h"
#include "core/sizes.h"
#include "core/text.h"
#include "interop/family.h"

namespace headloom {
namespace {

AttentionSizes lingua_sizes(const Settings& c) {
  AttentionSizes s{};
  s.width = c.count("dim");
  s.depth = c.count("n_layers");
  s.heads = c.count("n_heads");
  s.groups = c.count("n_kv_heads", s.heads);
  s.dim = c.count("head_dim", std::max<int64_t>(s.width / s.heads, 1));
  // Two thirds of 4 C, times a factor, rounded up.
  const int64_t multiple = c.count("multiple_of", 256);
  const double factor = c.real("ffn_dim_multiplier", 1.0);
  if (!(factor > 0 && factor < 1000)) {
    usage_error(c.path(), ": 'ffn_dim_multiplier' is ", factor, ", expected 0 to 1000.");
  }
  const int64_t usual = 8 * s.width / 3;
  const auto hidden = static_cast<int64_t>(factor * static_cast<double>(usual));
  s.hidden = (hidden + multiple - 1) / multiple * multiple;
  return s;
}

// A kernel over queries and keys, where the model has one: [heads, 1, query, key].
struct Kernel {
  int64_t query = 0, key = 0;
  bool there() const { return query > 0; }
};

Kernel kernel_of(const Settings& c, const std::string& before) {
  const std::string query = "mta." + before + "query_kernel_size",
                    key = "mta." + before + "key_kernel_size";
  // The code's own kernel before softmax is 1 x 1 unless it is switched off by a null.
  const bool default_one = before.empty();
  const auto size = [&](const std::string& name) -> int64_t {
    return c.integer(name, default_one && !c.is_null(name) ? 1 : 0);
  };
  return size(query) > 0 && size(key) > 0 ? Kernel{size(query), size(key)} : Kernel{};
}

struct Mta {
  bool here = false;  // in some layer
  Kernel pre, post;
  bool pre_mix = false, post_mix = false;
  int64_t mix_heads = 0;  // in a group after softmax; 0: none
  bool norm = false, gate = false;

  bool anything() const { return here || norm || gate; }
  bool mixes() const { return pre_mix || post_mix || mix_heads > 0; }
};

Mta mta_of(const Settings& c) {
  Mta m;
  m.norm = c.flag("mta.group_norm", false);
  m.gate = c.flag("mta.add_gating", false);
  m.here = c.flag("mta.use_mta", false);
  if (!m.here) return m;
  m.pre = kernel_of(c, "");
  m.post = kernel_of(c, "after_sm_");
  m.pre_mix = c.flag("mta.pre_sm_linear_head", false);
  m.post_mix = c.flag("mta.post_sm_linear_head", false);
  m.mix_heads = c.integer("mta.head_kernel_size", 0);
  if (m.pre.there() && m.post.there() && (m.pre.query != m.post.query || m.pre.key != m.post.key)) {
    usage_error(c.path(), ": the kernels are ", m.pre.query, " x ", m.pre.key, " before and ",
                m.post.query, " x ", m.post.key, " after softmax, expected the same.");
  }
  if (m.post_mix && m.mix_heads > 0) {
    usage_error(c.path(), ": 'mta.post_sm_linear_head' is true and 'mta.head_kernel_size' is ",
                m.mix_heads, ", expected one of the two.");
  }
  if (m.mix_heads < 0) {
    usage_error(c.path(), ": 'mta.head_kernel_size' is ", m.mix_heads, ", expected at least 1.");
  }
  return m;
}

// "2,6,10": the layers with convolutions; all where it is absent.
std::vector<bool> layers_with_kernels(const Settings& c, int64_t depth) {
  std::vector<bool> out(static_cast<size_t>(depth), !c.has("mta.mta_layers"));
  if (!c.has("mta.mta_layers")) return out;
  const std::string list = c.text("mta.mta_layers");
  int64_t layer = 0;
  bool digits = false;
  for (const char ch : list + ",") {
    if (ch >= '0' && ch <= '9' && layer < depth) {
      layer = 10 * layer + (ch - '0');
      digits = true;
    } else if (ch == ',' && digits && layer < depth) {
      out[static_cast<size_t>(layer)] = true;
      layer = 0;
      digits = false;
    } else if (ch != ' ') {
      usage_error(c.path(), ": 'mta.mta_layers' is \"", list, "\", expected layers from 0 to ",
                  depth - 1, " with commas between.");
    }
  }
  return out;
}

Node lingua_mixer(const Settings& c, const AttentionSizes& s, const Mta& m, bool kernels) {
  Node out = table({{"type", m.anything() ? "multi_token" : "mha"},
                    {"heads", s.heads},
                    {"kv_heads", s.groups},
                    {"head_dim", s.dim}});
  if (!m.anything()) return out;
  out.set("preset", Value("none"));
  out.set("norm", Value(m.norm));
  out.set("depth_scale", Value(m.norm && c.flag("mta.layer_norm_rescale", false)));
  out.set("gate", Value(!m.gate ? "none" : c.flag("mta.gate_1d", true) ? "head" : "full"));
  if (kernels && (m.pre.there() || m.post.there())) {
    const Kernel& kernel = m.pre.there() ? m.pre : m.post;
    out.set("pre_conv", Value(m.pre.there()));
    out.set("post_conv", Value(m.post.there()));
    out.set("conv_layers", Value("all"));
    out.set("query_kernel", Value(kernel.query));
    out.set("key_kernel", Value(kernel.key));
    out.set("conv_padding", Value(c.text("mta.pad_key", "both")));
  }
  if (m.pre_mix) out.set("pre_mix", Value("all"));
  if (m.post_mix) out.set("post_mix", Value("all"));
  if (m.mix_heads > 0) {
    out.set("post_mix", Value("groups"));
    out.set("mix_heads", Value(m.mix_heads));
  }
  return out;
}

Node lingua_model(const Settings& c) {
  c.only("triton", false);
  c.only("mta.curse_norm", false);
  c.only("use_scaled_rope", false);
  if (c.has("sliding_window")) {
    usage_error(c.path(), ": 'sliding_window' is set, expected it null or absent.");
  }
  // Each layer is written out below, before the model's own check of their number.
  const AttentionSizes s = lingua_sizes(c);
  if (s.depth > kMostLayers) {
    usage_error(c.path(), ": 'n_layers' is ", s.depth, ", expected at most ", kMostLayers, ".");
  }
  const Mta m = mta_of(c);
  const std::vector<bool> kernels = layers_with_kernels(c, s.depth);
  Array layers;
  for (int64_t i = 0; i < s.depth; ++i) {
    layers.push_back(table({{"mixer", lingua_mixer(c, s, m, kernels[static_cast<size_t>(i)])},
                            {"channel", table({{"type", "swiglu"}, {"hidden", s.hidden}})},
                            {"block", table({{"type", "sequential"}})}}));
  }
  Node out = table({{"vocabulary", c.count("vocab_size")},
                    {"max_length", c.count("max_seqlen", c.count("max_seq_len", 1024))},
                    {"width", s.width},
                    {"depth", s.depth},
                    {"position", table({{"type", "rope"},
                                        {"base", c.real("rope_theta", 10000.0)},
                                        {"layout", "interleaved"}})},
                    {"norm", "rms_norm"},
                    {"norm_eps", c.real("norm_eps", 1e-5)},
                    {"tied", c.flag("weight_tying", false)}});
  out.set("layer", {.value = std::move(layers)});
  return out;
}

Rules lingua_rules(const Settings& c) {
  const AttentionSizes s = lingua_sizes(c);
  const Mta m = mta_of(c);
  const std::vector<bool> kernels = layers_with_kernels(c, s.depth);
  const auto attention = [&](Rules& out, int64_t i) {
    const auto theirs = [&](const char* name) { return numbered("layers.{}.", i) + name; };
    const auto ours = [&](const char* name) { return at_layer(i, std::string("mixer.") + name); };
    add_linear(out, ours("qkv"),
               {theirs("attention.wq"), theirs("attention.wk"), theirs("attention.wv")}, false,
               {.rows = {s.heads * s.dim, s.groups * s.dim, s.groups * s.dim}});
    add_linear(out, ours("output"), {theirs("attention.wo")}, false);
    for (const auto& [kernel, name, their_name] :
         {std::tuple(m.pre, "pre_conv", "attention.mta_kernel"),
          std::tuple(m.post, "post_conv", "attention.mta_kernel_after_sm")}) {
      if (!kernel.there() || !kernels[static_cast<size_t>(i)]) continue;
      out.push_back({.ours = ours(name),
                     .theirs = {theirs(their_name)},
                     .shape = {s.heads, 1, kernel.query, kernel.key}});
    }
    // Linear maps are [out, in], ours and the kernels [group, in, out].
    for (const auto& [there, name, their_name] :
         {std::tuple(m.pre_mix, "pre_mix", "attention.wpsm.weight"),
          std::tuple(m.post_mix, "post_mix", "attention.wposm.weight")}) {
      if (!there) continue;
      out.push_back({.ours = ours(name), .theirs = {theirs(their_name)}, .transposed = true});
    }
    if (m.mix_heads > 0) {
      out.push_back({.ours = ours("post_mix"),
                     .theirs = {theirs("attention.head_kernel")},
                     .shape = {s.heads / m.mix_heads, m.mix_heads, m.mix_heads}});
    }
    if (m.norm) out.push_back({.ours = ours("norm"), .theirs = {theirs("attention.subln.weight")}});
    if (m.gate) add_linear(out, ours("gate"), {theirs("attention.gate")}, true);
  };
  return original_llama_rules(s.depth, c.flag("weight_tying", false), attention);
}

}  // namespace

Family lingua_family() {
  return {.name = "lingua",
          .architecture = "LMTransformer",
          .doc = "Multi-Token Attention, talking heads and LLaMA as Lingua trains them",
          // A tied output is saved as a second name of the embedding.
          .ignored = {"output.tied_module.weight", "rope_embeddings.freqs_cis", "rope.freqs"},
          .mark = "layers.0.attention.wq.weight",
          .model = lingua_model,
          .rules = lingua_rules};
}

}  // namespace headloom
