#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <tuple>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/text.h"
#include "data/tokenizer_json.h"
#include "interop/convert.h"
#include "interop/family.h"
#include "mixers/without_memory.h"
#include "model/model.h"
#include "train/checkpoint.h"
#include "train/load.h"

namespace headloom {
namespace {

namespace fs = std::filesystem;

// [model] with all defaults written out, without what does not change the function it computes: the
// same for models that are the same.
Node canonical(ModelConfig config) {
  config.dropout = 0;
  config.init_std = 0.02;
  config.equal_init = false;
  if (!config.norm_eps) config.norm_eps = config.norm == "layer_norm" ? 1e-5 : 1e-6;
  if (config.kind == "encoder") {
    const ModelConfig plain;
    if (!config.segments) config.segments = 0;
    if (config.head != "tokens") {
      config.transform = plain.transform;
      config.transform_activation = plain.transform_activation;
      config.output_bias = plain.output_bias;
      config.tied = plain.tied;
    }
    if (config.head != "label") {
      config.pool = plain.pool;
      config.pooler = plain.pooler;
    }
    if (!config.has_classes()) config.classes = plain.classes;
  }
  if (config.position.type != "rope") config.position = {.type = config.position.type};
  std::vector<LayerConfig> layers;
  for (int64_t i = 0; i < config.depth; ++i) {
    layers.push_back(config.layers[static_cast<size_t>(i) % config.layers.size()]);
  }
  config.layers = std::move(layers);
  for (LayerConfig& layer : config.layers) {
    if (const auto hidden = layer.channel->hidden(config.width)) *hidden->option = hidden->present;
  }
  Node out = write_fields(config);
  for (Node& layer : out.find("layer")->array()) {
    Node& mixer = *layer.find("mixer");
    const Settings given(mixer, "");
    if (given.has("heads") && !given.has("kv_heads")) {
      mixer.set("kv_heads", Value(given.integer("heads")));
    }
    const int64_t maps = given.integer("heads", 1) * (given.text("type") == "differential" ? 2 : 1);
    if (given.has("heads") && !given.has("head_dim")) {
      mixer.set("head_dim", Value(config.width / maps));
    }
    if (given.text("type") == "mamba" && !given.has("dt_rank")) {
      mixer.set("dt_rank", Value((config.width + 15) / 16));
    }
    // Mistral's files name a window where there is none: a huge one. Where positions have no end,
    // max_length is none of the model's.
    constexpr int64_t kNone = int64_t{1} << 30;
    const bool ends = config.position.type == "learned" && config.max_length;
    if (given.integer("window", 0) >= (ends ? *config.max_length : kNone)) {
      std::erase_if(mixer.table(), [](const auto& entry) { return entry.first == "window"; });
    }
    if (config.bias && mixer.find("qkv_bias") != nullptr) mixer.set("qkv_bias", Value(true));
    Node& channel = *layer.find("channel");
    if (config.bias && channel.find("bias") != nullptr) channel.set("bias", Value(true));
    std::erase_if(layer.table(), [](const auto& entry) { return entry.first == "cross"; });
  }
  return out;
}

std::string shown(const Node* node) {
  if (node == nullptr) return "absent";
  return node->is_table() || node->is_array() ? node->type_name() : inline_toml(*node);
}

bool same_value(const Node& a, const Node& b) {
  const auto* x = std::get_if<double>(&a.value);
  const auto* y = std::get_if<double>(&b.value);
  if (x != nullptr && y != nullptr) return std::abs(*x - *y) <= 1e-9 * std::abs(*x);
  return a.value.index() == b.value.index() && !a.is_table() && !a.is_array() &&
         shown(&a) == shown(&b);
}

// Where `ours` differs from `theirs`, as "model.norm is "x" instead of "y"".
void compare(const Node& ours, const Node& theirs, const std::string& path,
             std::vector<std::string>& out) {
  if (ours.is_table() && theirs.is_table()) {
    for (const auto& [key, value] : ours.table()) {
      const Node* other = theirs.find(key);
      if (other == nullptr) {
        out.push_back(str(path, '.', key, " is ", shown(&value), ", expected it absent"));
      } else {
        compare(value, *other, path + "." + key, out);
      }
    }
    for (const auto& [key, value] : theirs.table()) {
      if (ours.find(key) == nullptr) {
        out.push_back(str(path, '.', key, " is absent, expected ", shown(&value)));
      }
    }
  } else if (ours.is_array() && theirs.is_array() && ours.array().size() == theirs.array().size()) {
    for (size_t i = 0; i < ours.array().size(); ++i) {
      compare(ours.array()[i], theirs.array()[i], str(path, '[', i, ']'), out);
    }
  } else if (!same_value(ours, theirs)) {
    out.push_back(str(path, " is ", shown(&ours), ", expected ", shown(&theirs)));
  }
}

// What keeps a family from expressing a model, without full stops.
struct Obstacles {
  std::vector<std::string> found;
  bool other_kind = false;  // the family has models of another kind
  bool foreign = false;     // the family has no such model, whatever the values of its keys

