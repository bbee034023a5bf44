// An architecture of Hugging Face transformers or of a paper's own code: how its configuration and
// its tensors become those of a Headloom model, and back. `theirs` are of the other format, `ours`
// of Headloom.
//
// One file a family, one line each in families.cpp. The configuration goes both ways through plain
// tables; the tensors through a list of rules, which import reads forwards and export backwards.
#pragma once

#include <array>
#include <functional>

#include "interop/settings.h"
#include "interop/weights.h"

namespace headloom {

// Which tensors `theirs` hold the parameter `ours`: it has their rows, one below the other, in
// `order`.
struct Rule {
  std::string ours = {};
  std::vector<std::string> theirs = {};
  bool transposed = false;          // theirs are [in, out], ours [out, in]
  bool stacked = false;             // ours' first two dimensions together are the rows
  std::vector<int64_t> order = {};  // ours' row i is joined row order[i]; empty: as they are
  std::vector<int64_t> rows = {};   // of each of `theirs`, where they are several and unequal
  std::vector<int64_t> shape = {};  // of each of `theirs`, where it differs from that of its rows
};
using Rules = std::vector<Rule>;

struct Family {
  std::string name;          // model_type
  std::string architecture;  // the class of `transformers`
  std::string doc;
  std::string kind = "decoder";            // model.kind
  std::vector<std::string> prefixes = {};  // of names, absent from some files
  std::vector<std::string> ignored = {};   // ends of tensors' names that hold no parameters
  std::string head = {};  // the head's weight; where it is tied some files have it again
  // A tensor by which weights are known whose configuration names no model_type.
  std::string mark = {};
  // Other names of keys, and the keys: the attribute_map of their class.
  std::vector<std::pair<std::string, std::string>> aliases = {};
  // What transformers takes for keys that a file does not have, where the functions below do not
  // say it themselves.
  std::vector<std::pair<std::string, Node>> defaults = {};
  // Our [model] table, without its kind, for their config.json. Throws UsageError naming the key
  // that it cannot express.
  std::function<Node(const Settings& config)> model;
  std::function<Rules(const Settings& config)> rules;
  // Runs before the rules: makes the tensors that they name out of those that the file has instead,
  // and checks the tensors that are ignored.
  std::function<void(const Settings& config, Weights& weights)> prepare = {};
  // Their config.json for our [model] table, as far as it can say it; absent: import only. Export
  // reads it again with `model` to see whether anything was lost.
  std::function<Node(const Settings& model)> config = {};
};

const std::vector<Family>& families();
// A config.json as the functions of its family read it.
Settings settings_of(const Family& family, const Settings& given);
// The whole [model] table.
Node model_of(const Family& family, const Settings& config);

// --- What families share --------------------------------------------------------------------

// What a paper's configuration says of the sizes of its model, defaults filled in.
struct AttentionSizes {
  int64_t width, depth, heads;
  int64_t groups;  // key and value heads
  int64_t dim;     // of a head
  int64_t hidden;  // of the channel mixer
};

// "layer3." + name.
std::string at_layer(int64_t layer, const std::string& name);
// `name` with its "{}" replaced by the layer.
std::string numbered(const std::string& name, int64_t layer);
// Rules for NAME.weight and, with `bias`, NAME.bias.
void add_linear(Rules& rules, const std::string& ours, const std::vector<std::string>& theirs,
                bool bias, const Rule& how = {});
// Weight and bias of a LayerNorm, weight alone of an RMSNorm.
inline void add_norm(Rules& rules, const std::string& ours, const std::string& theirs, bool bias) {
  add_linear(rules, ours, {theirs}, bias);
}

// Their table of rotary embeddings: version 5 writes rope_parameters, version 4 rope_scaling, which
// counts where there are both. `rope_theta` may also be a key of config.json itself.
std::string rope_key(const Settings& config);
// Our position table for that table and rope_theta.
Node rope_table(const Settings& config, const std::string& layout, double fraction);
// Their rope_parameters for our position table.
Node rope_parameters(const Settings& model);
// Our name of an activation, UsageError where there is none.
std::string activation(const Settings& config, const std::string& key,
                       const std::string& otherwise);
std::string their_activation(const Settings& model, const std::string& key);
// How many classes their configuration has: transformers counts the names in id2label.
int64_t label_count(const Settings& config);
// Their id2label for classes without names: LABEL_0, LABEL_1, ...
Node label_names(int64_t count);

// A table with one layer for all of the depth.
Node with_layer(Node model, const Node& mixer, const Node& channel, const Node& block);
// Gives `model`, which has one layer for all of the depth, a layer each; `change` makes them
// differ.
void write_out_layers(Node& model, const Settings& config,
                      const std::function<void(int64_t layer, Node& table)>& change);
// Attention by the names of LLaMA's files: our mixer and the rules of its tensors, with biases of
// the projections to queries, keys and values and of the one to the output.
Node llama_attention(const Settings& config);
void add_llama_attention(Rules& rules, const Settings& config, int64_t layer, bool qkv_bias,
                         bool output_bias);
// Experts in place of the rules of LLaMA's network. `ours` and `theirs` begin the names:
// "layer3.channel.", "model.layers.3.mlp."; `parts` are the names of an expert's gate, up and down.
void add_experts(Rules& rules, const std::string& ours, const std::string& theirs, int64_t experts,
                 const std::array<const char*, 3>& parts = {"gate_proj", "up_proj", "down_proj"});
// Our table of experts of which none sees every token, for a config.json that names them as
// Mixtral's does; and such keys of a config.json for the table at `channel` of our [model] table.
Node experts_table(const Settings& config, int64_t hidden, bool renormalise);
void set_experts(Node& config, const Settings& model, const std::string& channel);
// LLaMA's shell, which several share: embedding, norms, SwiGLU, head. llama_shell_config() is their
// config.json for our [model] table with plain attention.
Node llama_model(const Settings& config, Node mixer, double eps);
Node llama_shell_config(const Settings& model);
Rules llama_rules(const Settings& config, const std::function<void(Rules&, int64_t)>& attention);
// The same shell by the names of LLaMA's original code (tok_embeddings, feed_forward.w1, ...),
// which authors of papers keep.
Rules original_llama_rules(int64_t depth, bool tied,
                           const std::function<void(Rules&, int64_t)>& attention);

}  // namespace headloom
