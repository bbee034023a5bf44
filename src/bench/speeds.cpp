#include "bench/speeds.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "bench/decode_step.h"
#include "bench/harness.h"
#include "bench/memory.h"
#include "core/files.h"
#include "core/json_text.h"
#include "core/text.h"
#include "train/device.h"
#include "train/interrupt.h"
#include "train/run_folder.h"

namespace headloom::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kSteps = 3, kTokens = 16;

// The median seconds of `count` calls after a first one.
template <typename Step>
double median_seconds(Step& step, int count) {
  using Clock = std::chrono::steady_clock;
  step();
  std::vector<double> seconds;
  for (int i = 0; i < count; ++i) {
    const auto start = Clock::now();
    step();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return spread_of(seconds).median;
}

// Sequences that are in memory at once.
int64_t micro_batch(const RunConfig& config) {
  return config.train.batch / config.train.accumulate;
}

StepBench step_of_run(const RunConfig& config, const data::Task& task) {
  return {config.model, task.train_batch(0, micro_batch(config)), config.train};
}

// One round of one model.
void measure(const RunConfig& config, const data::Task& task, report::Speed& speed) {
  {
    StepBench step = step_of_run(config, task);
    const double seconds = median_seconds(step, kSteps);
    const auto tokens = static_cast<double>(micro_batch(config) * work_unit(task).per_sequence);
    speed.train_tokens_per_second.push_back(tokens / seconds);
    speed.peak_memory_bytes.push_back(step.held_bytes() + peak_bytes([&] { step(); }));
  }
  seed_all();
  const auto decoder = std::dynamic_pointer_cast<Decoder>(build_model(config.model));
  if (decoder == nullptr || task.goal() != data::Goal::next_token ||
      !decoder->stacks()[0]->stateful()) {
    return;
  }
  hold_in(config.train.dtype, *decoder);
  DecodeStep step(decoder, std::max<int64_t>(task.length() / 2, 1), config.train.dtype);
  speed.decode_tokens_per_second.push_back(1 / median_seconds(step, kTokens));
}

// A model with a finished run of the task, and the configuration of that run but for what differs
// between seeds.
struct Measured {
  std::string model;
  RunConfig config;
};

std::vector<Measured> models_on(const std::string& task, const std::string& folder,
                                const report::Comparison& comparison) {
  std::vector<Measured> out;
  for (const report::ModelInfo& model : comparison.models) {
    for (const report::Run& run : comparison.runs) {
      if (run.model != model.label || run.task != task || run.sweep || run.folder.empty() ||
          run.state != report::RunState::kFinished) {
        continue;
      }
      RunConfig config = run_config_in(folder + "/" + run.folder);
      config.train.seed = 0;
      if (config.train.device == "cpu") out.push_back({model.label, std::move(config)});
      break;
    }
  }
  return out;
}

Json to_json(const report::Speed& speed) {
  return {{"train_tokens_per_second", speed.train_tokens_per_second},
          {"decode_tokens_per_second", speed.decode_tokens_per_second},
          {"peak_memory_bytes", speed.peak_memory_bytes}};
}

// Takes what was measured on the task, where it is whole and of `key`.
bool take(const Json& kept, const std::string& key, const std::string& task,
          const std::vector<Measured>& models, report::Comparison& comparison) {
  if (!kept.is_object() || !kept.contains(task)) return false;
  try {
    const Json& of_task = kept.at(task);
    if (of_task.at("of").get<std::string>() != key) return false;
    std::vector<report::Speed> speeds;
    for (const Measured& m : models) {
      const Json& of_model = of_task.at("models").at(m.model);
      report::Speed speed{.model = m.model, .task = task};
      of_model.at("train_tokens_per_second").get_to(speed.train_tokens_per_second);
      of_model.at("decode_tokens_per_second").get_to(speed.decode_tokens_per_second);
      of_model.at("peak_memory_bytes").get_to(speed.peak_memory_bytes);
      speeds.push_back(std::move(speed));
    }
    comparison.speeds.insert(comparison.speeds.end(), speeds.begin(), speeds.end());
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

}  // namespace

double step_seconds(const RunConfig& config, const data::Task& task) {
  if (config.train.device != "cpu") {
    usage_error("'budget' is \"seconds\" and 'train.device' is \"", config.train.device,
                "\", expected \"cpu\", because steps are timed there alone.");
  }
  StepBench step = step_of_run(config, task);
  return median_seconds(step, 2 * kSteps) * static_cast<double>(config.train.accumulate);
}

void measure_speeds(const std::string& folder, int64_t rounds, report::Comparison& comparison) {
  const std::string path = folder + "/speeds.json";
  Json kept;
  if (std::filesystem::exists(path)) kept = parse_json_if_whole<Json>(read_file(path));
  comparison.speeds.clear();
  for (const report::TaskInfo& info : comparison.tasks) {
    std::vector<Measured> models = models_on(info.name, folder, comparison);
    if (models.empty()) continue;
    std::string key = str(rounds, " rounds\n");
    for (Measured& m : models) key += str("# ", m.model, "\n", run_config_toml(m.config));
    if (take(kept, key, info.name, models, comparison)) continue;
    std::fprintf(stderr, "measuring the speed of %zu models on %s\n", models.size(),
                 info.name.c_str());
    const auto task = models[0].config.build_task();
    std::vector<report::Speed> speeds;
    for (const Measured& m : models) speeds.push_back({.model = m.model, .task = info.name});
    for (int64_t round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < models.size(); ++i) {
        if (interrupted()) return;
        measure(models[i].config, *task, speeds[i]);
      }
    }
    Json of_task = {{"of", key}};
    for (const report::Speed& speed : speeds) of_task["models"][speed.model] = to_json(speed);
    kept[info.name] = of_task;
    write_file(path, kept.dump(1) + "\n");
    comparison.speeds.insert(comparison.speeds.end(), speeds.begin(), speeds.end());
  }
}

}  // namespace headloom::bench
