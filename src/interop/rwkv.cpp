// RWKV-4 (Peng et al. 2023).
#include "core/error.h"
#include "interop/family.h"

namespace headloom {
namespace {

constexpr int64_t kRwkvLength = 1024;  // of a configuration that does not say it

int64_t rwkv_width(const Settings& c) { return c.count("hidden_size", 4096); }
int64_t rwkv_depth(const Settings& c) { return c.count("num_hidden_layers", 32); }

// The norm of the output has this eps in transformers, whatever layer_norm_epsilon the others have.
constexpr double kOutputEps = 1e-5;

Node rwkv_model(const Settings& c) {
  if (const double eps = c.real("layer_norm_epsilon", kOutputEps); eps != kOutputEps) {
    usage_error(c.path(), ": 'layer_norm_epsilon' is ", eps, ", expected 1e-05.");
  }
  c.only_equal("attention_hidden_size", rwkv_width(c));
  return with_layer(table({{"vocabulary", c.count("vocab_size", 50277)},
                           {"max_length", c.count("context_length", kRwkvLength)},
                           {"width", rwkv_width(c)},
                           {"depth", rwkv_depth(c)},
                           {"position", table({{"type", "none"}})},
                           {"norm", "layer_norm"},
                           {"norm_eps", kOutputEps},
                           {"embedding_norm", true},
                           {"bias", false},
                           {"tied", c.flag("tie_word_embeddings", false)}}),
                    table({{"type", "rwkv"}}),
                    table({{"type", "rwkv_channel"},
                           {"hidden", c.count("intermediate_size", 4 * rwkv_width(c))}}),
                    table({{"type", "sequential"}}));
}

Rules rwkv_rules(const Settings& c) {
  Rules out = {{.ours = "embedding", .theirs = {"rwkv.embeddings.weight"}}};
  add_norm(out, "embedding_norm", "rwkv.blocks.0.pre_ln", true);
  add_norm(out, "norm", "rwkv.ln_out", true);
  const std::vector<int64_t> one_row = {1, 1, rwkv_width(c)};
  for (int64_t i = 0; i < rwkv_depth(c); ++i) {
    const auto time = [&](const char* name) {
      return numbered("rwkv.blocks.{}.attention.", i) + name;
    };
    const auto channel = [&](const char* name) {
      return numbered("rwkv.blocks.{}.feed_forward.", i) + name;
    };
    add_norm(out, at_layer(i, "mixer_norm"), numbered("rwkv.blocks.{}.ln1", i), true);
    add_norm(out, at_layer(i, "channel_norm"), numbered("rwkv.blocks.{}.ln2", i), true);
    out.push_back({.ours = at_layer(i, "mixer.time_decay"), .theirs = {time("time_decay")}});
    out.push_back({.ours = at_layer(i, "mixer.bonus"), .theirs = {time("time_first")}});
    out.push_back(
        {.ours = at_layer(i, "mixer.mix"),
         .theirs = {time("time_mix_key"), time("time_mix_value"), time("time_mix_receptance")},
         .shape = one_row});
    out.push_back({.ours = at_layer(i, "channel.mix"),
                   .theirs = {channel("time_mix_key"), channel("time_mix_receptance")},
                   .shape = one_row});
    for (const char* name : {"key", "value", "receptance", "output"}) {
      add_linear(out, at_layer(i, std::string("mixer.") + name), {time(name)}, false);
    }
    for (const char* name : {"key", "value", "receptance"}) {
      add_linear(out, at_layer(i, std::string("channel.") + name), {channel(name)}, false);
    }
  }
  if (!c.flag("tie_word_embeddings", false)) add_linear(out, "head", {"head"}, false);
  return out;
}

Node rwkv_config(const Settings& m) {
  if (m.integer("depth") == 1) {
    usage_error("model.depth is 1, expected at least 2: transformers divides by what is left of ",
                "it without the first layer.");
  }
  return table({{"vocab_size", m.integer("vocabulary")},
                {"context_length", m.integer("max_length", kRwkvLength)},
                {"hidden_size", m.integer("width")},
                {"attention_hidden_size", m.integer("width")},
                {"intermediate_size", m.integer("layer.0.channel.hidden", 1)},
                {"num_hidden_layers", m.integer("depth")},
                {"layer_norm_epsilon", kOutputEps},
                {"tie_word_embeddings", m.flag("tied")}});
}

}  // namespace

Family rwkv_family() {
  return {.name = "rwkv",
          .architecture = "RwkvForCausalLM",
          .doc = "RWKV-4",
          .prefixes = {"rwkv."},
          .head = "head.weight",
          .aliases = {{"max_position_embeddings", "context_length"}},
          .model = rwkv_model,
          .rules = rwkv_rules,
          .config = rwkv_config};
}

}  // namespace headloom
