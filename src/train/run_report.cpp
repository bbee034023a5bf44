#include "train/run_report.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "core/differences.h"
#include "core/files.h"
#include "core/hash.h"
#include "core/lock.h"
#include "core/shell.h"
#include "core/text.h"
#include "model/describe.h"
#include "report/format.h"
#include "train/checkpoint.h"
#include "train/run_folder.h"
#include "train/run_session.h"
#include "train/speeds.h"
#include "train/sweep.h"

namespace headloom {
namespace {

namespace fs = std::filesystem;

// A run's folder, and what its comparison calls its model and task.
struct Place {
  std::string folder, model = {}, task = {}, comparison = {};
  std::string ladder = {};  // the task that its task is a size of, there
  size_t rank = 0;          // of the model: those of the first folders come first
};

bool is_comparison(const std::string& folder) {
  return read_toml(folder + "/config.toml").find("models") != nullptr;
}

CompareConfig comparison_in(const std::string& folder) {
  const std::string path = folder + "/config.toml";
  CompareConfig out;
  try {
    read_fields(read_toml(path), out);
  } catch (const UsageError& error) {
    fail(path, ": ", error.what());
  }
  return out;
}

// COMPARISON/runs/TASK/MODEL/seed-N of the tasks, models and seeds that are configured.
std::vector<Place> runs_of_comparison(const std::string& folder, size_t first_rank) {
  const CompareConfig config = comparison_in(folder);
  std::vector<Place> out;
  for (const ComparedTask& task : each_size(config)) {
    for (size_t m = 0; m < config.models.size(); ++m) {
      const std::string& model = config.models[m].name;
      for (const int64_t seed : config.seeds) {
        const std::string run = str(folder, "/runs/", task.name, "/", model, "/seed-", seed);
        // A run that failed before its first evaluation has a result alone.
        if (!fs::exists(run + "/config.toml") ||
            (!fs::exists(run + "/metrics.jsonl") && !fs::exists(run + "/result.json"))) {
          continue;
        }
        // Not every model need have begun on every task.
        out.push_back({.folder = run,
                       .model = model,
                       .task = task.name,
                       .comparison = folder,
                       .ladder = task.ladder,
                       .rank = first_rank + m});
      }
    }
  }
  return out;
}

std::vector<Place> places_in(const std::vector<std::string>& folders) {
  std::vector<Place> out;
  std::set<fs::path> seen;
  size_t rank = 0;
  for (const std::string& folder : folders) {
    if (!fs::is_directory(folder)) {
      fail(folder, ": is not the folder of a run or of a comparison",
           did_you_mean_folder(folder, FolderOf::either));
    }
    require(fs::exists(folder + "/config.toml"), folder,
            ": has no config.toml, expected the folder of a run or of a comparison.");
    const bool several = is_comparison(folder);
    if (!several) {
      require(fs::exists(folder + "/metrics.jsonl"), folder,
              ": has no metrics.jsonl: it was not trained here, so there is nothing to report.");
    }
    const size_t first_rank = rank;
    const size_t before = out.size();
    for (Place& place : several ? runs_of_comparison(folder, first_rank)
                                : std::vector{Place{.folder = folder, .rank = first_rank}}) {
      rank = std::max(rank, place.rank + 1);
      if (!seen.insert(fs::canonical(place.folder)).second) {
        usage_error(place.folder, ": the run is named twice.");
      }
      out.push_back(std::move(place));
    }
    // Of a comparison by itself its sweep is reported, too, and why it has chosen nothing.
    const bool swept = folders.size() == 1 && !read_comparison_file(folder).sweep_runs.empty();
    if (out.size() == before && !swept) {
      fail(folder,
           ": is a comparison of which no run has begun, or only runs of its sweep, so there is "
           "nothing to report yet.");
    }
  }
  return out;
}

// `wanted`, or with a number after it where `taken` has it.
std::string unique(const std::string& wanted, const std::set<std::string>& taken) {
  std::string name = wanted;
  for (int i = 2; taken.contains(name); ++i) name = str(wanted, " (", i, ")");
  return name;
}

// The last part of a path, also of "runs/a/".
std::string folder_name(const std::string& folder) {
  return fs::absolute(folder + "/").lexically_normal().parent_path().filename().string();
}

// A task's options with the content of its tokenizer in place of the file: each run has a copy.
Node task_identity(data::TaskSpec& task) {
  Node out = write_fields(task);
  if (const std::string* file = task.tokenizer_file()) {
    Node content;
    content.value = hash_text(read_file(*file));
    out.set("tokenizer", content);
  }
  return out;
}

// A value as TOML; of a list of several what the `other` lacks, "['a.txt', and 3 more]".
std::string shown_value(const Node& value, const Node* other) {
  if (!value.is_array() || value.array().size() < 2) return toml_value(value);
  const auto is_in_other = [&](const Node& item) {
    if (other == nullptr || !other->is_array()) return false;
    return std::any_of(other->array().begin(), other->array().end(),
                       [&](const Node& theirs) { return toml_value(theirs) == toml_value(item); });
  };
  const Array& items = value.array();
  auto first = std::find_if_not(items.begin(), items.end(), is_in_other);
  if (first == items.end()) first = items.begin();
  return str("[", toml_value(*first), ", and ", items.size() - 1, " more]");
}

// "differs from `text` in `tokenizer` ('b/tokenizer.model', not 'bytes')".
std::string apart_from(const std::string& name, data::TaskSpec& first, data::TaskSpec& other) {
  std::vector<std::string> parts;
  const Node before = write_fields(first), after = write_fields(other);
  for (const Difference& d : differences(task_identity(first), task_identity(other))) {
    const std::string key = d.key.substr(0, d.key.find('.'));
    const Node *theirs = before.find(key), *own = after.find(key);
    const auto text = [](const Node* value, const Node* than) {
      return value == nullptr ? std::string("none") : shown_value(*value, than);
    };
    const std::string part =
        str("`", key, "` (", text(own, theirs), ", not ", text(theirs, own), ")");
    if (parts.empty() || parts.back() != part) parts.push_back(part);
  }
  return str("differs from `", name, "` in ", report::list_of(parts));
}

// Whether a key of [train] may differ between models that are compared. Unequal steps are seen in
// the tokens.
bool is_of_no_consequence(const std::string& key) {
  static const std::set<std::string> keys = {
      "steps",      "seed",  "eval_every",      "checkpoint_every", "device",
      "accumulate", "shard", "tensor_parallel", "context_parallel", "activation_checkpointing"};
  return keys.contains(key);
}

// What the runs of one model share: all but the seed.
std::string without_seed(RunConfig config) {
  config.train.seed = 0;
  return to_toml(stored_config(config));
}

}  // namespace

std::string train_differences(TrainOptions baseline, TrainOptions run,
                              const std::set<std::string>& chosen) {
  std::vector<std::string> changed;
  for (const Difference& d : differences(write_fields(baseline), write_fields(run))) {
    if (is_of_no_consequence(d.key) || chosen.contains("train." + d.key)) continue;
    changed.push_back(d.after.empty() ? "no " + d.key : d.key + " = " + d.after);
  }
  return join(changed);
}

std::string mixer_sources(const ModelConfig& model) {
  std::vector<std::string> sources;
  for (const LayerConfig& layer : model.layers) {
    for (const TokenMixerEntry& entry : token_mixers()) {
      if (entry.name != layer.mixer->type()) continue;
      if (std::find(sources.begin(), sources.end(), entry.source) == sources.end()) {
        sources.push_back(entry.source);
      }
    }
  }
  return join(sources, "; ");
}

bool is_whole(const TrainOptions& train, const std::vector<EvalPoint>& evaluations) {
  if (evaluations.empty()) return false;
  const EvalPoint& last = evaluations.back();
  return last.step >= train.steps ||
         (train.stop_accuracy && last.validation_accuracy >= *train.stop_accuracy);
}

report::Point report_point(const EvalPoint& p, double bytes_per_token) {
  const bool text = bytes_per_token > 0;
  const double bits = std::log(2.0) * bytes_per_token;
  std::vector<double> parts = text ? p.loss_parts : p.accuracy_parts;
  for (double& part : parts) part = text ? part / bits : 1 - part;
  return {.step = p.step,
          .tokens = static_cast<double>(p.tokens),
          .seconds = p.seconds,
          .train_loss = p.train_loss,
          .loss = p.loss,
          .quality = text ? p.loss / bits : 1 - p.accuracy,
          .quality_error = text ? p.loss_error / bits : p.accuracy_error,
          .quality_parts = std::move(parts),
          .accuracy = text ? report::kUnknown : p.accuracy,
          .expert_load = p.expert_load};
}

report::TaskInfo report_task(const std::string& name, const data::Task& task,
                             data::TaskSpec& options) {
  const bool text = task.bytes_per_token() > 0;
  report::TaskInfo out{.name = name,
                       .description = task.describe(),
                       .metric = text ? "bits per byte" : "error rate",
                       .unit = work_unit(task).name,
                       .lower_is_better = true,
                       .percent = !text};
  out.options.push_back({"type", options.type()});
  const Node written = write_fields(options);
  for (const auto& [key, value] : written.table()) {
    out.options.push_back({key, toml_value(value)});
  }
  // A floor in bits per byte would be that of a uniform guess, which no model stays at.
  if (text) return out;
  for (const data::Floor& floor : task.floors()) {
    out.floors.push_back({.name = floor.name, .quality = 1 - floor.accuracy});
  }
  return out;
}

std::string stopping_text(const TrainOptions& options) {
  if (!options.stop_accuracy) return "";
  const char* const results =
      options.eval_split == "test" ? "; their results are of other data, the test data"
      : options.eval_split == "all"
          ? ", which is half of the data of their results and makes these a little too good"
          : ", which is also the data of their results and makes these too good";
  return str("runs end once they reach an accuracy of ", report::percent(*options.stop_accuracy),
             " on validation data", results);
}

report::Build report_build(const Model& model, const data::Task& task) {
  const ModelCosts costs = model_costs(model, task.length());
  const std::optional<MeasuredState> state = measured_state(model, task.length());
  ModelConfig config = model.config();
  report::Build out{.parameters = costs.parameters,
                    .flops_per_token = costs.flops_per_token,
                    .flops_per_unit = flops_per_unit(model, task),
                    .state_bytes_per_token = costs.state_bytes_per_token,
                    .mechanism_share = costs.mechanism_share,
                    .config = to_toml(write_fields(config))};
  if (state) out.measured_state_bytes_per_token = state->bytes_per_token;
  if (costs.state_bytes > 0) out.state_bytes = costs.state_bytes;
  return out;
}

namespace {

// The tasks of the runs, by their configurations. New ones are added to a report.
class NamedTasks {
 public:
  struct Known {
    std::string name;
    std::shared_ptr<data::Task> task;
    std::shared_ptr<data::TaskSpec> options;
    int64_t seed = 0;                     // that it was built with
    std::optional<StoredData> data;       // as runs of that seed store them
    std::optional<std::string> stopping;  // of the first run
  };

