#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/text.h"
#include "interop/convert.h"
#include "interop/family.h"
#include "interop/weights.h"
#include "mixers/without_memory.h"
#include "model/model.h"
#include "train/checkpoint.h"
#include "train/load.h"

namespace headloom {
namespace {

namespace fs = std::filesystem;

// config.json, else params.json or its table `model`.
Settings read_config(const std::string& folder) {
  const std::string config = folder + "/config.json", params = folder + "/params.json";
  if (is_there(folder + "/config.toml") && !is_there(config)) {
    fail(folder, ": is the folder of a run already, expected that of a Hugging Face model.");
  }
  if (is_there(config)) return {read_json(config), config};
  require(is_there(params), folder,
          ": has no config.json and no params.json, expected the folder of a Hugging Face model.");
  return Settings(read_json(params), params).below("model");
}

const Family& family_of(const Settings& config, const Weights& weights) {
  const bool named = config.has("model_type");
  const std::string type = named ? config.text("model_type") : "";
  std::vector<std::string> names;
  for (const Family& family : families()) {
    if (named ? family.name == type : !family.mark.empty() && weights.has(family.mark)) {
      return family;
    }
    names.push_back(family.name);
  }
  if (!named) {
    usage_error(config.path(), ": has no key 'model_type', and ", weights.path(),
                " has no tensor that tells it; set it to one of ", join(names), ".");
  }
  usage_error(config.path(), ": 'model_type' is \"", type, "\", expected one of ", join(names),
              ".");
}

// The name that the file uses: some leave the prefix out.
std::string present(const Weights& weights, const Family& family, const std::string& name) {
  if (weights.has(name)) return name;
  for (const std::string& prefix : family.prefixes) {
    if (name.starts_with(prefix) && weights.has(name.substr(prefix.size()))) {
      return name.substr(prefix.size());
    }
  }
  return name;
}

// The tensor that `rule` makes, of the sizes `ours`.
Tensor joined(const Rule& rule, const Family& family, Weights& weights, at::IntArrayRef ours) {
  std::vector<int64_t> sizes = ours.vec();
  if (rule.stacked) {
    sizes[1] *= sizes[0];
    sizes.erase(sizes.begin());
  }
  std::vector<Tensor> pieces;
  for (size_t i = 0; i < rule.theirs.size(); ++i) {
    const std::string name = present(weights, family, rule.theirs[i]);
    Tensor t = weights.take(name);
    require(at::isFloatingType(t.scalar_type()), weights.path(), ": tensor '", name,
            "' has the type ", toString(t.scalar_type()), ", expected a floating-point one.");
    std::vector<int64_t> wanted = sizes;
    wanted[0] =
        rule.rows.empty() ? sizes[0] / static_cast<int64_t>(rule.theirs.size()) : rule.rows[i];
    std::vector<int64_t> across = wanted;
    std::reverse(across.begin(), across.end());
    const std::vector<int64_t>& theirs = !rule.shape.empty() ? rule.shape
                                         : rule.transposed   ? across
                                                             : wanted;
    require(t.sizes() == at::IntArrayRef(theirs), weights.path(), ": tensor '", name,
            "' has shape ", t.sizes(), ", expected ", at::IntArrayRef(theirs), ".");
    if (rule.transposed) t = t.reshape(across).t();
    pieces.push_back(t.reshape(wanted));
  }
  const Tensor whole = pieces.size() == 1 ? pieces[0] : at::cat(pieces);
  return rule.order.empty() ? whole : whole.index_select(0, at::tensor(rule.order, at::kLong));
}

void fill(const torch::nn::Module& model, const Rules& rules, const Family& family,
          Weights& weights) {
  at::NoGradGuard no_grad;
  auto parameters = model.named_parameters();
  std::vector<std::string> missing = parameters.keys();
  for (const Rule& rule : rules) {
    Tensor* target = parameters.find(rule.ours);
    require(target != nullptr, "the model has no parameter '", rule.ours, "', which ", family.name,
            " has.");
    target->copy_(joined(rule, family, weights, target->sizes()).view_as(*target));
    std::erase(missing, rule.ours);
  }
  require(missing.empty(), family.name, " has nothing for the model's parameter '",
          missing.empty() ? "" : missing[0], "'.");
  if (family.head != "" && !parameters.contains("head.weight") && weights.has(family.head)) {
    const Tensor copy = weights.take(family.head).to(at::kFloat);
    require(at::equal(copy, parameters["embedding"].to(at::kFloat)), weights.path(), ": tensor '",
            family.head, "' is not the embedding, with which 'tie_word_embeddings' ties it.");
  }
  for (const std::string& name : weights.unused()) {
    const bool known = std::any_of(family.ignored.begin(), family.ignored.end(),
                                   [&](const std::string& end) { return name.ends_with(end); });
    require(known, weights.path(), ": tensor '", name, "' has no place in a ", family.name, ".");
  }
}

// The tokenizer's file in `folder` that is used, or "" where there is none. `note` says why it is
// not the first one that is looked for, and what that means for a model of `vocabulary` tokens.
// Throws Error where there are files and none can be used.
std::string tokenizer_in(const std::string& folder, int64_t vocabulary, std::string& note) {
  const bool bytes = vocabulary >= data::byte_tokenizer()->vocabulary();
  std::string problem;
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    const std::string path = folder + "/" + name;
    if (!is_there(path)) continue;
    try {
      const int64_t tokens = data::make_tokenizer(path)->vocabulary();
      if (!problem.empty()) note = str("The tokenizer is ", path, ": ", problem);
      if (tokens > vocabulary) {
        note += str(note.empty() ? "" : " ", path, " has ", tokens, " tokens, and the model only ",
                    vocabulary, ": a text that has one of the others is refused.");
      }
      return path;
    } catch (const Error& error) {
      if (problem.empty()) problem = error.what();
    }
  }
  if (problem.empty()) {
    note = str(bytes ? "Text is read as bytes: " : "The model reads no text: ", folder,
               " has neither tokenizer.json nor tokenizer.model.");
    return "";
  }
  if (problem.ends_with('.')) problem.pop_back();
  fail(problem, "; move the file to another folder to import the model without it, ",
       bytes ? "text is read as bytes then." : "it reads no text then.");
}

// Refuses sizes that the weights cannot have, before a model of them is built: each of a table's
// integers counts rows of `width` numbers somewhere.
void check_sizes(const Node& node, double width, const std::string& key, const Weights& weights,
                 const std::string& path) {
  if (node.is_table()) {
    for (const auto& [name, value] : node.table()) {
      check_sizes(value, width, name, weights, path);
    }
  } else if (node.is_array()) {
    for (const Node& value : node.array()) check_sizes(value, width, key, weights, path);
  } else if (const auto* size = std::get_if<int64_t>(&node.value)) {
    const bool free = key == "max_length" || key == "original_length" || key == "window";
    const bool fits = key == "depth"
                          ? *size <= weights.count()
                          : free || static_cast<double>(*size) * width <= weights.numbers();
    if (!fits) {
      usage_error(path, ": makes '", key, "' ", *size, ", more than the ", weights.count(),
                  " tensors in ", weights.path(), " can have.");
    }
  }
}

// The model of the table `root`, which is what the file `path` says. What no family has checked is
// named by the key of [model] that it became, so the file is named too.
void build(const Node& root, const std::string& path, ImportedModel& result) {
  try {
    result.config = read_run_config(root);
    const WithoutValues no_values(/*filled=*/true);
    result.model = build_model(result.config.model);
  } catch (const UsageError& error) {
    usage_error(path, ": ", error.what());
  }
  result.model->eval();
}

// What the imported model can be evaluated on, once --set names the data.
Node task_for(const ModelConfig& model, const std::string& tokenizer,
              const std::vector<std::string>& labels) {
  if (model.kind == "vit") return table({{"type", "images"}, {"size", *model.image.height}});
  const int64_t length = std::min<int64_t>(model.max_length.value_or(1024), 1024);
  const char* type = model.kind != "encoder" ? "text"
                     : model.head == "label" ? "classify_text"
                     : model.head == "tags"  ? "tag_text"
                     : model.head == "span"  ? "find_span"
                                             : "masked_text";
  if (model.kind == "encoder_decoder") return table({{"type", "sequence"}});
  Node out = table({{"type", type}, {"length", length}});
  if (!tokenizer.empty()) {
    out.set("tokenizer", Value(fs::path(tokenizer).filename().string()));
  }
  if (model.head == "tags" && !labels.empty()) {
    Array names;
    for (const std::string& label : labels) names.push_back(Value(label));
    out.set("labels", {.value = std::move(names)});
  }
  return out;
}

}  // namespace

