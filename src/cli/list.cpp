#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "bench/machine.h"
#include "cli/command.h"
#include "core/error.h"
#include "core/shell.h"
#include "data/task.h"
#include "ops/case.h"
#include "ops/product/product.h"
#include "train/compare.h"
#include "train/config.h"

namespace headloom::cli {
namespace {

struct Item {
  std::string name, doc, source;
  std::vector<OptionInfo> options;
  std::vector<std::string> traits = {};
};
struct Section {
  std::string key, title;
  std::vector<Item> items;
};

template <typename Thing>
std::vector<OptionInfo> options_of(Thing& thing) {
  Lister lister;
  thing.fields(lister);
  return lister.options();
}

template <typename EntryType>
std::vector<Item> items_of(const std::vector<EntryType>& entries) {
  std::vector<Item> items;
  for (const auto& e : entries) items.push_back({e.name, e.doc, e.source, options_of(*e.make())});
  return items;
}

std::vector<std::string> traits_of(const ChannelMixerTraits& t) {
  std::vector<std::string> out;
  if (t.bidirectional) out.emplace_back("bidirectional");
  if (t.tensor_parallel) out.emplace_back("tensor parallel");
  if (t.context_parallel) out.emplace_back("context parallel");
  return out;
}

std::vector<std::string> traits_of(const MixerTraits& t) {
  std::vector<std::string> out;
  const auto add = [&](bool has, const char* name) {
    if (has) out.emplace_back(name);
  };
  add(t.causal, "causal");
  add(t.bidirectional, "bidirectional");
  add(t.cross_attention, "cross-attention");
  add(t.documents, "packed documents");
  add(t.stateful, "decoding state");
  add(t.tensor_parallel, "tensor parallel");
  add(t.context_parallel, "context parallel");
  return out;
}

// The keys of [model]: of a decoder, then those that other kinds and options have beside them.
Section model_section() {
  Section out{"model", "[model]", {}};
  ModelConfig decoder;
  out.items.push_back({"model", "keys of the model", "", options_of(decoder)});
  std::set<std::string> known;  // the keys of a decoder, which are those of nearly all kinds
  for (const OptionInfo& o : out.items[0].options) known.insert(o.key);
  const auto further = [&](ModelConfig config, const std::string& name, const std::string& doc) {
    std::vector<OptionInfo> options;
    for (const OptionInfo& o : options_of(config)) {
      if (!known.contains(o.key)) options.push_back(o);
    }
    if (!options.empty()) out.items.push_back({name, doc, "", options});
  };
  for (const std::string& kind : model_kinds()) {
    if (kind == decoder.kind) continue;
    ModelConfig config;
    config.kind = kind;
    further(config, "kind " + kind, "further keys of kind = \"" + kind + "\"");
  }
  ModelConfig stretched;
  stretched.position.scaling = "llama3";
  further(stretched, "position.scaling",
          "further keys of position.scaling = \"llama3\"; \"linear\" has position.factor alone");
  stretched.position.scaling = "yarn";
  further(stretched, "position.scaling, yarn", "further keys of position.scaling = \"yarn\"");
  LayerConfig layer;
  out.items.push_back({"[[model.layer]]", "keys of each layer", "", options_of(layer)});
  return out;
}

Section train_section() {
  TrainOptions train;
  ParameterGroup group;
  return {"train",
          "[train]",
          {{"train", "keys of the training", "", options_of(train)},
           {"[[train.group]]", "keys of each group of parameters", "", options_of(group)}}};
}

Section compare_section() {
  CompareConfig comparison;
  ComparedModel model;
  ComparedTask task;
  ComparedSize size;
  return {
      "compare",
      "Comparisons",
      {{"compare", "keys of a comparison, beside [model] and [train]", "", options_of(comparison)},
       {"[[models]]", "keys of each model compared", "", options_of(model)},
       {"[[tasks]]", "keys of each task compared", "", options_of(task)},
       {"[[sizes]]", "keys of each size compared", "", options_of(size)}}};
}

std::vector<Section> sections() {
  std::vector<Section> out = {{"mixers", "Token mixers", items_of(token_mixers())},
                              {"channels", "Channel mixers", items_of(channel_mixers())},
                              {"blocks", "Blocks", items_of(blocks())},
                              {"tasks", "Tasks", items_of(data::tasks())}};
  const auto add_traits = [](Section& section, const auto& entries) {
    for (size_t i = 0; i < entries.size(); ++i) {
      section.items[i].traits = traits_of(entries[i].traits);
    }
  };
  add_traits(out[0], token_mixers());
  add_traits(out[1], channel_mixers());
  Section operators{"operators", "Operators", {}};
  for (const ops::OpInfo& o : ops::operators()) {
    operators.items.push_back({o.name, o.doc + "; " + o.backends, o.source, {}});
  }
  out.push_back(operators);
  Section presets{"presets", "Model presets", {}};
  for (const ModelPreset& p : model_presets())
    presets.items.push_back({p.name, p.doc, p.source, {}});
  out.push_back(presets);
  out.push_back(model_section());
  out.push_back(train_section());
  out.push_back(compare_section());
  return out;
}

struct ListArguments {
  std::string what;
  bool json = false;
  bool markdown = false;
};

void print_plain(const Section& section) {
  std::printf("%s\n", section.title.c_str());
  for (const Item& item : section.items) {
    std::printf("  %-20s %s%s%s%s\n", item.name.c_str(), item.doc.c_str(),
                item.source.empty() ? "" : " (", item.source.c_str(),
                item.source.empty() ? "" : ")");
    if (!item.traits.empty()) std::printf("      traits: %s\n", join(item.traits).c_str());
    for (const OptionInfo& o : item.options) {
      std::printf("      %-18s %s%s\n",
                  (o.key + (o.default_value.empty() ? "" : " = " + o.default_value)).c_str(),
                  o.doc.c_str(), (" [" + o.type + "]").c_str());
    }
  }
  std::printf("\n");
}

// A cell of a Markdown table: a bar would end it.
std::string cell(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

std::string code_cell(const std::string& text) {
  return text.empty() ? "" : "`" + cell(text) + "`";
}

std::string sentence(const Item& item) {
  std::string out = cell(item.doc);
  if (!out.empty() && out[0] >= 'a' && out[0] <= 'z')
    out[0] = static_cast<char>(out[0] - 'a' + 'A');
  out += (item.source.empty() ? "" : " (" + cell(item.source) + ")") + ".";
  return item.traits.empty() ? out : out + " Traits: " + join(item.traits) + ".";
}

// docs/reference.md is this output. What has no options stands in one table.
void print_markdown(const Section& section) {
  std::printf("## %s\n\n", section.title.c_str());
  bool in_table = false;
  for (const Item& item : section.items) {
    if (item.options.empty()) {
      if (!in_table) std::printf("| name | what it is |\n|---|---|\n");
      std::printf("| `%s` | %s |\n", item.name.c_str(), sentence(item).c_str());
      in_table = true;
      continue;
    }
    if (in_table) std::printf("\n");
    in_table = false;
    std::printf("### `%s`\n\n%s\n\n", item.name.c_str(), sentence(item).c_str());
    std::printf("| key | type | default | meaning |\n|---|---|---|---|\n");
    for (const OptionInfo& o : item.options) {
      std::printf("| `%s` | %s | %s | %s |\n", o.key.c_str(), cell(o.type).c_str(),
                  code_cell(o.default_value).c_str(), cell(o.doc).c_str());
    }
    std::printf("\n");
  }
  if (in_table) std::printf("\n");
}

// What the results' speed and rounding depend on here.
void print_machine(bool as_json) {
  const auto facts = bench::machine_facts();
  const auto routes = ops::product_routes();
  if (as_json) {
    nlohmann::ordered_json json;
    for (const auto& [name, value] : facts) json["machine"][name] = value;
    json["product_routes"] = routes;
    std::printf("%s\n", json.dump(1).c_str());
    return;
  }
  std::printf("Machine\n");
  for (const auto& [name, value] : facts) std::printf("  %-20s %s\n", name.c_str(), value.c_str());
  std::printf("\nRoutes of matrix products (of %s), by class\n",
              join(ops::routes_available()).c_str());
  if (routes.empty()) std::printf("  none has been measured yet\n");
  for (const auto& [name, route] : routes) {
    std::printf("  %-40s %s\n", name.c_str(), route.c_str());
  }
}

int run_list(const ListArguments& a) {
  if (a.what == "machine") {
    if (a.markdown) usage_error("--markdown is of tables of options, which 'machine' has none of.");
    print_machine(a.json);
    return 0;
  }
  const auto all = sections();
  std::vector<Section> chosen;
  std::vector<std::string> names;
  for (const Section& section : all) {
    names.push_back(section.key);
    if (a.what.empty() || a.what == section.key) {
      chosen.push_back(section);
      continue;
    }
    for (const Item& item : section.items) {
      names.push_back(item.name);
      if (item.name == a.what) chosen.push_back({section.key, section.title, {item}});
    }
  }
  if (chosen.empty()) {
    usage_error("there is nothing called '", a.what, "'",
                did_you_mean(a.what, names,
                             "; sections are mixers, channels, blocks, tasks, operators, presets, "
                             "model, train, compare, machine."));
  }
  if (!a.json) {
    for (const Section& section : chosen)
      a.markdown ? print_markdown(section) : print_plain(section);
    if (a.what.empty() && !a.markdown) {
      std::printf("This machine, and how it multiplies matrices: %s list machine\n",
                  program_name().c_str());
    }
    return 0;
  }
  nlohmann::ordered_json json;
  for (const Section& section : chosen) {
    for (const Item& item : section.items) {
      nlohmann::ordered_json entry = {
          {"name", item.name}, {"doc", item.doc}, {"source", item.source}};
      if (!item.traits.empty()) entry["traits"] = item.traits;
      entry["options"] = nlohmann::ordered_json::array();
      for (const OptionInfo& o : item.options) {
        entry["options"].push_back(
            {{"key", o.key}, {"type", o.type}, {"default", o.default_value}, {"doc", o.doc}});
      }
      json[section.key].push_back(entry);
    }
  }
  std::printf("%s\n", json.dump(1).c_str());
  return 0;
}

}  // namespace

Command list_command() {
  return {"list", "every mixer, channel mixer, block, task and preset, with options and defaults",
          "headloom list dcmha", [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<ListArguments>();
            app.add_option("what", a->what,
                           "a section (mixers, tasks, presets, machine, ...) or a name");
            CLI::Option* json = app.add_flag("--json", a->json, "print as JSON");
            app.add_flag("--markdown", a->markdown, "print as Markdown tables")->excludes(json);
            return [a] { return run_list(*a); };
          }};
}

}  // namespace headloom::cli
