// The command line: one file a subcommand, one line each in commands().
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/config.h"
#include "train/run_folder.h"

namespace headloom {
struct CachePolicy;
struct Precision;
}  // namespace headloom

namespace headloom::cli {

// Registers a subcommand's flags on `app` and returns what runs when it was chosen. The returned
// function gives the exit code.
struct Command {
  const char* name;
  const char* doc;
  const char* example;  // "headloom ...", shown with the program as it was called
  std::function<std::function<int()>(CLI::App&)> setup;
};

Command train_command();
Command eval_command();
Command generate_command();
Command serve_command();
Command compare_command();
Command report_command();
Command describe_command();
Command analyze_command();
Command bench_command();
Command list_command();
Command vocabulary_command();
Command tokenize_command();
Command import_command();
Command export_command();

struct ConfigArguments {
  std::string path;
  std::vector<std::string> overrides;
  FolderOf folders = FolderOf::run;  // that may stand in place of a file
  void add(CLI::App& app, const char* doc = "configuration file (TOML)");
  // CONFIG as it stands. Throws Error, with the nearest name, where it is not there.
  Node read_file() const;
  // With its --set overrides applied.
  Node read() const;
};

// Throws UsageError where `root`, read from `path`, is a comparison's configuration ([[models]])
// and one model's is expected, or the other way round: its first unknown key would not say so.
void expect_comparison(const Node& root, const std::string& path, bool comparison);

// All of the standard input, for which "-" stands.
std::string read_standard_input();

// What --json prints. Bytes that are not UTF-8, as a folder's name may have, are replaced.
std::string printed(const nlohmann::ordered_json& json);

// Calls `write`. Where that cannot write to `what` ("file" or "folder"), which the command has
// chosen itself unless `asked`, the error tells of --out.
void or_tell_of_out(bool asked, const char* what, const std::function<void()>& write);

// --cache, what decoding states forget, and --cache-dtype, the type of what they keep.
void add_cache_option(CLI::App& app, CachePolicy& cache);

// --checkpoint, the one of a run that is read: a name for CheckpointStore::find().
void add_checkpoint_option(CLI::App& app, std::string& checkpoint);

// --device, what the model runs on: a name for find_device() (train/device.h).
void add_device_option(CLI::App& app, std::string& device);

// --dtype and --quantize: the types that are computed in and that hold the weights. `more` ends
// both descriptions.
void add_precision_options(CLI::App& app, Precision& p, const std::string& more = "");

}  // namespace headloom::cli