ImportedModel read_folder(const std::string& folder) {
  require(fs::is_directory(folder), folder, ": is not a folder.");
  const Settings given = read_config(folder);
  Weights weights(folder);
  const Family& family = family_of(given, weights);
  const Settings settings = settings_of(family, given);
  const std::string& config_path = settings.path();
  ImportedModel result{.family = family.name};

  Node root;
  root.set("model", model_of(family, settings));
  const Node& model_table = *root.find("model");
  const Settings sizes(model_table, config_path);
  const int64_t columns = sizes.integer("width");
  const double width = static_cast<double>(columns);
  check_sizes(table({{"width", columns}}), 1, "", weights, config_path);
  check_sizes(model_table, width, "", weights, config_path);
  if (sizes.text("position.type", "") == "learned" && sizes.has("max_length")) {
    check_sizes(table({{"positions", sizes.integer("max_length")}}), width, "", weights,
                config_path);
  }
  build(root, config_path, result);
  settings.only("is_causal", result.config.model.kind == "decoder");  // a key of every model
  if (result.config.model.kind != "vit") {
    result.tokenizer =
        tokenizer_in(folder, result.config.model.vocabulary.value_or(0), result.note);
  }
  if (result.config.model.has_classes()) {
    for (int64_t i = 0; i < result.config.model.classes; ++i) {
      result.labels.push_back(settings.text(str("id2label.", i), str("LABEL_", i)));
    }
  }
  if (family.prepare) family.prepare(settings, weights);
  fill(*result.model, family.rules(settings), family, weights);
  return result;
}

