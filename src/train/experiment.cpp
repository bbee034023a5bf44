#include "train/experiment.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <list>
#include <map>
#include <set>

#include "core/differences.h"
#include "core/files.h"
#include "core/json_text.h"
#include "core/text.h"
#include "model/describe.h"
#include "train/compare_checks.h"
#include "train/evaluate.h"
#include "train/optimizer.h"
#include "train/reported.h"
#include "train/run_folder.h"
#include "train/run_session.h"
#include "train/speeds.h"
#include "train/training_memory.h"

namespace headloom {
namespace {

namespace fs = std::filesystem;

// Merges `changes` over the table `key` of every layer.
void change_layers(Node& model, const std::string& key, const Node& changes) {
  if (changes.table().empty()) return;
  for (const char* list : {"layer", "encoder_layer"}) {
    Node* layers = model.find(list);
    if (layers == nullptr || !layers->is_array()) continue;
    for (Node& layer : layers->array()) {
      if (!layer.is_table()) continue;
      const Node* present = layer.find(key);
      layer.set(key, present != nullptr ? merged(*present, changes) : changes);
    }
  }
}

// The shared configuration with the changes of a task, a model and a setting, in this order.
Node combined(const CompareConfig& config, const ComparedModel& model, const ComparedTask& task,
              const Sweep& sweep, const SweepPoint& point, bool second_init = false) {
  Node layers_model = merged(merged(config.model, task.model), model.model);
  if (layers_model.find("layer") == nullptr) {
    Node one;
    one.value = Array{Node{}};
    layers_model.set("layer", one);
  }
  for (const auto& [key, part] :
       {std::pair("mixer", &model.mixer), std::pair("channel", &model.channel),
        std::pair("block", &model.block), std::pair("cross", &model.cross)}) {
    change_layers(layers_model, key, *part);
  }
  Node train = merged(merged(config.train, task.train), model.train);
  for (size_t i = 0; i < point.size(); ++i) {
    const SweepKey& key = sweep.keys[i];
    if (key.table == "train") {
      set_below(train, key.key, point[i]);
    } else if (key.table == "model") {
      set_below(layers_model, key.key, point[i]);
    } else {
      Node changes;
      set_below(changes, key.key, point[i]);
      change_layers(layers_model, key.table, changes);
    }
  }
  if (second_init) layers_model = merged(layers_model, config.robustness.model);
  Node root;
  root.set("model", layers_model);
  root.set("task", task.task);
  root.set("train", train);
  return root;
}

constexpr const char* kStepSeconds = "/step_seconds.json";

// `machine` becomes the one that they were measured on. Files of earlier versions do not say it,
// and are taken for this one's.
std::map<std::string, double> read_step_seconds(const std::string& folder, std::string& machine) {
  std::map<std::string, double> out;
  if (!fs::exists(folder + kStepSeconds)) return out;
  const auto json = parse_json_if_whole<nlohmann::ordered_json>(read_file(folder + kStepSeconds));
  if (!json.is_object()) return out;
  for (const auto& [key, value] : json.items()) {
    if (key == "machine" && value.is_string()) machine = value.get<std::string>();
    if (!value.is_number() || value.get<double>() <= 0) continue;
    try {  // files of earlier versions have the places of the data, too
      out[toml_without_places(parse_toml(key, folder + kStepSeconds))] = value.get<double>();
    } catch (const UsageError&) {  // a damaged key is none that is looked for
    }
  }
  return out;
}

}  // namespace

Node with_absolute_paths(Node comparison) {
  for (Node& task : comparison.find("tasks")->array()) {
    Node* const options = task.find("task");
    if (options == nullptr) continue;
    Node run;
    run.set("task", *options);
    const Node whole = run_with_absolute_paths(run);
    for (auto& [key, value] : options->table()) value = *whole.find("task")->find(key);
  }
  return comparison;
}

namespace {

CompareConfig at_each_size(CompareConfig config) {
  config.tasks = each_size(config);
  return config;
}

// What a comparison says before anything of it is built.
report::Comparison empty_comparison(const CompareConfig& config, const Sweep& sweep) {
  report::Comparison out;
  out.title = config.title;
  out.seeds = config.seeds;
  for (const SweepKey& key : sweep.keys) out.swept.push_back(key.name);
  if (!sweep.empty()) out.sweep_seeds = sweep.seeds;
  for (const ComparedModel& m : config.models) {
    out.models.push_back({.label = m.name, .description = m.description});
  }
  return out;
}

}  // namespace

Experiment::Experiment(const CompareConfig& config, const CompareControl& control)
    : config_(at_each_size(config)),
      control_(control),
      sweep_(Sweep::read(config.sweep)),
      splits_(asks_validation_data(config_, sweep_)) {
  if (fs::is_directory(control.folder)) lock_.emplace(control.folder);
  check_comparison(config, config_, sweep_);
  if (!control.fresh) step_seconds_ = read_step_seconds(control.folder, timed_on_);
  check_swept_keys(config_, sweep_);
  check_no_own_steps(config.models);
  outcome_.comparison = empty_comparison(config, sweep_);
  for (size_t t = 0; t < config_.tasks.size(); ++t) {
    add_task(t);
    for (size_t m = 0; m < config.models.size(); ++m) add_model(m, t);
  }
  check_robustness_not_empty(config.robustness);
  outcome_.comparison.budget = budget_text();
}

// One sentence: what all runs have equal.
std::string Experiment::budget_text() {
  std::vector<std::string> budgets;
  bool stops = false;
  for (size_t t = 0; t < config_.tasks.size(); ++t) {
    const RunConfig baseline = built(0, t, {});
    stops |= !outcome_.comparison.tasks[t].stopping.empty();
    const auto sequences = static_cast<int64_t>(steps_[t]) * baseline.train.batch;
    const auto tokens = static_cast<double>(work_of(*tasks_[t], 0, sequences));
    const std::string& name = config_.tasks[t].name;
    if (config_.budget == "flops") {
      // A backward pass costs twice a forward pass.
      budgets.push_back(str(human_count(3 * steps_[t] * costs_[t]), " FLOPs on ", name));
    } else if (config_.budget == "seconds") {
      budgets.push_back(str(human_seconds(steps_[t] * costs_[t]), " on ", name));
    } else {
      budgets.push_back(str(human_count(tokens), " ", work_unit(*tasks_[t]).name, " on ", name));
    }
  }
  std::string what = config_.budget == "flops"     ? "computes the same number of operations"
                     : config_.budget == "seconds" ? "trains for the same time by a measured step"
                                                   : "trains on the same amount of data";
  // Within 1% budgets are called equal, as parameters are.
  if (least_share_ < 0.99) {
    what += str(", rounded down to whole steps (", has_least_, " has the least, ",
                formatted("%.0f%%", std::floor(100 * least_share_)), ")");
  }
  if (stops) what += ", unless it reaches train.stop_accuracy before";
  return str("Every run ", what, ": ", join(budgets), "; ",
             config_.match_parameters ? "parameters are equal within 1% on each task."
                                      : "parameters are not matched.");
}

std::string Experiment::named(size_t model, size_t task) const {
  return str("model '", config_.models[model].name, "' on task '", config_.tasks[task].name, "'");
}

// Builds the task with what the first model's configuration says of it.
void Experiment::add_task(size_t t) {
  RunConfig run =
      read_run_config(combined(config_, config_.models[0], config_.tasks[t], sweep_, {}));
  run.find_data(str("tasks.", config_.tasks[t].place, ".task"));
  try {
    check_training_fits(run);
  } catch (const UsageError& error) {
    usage_error(named(0, t), ": ", error.what());
  }
  run.train.seed = 0;
  tasks_.push_back(run.build_task());
  const data::Task& task = *tasks_.back();
  if (splits_) {
    try {
      check_split(task, Split::validation, run.train.eval_sequences);
    } catch (const UsageError& error) {
      usage_error("task '", config_.tasks[t].name, "': ", error.what());
    }
  }
  if (splits_) run.train.eval_split = "test";
  outcome_.comparison.tasks.push_back(
      report_task(config_.tasks[t].name, task, *run.task, run.train));
  outcome_.comparison.tasks.back().size_of = config_.tasks[t].size_of;
  parameters_.push_back(0);
  costs_.push_back(0);
  steps_.push_back(0);
}

// What a step costs in the unit of the budget.
double Experiment::cost_of_step(const RunConfig& run, size_t t) {
  if (config_.budget == "seconds") return seconds_of_step(run, t);
  const double units = static_cast<double>(run.train.batch) * work_unit(*tasks_[t]).per_sequence;
  if (config_.budget == "tokens") return units;
  return units * training_flops(*build_without_memory(run.model), *tasks_[t]).per_unit;
}

// Measured once for each configuration that may differ in it, and kept, so that runs that go on
// have the same number of steps.
double Experiment::seconds_of_step(const RunConfig& run, size_t t) {
  RunConfig timed = run;
  const TrainOptions& given = run.train;
  timed.train = {};
  timed.train.batch = given.batch;
  timed.train.accumulate = given.accumulate;
  timed.train.dtype = given.dtype;
  timed.train.device = given.device;
  timed.train.activation_checkpointing = given.activation_checkpointing;
  const std::string key = toml_without_places(write_fields(timed));
  const auto known = step_seconds_.find(key);
  if (known != step_seconds_.end()) return known->second;
  require(control_.step_seconds != nullptr, "a budget of seconds needs a measured step.");
  if (timed_on_.empty()) timed_on_ = machine_text();
  if (timed_on_ != machine_text()) {
    // No UsageError: a sweep takes that for the end of a key's range.
    throw Obstacle(str(control_.folder, ": steps were timed on \"", timed_on_, "\", and this is \"",
                       machine_text(),
                       "\"; time another model there, or everything here with --fresh."));
  }
  const double seconds = step_seconds_[key] = control_.step_seconds(timed, *tasks_[t]);
  measured_ = true;
  if (opened_) keep_step_seconds();  // of a value by which a sweep has grown
  return seconds;
}

void Experiment::keep_step_seconds() const {
  nlohmann::ordered_json json = {{"machine", timed_on_}};
  for (const auto& [key, seconds] : step_seconds_) json[key] = seconds;
  write_file(control_.folder + kStepSeconds, json.dump(1) + "\n");
}

// The steps that the baseline's budget pays for.
void Experiment::set_steps(RunConfig& run, size_t t) {
  const double budget = steps_[t] * costs_[t];
  const double cost = cost_of_step(run, t);
  // A tolerance for quotients that are whole but for rounding.
  const double steps = std::floor(budget / cost * (1 + 1e-9));
  if (steps < 1) {
    usage_error("the budget of ", formatted("%.4g", budget), " ", config_.budget,
                " is shorter than a step, which takes ", formatted("%.4g", cost),
                ", expected more train.steps.");
  }
  run.train.steps = static_cast<int64_t>(steps);
}

// The complete configuration of a model on a task with a setting, at seed 0.
RunConfig Experiment::built(size_t m, size_t t, const SweepPoint& point, bool second_init) {
  RunConfig run = read_run_config(
      combined(config_, config_.models[m], config_.tasks[t], sweep_, point, second_init));
  run.train.seed = 0;
  run.fit(data::sizes_of(*tasks_[t]));
  if (std::vector<std::string>* labels = run.task->labels()) *labels = tasks_[t]->labels();
  bool changes_model = m > 0;
  for (size_t i = 0; i < point.size(); ++i) {
    changes_model = changes_model || sweep_.keys[i].table != "train";
  }
  if (config_.match_parameters && changes_model) match_parameters(run.model, parameters_[t]);
  if (second_init) {
    // Another initialisation takes no other time, whatever a measurement would say.
    run.train.steps = built(m, t, point).train.steps;
  } else if (m > 0 || !point.empty()) {
    set_steps(run, t);
  }
  return run;
}

// [robustness] must change nothing that comparisons have equal.
void Experiment::check_second_init(size_t m, size_t t, RunConfig& first) {
  if (config_.robustness.empty()) return;
  try {
    RunConfig second = built(m, t, {}, /*second_init=*/true);
    const int64_t before = count_parameters(first.model), after = count_parameters(second.model);
    if (before != after) {
      usage_error("the model has ", after, " parameters instead of ", before,
                  ", expected changes of the initialisation alone.");
    }
    if (differences(write_fields(first.model), write_fields(second.model)).empty()) {
      usage_error("changes nothing of the model, so that its runs would be the same again; ",
                  "expected another initialisation, such as {equal_init = true}.");
    }
  } catch (const UsageError& error) {
    usage_error("'robustness.model': ", error.what());
  }
}

// Checks the model with every setting, and notes what it is.
void Experiment::add_model(size_t m, size_t t) {
  report::Comparison& comparison = outcome_.comparison;
  const data::Task& task = *tasks_[t];
  try {
    if (m == 0) {
      const RunConfig baseline = built(0, t, {});
      parameters_[t] = count_parameters(baseline.model);
      steps_[t] = static_cast<double>(baseline.train.steps);
      costs_[t] = cost_of_step(baseline, t);
    }
    RunConfig run = built(m, t, {});
    const std::shared_ptr<Model> counted = build_without_memory(run.model);
    check_training_fits(*counted, task, run.train);
    AdamW(*counted, run.train);  // refuses groups that name no parameter
    check_second_init(m, t, run);
    RunConfig reported = run;
    reported.train.eval_split = "test";
    report::TaskInfo& info = comparison.tasks[t];
    const std::string stopping = stopping_text(reported.train);
    if (m == 0) info.stopping = stopping;
    if (stopping != info.stopping) info.stopping = kSomeStop;
    report::Build build = report_build(*counted, task);
    build.model = config_.models[m].name;
    build.task = config_.tasks[t].name;
    build.train_differences = train_differences(built(0, t, {}).train, run.train, sweep_.places());
    build.conditions = conditions_of(run);
    comparison.builds.push_back(std::move(build));
    comparison.models[m].source = mixer_sources(run.model);
  } catch (const UsageError& error) {
    usage_error(named(m, t), ": ", error.what());
  }
  cells_.emplace_back();
  cells_.back().model = m;
  cells_.back().task = t;
  if (sweep_.empty()) {
    cells_.back().chosen = SweepPoint{};
    add_finals(cells_.back());
    return;
  }
  for (const SweepPoint& point : sweep_.grid()) {
    try {
      add_trial(cells_.back(), point);
    } catch (const UsageError& error) {
      const std::string problem = error.what();
      // A value that is wrong by itself is named by its key.
      usage_error(
          named(m, t),
          problem.starts_with("sweep.") ? "" : " with " + sweep_.text(point) + " of [sweep]", ": ",
          problem);
    }
  }
}

PlannedRun Experiment::plan(RunConfig run, const Cell& cell, const SweepPoint& point, int64_t seed,
                            bool sweep, const std::string& path) {
  run.train.seed = seed;
  if (splits_) run.train.eval_split = sweep ? "validation" : "test";
  PlannedRun planned;
  planned.path = path;
  planned.config = write_fields(run);
  const std::string hint = run.train.long_warmup();
  if (outcome_.hint.empty() && !hint.empty()) {
    outcome_.hint = str(named(cell.model, cell.task), ": ", hint);
  }
  planned.bytes_per_token = tasks_[cell.task]->bytes_per_token();
  planned.run = {.model = config_.models[cell.model].name,
                 .task = config_.tasks[cell.task].name,
                 .seed = seed,
                 .setting = sweep_.setting(point),
                 .sweep = sweep,
                 .folder = path};
  if (opened_) adopt(planned, cell.task);
  return planned;
}

// Steps are whole, so that a run may have less than the budget.
void Experiment::note_share(const RunConfig& run, const Cell& cell, const SweepPoint& point) {
  const size_t t = cell.task;
  const double share =
      static_cast<double>(run.train.steps) * cost_of_step(run, t) / (steps_[t] * costs_[t]);
  if (share >= least_share_) return;
  least_share_ = share;
  has_least_ = str("`", config_.models[cell.model].name, "` on ", config_.tasks[t].name,
                   point.empty() ? "" : " with " + sweep_.text(point));
  if (opened_) outcome_.comparison.budget = budget_text();  // the constructor writes the first
}

void Experiment::add_trial(Cell& cell, const SweepPoint& point) {
  const RunConfig run = built(cell.model, cell.task, point);
  note_share(run, cell, point);
  check_training_fits(*build_without_memory(run.model), *tasks_[cell.task], run.train);
  Trial trial{.point = point, .runs = {}};
  for (const int64_t seed : sweep_.seeds) {
    trial.runs.push_back(
        plan(run, cell, point, seed, true,
             str("sweep/", config_.tasks[cell.task].name, "/", config_.models[cell.model].name,
                 "/seed-", seed, ",", sweep_.folder(point))));
  }
  cell.trials.push_back(std::move(trial));
}

std::string Experiment::final_path(const char* part, const Cell& cell, int64_t seed) const {
  return str(part, "/", config_.tasks[cell.task].name, "/", config_.models[cell.model].name,
             "/seed-", seed);
}

// The model is reported with the setting that is chosen for it.
void Experiment::note_build(const Cell& cell, const RunConfig& run) {
  for (report::Build& build : outcome_.comparison.builds) {
    if (build.model != config_.models[cell.model].name ||
        build.task != config_.tasks[cell.task].name) {
      continue;
    }
    report::Build chosen = report_build(*build_without_memory(run.model), *tasks_[cell.task]);
    chosen.model = build.model;
    chosen.task = build.task;
    chosen.train_differences = build.train_differences;
    chosen.conditions = build.conditions;
    build = std::move(chosen);
  }
}

void Experiment::add_finals(Cell& cell) {
  const RunConfig run = built(cell.model, cell.task, *cell.chosen);
  note_share(run, cell, *cell.chosen);
  const auto changes_model = [](const SweepKey& key) { return key.table != "train"; };
  if (std::any_of(sweep_.keys.begin(), sweep_.keys.end(), changes_model)) note_build(cell, run);
  for (const int64_t seed : config_.seeds) {
    cell.finals.push_back(
        plan(run, cell, *cell.chosen, seed, false, final_path("runs", cell, seed)));
  }
  if (config_.robustness.empty()) return;
  const RunConfig again = built(cell.model, cell.task, *cell.chosen, /*second_init=*/true);
  for (const int64_t seed : config_.seeds) {
    cell.repeated.push_back(
        plan(again, cell, *cell.chosen, seed, false, final_path("robustness", cell, seed)));
    cell.repeated.back().label =
        label_of(cell.repeated.back()) + " under the second initialisation";
  }
}

// What a run of the task from the seed of `config` is trained on. Each seed has its own order.
const std::optional<StoredData>& Experiment::data_of_run(RunConfig& config, size_t task) {
  const auto [found, is_new] = data_.try_emplace({task, config.train.seed});
  if (is_new && !config.task->data_paths().empty()) {
    found->second = data_of(config, *config.build_task());
  }
  return found->second;
}

void Experiment::adopt(PlannedRun& planned, size_t task) {
  drop_outdated_plan(planned, control_.folder);
  const auto data_now = [&](RunConfig& config) { return data_of_run(config, task); };
  if (adopt_run(planned, control_.folder, *tasks_[task], data_now)) ++outcome_.present;
}

namespace {

// The folders of runs that comparisons have written in `folder`: PART/TASK/MODEL/seed-*.
std::vector<fs::path> run_folders(const std::string& folder) {
  std::vector<fs::path> out;
  std::error_code none;
  for (const char* part : {"runs", "sweep", "robustness"}) {
    for (const auto& task : fs::directory_iterator(fs::path(folder) / part, none)) {
      for (const auto& model : fs::directory_iterator(task.path(), none)) {
        for (const auto& run : fs::directory_iterator(model.path(), none)) {
          if (run.path().filename().string().starts_with("seed-")) out.push_back(run.path());
        }
      }
    }
  }
  return out;
}

}  // namespace

// Throws FolderInUse where another process trains one of the runs, by a command of --plan. Other
// runs, which somebody has put into the same folder, stay.
void Experiment::remove_runs() const {
  const std::vector<fs::path> runs = run_folders(control_.folder);
  std::list<FolderLock> nobody_trains_them;
  std::error_code none;
  for (const fs::path& run : runs) {
    if (fs::exists(FolderLock::lock_file(run.string()), none)) {
      nobody_trains_them.emplace_back(run.string());
    }
  }
  for (const fs::path& run : runs) {
    fs::remove_all(run);
    fs::path parent = run;
    for (int i = 0; i < 3; ++i) {  // MODEL, TASK and PART, where they are empty now
      parent = parent.parent_path();
      fs::remove(parent, none);
    }
  }
  for (const char* part : {"/plan", "/speeds.json", kStepSeconds}) {
    fs::remove_all(control_.folder + part);
  }
}

void Experiment::open() {
  make_folders(control_.folder);
  if (!lock_) lock_.emplace(control_.folder);
  if (control_.fresh) remove_runs();
  if (measured_) keep_step_seconds();
  opened_ = true;
  for (Cell& cell : cells_) {
    for (Trial& trial : cell.trials) {
      for (PlannedRun& planned : trial.runs) adopt(planned, cell.task);
    }
    for (PlannedRun& planned : cell.finals) adopt(planned, cell.task);
    for (PlannedRun& planned : cell.repeated) adopt(planned, cell.task);
  }
  advance();
  outcome_.left_out = others();
}

// Chooses the setting of a cell whose trials are all finished, or extends the sweep.
void Experiment::choose(Cell& cell) {
  while (!cell.chosen && cell.problem.empty()) {
    std::vector<Tried> tried;
    for (const Trial& trial : cell.trials) {
      double quality = 0, loss = 0;
      for (const PlannedRun& planned : trial.runs) {
        if (!planned.finished) return;
        const bool good =
            planned.run.state == report::RunState::kFinished && !planned.run.points.empty();
        quality += good ? planned.run.points.back().quality : INFINITY;
        loss += good ? planned.run.points.back().loss : INFINITY;
      }
      const auto count = static_cast<double>(trial.runs.size());
      tried.push_back({.point = trial.point, .quality = quality / count, .loss = loss / count});
    }
    bool extended = false;
    for (const SweepPoint& point : sweep_.extension(tried)) {
      try {
        add_trial(cell, point);
      } catch (const UsageError&) {
        continue;  // the value is out of the key's range: nothing lies beyond
      }
      extended = true;
    }
    if (extended) continue;
    const std::optional<SweepPoint> best = best_of(tried);
    if (!best) {
      cell.problem = str("no setting of the sweep has a finite loss for ",
                         named(cell.model, cell.task), ", so none can be chosen.");
      return;
    }
    cell.chosen = best;
    cell.at_edge = sweep_.at_edge(tried, *best);
    add_finals(cell);
  }
}

void Experiment::advance() {
  for (Cell& cell : cells_) choose(cell);
}

// Runs of a sweep come first, since others wait for them. Of the rest whole rounds of seeds come
// one after another, so that a first comparison is there early.
std::vector<PlannedRun*> Experiment::ready() {
  std::vector<PlannedRun*> out;
  for (size_t s = 0; s < sweep_.seeds.size(); ++s) {
    for (Cell& cell : cells_) {
      for (Trial& trial : cell.trials) {
        if (trial.runs[s].can_run()) out.push_back(&trial.runs[s]);
      }
    }
  }
  for (size_t s = 0; s < config_.seeds.size(); ++s) {
    for (Cell& cell : cells_) {
      if (!cell.finals.empty() && cell.finals[s].can_run()) out.push_back(&cell.finals[s]);
    }
  }
  for (size_t s = 0; s < config_.seeds.size(); ++s) {
    for (Cell& cell : cells_) {
      if (!cell.repeated.empty() && cell.repeated[s].can_run()) out.push_back(&cell.repeated[s]);
    }
  }
  return out;
}

size_t Experiment::planned() const {
  return cells_.size() * config_.seeds.size() * (config_.robustness.empty() ? 1 : 2) +
         planned_trials();
}

size_t Experiment::planned_trials() const {
  size_t count = 0;
  for (const Cell& cell : cells_) count += cell.trials.size() * sweep_.seeds.size();
  return count;
}

size_t Experiment::finished() const {
  size_t count = 0;
  for (const Cell& cell : cells_) {
    for (const Trial& trial : cell.trials) {
      for (const PlannedRun& planned : trial.runs) count += planned.finished ? 1 : 0;
    }
    for (const PlannedRun& planned : cell.finals) count += planned.finished ? 1 : 0;
    for (const PlannedRun& planned : cell.repeated) count += planned.finished ? 1 : 0;
  }
  return count;
}

CompareOutcome Experiment::outcome() const {
  CompareOutcome out = outcome_;
  out.planned = planned();
  out.comparison.sweep_planned = static_cast<int>(planned_trials());
  add_choices(out.comparison);
  add_trial_runs(out.comparison);
  add_final_runs(out.comparison);
  if (!config_.robustness.empty()) out.comparison.robustness = {repetition(out.comparison)};
  return out;
}

void Experiment::add_choices(report::Comparison& out) const {
  if (sweep_.empty()) return;
  for (const Cell& cell : cells_) {
    if (!cell.chosen) continue;
    out.choices.push_back({.model = config_.models[cell.model].name,
                           .task = config_.tasks[cell.task].name,
                           .setting = sweep_.setting(*cell.chosen),
                           .at_edge = cell.at_edge});
  }
}

void Experiment::add_trial_runs(report::Comparison& out) const {
  for (size_t s = 0; s < sweep_.seeds.size(); ++s) {
    for (const Cell& cell : cells_) {
      for (const Trial& trial : cell.trials) {
        if (trial.runs[s].begun) out.runs.push_back(trial.runs[s].run);
      }
    }
  }
}

// Where nothing could be chosen, all runs of the cell have failed.
void Experiment::add_final_runs(report::Comparison& out) const {
  for (size_t s = 0; s < config_.seeds.size(); ++s) {
    for (const Cell& cell : cells_) {
      if (!cell.problem.empty()) {
        out.runs.push_back({.model = config_.models[cell.model].name,
                            .task = config_.tasks[cell.task].name,
                            .seed = config_.seeds[s],
                            .state = report::RunState::kFailed,
                            .problem = cell.problem});
      } else if (!cell.finals.empty() && cell.finals[s].begun) {
        out.runs.push_back(cell.finals[s].run);
      }
    }
  }
}

// The comparison under the second initialisation. `first` has all runs under the first one.
report::Comparison Experiment::repetition(const report::Comparison& first) const {
  report::Comparison out = first;
  out.title = config_.robustness.title();
  out.speeds.clear();
  // A sweep without a choice has failed for both.
  std::erase_if(out.runs, [](const report::Run& run) {
    return run.sweep || run.state != report::RunState::kFailed || !run.folder.empty();
  });
  for (size_t s = 0; s < config_.seeds.size(); ++s) {
    for (const Cell& cell : cells_) {
      if (!cell.repeated.empty() && cell.repeated[s].begun) {
        out.runs.push_back(cell.repeated[s].run);
      }
    }
  }
  return out;
}

// Folders of runs that are there and not planned.
std::vector<std::string> Experiment::others() const {
  std::set<std::string> asked;
  for (const Cell& cell : cells_) {
    for (const Trial& trial : cell.trials) {
      for (const PlannedRun& planned : trial.runs) asked.insert(planned.path);
    }
    for (const int64_t seed : config_.seeds) {
      asked.insert(final_path("runs", cell, seed));
      if (!config_.robustness.empty()) asked.insert(final_path("robustness", cell, seed));
    }
  }
  std::vector<std::string> out;
  for (const fs::path& run : run_folders(control_.folder)) {
    const std::string path = run.lexically_relative(control_.folder).string();
    if (!asked.contains(path)) out.push_back(path);
  }
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace headloom
