#include <filesystem>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "cli/arguments.h"
#include "cli/command.h"
#include "core/error.h"
#include "core/files.h"
#include "core/shell.h"
#include "core/text.h"
#include "mixers/decoding_state.h"
#include "model/config.h"
#include "train/load.h"

namespace headloom::cli {

void ConfigArguments::add(CLI::App& app, const char* doc) {
  app.add_option("config", path, doc)->required()->check(not_empty());
  repeatable(app.add_option(
                 "--set", overrides,
                 "override a key of the configuration, as in --set train.steps=200; repeatable"))
      ->type_name("KEY=VALUE");
}

Node ConfigArguments::read_file() const {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::exists(path, error) || error) return read_toml(path);
  // A name that is near, or that lacks its folder or its ending.
  const fs::path folder = fs::path(path).parent_path();
  std::vector<std::string> names;
  for (const fs::path& place : {folder, folder / "configs"}) {
    for (fs::directory_iterator entry(place.empty() ? "." : place, error), end;
         !error && entry != end; entry.increment(error)) {
      if (entry->path().extension() == ".toml") {
        names.push_back((place / entry->path().filename()).string());
      }
    }
  }
  std::string near = nearest(path, names);
  for (const std::string& name : names) {
    if (fs::path(name).stem() == fs::path(path).filename()) near = name;
  }
  std::vector<std::string> presets;
  for (const ModelPreset& preset : model_presets()) presets.push_back(preset.name);
  const std::string preset = nearest(path, presets);
  if (preset == path || (near.empty() && !preset.empty())) {
    fail(path, ": cannot be read: there is no such file; ",
         preset == path ? "it is a preset" : str("'", preset, "' is a preset"),
         ", which a configuration names in [model] as preset = \"", preset, "\".");
  }
  fail(path, ": cannot be read: there is no such file or folder",
       near.empty() ? did_you_mean_folder(path, folders) : str("; did you mean '", near, "'?"));
}

Node ConfigArguments::read() const {
  Node root = read_file();
  for (const std::string& assignment : overrides) apply_override(root, assignment);
  return root;
}

std::string printed(const nlohmann::ordered_json& json) {
  return json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void or_tell_of_out(bool asked, const char* what, const std::function<void()>& write) {
  try {
    write();
  } catch (const CannotWrite& error) {
    if (asked) throw;
    const std::string why = error.what();
    throw CannotWrite(
        str(why.substr(0, why.rfind('.')), "; choose another ", what, " with --out."));
  }
}

namespace {

// `path` in a command that goes on with what stands there, not one that begins anew: the folder,
// where it is that of a run or of a comparison.
std::string place_to_go_on(const std::string& path) {
  const std::filesystem::path file = path;
  const std::string folder = file.has_parent_path() ? file.parent_path().string() : ".";
  const bool stored = file.filename() == "config.toml" &&
                      (is_there(metrics_path(folder)) || is_there(folder + "/comparison.json"));
  return shell_word(stored ? folder : path);
}

}  // namespace

void expect_comparison(const Node& root, const std::string& path, bool comparison) {
  const bool many = root.find("models") != nullptr || root.find("tasks") != nullptr;
  const bool one = root.find("model") != nullptr || root.find("task") != nullptr;
  if (comparison && one && !many) {
    usage_error(path,
                ": configures one model ([model], [task]), expected a comparison ([[models]], "
                "[[tasks]]); ",
                program_name(), " train ", place_to_go_on(path), " trains it.");
  }
  if (!comparison && many && !one) {
    usage_error(path,
                ": configures a comparison ([[models]], [[tasks]]), expected one model ([model], "
                "[task]); ",
                program_name(), " compare ", place_to_go_on(path), " runs it.");
  }
  if (!comparison && !one) {
    usage_error(path, root.table().empty() ? ": is empty" : ": has no [model] and no [task]",
                ", expected the configuration of a model ([model], [task], [train]).");
  }
}

std::string read_standard_input() {
  return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
}

void add_cache_option(CLI::App& app, CachePolicy& cache) {
  app.add_option_function<std::string>(
         "--cache",
         [&cache](const std::string& text) { cache = CachePolicy::parse(text, cache.dtype); },
         "positions that attention keeps: window:N, sinks:N or tova:N; full keeps all")
      ->type_name("POLICY")
      ->default_str("full");
  app.add_option("--cache-dtype", cache.dtype,
                 "hold keys and values in this type; in that of the computation by default")
      ->check(one_of({"int8"}));
}

void add_checkpoint_option(CLI::App& app, std::string& checkpoint) {
  app.add_option("--checkpoint", checkpoint, "best, last or a step");
}

void add_device_option(CLI::App& app, std::string& device) {
  app.add_option("--device", device, "what the model runs on: cpu, cuda (the first) or cuda:N")
      ->check(not_empty())
      ->type_name("DEVICE");
}

void add_precision_options(CLI::App& app, Precision& p, const std::string& more) {
  app.add_option("--dtype", p.dtype,
                 "compute in this type (bfloat16: faster, a little less exact)" + more +
                     "; as it was trained by default")
      ->check(one_of({"float32", "bfloat16", "float64"}));
  app.add_option(
         "--quantize", p.quantize,
         "hold the weights of linear maps in this type (faster, a little less exact)" + more)
      ->check(one_of({"int8", "int4"}));
}

}  // namespace headloom::cli
