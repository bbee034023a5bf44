#include "train/planned_run.h"

#include <algorithm>
#include <filesystem>

#include "core/differences.h"
#include "core/files.h"
#include "core/hash.h"
#include "core/lock.h"
#include "core/problem.h"
#include "core/shell.h"
#include "core/text.h"
#include "train/checkpoint.h"
#include "train/metrics.h"
#include "train/reported.h"
#include "train/result.h"
#include "train/run_folder.h"
#include "train/run_session.h"
#include "train/train.h"

namespace headloom {
namespace {

namespace fs = std::filesystem;

// What a run's folder has of its progress.
struct Progressed {
  std::optional<RunResult> result;
  RunMetrics metrics;
};

Progressed progress_in(const std::string& run) {
  return {read_result(result_path(run)), read_metrics(metrics_path(run))};
}

void take_points(PlannedRun& planned, const RunMetrics& metrics) {
  planned.run.points.clear();
  for (const EvalPoint& p : metrics.evaluations) {
    planned.run.points.push_back(report_point(p, planned.bytes_per_token));
  }
}

void finish(PlannedRun& planned, const RunResult& result) {
  take_result(planned.run, result);
  planned.begun = planned.finished = true;
}

void take(PlannedRun& planned, const Progressed& progress) {
  planned.begun = true;
  if (progress.result) finish(planned, *progress.result);
  take_points(planned, progress.metrics);
}

// Whether the run's folder has a run, and whether that is another one than is planned. `moved`: its
// configuration names other places of the data, and nothing else is different.
enum class Present { no, same, moved, other };

// A run that has lost its configuration, or its last evaluation after it had finished, is none that
// can be reported or go on.
Present present(const std::string& run, const Node& planned, const Progressed& progress) {
  if (!fs::exists(run + "/config.toml")) {
    return fs::exists(metrics_path(run)) || fs::exists(run + "/checkpoints") ? Present::other
                                                                             : Present::no;
  }
  try {
    RunConfig config = read_run_config(planned);
    Present found = Present::same;
    for (const Difference& d : differences_from(run, config)) {
      if (!is_place_of_data(d.key)) return Present::other;
      found = Present::moved;
    }
    if (!progress.result || !progress.result->problem.empty()) return found;
    return is_whole(config.train, progress.metrics.evaluations) ? found : Present::other;
  } catch (const UsageError&) {  // another tokenizer, or an option that is no more
    return Present::other;
  }
}

// Has the run's configuration say where its data are now.
void move_data(const std::string& run, const Node& planned) {
  const FolderLock nobody_trains_it(run);
  RunConfig config = read_run_config(planned);
  use_kept_tokenizer(run, config);
  write_run_config(run, config, config_comments(run));
}

// Moves another run out of the way.
void set_aside(const std::string& run) {
  {
    const FolderLock nobody_trains_it(run);
  }
  int number = 1;
  while (fs::exists(str(run, ".earlier-", number))) ++number;
  publish_folder(run, str(run, ".earlier-", number));
}

std::string plan_path(const std::string& folder, const std::string& path) {
  return folder + "/plan/" + path + ".toml";
}

std::string plan_text(const PlannedRun& planned) {
  Node root = run_with_absolute_paths(planned.config), run;
  run.set("model", {.value = planned.run.model});
  run.set("task", {.value = planned.run.task});
  run.set("label", {.value = label_of(planned)});
  Array setting;  // keys and values in turn
  for (const auto& [key, value] : planned.run.setting) {
    setting.push_back({.value = key});
    setting.push_back({.value = value});
  }
  run.set("setting", {.value = std::move(setting)});
  run.set("bytes_per_token", {.value = planned.bytes_per_token});
  root.set("run", run);
  return to_toml(root);
}

// What plan_text() has written of the run at `path`.
PlannedRun planned_in(const Node& root, const std::string& path) {
  PlannedRun planned;
  planned.path = path;
  for (const auto& [key, value] : root.table()) {
    if (key != "run") planned.config.set(key, value);
  }
  const Node& run = *root.find("run");
  planned.run.model = std::get<std::string>(run.find("model")->value);
  planned.run.task = std::get<std::string>(run.find("task")->value);
  planned.label = std::get<std::string>(run.find("label")->value);
  planned.run.seed = read_run_config(planned.config).train.seed;
  planned.run.folder = path;
  planned.run.sweep = path.starts_with("sweep/");
  planned.bytes_per_token = std::get<double>(run.find("bytes_per_token")->value);
  const Node* const setting = run.find("setting");
  for (size_t i = 0; setting != nullptr && i + 1 < setting->array().size(); i += 2) {
    planned.run.setting.push_back({std::get<std::string>(setting->array()[i].value),
                                   std::get<std::string>(setting->array()[i + 1].value)});
  }
  return planned;
}

}  // namespace

bool PlannedRun::can_run() const { return !finished && run.state != report::RunState::kFailed; }

Node run_with_absolute_paths(const Node& config) {
  RunConfig run = read_run_config(config);
  for (const data::DataPath& data : run.task->data_paths()) {
    *data.path = fs::absolute(*data.path).string();
  }
  if (std::string* file = run.task->tokenizer_file()) *file = fs::absolute(*file).string();
  return write_fields(run);
}

std::string label_of(const PlannedRun& planned) {
  if (!planned.label.empty()) return planned.label;
  std::string label = str(planned.run.task, " ", planned.run.model, " seed ", planned.run.seed);
  for (const auto& [key, value] : planned.run.setting) label += str(" ", key, "=", value);
  return label;
}

std::string write_plan_file(const PlannedRun& planned, const std::string& folder) {
  const std::string file = plan_path(folder, planned.path), text = plan_text(planned);
  make_folders(file.substr(0, file.rfind('/')));
  write_file(file, text);
  return planned.path + "@" + hash_text(text);
}

PlannedRun read_plan_file(const std::string& folder, const std::string& name) {
  const std::string path = name.substr(0, name.rfind('@'));
  const std::string file = plan_path(folder, path);
  const std::string plan_command = str(program_name(), " compare ", shell_word(folder), " --plan");
  if (path.find("..") != std::string::npos || !fs::exists(file)) {
    usage_error("--run ", name, ": there is no such run in the plan of ", folder, "; ",
                plan_command, " prints the runs that can be trained now.");
  }
  const std::string text = read_file(file);
  if (name == path) {
    usage_error("--run ", name, ": has no '@' and hash of the run's configuration after the path; ",
                plan_command, " prints the whole name.");
  }
  if (name != path + "@" + hash_text(text)) {
    usage_error("--run ", name, ": the plan of ", folder, " has ", path,
                " with another configuration by now; ", plan_command,
                " prints the runs that can be trained now.");
  }
  return planned_in(parse_toml(text, file), path);
}

std::vector<report::Run> begun_sweep_runs(const std::string& folder) {
  std::vector<report::Run> out;
  std::error_code none;
  const fs::path plan = folder + "/plan";
  for (const auto& file : fs::recursive_directory_iterator(plan / "sweep", none)) {
    if (file.path().extension() != ".toml") continue;
    const std::string name = file.path().lexically_relative(plan).string();
    PlannedRun planned =
        planned_in(read_toml(file.path().string()), name.substr(0, name.size() - 5));
    refresh(planned, folder);
    if (planned.begun) out.push_back(std::move(planned.run));
  }
  std::sort(out.begin(), out.end(),
            [](const report::Run& a, const report::Run& b) { return a.folder < b.folder; });
  return out;
}

void refresh(PlannedRun& planned, const std::string& folder) {
  if (planned.finished) return;
  const std::string run = folder + "/" + planned.path;
  planned.begun = fs::exists(run + "/config.toml") || fs::exists(result_path(run));
  if (planned.begun) take(planned, progress_in(run));
}

bool train_run(PlannedRun& planned, const std::string& folder, const std::string& label) {
  const std::string run = folder + "/" + planned.path;
  RunResult result;
  planned.begun = true;
  try {
    const TrainOutcome outcome = train(
        planned.config, {.folder = run, .resume = true, .label = label, .of_comparison = true});
    result = outcome.result;
    if (outcome.interrupted) {
      take_points(planned, read_metrics(metrics_path(run)));
      return false;
    }
  } catch (const UsageError&) {
    throw;
  } catch (const Obstacle&) {
    throw;
  } catch (const std::exception& error) {  // an allocation that failed, say
    result.problem = problem_of(error);
  }
  if (!fs::exists(run + "/config.toml")) {  // it failed before it began
    make_folders(run);
    RunConfig config = read_run_config(planned.config);
    write_run_config(run, config, "");
    if (const std::string* file = config.task->tokenizer_file()) keep_tokenizer(run, *file);
  }
  write_result(result_path(run), result);
  finish(planned, result);
  take_points(planned, read_metrics(metrics_path(run)));
  return true;
}

void drop_outdated_plan(const PlannedRun& planned, const std::string& folder) {
  const std::string plan = plan_path(folder, planned.path);
  if (fs::exists(plan) && read_file(plan) != plan_text(planned)) fs::remove(plan);
}

bool adopt_run(PlannedRun& planned, const std::string& folder, const data::Task& task,
               const std::function<std::optional<StoredData>(RunConfig&)>& data_now) {
  const std::string run = folder + "/" + planned.path;
  const Progressed progress = progress_in(run);
  Present found = present(run, planned.config, progress);
  if (found == Present::same || found == Present::moved) {
    RunConfig config = read_run_config(planned.config);
    const std::optional<StoredData> stored = CheckpointStore(run).data();
    if (found == Present::moved) {
      const bool same = stored && stored == data_now(config);
      if (same) move_data(run, planned.config);
      found = same ? Present::same : Present::other;
    } else if (stored && progress.result) {  // a run that goes on looks at its data itself
      check_same_data(run, true, config, task, stored, data_now(config));
    }
  }
  if (found == Present::other) set_aside(run);
  if (found == Present::no) fs::remove(result_path(run));  // whose configuration is gone
  if (found != Present::same) return false;
  take(planned, progress);
  return true;
}

}  // namespace headloom