  const Known& of(const Place& place, RunConfig& config, report::Comparison& report) {
    Known& known = tasks_[key_of(place, config)];
    if (known.task == nullptr) {
      if (!config.task->data_paths().empty()) known.seed = config.train.seed;
      known.task = config.task->build(static_cast<uint64_t>(known.seed));
      known.data = data_of(config, *known.task);
      known.options = config.task;
      const std::string wanted = place.task.empty() ? config.task->type() : place.task;
      known.name = unique(wanted, names_);
      names_.insert(known.name);
      report::TaskInfo info = report_task(known.name, *known.task, *config.task);
      // One that is named otherwise than in its comparison is a size of another task, too.
      if (!place.ladder.empty()) {
        info.ladder = place.ladder + known.name.substr(place.task.size());
      }
      for (const auto& [key, first] : tasks_) {
        if (first.name != wanted || known.name == wanted) continue;
        info.apart = apart_from(wanted, *first.options, *config.task);
      }
      report.tasks.push_back(std::move(info));
    }
    const auto info =
        std::find_if(report.tasks.begin(), report.tasks.end(),
                     [&](const report::TaskInfo& task) { return task.name == known.name; });
    const std::string stopping = stopping_text(config.train);
    if (!known.stopping) known.stopping = info->stopping = stopping;
    if (stopping != *known.stopping) info->stopping = kSomeStop;
    return known;
  }

