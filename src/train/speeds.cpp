#include "train/speeds.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <filesystem>

#include "core/files.h"
#include "core/hash.h"
#include "core/json_text.h"
#include "core/platform.h"
#include "core/text.h"
#include "train/run_folder.h"

namespace headloom {
namespace {

using SpeedsJson = nlohmann::ordered_json;

SpeedsJson json_of(const report::Speed& speed) {
  return {{"train_tokens_per_second", speed.train_tokens_per_second},
          {"decode_tokens_per_second", speed.decode_tokens_per_second},
          {"peak_memory_bytes", speed.peak_memory_bytes}};
}

// What was measured.
std::string measured_key(int64_t rounds, std::vector<TimedModel>& models) {
  std::string key = str(rounds, " rounds\n");
  for (TimedModel& m : models) {
    // The path of a run's copy of its tokenizer depends on where the command is called.
    std::string* const tokenizer = m.config.task->tokenizer_file();
    const std::string path = tokenizer == nullptr ? "" : *tokenizer;
    if (tokenizer != nullptr) *tokenizer = hash_text(read_file(path));
    key += str("# ", m.model, "\n", toml_without_places(write_fields(m.config)));
    if (tokenizer != nullptr) *tokenizer = path;
  }
  return key;
}

}  // namespace

std::string machine_text() {
  return str(processor_name(), ", ", at::get_cpu_capability(), ", ",
             counted(at::get_num_threads(), "thread"));
}

std::vector<TimedModel> timed_models(const std::string& task, const std::string& folder,
                                     const report::Comparison& comparison) {
  std::vector<TimedModel> out;
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

KeptSpeeds::KeptSpeeds(const std::string& folder) : path_(folder + "/speeds.json") {
  if (!std::filesystem::exists(path_)) return;
  tasks_ = parse_json_if_whole<SpeedsJson>(read_file(path_));
  if (!tasks_.is_object()) tasks_ = {};
}

bool KeptSpeeds::take(const std::string& task, int64_t rounds, std::vector<TimedModel>& models,
                      bool anywhere, std::vector<report::Speed>& out) const {
  if (!tasks_.contains(task)) return false;
  try {
    const SpeedsJson& of_task = tasks_.at(task);
    if (of_task.at("of").get<std::string>() != measured_key(rounds, models)) return false;
    if (!anywhere && of_task.at("machine").get<std::string>() != machine_text()) return false;
    std::vector<report::Speed> speeds;
    for (const TimedModel& m : models) {
      const SpeedsJson& of_model = of_task.at("models").at(m.model);
      report::Speed speed{.model = m.model, .task = task};
      of_task.at("machine").get_to(speed.machine);
      of_model.at("train_tokens_per_second").get_to(speed.train_tokens_per_second);
      of_model.at("decode_tokens_per_second").get_to(speed.decode_tokens_per_second);
      of_model.at("peak_memory_bytes").get_to(speed.peak_memory_bytes);
      speeds.push_back(std::move(speed));
    }
    out.insert(out.end(), speeds.begin(), speeds.end());
    return true;
  } catch (const SpeedsJson::exception&) {
    return false;
  }
}

void KeptSpeeds::keep(const std::string& task, int64_t rounds, std::vector<TimedModel>& models,
                      const std::vector<report::Speed>& speeds) {
  SpeedsJson of_task = {{"of", measured_key(rounds, models)}, {"machine", machine_text()}};
  for (const report::Speed& speed : speeds) of_task["models"][speed.model] = json_of(speed);
  tasks_[task] = of_task;
  write_file(path_, tasks_.dump(1) + "\n");
}

void take_kept_speeds(const std::string& folder, int64_t rounds, bool anywhere,
                      report::Comparison& comparison) {
  comparison.speeds.clear();
  if (!std::filesystem::exists(folder + "/speeds.json")) return;
  const KeptSpeeds kept(folder);
  for (const report::TaskInfo& task : comparison.tasks) {
    std::vector<TimedModel> models = timed_models(task.name, folder, comparison);
    kept.take(task.name, rounds, models, anywhere, comparison.speeds);
  }
}

}  // namespace headloom
