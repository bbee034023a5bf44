#include "train/comparison_file.h"

#include <filesystem>
#include <type_traits>

#include "core/files.h"
#include "core/json_text.h"

namespace headloom {
namespace {

using Json = nlohmann::ordered_json;

// The member, or an empty value where there is none of this type.
const Json& member(const Json& of, const char* key, Json::value_t type) {
  static const Json kTable = Json::object(), kList = Json::array();
  const Json& none = type == Json::value_t::object ? kTable : kList;
  if (!of.is_object()) return none;
  const auto found = of.find(key);
  return found != of.end() && found->type() == type ? *found : none;
}
const Json& list(const Json& of, const char* key) { return member(of, key, Json::value_t::array); }
const Json& table(const Json& of, const char* key) {
  return member(of, key, Json::value_t::object);
}

// Leaves `out` as it is where the member is missing or of another type.
template <typename T>
void take(const Json& of, const char* key, T& out) {
  if (!of.is_object()) return;
  const auto found = of.find(key);
  if (found == of.end()) return;
  const bool fits = std::is_same_v<T, std::string> ? found->is_string()
                    : std::is_same_v<T, bool>      ? found->is_boolean()
                                                   : found->is_number();
  if (fits) out = found->template get<T>();
}

report::Setting setting_in(const Json& of, const char* key) {
  report::Setting out;
  for (const auto& [name, value] : table(of, key).items()) {
    if (value.is_string()) out.push_back({name, value.get<std::string>()});
  }
  return out;
}

// The parts of the held-out data and the load of experts stay unknown.
report::Run run_in(const Json& json, const std::string& model, const std::string& task) {
  report::Run out{.model = model, .task = task, .setting = setting_in(json, "setting")};
  std::string state;
  take(json, "seed", out.seed);
  take(json, "folder", out.folder);
  take(json, "problem", out.problem);
  take(json, "warning", out.warning);
  take(json, "tokens_per_second", out.tokens_per_second);
  take(json, "peak_memory_bytes", out.peak_memory_bytes);
  for (const Json& point : list(json, "points")) {
    report::Point& p = out.points.emplace_back();
    take(point, "step", p.step);
    take(point, "tokens", p.tokens);
    take(point, "seconds", p.seconds);
    take(point, "train_loss", p.train_loss);
    take(point, "loss", p.loss);
    take(point, "quality", p.quality);
    take(point, "quality_error", p.quality_error);
    take(point, "accuracy", p.accuracy);
  }
  take(json, "state", state);
  if (state == "failed") out.state = report::RunState::kFailed;
  if (state == "finished") out.state = report::RunState::kFinished;
  return out;
}

report::TaskInfo task_in(const Json& json) {
  report::TaskInfo out;
  take(json, "task", out.name);
  take(json, "description", out.description);
  take(json, "metric", out.metric);
  take(json, "unit", out.unit);
  take(json, "lower_is_better", out.lower_is_better);
  take(json, "stopping", out.stopping);
  out.percent = out.metric == "error rate";
  out.options = setting_in(json, "options");
  for (const Json& floor : list(json, "floors")) {
    out.floors.emplace_back();
    take(floor, "name", out.floors.back().name);
    take(floor, "quality", out.floors.back().quality);
  }
  return out;
}

report::Build build_in(const Json& json, const std::string& model, const std::string& task) {
  report::Build out{.model = model, .task = task};
  take(json, "parameters", out.parameters);
  take(json, "flops_per_token", out.flops_per_token);
  out.flops_per_unit = out.flops_per_token;  // of a file that is older than the key
  take(json, "flops_per_unit", out.flops_per_unit);
  take(json, "state_bytes_per_token", out.state_bytes_per_token);
  take(json, "measured_state_bytes_per_token", out.measured_state_bytes_per_token);
  take(json, "state_bytes", out.state_bytes);
  take(json, "mechanism_share", out.mechanism_share);
  take(json, "config", out.config);
  take(json, "train_differences", out.train_differences);
  return out;
}

void take_failed(const Json& row, const std::string& model, const std::string& task,
                 std::vector<report::Run>& out) {
  for (const Json& run : list(row, "runs")) {
    report::Run read = run_in(run, model, task);
    if (read.state == report::RunState::kFailed) out.push_back(std::move(read));
  }
}

}  // namespace

WrittenComparison read_comparison_file(const std::string& folder) {
  WrittenComparison out;
  const std::string path = folder + "/comparison.json";
  if (!std::filesystem::exists(path)) return out;
  const auto json = parse_json_if_whole<Json>(read_file(path));
  take(json, "budget", out.budget);
  for (const auto& [name, fact] : setting_in(json, "machine")) out.machine.emplace_back(name, fact);
  take(json, "config", out.config);
  take(json, "sweep_planned", out.sweep_planned);
  take(json, "by_commands", out.by_commands);
  for (const Json& task : list(json, "tasks")) {
    out.tasks.push_back(task_in(task));
    const std::string& name = out.tasks.back().name;
    for (const Json& row : list(task, "models")) {
      std::string model;
      take(row, "model", model);
      out.builds.push_back(build_in(row, model, name));
      take_failed(row, model, name, out.failed);
      const Json& choice = table(row, "choice");
      if (choice.empty()) continue;
      report::Choice& chosen = out.choices.emplace_back();
      chosen.model = model;
      chosen.task = name;
      chosen.setting = setting_in(choice, "setting");
      for (const Json& key : list(choice, "at_edge")) {
        if (key.is_string()) chosen.at_edge.push_back(key.get<std::string>());
      }
    }
    for (const Json& row : list(table(task, "robustness"), "models")) {
      std::string model;
      take(row, "model", model);
      take_failed(row, model, name, out.failed_again);
    }
  }
  for (const Json& run : list(json, "sweep_runs")) {
    std::string model, task;
    take(run, "model", model);
    take(run, "task", task);
    out.sweep_runs.push_back(run_in(run, model, task));
    out.sweep_runs.back().sweep = true;
  }
  return out;
}

}  // namespace headloom