 private:
  std::string key_of(const Place& place, const RunConfig& config) {
    std::string key = to_toml(task_identity(*config.task));
    if (place.task.empty()) return key;
    // Sizes of two comparisons are the same where they have the same name.
    if (!place.ladder.empty()) return key + place.task;
    // The task at another size, or with another training, is another task of its comparison.
    const auto first = first_names_.emplace(std::pair(place.comparison, key), place.task).first;
    if (first->second != place.task) key += place.task;
    return key;
  }

  std::map<std::string, Known> tasks_;
  // What a comparison calls the first of its tasks of a configuration.
  std::map<std::pair<std::string, std::string>, std::string> first_names_;
  std::set<std::string> names_;
};

// The models of the runs, by their configurations. New ones are added to a report.
class NamedModels {
 public:
  // Its label on `task`; a comparison's model has one label on all of its tasks if those that
  // others have too are named first. `config` has the task's sizes.
  const std::string& of(const Place& place, const RunConfig& config, const NamedTasks::Known& task,
                        report::Comparison& report) {
    const std::string key = without_seed(config) + place.model;
    auto label = labels_.find(key);
    if (label == labels_.end()) {
      std::set<std::string>& taken = taken_[task.name];
      const auto own = of_comparison_.find({place.comparison, place.model});
      const bool known = !place.model.empty() && own != of_comparison_.end();
      const std::string name =
          unique(known && !taken.contains(own->second) ? own->second : plain_name(place), taken);
      taken.insert(name);
      label = labels_.emplace(key, name).first;
      const auto same = [&](const report::ModelInfo& m) { return m.label == name; };
      if (std::none_of(report.models.begin(), report.models.end(), same)) {
        report.models.push_back({.label = name, .source = mixer_sources(config.model)});
      }
      report::Build build = report_build(*build_without_memory(config.model), *task.task);
      build.model = name;
      build.task = task.name;
      report.builds.push_back(std::move(build));
    }
    of_comparison_.emplace(std::pair(place.comparison, place.model), label->second);
    const auto [ranked, is_new] = ranks_.emplace(label->second, place.rank);
    if (!is_new) ranked->second = std::min(ranked->second, place.rank);
    return label->second;
  }