  bool fewer_than(const Obstacles& other) const {
    return std::tuple(other_kind, foreign, found.size()) <
           std::tuple(other.other_kind, other.foreign, other.found.size());
  }
};

// All of them, unless they are many: layers that differ alike have one each.
std::string reasons(const std::vector<std::string>& found) {
  constexpr size_t kNamed = 4;
  std::string out;
  for (size_t i = 0; i < std::min(found.size(), kNamed); ++i) {
    out += (i > 0 ? "; " : "") + found[i];
  }
  return found.size() > kNamed ? str(out, "; and ", found.size() - kNamed, " more") : out;
}

// Fills `config`.
Obstacles obstacles(const Family& family, const Node& model, Node& config) {
  Obstacles out;
  compare(*model.find("kind"), Value(family.kind), "model.kind", out.found);
  out.other_kind = !out.found.empty();
  if (out.other_kind) return out;
  try {
    config = family.config(Settings(model, "the model"));
    ModelConfig back;
    read_fields(model_of(family, settings_of(family, {config, family.name})), back, "model");
    // A model without a longest length is written with the family's usual one, which limits nothing
    // that is computed: learned positions always have a length.
    if (!Settings(model, "the model").has("max_length")) back.max_length.reset();
    compare(model, canonical(back), "model", out.found);
    return out;
  } catch (const Error& error) {
    std::string text = error.what();
    if (!text.empty() && text.back() == '.') text.pop_back();
    return {.found = {text}, .foreign = true};
  }
}

// The model's parameters under the names, and in the parts, of the other format.
NamedTensors parts(const torch::nn::Module& model, const Rules& rules) {
  NamedTensors out;
  const auto parameters = model.named_parameters();
  for (const Rule& rule : rules) {
    const Tensor* found = parameters.find(rule.ours);
    require(found != nullptr, "the model has no parameter '", rule.ours, "'.");
    Tensor whole = found->detach();
    if (rule.stacked) whole = whole.flatten(0, 1);
    if (!rule.order.empty()) {
      whole = at::empty_like(whole).index_copy_(0, at::tensor(rule.order, at::kLong), whole);
    }
    int64_t first = 0;
    for (size_t i = 0; i < rule.theirs.size(); ++i) {
      const int64_t rows = rule.rows.empty()
                               ? whole.size(0) / static_cast<int64_t>(rule.theirs.size())
                               : rule.rows[i];
      Tensor part = whole.narrow(0, first, rows);
      first += rows;
      if (rule.transposed) part = part.t();
      if (!rule.shape.empty()) part = part.reshape(rule.shape);
      out.emplace_back(rule.theirs[i], part);
    }
  }
  return out;
}

// The tokenizer of a model of bytes, which has no file here.
void write_byte_tokenizer(const LoadedRun& run, Node& config, const std::string& out) {
  const bool mask = run.config.task->type() == "masked_text";
  // What was imported without its tokenizer reads bytes here, but was not trained on them.
  if (run.config.model.vocabulary.value_or(0) > (mask ? 257 : 256)) return;
  write_file(out + "/tokenizer.json", data::byte_tokenizer_json(mask));
  const std::string end(1, '\0');
  Node how = table({{"tokenizer_class", "PreTrainedTokenizerFast"},
                    {"eos_token", end},
                    {"clean_up_tokenization_spaces", false}});
  if (mask) how.set("mask_token", Value("[MASK]"));
  if (run.config.model.max_length) {
    how.set("model_max_length", Value(*run.config.model.max_length));
  }
  write_file(out + "/tokenizer_config.json", to_json(how));
  config.set("eos_token_id", Value(0));
  config.set("bos_token_id", Value(0));
}

void write_tokenizer(LoadedRun& run, Node& config, const std::string& out) {
  const std::string* file = run.config.task->tokenizer_file();
  if (file == nullptr) {
    if (run.config.task->tokenizer() != nullptr) write_byte_tokenizer(run, config, out);
    return;
  }
  keep_tokenizer(out, *file);
  const auto tokenizer = run.config.task->tokenizer();
  config.set("eos_token_id", Value(tokenizer->end_token()));
  config.set("bos_token_id", Value(tokenizer->start_token().value_or(tokenizer->end_token())));
}

// The names of the classes, where the task has them, in place of numbers.
void write_labels(LoadedRun& run, Node& config) {
  const std::vector<std::string>* labels = run.config.task->labels();
  Node* names = config.find("id2label");
  if (names == nullptr) return;
  for (size_t i = 0; labels != nullptr && i < labels->size(); ++i) {
    names->set(std::to_string(i), Value((*labels)[i]));
  }
  Node numbers;
  int64_t number = 0;
  for (const auto& [key, name] : names->table()) {
    numbers.set(std::get<std::string>(name.value), Value(number++));
  }
  config.set("label2id", std::move(numbers));
}

}  // namespace

Converted export_run(const std::string& folder, const std::string& checkpoint,
                     const std::string& wanted, const std::string& out) {
  if (fs::exists(out) && !fs::is_empty(out)) {
    usage_error(out, ": is not empty; choose another folder with --out.");
  }
  LoadedRun run = load_run(folder, checkpoint);
  const Node model = canonical(run.config.model);
  const Family* chosen = nullptr;
  Node config;
  std::string nearest_name;
  Obstacles nearest;
  std::vector<std::string> names;
  for (const Family& family : families()) {
    if (!family.config) continue;
    names.push_back(family.name);
    if (!wanted.empty() && family.name != wanted) continue;
    const Obstacles in_the_way = obstacles(family, model, config);
    if (in_the_way.found.empty()) {
      chosen = &family;
      break;
    }
    if (nearest_name.empty() || in_the_way.fewer_than(nearest)) {
      nearest_name = family.name;
      nearest = in_the_way;
    }
  }
  if (chosen == nullptr && nearest_name.empty()) {
    usage_error("there is no architecture '", wanted, "' to export to; there are ", join(names),
                ".");
  }
  if (chosen == nullptr) {
    usage_error(folder, ": the model cannot be written as ", nearest_name,
                wanted.empty() ? " (the nearest) or any other architecture" : "", ": ",
                reasons(nearest.found), ".");
  }

  Converted result{.family = chosen->name,
                   .parameters = static_cast<int64_t>(parameter_count(*run.model))};
  make_folders(out);
  write_tokenizer(run, config, out);
  write_labels(run, config);
  config.set("model_type", Value(chosen->name));
  if (config.find("architectures") == nullptr) {
    config.set("architectures", {.value = Array{Value(chosen->architecture)}});
  }
  config.set("torch_dtype", Value(run.config.train.dtype == "float64" ? "float64" : "float32"));
  write_safetensors(
      out + "/model.safetensors",
      parts(*run.model, chosen->rules(settings_of(*chosen, {config, out + "/config.json"}))));
  write_file(out + "/config.json", to_json(config));
  return result;
}

}  // namespace headloom
