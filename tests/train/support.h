// What the tests of training share: tiny runs and their files.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/error.h"
#include "storage/safetensors.h"
#include "testing/errors.h"
#include "testing/temp_folder.h"
#include "train/checkpoint.h"
#include "train/compare.h"
#include "train/train.h"

namespace headloom::test {

// A run that takes a few milliseconds a step. `train` are further keys of [train], `model` of
// [model].
inline Node tiny_run(const std::string& train, const std::string& model = "") {
  Node root = parse_toml(str("[model]\nwidth = 16\ndepth = 2\n", model,
                             "\n[[model.layer]]\nmixer = { type = 'mha', heads = 2 }\n"
                             "channel = { type = 'swiglu', hidden = 8 }\n[task]\ntype = 'copy'\n"
                             "symbols = 8\ncount = 4\neval_sequences = 16\n[train]\nbatch = 8\n"
                             "lr = 3e-3\nwarmup = 4\n"),
                         "run.toml");
  root.set("train", merged(*root.find("train"), parse_toml(train, "train")));
  return root;
}

// What `run` returns; what it writes to stderr is dropped.
template <typename F>
auto quietly(const F& run) {
  ::testing::internal::CaptureStderr();
  try {
    const auto result = run();
    ::testing::internal::GetCapturedStderr();
    return result;
  } catch (...) {
    ::testing::internal::GetCapturedStderr();
    throw;
  }
}

inline TrainOutcome train_quietly(const Node& config, const TrainControl& control) {
  return quietly([&] { return train(config, control); });
}

// Of plain attention and talking heads over two seeds. `model` and `train` are further keys of
// [model] and [train], `more` is the rest: tasks, and what else there is.
inline Node tiny_comparison(const std::string& model, const std::string& train,
                            const std::string& more) {
  return parse_toml(str("seeds = [1, 2]\n[model]\nwidth = 16\n", model,
                        "\n[train]\nbatch = 4\neval_every = 2\n", train,
                        "\n[[models]]\nname = \"mha\"\n[[models]]\nname = \"talking\"\n"
                        "mixer = { type = \"talking_heads\" }\n",
                        more),
                    "compare.toml");
}

inline CompareConfig compare_config(const Node& node) {
  CompareConfig config;
  read_fields(node, config);
  return config;
}

// `calls` counts those of CompareControl::progress.
inline CompareOutcome compare_quietly(const Node& node, const std::string& folder,
                                      int* calls = nullptr) {
  const auto count = [&](const CompareOutcome&) {
    if (calls != nullptr) ++*calls;
  };
  return quietly(
      [&] { return compare(compare_config(node), {.folder = folder, .progress = count}); });
}

inline std::vector<std::string> lines_of(const std::string& path) {
  std::istringstream text(bytes_of(path));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

// metrics.jsonl without its timings.
inline std::vector<std::string> metrics_of(const std::string& run) {
  std::vector<std::string> lines = lines_of(run + "/metrics.jsonl");
  for (std::string& line : lines) {
    for (const char* key : {"\"step_seconds\":", "\"seconds\":"}) {
      const size_t at = line.find(key);
      if (at != std::string::npos) line.erase(at, line.find_first_of(",}", at) - at);
    }
  }
  return lines;
}

// The losses that metrics.jsonl names.
inline std::vector<double> losses_of(const std::string& run) {
  std::vector<double> out;
  for (const std::string& line : lines_of(run + "/metrics.jsonl")) {
    const std::string key = "\"loss\":";
    const size_t at = line.find(key);
    if (at != std::string::npos) out.push_back(std::stod(line.substr(at + key.size())));
  }
  return out;
}

inline void copy_folder(const std::string& from, const std::string& to) {
  std::filesystem::copy(from, to, std::filesystem::copy_options::recursive);
}

}  // namespace headloom::test