  // Those of the first folders come first.
  void sort(std::vector<report::ModelInfo>& models) const {
    std::stable_sort(models.begin(), models.end(),
                     [&](const report::ModelInfo& a, const report::ModelInfo& b) {
                       return ranks_.at(a.label) < ranks_.at(b.label);
                     });
  }

 private:
  // As its comparison calls it, whose folders are COMPARISON/runs/TASK/MODEL/seed-N, or its folder.
  static std::string plain_name(const Place& place) {
    if (!place.model.empty()) return place.model;
    return comparison_of(place.folder) ? folder_name(place.folder + "/..")
                                       : folder_name(place.folder);
  }

  std::map<std::string, std::string> labels_;                                 // by configuration
  std::map<std::pair<std::string, std::string>, std::string> of_comparison_;  // and by its model
  std::map<std::string, std::set<std::string>> taken_;                        // labels, by task
  std::map<std::string, size_t> ranks_;  // by label, the first of each
};

// The folder of the comparison that a run belongs to, named as `folder` is; "" for none.
std::string comparison_around(const std::string& folder) {
  if (!comparison_of(folder)) return "";
  const std::string out = fs::path(folder + "/../../../..").lexically_normal().string();
  return out.size() > 1 && out.ends_with('/') ? out.substr(0, out.size() - 1) : out;
}

// The configuration of a run whose data are there.
RunConfig config_with_data(const std::string& folder) {
  RunConfig config = run_config_in(folder);
  const std::string missing = missing_data_text(folder, config);
  if (!missing.empty()) fail(missing, ".");
  return config;
}

// Refuses a run whose data have changed since it was trained: the bytes of a token, the sizes of
// the data and the floors of a report would be those of other data.
void check_data(const std::string& folder, RunConfig& config, const NamedTasks::Known& task) {
  std::optional<StoredData> stored = CheckpointStore(folder).data();
  // Each seed has its own order, and to read the data once for each would take long.
  if (stored && task.data && config.train.seed != task.seed) {
    stored->fingerprint = task.data->fingerprint;
  }
  const std::string changed = changed_data(folder, config, *task.task, stored, task.data);
  if (!changed.empty()) {
    usage_error(changed, "; a report needs the data of its runs: restore them.");
  }
}

}  // namespace

RunReport::RunReport(const std::vector<std::string>& folders) {
  const std::vector<Place> places = places_in(folders);
  for (const std::string& folder : folders) {
    if (is_comparison(folder)) comparisons_.push_back({folder, comparison_in(folder)});
  }
  alone_ = folders.size() == 1 && comparisons_.size() == 1;
  NamedTasks tasks;
  NamedModels models;
  std::set<int64_t> seeds;
  std::vector<RunConfig> configs;
  std::vector<const NamedTasks::Known*> tasks_of;
  std::map<const NamedTasks::Known*, std::set<std::string>> comparisons_of;
  for (const Place& place : places) {
    RunConfig& config = configs.emplace_back(config_with_data(place.folder));
    const NamedTasks::Known& task = tasks.of(place, config, empty_);
    check_data(place.folder, config, task);
    config.fit(data::sizes_of(*task.task));
    tasks_of.push_back(&task);
    comparisons_of[&task].insert(place.comparison);
  }
  std::vector<std::string> labels(places.size());
  for (const bool several : {true, false}) {
    for (size_t i = 0; i < places.size(); ++i) {
      if ((comparisons_of[tasks_of[i]].size() > 1) != several) continue;
      labels[i] = models.of(places[i], configs[i], *tasks_of[i], empty_);
    }
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const Place& place = places[i];
    const RunConfig& config = configs[i];
    const NamedTasks::Known& task = *tasks_of[i];
    const std::string& model = labels[i];
    for (const Run& other : runs_) {
      if (other.run.model == model && other.run.task == task.name &&
          other.run.seed == config.train.seed) {
        usage_error(place.folder, ": has the same configuration and seed as ", other.folder,
                    "; leave one of them out.");
      }
    }
    runs_.push_back({.folder = place.folder,
                     .run = {.model = model,
                             .task = task.name,
                             .seed = config.train.seed,
                             .folder = fs::absolute(place.folder).lexically_normal().string()},
                     .bytes_per_token = task.task->bytes_per_token(),
                     .train = config.train,
                     .comparison = place.comparison,
                     .model_there = place.model,
                     .task_there = place.task,
                     .belongs_to = place.comparison.empty() ? comparison_around(place.folder)
                                                            : place.comparison});
    seeds.insert(config.train.seed);
  }
  models.sort(empty_.models);
  compare_training();
  empty_.seeds.assign(seeds.begin(), seeds.end());
  empty_.planned = false;
  empty_.title = runs_.size() == 1 ? "A run" : str(runs_.size(), " runs");
  empty_.budget = "The runs are shown as they are: budgets and parameters may differ.";
  if (alone_) plan_as(comparisons_.front());
}

// Expects what the comparison plans. What its folder's comparison.json says follows in read().
void RunReport::plan_as(const Compared& compared) {
  const CompareConfig& config = compared.config;
  empty_.title = config.title;
  empty_.planned = true;
  empty_.seeds = config.seeds;
  empty_.config = read_file(compared.folder + "/config.toml");
  const Sweep sweep = Sweep::read(config.sweep);
  empty_.swept.clear();
  for (const SweepKey& key : sweep.keys) empty_.swept.push_back(key.name);
  if (!sweep.empty()) empty_.sweep_seeds = sweep.seeds;
  std::vector<report::ModelInfo> models;
  for (const ComparedModel& m : config.models) {
    models.push_back({.label = m.name, .description = m.description});
    for (const report::ModelInfo& begun : empty_.models) {
      if (begun.label == m.name) models.back().source = begun.source;
    }
  }
  // Where a run's configuration is not that of the model's other runs, it has a name of its own.
  for (report::ModelInfo& begun : empty_.models) {
    const auto same = [&](const report::ModelInfo& m) { return m.label == begun.label; };
    if (std::none_of(models.begin(), models.end(), same)) models.push_back(std::move(begun));
  }
  empty_.models = std::move(models);
}

// What the run's comparison has chosen by its [sweep], "train.lr" or "mixer.post", and from which
// values: comparisons that try others do not tune alike.
std::map<std::string, std::string> RunReport::swept_for(const Run& run) const {
  std::map<std::string, std::string> out;
  for (const Compared& compared : comparisons_) {
    if (compared.folder != run.comparison) continue;
    for (const SweepKey& key : Sweep::read(compared.config.sweep).keys) {
      std::vector<std::string> values;
      for (const Node& value : key.values) values.push_back(toml_value(value));
      out[key.place()] = join(values);
    }
  }
  return out;
}

// Says what was swept for all runs, and where a model is trained otherwise than the baseline.
void RunReport::compare_training() {
  using Swept = std::map<std::string, std::string>;
  const auto keep_common = [](Swept& swept, const Swept& others) {
    std::erase_if(swept, [&](const auto& key_and_values) {
      const auto other = others.find(key_and_values.first);
      return other == others.end() || other->second != key_and_values.second;
    });
  };
  if (runs_.empty()) return;
  Swept swept = swept_for(runs_.front());
  for (const Run& run : runs_) keep_common(swept, swept_for(run));
  for (const auto& [key, values] : swept) {
    empty_.swept.push_back(key.starts_with("train.") ? key.substr(6) : key);
  }
  const auto first_run = [&](const std::string& model, const std::string& task) {
    return std::find_if(runs_.begin(), runs_.end(), [&](const Run& run) {
      return run.run.model == model && run.run.task == task;
    });
  };
  for (report::Build& build : empty_.builds) {
    auto baseline = runs_.end();
    for (const report::ModelInfo& model : empty_.models) {
      if (baseline == runs_.end()) baseline = first_run(model.label, build.task);
    }
    const auto run = first_run(build.model, build.task);
    Swept common = swept_for(*run);
    keep_common(common, swept_for(*baseline));
    std::set<std::string> chosen;
    for (const auto& [key, values] : common) chosen.insert(key);
    build.train_differences = train_differences(baseline->train, run->train, chosen);
  }
}

namespace {

// Puts what the run in `folder` has so far, its evaluations and its result, into `run`.
RunMetrics take_progress(report::Run& run, const std::string& folder, const TrainOptions& train,
                         double bytes_per_token) {
  const auto result = read_result(folder + "/result.json");
  const std::string file = folder + "/metrics.jsonl";
  // A run that failed before its first step has a result alone.
  require(result || fs::exists(file), file, ": cannot be read: there is no such file.");
  const RunMetrics metrics = read_metrics(file);
  for (const EvalPoint& p : metrics.evaluations) {
    run.points.push_back(report_point(p, bytes_per_token));
  }
  // A run that has lost its last evaluation is trained again by its comparison.
  if (result && (!result->problem.empty() || is_whole(train, metrics.evaluations))) {
    take_result(run, *result);
  }
  return metrics;
}

// Whether a process trains the run in `folder`, or will once it has trained others of `comparison`.
bool is_worked_on(const std::string& folder, const std::string& comparison) {
  return FolderLock::is_held(folder) || (!comparison.empty() && FolderLock::is_held(comparison));
}

// Runs that failed without leaving a result: their processes died, or nothing could be chosen.
void add_failed(const std::vector<report::Run>& failed, report::Comparison& out) {
  for (const report::Run& run : failed) {
    const auto there = std::find_if(out.runs.begin(), out.runs.end(), [&](const report::Run& r) {
      return !r.sweep && r.model == run.model && r.task == run.task && r.seed == run.seed;
    });
    if (there == out.runs.end()) {
      out.runs.push_back(run);
    } else if (there->state == report::RunState::kRunning) {
      there->state = run.state;
      there->interruption.reset();
      there->problem = run.problem;
    }
  }
}

}  // namespace

report::Comparison RunReport::read() const {
  report::Comparison out = empty_;
  const bool may_stand_still = alone_ && !FolderLock::is_held(comparisons_.front().folder);
  for (const Run& r : runs_) {
    report::Run run = r.run;
    // Asked first: a run that ends meanwhile is then read whole.
    const bool worked_on = is_worked_on(r.folder, r.belongs_to);
    const RunMetrics metrics = take_progress(run, r.folder, r.train, r.bytes_per_token);
    if (run.state == report::RunState::kRunning && !run.points.empty()) {
      // A run of no comparison leaves a result only where it failed.
      const report::Point& last = run.points.back();
      if (last.seconds > 0) run.tokens_per_second = last.tokens / last.seconds;
      if (is_whole(r.train, metrics.evaluations)) run.state = report::RunState::kFinished;
    }
    note_interruption(run, r.folder, r.belongs_to, worked_on, metrics);
    out.runs.push_back(std::move(run));
  }
  for (const Compared& compared : comparisons_) {
    const WrittenComparison written = read_comparison_file(compared.folder);
    add_choices(compared, written, out);
    if (!alone_) continue;
    add_written(written, out);
    add_settings(out);
    add_sweep(compared, written, out);
    add_robustness(compared, written, out);
  }
  const auto trained = [](const report::Run& run) { return FolderLock::is_held(run.folder); };
  if (may_stand_still && std::none_of(out.runs.begin(), out.runs.end(), trained)) {
    const std::string& folder = comparisons_.front().folder;
    out.go_on = out.by_commands ? command_that_plans(folder) : command_that_goes_on(folder);
  }
  add_speeds(out);
  return out;
}

const RunReport::Run* RunReport::find(const std::string& comparison, const std::string& model,
                                      const std::string& task) const {
  for (const Run& run : runs_) {
    if (run.comparison == comparison && run.model_there == model && run.task_there == task) {
      return &run;
    }
  }
  return nullptr;
}

void RunReport::add_choices(const Compared& compared, const WrittenComparison& written,
                            report::Comparison& out) const {
  for (report::Choice choice : written.choices) {
    const Run* const run = find(compared.folder, choice.model, choice.task);
    if (run == nullptr && !alone_) continue;
    if (run != nullptr) {
      choice.model = run->run.model;
      choice.task = run->run.task;
    }
    // Two comparisons may have chosen the same for a model, one of them at an edge.
    const auto there =
        std::find_if(out.choices.begin(), out.choices.end(), [&](const report::Choice& other) {
          return other.model == choice.model && other.task == choice.task;
        });
    if (there == out.choices.end()) {
      out.choices.push_back(std::move(choice));
      continue;
    }
    for (const std::string& key : choice.at_edge) {
      if (std::find(there->at_edge.begin(), there->at_edge.end(), key) == there->at_edge.end()) {
        there->at_edge.push_back(key);
      }
    }
  }
}

// What a comparison says of itself, and its models and tasks that no run has begun on.
void RunReport::add_written(const WrittenComparison& written, report::Comparison& out) const {
  if (!written.budget.empty()) out.budget = written.budget;
  if (!written.config.empty()) out.config = written.config;
  out.by_commands = written.by_commands;
  std::vector<report::TaskInfo> tasks;
  for (const ComparedTask& task : each_size(comparisons_.front().config)) {
    const auto named = [&](const report::TaskInfo& info) { return info.name == task.name; };
    const auto begun = std::find_if(out.tasks.begin(), out.tasks.end(), named);
    const auto known = std::find_if(written.tasks.begin(), written.tasks.end(), named);
    if (begun != out.tasks.end()) {
      tasks.push_back(*begun);
      // With the paths as they are configured, where its runs have absolute ones.
      if (known != written.tasks.end() && !known->description.empty()) {
        tasks.back().description = known->description;
        tasks.back().options = known->options;
      }
    } else if (known != written.tasks.end()) {
      tasks.push_back(*known);
      tasks.back().ladder = task.ladder;
    }
  }
  for (const report::TaskInfo& task : out.tasks) {  // those that have another name here
    const auto same = [&](const report::TaskInfo& other) { return other.name == task.name; };
    if (std::none_of(tasks.begin(), tasks.end(), same)) tasks.push_back(task);
  }
  out.tasks = std::move(tasks);
  for (const report::Build& build : written.builds) {
    const auto same =
        std::find_if(out.builds.begin(), out.builds.end(), [&](const report::Build& other) {
          return other.model == build.model && other.task == build.task;
        });
    if (same == out.builds.end()) {
      out.builds.push_back(build);
    } else {
      same->train_differences = build.train_differences;
    }
  }
  add_failed(written.failed, out);
}

void RunReport::add_sweep(const Compared& compared, const WrittenComparison& written,
                          report::Comparison& out) {
  out.sweep_planned = written.sweep_planned;
  for (const report::Run& run : written.sweep_runs) {
    out.runs.push_back(run);
    report::Run& added = out.runs.back();
    const std::string folder = compared.folder + "/" + run.folder;
    added.folder = fs::absolute(folder).lexically_normal().string();
    const bool worked_on = is_worked_on(folder, compared.folder);
    // comparison.json may be older than the run's end.
    if (fs::exists(folder + "/result.json")) continue;
    note_interruption(added, folder, compared.folder, worked_on,
                      read_metrics(folder + "/metrics.jsonl"));
  }
}

// Gives the runs of a model the setting that was chosen for it.
void RunReport::add_settings(report::Comparison& out) {
  for (report::Run& run : out.runs) {
    for (const report::Choice& choice : out.choices) {
      if (!run.sweep && choice.model == run.model && choice.task == run.task) {
        run.setting = choice.setting;
      }
    }
  }
}

void RunReport::add_robustness(const Compared& compared, const WrittenComparison& written,
                               report::Comparison& out) const {
  const RobustnessOptions& second = compared.config.robustness;
  if (second.empty()) return;
  report::Comparison again = out;
  again.title = second.title();
  again.speeds.clear();
  again.runs.clear();
  for (const ComparedTask& task : each_size(compared.config)) {
    const double* const bytes = bytes_per_token(task.name);
    for (const ComparedModel& model : compared.config.models) {
      for (const int64_t seed : compared.config.seeds) {
        const std::string folder =
            str(compared.folder, "/robustness/", task.name, "/", model.name, "/seed-", seed);
        if (bytes == nullptr || !fs::exists(folder + "/config.toml")) continue;
        report::Run run{.model = model.name,
                        .task = task.name,
                        .seed = seed,
                        .folder = fs::absolute(folder).lexically_normal().string()};
        if (fs::exists(folder + "/metrics.jsonl") || fs::exists(folder + "/result.json")) {
          const bool worked_on = is_worked_on(folder, compared.folder);
          const RunMetrics metrics =
              take_progress(run, folder, run_config_in(folder).train, *bytes);
          note_interruption(run, folder, compared.folder, worked_on, metrics);
        }
        again.runs.push_back(std::move(run));
      }
    }
  }
  add_settings(again);
  add_failed(written.failed_again, again);
  out.robustness = {std::move(again)};
}

// Of the task that the only comparison calls so; null where no run of it has begun.
const double* RunReport::bytes_per_token(const std::string& task) const {
  for (const Run& run : runs_) {
    if (run.task_there == task) return &run.bytes_per_token;
  }
  return nullptr;
}

// What was measured apart from the runs' own steps, which may have disturbed each other.
void RunReport::add_speeds(report::Comparison& out) const {
  for (const Compared& compared : comparisons_) {
    const int64_t rounds = compared.config.speed.rounds;
    if (rounds == 0) continue;
    report::Comparison there;  // by the names that are used there
    for (const ComparedModel& m : compared.config.models) there.models.push_back({.label = m.name});
    for (const ComparedTask& t : each_size(compared.config))
      there.tasks.push_back({.name = t.name});
    std::map<std::pair<std::string, std::string>, const Run*> named;
    for (size_t i = 0; i < runs_.size(); ++i) {
      const Run& r = runs_[i];
      const std::vector<int64_t>& seeds = compared.config.seeds;
      if (r.comparison != compared.folder ||
          std::find(seeds.begin(), seeds.end(), r.run.seed) == seeds.end()) {
        continue;
      }
      named[{r.model_there, r.task_there}] = &r;
      there.runs.push_back({.model = r.model_there,
                            .task = r.task_there,
                            .seed = r.run.seed,
                            .folder = fs::path(r.folder).lexically_relative(r.comparison).string(),
                            .state = out.runs[i].state});
    }
    take_kept_speeds(compared.folder, rounds, there);
    for (report::Speed& speed : there.speeds) {
      const Run& run = *named.at({speed.model, speed.task});
      speed.model = run.run.model;
      speed.task = run.run.task;
      out.speeds.push_back(std::move(speed));
    }
  }
}

void take_result(report::Run& run, const RunResult& result) {
  run.state = result.problem.empty() ? report::RunState::kFinished : report::RunState::kFailed;
  run.problem = result.problem;
  run.warning = result.warning;
  run.tokens_per_second = result.tokens_per_second;
  if (result.peak_memory >= 0) run.peak_memory_bytes = static_cast<double>(result.peak_memory);
}

void note_interruption(report::Run& run, const std::string& folder, const std::string& comparison,
                       bool worked_on, const RunMetrics& metrics) {
  if (run.state != report::RunState::kRunning || worked_on) return;
  if (!fs::exists(folder + "/config.toml")) return;  // it has not begun
  const StepPoint& last = metrics.last_step;
  const std::vector<int64_t> saved = CheckpointStore(folder).steps();
  run.interruption = {.step = last.step, .steps = run_config_in(folder).train.steps};
  if (!saved.empty()) run.interruption->saved_step = saved.back();
  if (!comparison.empty()) {
    run.interruption->go_on = command_that_goes_on(comparison);
    return;
  }
  // With as many processes as it had: a run of another number differs by rounding, or is refused
  // where the processes share out the layers.
  run.interruption->go_on = str("headloom train ", shell_word(folder), " --resume",
                                last.processes > 1 ? str(" --processes ", last.processes) : "");
}

std::string command_that_goes_on(const std::string& comparison) {
  return "headloom compare " + shell_word(comparison);
}

std::string command_that_plans(const std::string& comparison) {
  return command_that_goes_on(comparison) + " --plan";
}

std::vector<std::string> begun_runs(const std::vector<std::string>& folders) {
  std::vector<std::string> out;
  for (const Place& place : places_in(folders)) out.push_back(place.folder);
  return out;
}

std::vector<std::string> RunReport::files() const {
  std::vector<std::string> out;
  for (const Run& r : runs_) {
    out.push_back(r.folder + "/metrics.jsonl");
    out.push_back(r.folder + "/result.json");
  }
  for (const Compared& compared : comparisons_) {
    out.push_back(compared.folder + "/speeds.json");
    out.push_back(compared.folder + "/comparison.json");
  }
  return out;
}

std::vector<std::string> RunReport::configurations() const {
  std::vector<std::string> out;
  for (const Run& r : runs_) out.push_back(r.folder + "/config.toml");
  for (const Compared& compared : comparisons_) out.push_back(compared.folder + "/config.toml");
  return out;
}

std::vector<bool> RunReport::worked_on() const {
  std::vector<bool> out;
  for (const Run& r : runs_) out.push_back(is_worked_on(r.folder, r.belongs_to));
  return out;
}

}  // namespace headloom
