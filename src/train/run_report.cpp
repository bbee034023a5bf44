#include "train/run_report.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "core/differences.h"
#include "core/files.h"
#include "core/hash.h"
#include "core/lock.h"
#include "core/text.h"
#include "model/describe.h"
#include "report/format.h"
#include "train/checkpoint.h"
#include "train/metrics.h"
#include "train/planned_run.h"
#include "train/reported.h"
#include "train/run_folder.h"
#include "train/run_past.h"
#include "train/run_places.h"
#include "train/run_session.h"
#include "train/speeds.h"
#include "train/state.h"
#include "train/sweep.h"

namespace headloom {
namespace {

namespace fs = std::filesystem;

// `wanted`, or with a number after it where `taken` has it.
std::string unique(const std::string& wanted, const std::set<std::string>& taken) {
  std::string name = wanted;
  for (int i = 2; taken.contains(name); ++i) name = str(wanted, " (", i, ")");
  return name;
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
  if (!value.is_array() || value.array().size() < 2) return inline_toml(value);
  const auto is_in_other = [&](const Node& item) {
    if (other == nullptr || !other->is_array()) return false;
    return std::any_of(other->array().begin(), other->array().end(), [&](const Node& theirs) {
      return inline_toml(theirs) == inline_toml(item);
    });
  };
  const Array& items = value.array();
  auto first = std::find_if_not(items.begin(), items.end(), is_in_other);
  if (first == items.end()) first = items.begin();
  return str("[", inline_toml(*first), ", and ", items.size() - 1, " more]");
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

// Where in `tasks` the one of that name is; their end where it is not.
template <typename Tasks>
auto find_task(Tasks& tasks, const std::string& name) {
  return std::find_if(tasks.begin(), tasks.end(),
                      [&](const report::TaskInfo& task) { return task.name == name; });
}

// The tasks of the runs, by their configurations. New ones are added to a report.
class NamedTasks {
 public:
  struct Known {
    std::string name;
    std::shared_ptr<data::Task> task;
    std::shared_ptr<data::TaskSpec> options;
    std::map<int64_t, StoredData> data;   // by seed, of data that are read
    std::optional<std::string> stopping;  // of the first run
  };

  const Known& of(const RunPlace& place, RunConfig& config, report::Comparison& report) {
    Known& known = tasks_[key_of(place, config)];
    const bool drawn = config.task->data_paths().empty();  // from a seed, not read
    if (known.task == nullptr) {
      known.task = built_for(config);
      if (!drawn) known.data[config.train.seed] = *data_of(config, *known.task);
      known.options = config.task;
      const std::string wanted = place.task.empty() ? config.task->type() : place.task;
      known.name = unique(wanted, names_);
      names_.insert(known.name);
      report::TaskInfo info = report_task(known.name, *known.task, *config.task, config.train);
      // Where unique() put a number after the task's name, the task that it is a size of gets the
      // same number.
      if (!place.size_of.empty()) {
        info.size_of = place.size_of + known.name.substr(place.task.size());
      }
      for (const auto& [key, first] : tasks_) {
        if (first.name != wanted || known.name == wanted) continue;
        info.apart = apart_from(wanted, *first.options, *config.task);
      }
      report.tasks.push_back(std::move(info));
    }
    const auto info = find_task(report.tasks, known.name);
    // Each seed has an order of its own.
    if (!drawn && !known.data.contains(config.train.seed)) {
      known.data[config.train.seed] = *data_of(config, *built_for(config));
    }
    const std::string stopping = stopping_text(config.train);
    if (!known.stopping) known.stopping = info->stopping = stopping;
    if (stopping != *known.stopping) info->stopping = kSomeStop;
    return known;
  }

 private:
  static std::shared_ptr<data::Task> built_for(const RunConfig& config) {
    const bool drawn = config.task->data_paths().empty();
    return config.task->build(drawn ? 0 : static_cast<uint64_t>(config.train.seed));
  }

  std::string key_of(const RunPlace& place, const RunConfig& config) {
    std::string key = to_toml(task_identity(*config.task));
    if (place.task.empty()) return key;
    // Sizes of two comparisons are the same where they have the same name.
    if (!place.size_of.empty()) return key + place.task;
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

// The models of the runs, by their configurations and their past. New ones are added to a report.
class NamedModels {
 public:
  // Its label on `task`; a comparison's model has one label on all of its tasks if those that
  // others have too are named first. `config` has the task's sizes.
  const std::string& of(const RunPlace& place, const RunConfig& config,
                        const std::vector<PastEvent>& past, const NamedTasks::Known& task,
                        report::Comparison& report) {
    std::string key = config_of_all_seeds(config) + place.model;
    for (const PastEvent& event : past) key += "\n" + event.key;
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
      build.conditions = conditions_of(config);
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
  static std::string plain_name(const RunPlace& place) {
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
  const auto now = task.data.find(config.train.seed);
  if (now == task.data.end()) return;
  const std::string changed =
      changed_data(folder, config, *task.task, CheckpointStore(folder).data(), now->second);
  if (!changed.empty()) {
    usage_error(changed, "; a report needs the data of its runs: restore them.");
  }
}

// Refuses a run whose configuration has been edited since its newest step was made: a report would
// describe another run.
void check_config(const std::string& folder, const RunConfig& config) {
  const CheckpointStore store(folder);
  if (store.steps().empty()) return;
  const int64_t step = store.find("last");
  const std::string trained = store.config(step);
  if (trained.empty()) return;
  std::string file = "config.toml";
  RunConfig said = config;
  // What the steps after it are to be made with is in config.toml already.
  for (const EarlierConfig& earlier : earlier_configs(folder)) {
    if (earlier.until < step) continue;
    file = earlier.file;
    said = read_run_config(read_toml(folder + "/" + file));
    break;
  }
  RunConfig before = read_run_config(parse_toml(trained, store.folder(step) + "/state.json"));
  for (const Difference& d : differences(stored_config(before), stored_config(said))) {
    if (is_place_of_data(d.key)) continue;
    usage_error(folder, "/", file, ": the run was trained with ", d.was(), ", now it is ", d.is(),
                "; restore what it was trained with.");
  }
}

// A run that a report has, as its folder says.
struct FoundRun {
  const RunPlace& place;
  const NamedTasks::Known& task;
  RunConfig config;  // with the sizes of the task
  std::vector<PastEvent> past;
  std::string label = {};  // of its model
};

// Reads the runs and adds their tasks to `report`; their models have no labels yet.
std::vector<FoundRun> found_runs(const std::vector<RunPlace>& places, NamedTasks& tasks,
                                 report::Comparison& report) {
  std::vector<FoundRun> out;
  for (const RunPlace& place : places) {
    RunConfig config = config_with_data(place.folder);
    const NamedTasks::Known& task = tasks.of(place, config, report);
    check_config(place.folder, config);
    check_data(place.folder, config, task);
    std::vector<PastEvent> past = past_of(place.folder, config);
    config.fit(data::sizes_of(*task.task));
    out.push_back(
        {.place = place, .task = task, .config = std::move(config), .past = std::move(past)});
  }
  return out;
}

// Gives the runs the labels of their models, which are added to `report`. Those of tasks that
// comparisons share come first.
void name_models(std::vector<FoundRun>& found, NamedModels& models, report::Comparison& report) {
  std::map<const NamedTasks::Known*, std::set<std::string>> comparisons_of;
  for (const FoundRun& run : found) comparisons_of[&run.task].insert(run.place.comparison);
  for (const bool several : {true, false}) {
    for (FoundRun& run : found) {
      if ((comparisons_of[&run.task].size() > 1) != several) continue;
      run.label = models.of(run.place, run.config, run.past, run.task, report);
    }
  }
}

// Throws UsageError where two of the runs are of one model, task and seed.
void refuse_copies(const std::vector<FoundRun>& found) {
  for (auto run = found.begin(); run != found.end(); ++run) {
    for (auto other = found.begin(); other != run; ++other) {
      if (other->label == run->label && other->task.name == run->task.name &&
          other->config.train.seed == run->config.train.seed) {
        usage_error(run->place.folder, ": has the same configuration and seed as ",
                    other->place.folder, "; leave one of them out.");
      }
    }
  }
}

std::string absolute_folder(const std::string& folder) {
  return fs::absolute(folder).lexically_normal().string();
}

}  // namespace

RunReport::RunReport(const std::vector<std::string>& folders) {
  const std::vector<RunPlace> places = places_in(folders);
  for (const std::string& folder : folders) {
    if (is_comparison(folder)) comparisons_.push_back({folder, comparison_in(folder)});
  }
  alone_ = folders.size() == 1 && comparisons_.size() == 1;
  NamedTasks tasks;
  NamedModels models;
  std::vector<FoundRun> found = found_runs(places, tasks, empty_);
  name_models(found, models, empty_);
  refuse_copies(found);
  std::set<int64_t> seeds;
  for (FoundRun& run : found) {
    const RunPlace& place = run.place;
    seeds.insert(run.config.train.seed);
    runs_.push_back({.folder = place.folder,
                     .run = {.model = run.label,
                             .task = run.task.name,
                             .seed = run.config.train.seed,
                             .folder = absolute_folder(place.folder)},
                     .bytes_per_token = run.task.task->bytes_per_token(),
                     .train = run.config.train,
                     .past = std::move(run.past),
                     .comparison = place.comparison,
                     .model_there = place.model,
                     .task_there = place.task,
                     .belongs_to = place.comparison.empty() ? comparison_around(place.folder)
                                                            : place.comparison});
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
      std::set<std::string> values;
      for (const Node& value : key.values) values.insert(inline_toml(value));
      out[key.place()] = join({values.begin(), values.end()});
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
    return std::find_if(runs_.begin(), runs_.end(),
                        [&](const Run& run) { return report::is_of(run.run, model, task); });
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
    const std::string past = past_differences(baseline->past, run->past);
    if (!past.empty() && !build.train_differences.empty()) build.train_differences += ", ";
    build.train_differences += past;
  }
}

namespace {

// Puts what the run in `folder` has so far, its evaluations and its result, into `run`.
RunMetrics take_progress(report::Run& run, const std::string& folder, const TrainOptions& train,
                         double bytes_per_token, bool of_comparison) {
  const auto result = read_result(result_path(folder));
  const std::string file = metrics_path(folder);
  // A run that failed before its first step has a result alone, and a comparison trains one anew
  // that has lost its file.
  require(fs::exists(file) || (result && (of_comparison || !result->problem.empty())), file,
          ": cannot be read: there is no such file.");
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
      return !r.sweep && report::is_of(r, run.model, run.task) && r.seed == run.seed;
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
    const RunMetrics metrics =
        take_progress(run, r.folder, r.train, r.bytes_per_token, !r.comparison.empty());
    if (run.state == report::RunState::kRunning && !run.points.empty()) {
      // A process that was killed after the last evaluation has left no result.
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
          return report::is_of(other, choice.model, choice.task);
        });
    if (there == out.choices.end()) {
      out.choices.push_back(std::move(choice));
      continue;
    }
    for (const std::string& key : choice.at_edge) report::add_once(there->at_edge, key);
  }
}

// What a comparison says of itself, and its models and tasks that no run has begun on.
void RunReport::add_written(const WrittenComparison& written, report::Comparison& out) const {
  if (!written.budget.empty()) out.budget = written.budget;
  out.machine = written.machine;
  if (!written.config.empty()) out.config = written.config;
  out.by_commands = written.by_commands;
  std::vector<report::TaskInfo> tasks;
  for (const ComparedTask& task : each_size(comparisons_.front().config)) {
    const auto begun = find_task(out.tasks, task.name);
    const auto known = find_task(written.tasks, task.name);
    if (begun != out.tasks.end()) {
      tasks.push_back(*begun);
      // With the paths as they are configured, where its runs have absolute ones.
      if (known != written.tasks.end() && !known->description.empty()) {
        tasks.back().description = known->description;
        tasks.back().options = known->options;
      }
    } else if (known != written.tasks.end()) {
      tasks.push_back(*known);
      tasks.back().size_of = task.size_of;
    }
  }
  for (const report::TaskInfo& task : out.tasks) {  // those that have another name here
    if (find_task(tasks, task.name) == tasks.end()) tasks.push_back(task);
  }
  out.tasks = std::move(tasks);
  for (const report::Build& build : written.builds) {
    const auto same = std::find_if(
        out.builds.begin(), out.builds.end(),
        [&](const report::Build& other) { return report::is_of(other, build.model, build.task); });
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
  std::vector<report::Run> runs = written.sweep_runs;
  for (report::Run& run : begun_sweep_runs(compared.folder)) {
    const auto known = std::find_if(runs.begin(), runs.end(), [&](const report::Run& other) {
      return other.folder == run.folder;
    });
    if (known == runs.end()) {
      runs.push_back(std::move(run));
    } else if (known->state == report::RunState::kRunning) {  // as it was when that was written
      *known = std::move(run);
    }
  }
  for (const report::Run& run : runs) {
    out.runs.push_back(run);
    report::Run& added = out.runs.back();
    const std::string folder = compared.folder + "/" + run.folder;
    added.folder = absolute_folder(folder);
    const bool worked_on = is_worked_on(folder, compared.folder);
    // comparison.json may be older than the run's end.
    if (fs::exists(result_path(folder))) continue;
    note_interruption(added, folder, compared.folder, worked_on,
                      read_metrics(metrics_path(folder)));
  }
}

// Gives the runs of a model the setting that was chosen for it.
void RunReport::add_settings(report::Comparison& out) {
  for (report::Run& run : out.runs) {
    for (const report::Choice& choice : out.choices) {
      if (!run.sweep && report::is_of(choice, run.model, run.task)) {
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
                        .folder = absolute_folder(folder)};
        if (fs::exists(metrics_path(folder)) || fs::exists(result_path(folder))) {
          const bool worked_on = is_worked_on(folder, compared.folder);
          const RunMetrics metrics = take_progress(run, folder, run_config_in(folder).train, *bytes,
                                                   /*of_comparison=*/true);
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
    take_kept_speeds(compared.folder, rounds, /*anywhere=*/true, there);
    for (report::Speed& speed : there.speeds) {
      const Run& run = *named.at({speed.model, speed.task});
      speed.model = run.run.model;
      speed.task = run.run.task;
      out.speeds.push_back(std::move(speed));
    }
  }
}

std::vector<std::string> RunReport::files() const {
  std::vector<std::string> out;
  for (const Run& r : runs_) {
    out.push_back(metrics_path(r.folder));
    out.push_back(result_path(r.folder));
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