namespace {

// Throws UsageError where a run cannot be put into `out`. What an import has left there that was
// interrupted is no hindrance.
void check_import(const std::string& out, const std::string* tokenizer) {
  if (is_there(out + "/config.toml")) usage_error(out, ": already holds a run.");
  const CheckpointStore store(out);
  const std::vector<int64_t> steps = store.steps();
  const bool begun = steps == std::vector<int64_t>{0} && store.has_weights_alone(0);
  check_new_folder(out, tokenizer, /*again=*/begun || steps.empty());
}

}  // namespace

void write_run(const std::string& out, const ModelConfig& model_config, const Model& model,
               const std::string& tokenizer, const std::vector<std::string>& labels) {
  check_import(out, tokenizer.empty() ? nullptr : &tokenizer);
  Node root;
  root.set("task", task_for(model_config, tokenizer, labels));
  RunConfig config = read_run_config(root);
  config.model = model_config;
  make_folders(out);
  if (!tokenizer.empty()) keep_tokenizer(out, tokenizer);
  const CheckpointStore store(out);
  store.drop_after(-1);
  store.save_weights(model, {});
  write_file(out + "/config.toml", run_config_toml(config));
}

Converted import_folder(const std::string& folder, const std::string& out) {
  check_import(out, nullptr);  // before it takes long
  const ImportedModel read = read_folder(folder);
  write_run(out, read.config.model, *read.model, read.tokenizer, read.labels);
  return {.family = read.family,
          .parameters = static_cast<int64_t>(parameter_count(*read.model)),
          .tokenizer = read.tokenizer,
          .note = read.note};
}

}  // namespace headloom
