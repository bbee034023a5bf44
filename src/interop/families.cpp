// The table of families, and what they share.
#include <cmath>

#include "core/error.h"
#include "core/sizes.h"
#include "core/text.h"
#include "interop/family.h"

namespace headloom {

#define HEADLOOM_FAMILIES(X) \
  X(gpt2)                    \
  X(gpt_neox)                \
  X(gptj)                    \
  X(llama)                   \
  X(mistral)                 \
  X(qwen2)                   \
  X(qwen3)                   \
  X(mixtral)                 \
  X(qwen3_moe)               \
  X(diffllama)               \
  X(rwkv)                    \
  X(mamba)                   \
  X(deepseek)                \
  X(bert)                    \
  X(fnet)                    \
  X(lingua)                  \
  X(diff_transformer)        \
  X(dcformer)                \
  X(dcpythia)                \
  X(vit)

#define DECLARE(name) Family name##_family();
HEADLOOM_FAMILIES(DECLARE)
#undef DECLARE

const std::vector<Family>& families() {
#define ENTRY(name) name##_family(),
  static const std::vector<Family> table = {HEADLOOM_FAMILIES(ENTRY)};
#undef ENTRY
  return table;
}

Settings settings_of(const Family& family, const Settings& given) {
  return given.resolved(family.aliases).with_defaults(family.defaults);
}

Node model_of(const Family& family, const Settings& config) {
  Node out = family.model(config);
  out.set("kind", Value(family.kind));
  return out;
}

std::string at_layer(int64_t layer, const std::string& name) {
  return str("layer", layer, '.', name);
}

std::string numbered(const std::string& name, int64_t layer) {
  const size_t place = name.find("{}");
  return name.substr(0, place) + std::to_string(layer) + name.substr(place + 2);
}

void add_linear(Rules& rules, const std::string& ours, const std::vector<std::string>& theirs,
                bool bias, const Rule& how) {
  for (const char* part : {".weight", ".bias"}) {
    const bool is_bias = part[1] == 'b';
    if (is_bias && !bias) continue;
    Rule rule = how;
    rule.ours = ours + part;
    rule.transposed = how.transposed && !is_bias;
    for (const std::string& name : theirs) rule.theirs.push_back(name + part);
    rules.push_back(std::move(rule));
  }
}

std::string rope_key(const Settings& config) {
  const Node* const scaling = config.find("rope_scaling");
  const bool empty = scaling == nullptr || (scaling->is_table() && scaling->table().empty());
  return empty ? "rope_parameters" : "rope_scaling";
}

namespace {

// The keys of `out` that only YaRN has.
void set_yarn(Node& out, const Settings& config, const std::string& scaling) {
  config.only(scaling + ".truncate", true);
  out.set("beta_slow", Value(config.real(scaling + ".beta_slow", 1.0)));
  out.set("beta_fast", Value(config.real(scaling + ".beta_fast", 32.0)));
  const auto given = [&](const char* key) { return config.real(scaling + key, 0.0); };
  const double factor = given(".factor");
  const auto of = [&](double scale) { return factor > 1 ? 0.1 * scale * std::log(factor) + 1 : 1; };
  if (config.has(scaling + ".attention_factor")) {
    out.set("attention_factor", Value(given(".attention_factor")));
  } else if (given(".mscale") != 0 && given(".mscale_all_dim") != 0) {
    out.set("attention_factor", Value(of(given(".mscale")) / of(given(".mscale_all_dim"))));
  }
}

}  // namespace

Node rope_table(const Settings& config, const std::string& layout, double fraction) {
  const std::string scaling = rope_key(config);
  const double base = config.real(scaling + ".rope_theta", config.real("rope_theta", 10000.0));
  Node out = table({{"type", "rope"}, {"base", base}, {"layout", layout}, {"fraction", fraction}});
  if (!config.has(scaling)) return out;
  const std::string key =
      scaling + (config.has(scaling + ".type") && !config.has(scaling + ".rope_type")
                     ? ".type"
                     : ".rope_type");
  config.only(key, {"default", "linear", "llama3", "yarn"});
  const std::string type = config.text(key, "default");
  if (type == "default") return out;
  out.set("scaling", Value(type));
  out.set("factor", Value(config.real(scaling + ".factor")));
  if (type == "linear") return out;
  if (type == "yarn") {
    set_yarn(out, config, scaling);
  } else {
    out.set("low_factor", Value(config.real(scaling + ".low_freq_factor")));
    out.set("high_factor", Value(config.real(scaling + ".high_freq_factor")));
  }
  // The first that is there, as transformers takes it.
  const std::string original = "original_max_position_embeddings";
  const std::string inner = scaling + "." + original;
  out.set("original_length", Value(config.count(config.has(original) ? original
                                                : config.has(inner)  ? inner
                                                                     : "max_position_embeddings")));
  return out;
}

Node rope_parameters(const Settings& model) {
  const std::string scaling = model.text("position.scaling", "none");
  Node out = table({{"rope_type", scaling == "none" ? "default" : scaling},
                    {"rope_theta", model.real("position.base", 10000.0)}});
  if (scaling != "none") out.set("factor", Value(model.real("position.factor")));
  if (scaling == "llama3") {
    out.set("low_freq_factor", Value(model.real("position.low_factor")));
    out.set("high_freq_factor", Value(model.real("position.high_factor")));
  } else if (scaling == "yarn") {
    out.set("beta_slow", Value(model.real("position.beta_slow")));
    out.set("beta_fast", Value(model.real("position.beta_fast")));
    if (model.has("position.attention_factor")) {
      out.set("attention_factor", Value(model.real("position.attention_factor")));
    }
  }
  if (scaling == "llama3" || scaling == "yarn") {
    out.set("original_max_position_embeddings", Value(model.integer("position.original_length")));
  }
  return out;
}

namespace {
// Theirs, ours; the first of equals is written.
constexpr std::pair<const char*, const char*> kActivations[] = {
    {"gelu", "gelu"},           {"gelu_new", "gelu_tanh"}, {"gelu_pytorch_tanh", "gelu_tanh"},
    {"gelu_fast", "gelu_tanh"}, {"relu", "relu"},          {"relu2", "relu2"}};
}  // namespace

std::string activation(const Settings& config, const std::string& key,
                       const std::string& otherwise) {
  const std::string name = config.text(key, otherwise);
  std::vector<std::string> known;
  for (const auto& [theirs, ours] : kActivations) {
    if (name == theirs) return ours;
    known.push_back(theirs);
  }
  config.only(key, known);
  return "";
}

std::string their_activation(const Settings& model, const std::string& key) {
  const std::string name = model.text(key, "gelu");
  for (const auto& [theirs, ours] : kActivations) {
    if (name == ours) return theirs;
  }
  return name;
}

int64_t label_count(const Settings& config) {
  int64_t count = 0;
  while (config.has(str("id2label.", count))) ++count;
  return count > 0 ? count : config.count("num_labels", 2);
}

Node label_names(int64_t count) {
  Node names;
  for (int64_t i = 0; i < count; ++i) names.set(std::to_string(i), Value(str("LABEL_", i)));
  return names;
}

void add_experts(Rules& rules, const std::string& ours, const std::string& theirs, int64_t experts,
                 const std::array<const char*, 3>& parts) {
  std::erase_if(rules, [&](const Rule& rule) { return rule.ours.starts_with(ours); });
  add_linear(rules, ours + "gate", {theirs + "gate"}, false);
  Rule up = {.ours = ours + "up", .stacked = true}, down = {.ours = ours + "down", .stacked = true};
  for (int64_t e = 0; e < experts; ++e) {
    const auto part = [&](size_t i) {
      return str(theirs, "experts.", e, '.', parts[i], ".weight");
    };
    up.theirs.push_back(part(0));
    up.theirs.push_back(part(1));
    down.theirs.push_back(part(2));
  }
  rules.push_back(std::move(up));
  rules.push_back(std::move(down));
}

Node experts_table(const Settings& c, int64_t hidden, bool renormalise) {
  return table({{"type", "moe"},
                {"hidden", hidden},
                {"routed", c.count("num_experts")},
                {"shared", 0},
                {"active", c.count("num_experts_per_tok")},
                {"renormalise", renormalise},
                {"balance", c.real("router_aux_loss_coef", 0.001)}});
}

void set_experts(Node& config, const Settings& m, const std::string& channel) {
  const int64_t routed = m.integer(channel + ".routed", 1);
  config.set("num_experts", Value(routed));  // of the two names older classes know one
  config.set("num_local_experts", Value(routed));
  config.set("num_experts_per_tok", Value(m.integer(channel + ".active", 1)));
  config.set("router_aux_loss_coef", Value(m.real(channel + ".balance", 0.001)));
}

void write_out_layers(Node& model, const Settings& config,
                      const std::function<void(int64_t layer, Node& table)>& change) {
  // Before the model's own check of their number.
  const int64_t depth = config.count("num_hidden_layers");
  if (depth > kMostLayers) {
    usage_error(config.path(), ": 'num_hidden_layers' is ", depth, ", expected at most ",
                kMostLayers, ".");
  }
  const Node all = model.find("layer")->array().at(0);
  Array layers;
  for (int64_t i = 0; i < depth; ++i) {
    layers.push_back(all);
    change(i, layers.back());
  }
  model.set("layer", {.value = std::move(layers)});
}

Node with_layer(Node model, const Node& mixer, const Node& channel, const Node& block) {
  model.set("layer",
            {.value = Array{table({{"mixer", mixer}, {"channel", channel}, {"block", block}})}});
  return model;
}

}  // namespace headloom
