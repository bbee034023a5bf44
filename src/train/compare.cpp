#include "train/compare.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "core/files.h"
#include "core/lock.h"
#include "core/problem.h"
#include "core/text.h"
#include "model/describe.h"
#include "train/config.h"
#include "train/result.h"
#include "train/run_folder.h"
#include "train/run_report.h"
#include "train/train.h"
#include "train/training_memory.h"

namespace headloom {
namespace {

namespace fs = std::filesystem;

// Names become folders.
void check_name(const std::string& name, const char* what) {
  bool good = !name.empty() && name.front() != '.';
  for (char c : name) {
    good = good && (std::isalnum(static_cast<unsigned char>(c)) ||
                    std::string("_-+. ").find(c) != std::string::npos);
  }
  if (!good) {
    usage_error(what, " has the name '", name,
                "', expected letters, digits, spaces and any of _ - + . only.");
  }
}

template <typename Named>
void check_names(const std::vector<Named>& items, const char* what) {
  if (items.empty()) usage_error("the comparison has no [[", what, "]], expected at least one.");
  std::set<std::string> seen;
  for (const Named& item : items) {
    check_name(item.name, what);
    if (!seen.insert(item.name).second) {
      usage_error("two of [[", what, "]] are named '", item.name, "', expected different names.");
    }
  }
}

// The shared configuration with a task's and a model's changes.
Node combined(const CompareConfig& config, const ComparedModel& model, const ComparedTask& task,
              int64_t seed) {
  Node layers_model = merged(merged(config.model, task.model), model.model);
  if (layers_model.find("layer") == nullptr) {
    Node one;
    one.value = Array{Node{}};
    layers_model.set("layer", one);
  }
  for (const char* list : {"layer", "encoder_layer"}) {
    Node* layers = layers_model.find(list);
    if (layers == nullptr || !layers->is_array()) continue;
    for (Node& layer : layers->array()) {
      for (const auto& [key, part] :
           {std::pair("mixer", &model.mixer), std::pair("channel", &model.channel),
            std::pair("block", &model.block), std::pair("cross", &model.cross)}) {
        if (part->table().empty() || !layer.is_table()) continue;
        const Node* present = layer.find(key);
        layer.set(key, present != nullptr ? merged(*present, *part) : *part);
      }
    }
  }
  Node root;
  root.set("model", layers_model);
  root.set("task", task.task);
  Node train = merged(config.train, task.train);
  Node seed_node;
  seed_node.value = seed;
  train.set("seed", seed_node);
  root.set("train", train);
  return root;
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

struct Planned {
  report::Run run;             // before it has begun
  double bytes_per_token = 0;  // of its task
  Node config;
  std::string folder;
};

report::Run run_one(const Planned& plan, const std::string& label, bool& stopped) {
  const std::string result_path = plan.folder + "/result.json";
  const std::string metrics = plan.folder + "/metrics.jsonl";
  report::Run run = plan.run;
  RunResult result;
  std::vector<EvalPoint> evaluations;
  if (const auto done = read_result(result_path)) {
    result = *done;
    run.state = done->problem.empty() ? report::RunState::kFinished : report::RunState::kFailed;
    evaluations = read_evaluations(metrics);
  } else {
    try {
      const TrainOutcome outcome =
          train(plan.config,
                {.folder = plan.folder, .resume = true, .label = label, .of_comparison = true});
      result.warning = outcome.warning;
      result.tokens_per_second = outcome.tokens_per_second;
      result.peak_memory = outcome.peak_memory;
      evaluations = outcome.evaluations;
      stopped = outcome.interrupted;
      if (!stopped) run.state = report::RunState::kFinished;
    } catch (const UsageError&) {
      throw;
    } catch (const std::exception& error) {  // an allocation that failed, say
      result.problem = problem_of(error);
      run.state = report::RunState::kFailed;
      if (fs::exists(metrics)) evaluations = read_evaluations(metrics);
    }
    if (!stopped) write_result(result_path, result);
  }
  run.problem = result.problem;
  run.warning = result.warning;
  for (const EvalPoint& p : evaluations) {
    run.points.push_back(report_point(p, plan.bytes_per_token));
  }
  run.tokens_per_second = result.tokens_per_second;
  if (result.peak_memory >= 0) run.peak_memory_bytes = static_cast<double>(result.peak_memory);
  return run;
}

// Whether the run's folder has a configuration, and whether it is another one than is planned.
enum class Present { no, same, other };

Present present(const Planned& plan) {
  if (!fs::exists(plan.folder + "/config.toml")) return Present::no;
  try {
    RunConfig config = read_run_config(plan.config);
    return differences_from(plan.folder, config).empty() ? Present::same : Present::other;
  } catch (const UsageError&) {  // another tokenizer, or an option that is no more
    return Present::other;
  }
}

// Moves a run of another configuration out of the way.
void set_aside(const std::string& run) {
  {
    const FolderLock nobody_trains_it(run);
  }
  int number = 1;
  while (fs::exists(str(run, ".earlier-", number))) ++number;
  publish_folder(run, str(run, ".earlier-", number));
}

// Folders of runs below `folder` that are not in `plan`.
std::vector<std::string> others(const std::string& folder, const std::vector<Planned>& plan) {
  std::set<fs::path> asked;
  for (const Planned& p : plan) asked.insert(p.folder);
  std::vector<std::string> out;
  std::error_code error;
  for (const auto& task : fs::directory_iterator(folder + "/runs", error)) {
    for (const auto& model : fs::directory_iterator(task.path(), error)) {
      for (const auto& run : fs::directory_iterator(model.path(), error)) {
        if (run.path().filename().string().starts_with("seed-") && !asked.contains(run.path())) {
          out.push_back(run.path().lexically_relative(folder + "/runs").string());
        }
      }
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace

void ComparedModel::fields(Fields& f) {
  f.field("name", name, "how the report calls it");
  f.field("description", description, "one line for the report");
  f.raw("model", model, "changes to [model]");
  f.raw("mixer", mixer, "changes to every layer's token mixer");
  f.raw("channel", channel, "changes to every layer's channel mixer");
  f.raw("block", block, "changes to every layer's block");
  f.raw("cross", cross, "changes to every layer's cross-attention");
}

void ComparedTask::fields(Fields& f) {
  f.field("name", name, "how the report calls it");
  f.raw("task", task, "the task");
  f.raw("train", train, "changes to [train]");
  f.raw("model", model, "changes to [model]");
}

void CompareConfig::fields(Fields& f) {
  f.field("title", title, "of the report");
  f.field("seeds", seeds, "each model trains once for every seed", at_least(0));
  f.field("match_parameters", match_parameters,
          "equal parameters within 1% by the channel mixer's width");
  f.raw("model", model, "what the models share");
  f.raw("train", train, "how all are trained");
  f.list("models", models, "the models; the first is the baseline");
  f.list("tasks", tasks, "the tasks");
}

CompareOutcome compare(const CompareConfig& config, const CompareControl& control) {
  const std::string& folder = control.folder;
  std::optional<FolderLock> lock;
  if (fs::is_directory(folder)) lock.emplace(folder);
  check_names(config.models, "models");
  check_names(config.tasks, "tasks");
  if (config.seeds.empty()) usage_error("'seeds' is empty, expected at least one seed.");
  if (std::set<int64_t>(config.seeds.begin(), config.seeds.end()).size() != config.seeds.size()) {
    usage_error("'seeds' has a seed twice, expected different ones.");
  }

  CompareOutcome outcome;
  report::Comparison& comparison = outcome.comparison;
  comparison.title = config.title;
  comparison.seeds = config.seeds;
  for (const ComparedModel& m : config.models) {
    comparison.models.push_back({.label = m.name, .description = m.description});
  }
  std::vector<std::string> budgets;
  std::vector<Planned> plan;
  for (size_t t = 0; t < config.tasks.size(); ++t) {
    int64_t target = 0;
    for (size_t m = 0; m < config.models.size(); ++m) {
      RunConfig run = read_run_config(combined(config, config.models[m], config.tasks[t], 0));
      run.find_data(str("tasks.", t, ".task"));
      const auto named = [&](const auto& check) {
        try {
          check();
        } catch (const UsageError& error) {
          usage_error("model '", config.models[m].name, "' on task '", config.tasks[t].name,
                      "': ", error.what());
        }
      };
      // Later ones may be matched to the first.
      if (m == 0) named([&] { check_training_fits(run); });
      const auto task = run.build_task();
      if (m == 0) {
        const WorkUnit unit = work_unit(*task);
        const bool text = task->bytes_per_token() > 0;
        comparison.tasks.push_back({.name = config.tasks[t].name,
                                    .description = task->describe(),
                                    .metric = text ? "bits per byte" : "error rate",
                                    .unit = unit.name,
                                    .lower_is_better = true,
                                    .percent = !text});
        const double tokens = static_cast<double>(run.train.steps) *
                              static_cast<double>(run.train.batch) *
                              static_cast<double>(unit.per_sequence);
        budgets.push_back(str(human_count(tokens), " ", unit.name, " on ", config.tasks[t].name));
      }
      named([&] {
        if (config.match_parameters && m > 0) match_parameters(run.model, target);
        const std::shared_ptr<Model> counted = build_without_memory(run.model);
        check_training_fits(*counted, *task, run.train);
        const ModelCosts costs = model_costs(*counted, task->length());
        const std::optional<MeasuredState> state = measured_state(*counted, task->length());
        if (m == 0) target = costs.parameters;
        comparison.builds.push_back(
            {.model = config.models[m].name,
             .task = config.tasks[t].name,
             .parameters = costs.parameters,
             .flops_per_token = costs.flops_per_token,
             .state_bytes_per_token = costs.state_bytes_per_token,
             .measured_state_bytes_per_token = state ? state->bytes_per_token : report::kUnknown,
             .mechanism_share = costs.mechanism_share,
             .config = to_toml(write_fields(run.model))});
        comparison.models[m].source = mixer_sources(run.model);
      });
      for (int64_t seed : config.seeds) {
        run.train.seed = seed;
        plan.push_back(
            {.run = {.model = config.models[m].name, .task = config.tasks[t].name, .seed = seed},
             .bytes_per_token = task->bytes_per_token(),
             .config = write_fields(run),
             .folder = str(folder, "/runs/", config.tasks[t].name, "/", config.models[m].name,
                           "/seed-", seed)});
      }
    }
  }
  comparison.budget = str("Every run trains on the same amount of data: ", join(budgets), "; ",
                          config.match_parameters ? "parameters are equal within 1% on each task."
                                                  : "parameters are not matched.");
  // Seed by seed, so that a whole first comparison is there early.
  const auto place = [&](const Planned& p) {
    return std::find(config.seeds.begin(), config.seeds.end(), p.run.seed) - config.seeds.begin();
  };
  std::stable_sort(plan.begin(), plan.end(),
                   [&](const Planned& a, const Planned& b) { return place(a) < place(b); });
  make_folders(folder);
  if (!lock) lock.emplace(folder);
  if (control.fresh) fs::remove_all(folder + "/runs");
  outcome.planned = plan.size();
  for (const Planned& p : plan) {
    const Present found = present(p);
    if (found == Present::same) ++outcome.present;
    if (found == Present::other) set_aside(p.folder);
  }
  outcome.left_out = others(folder, plan);
  control.progress(outcome);
  for (size_t i = 0; i < plan.size(); ++i) {
    const report::Run& r = plan[i].run;
    const std::string label =
        str("[", i + 1, "/", plan.size(), "] ", r.task, " ", r.model, " seed ", r.seed);
    comparison.runs.push_back(run_one(plan[i], label, outcome.interrupted));
    control.progress(outcome);
    if (outcome.interrupted) break;
  }
  return outcome;
}

}  // namespace headloom
