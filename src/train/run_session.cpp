#include "train/run_session.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "core/files.h"
#include "core/json_text.h"
#include "core/shell.h"
#include "core/text.h"
#include "train/metrics.h"
#include "train/reported.h"
#include "train/run_folder.h"
#include "train/run_past.h"

namespace headloom {
namespace fs = std::filesystem;

std::optional<StoredData> data_of(RunConfig& config, const data::Task& task) {
  if (config.task->data_paths().empty()) return std::nullopt;
  return StoredData{task.data_size().count, data::fingerprint(task, /*pixels=*/false)};
}

std::string changed_data(const std::string& folder, RunConfig& config, const data::Task& task,
                         const std::optional<StoredData>& stored,
                         const std::optional<StoredData>& now) {
  if (!stored || !now || *stored == *now) return "";
  const std::string how =
      stored->count == now->count
          ? std::string(", or are in another order")
          : str(" (", stored->count, " ", task.data_size().unit, ", now ", now->count, ")");
  return str(folder, ": the data of 'task.", config.task->data_paths()[0].key,
             "' are not those that the run was trained on", how);
}

void say_what_changed(const std::string& folder, RunConfig& config, const data::Task& task) {
  const std::optional<StoredData> stored = CheckpointStore(folder).data();
  if (!stored) return;
  const std::string changed = changed_data(folder, config, task, stored, data_of(config, task));
  if (changed.empty()) return;
  std::fprintf(stderr, "headloom: %s; what is held out of them now may have been trained on.\n",
               changed.c_str());
}

void check_same_data(const std::string& folder, bool of_comparison, RunConfig& config,
                     const data::Task& task, const std::optional<StoredData>& stored,
                     const std::optional<StoredData>& now) {
  const std::string changed = changed_data(folder, config, task, stored, now);
  if (changed.empty()) return;
  const std::string instead =
      of_comparison
          ? std::string("restore them, or train all runs of the comparison anew with --fresh.")
          : str("go on with the same data, or begin a new run with its weights: ", program_name(),
                " train CONFIG --from ", shell_word(folder), ".");
  usage_error(changed, "; ", instead);
}

RunSession::RunSession(const TrainControl& control, RunConfig& config, Progress& progress)
    : control_(control), config_(config), progress_(progress), store_(control.folder) {
  lock();
  const std::string& folder = control_.folder;
  const auto steps = store_.steps();
  if (steps.empty()) {
    require(control_.checkpoint.empty(), folder, ": has no checkpoint to go on from.");
    if (!control_.of_comparison && !fs::exists(control_.folder + "/config.toml")) {
      check_new_folder(control_.folder, config_.task->tokenizer_file());
    }
  } else if (!goes_on()) {
    refuse_present();
  } else {
    const int64_t step = store_.find(which());
    if (store_.has_weights_alone(step)) {
      usage_error(folder, ": its checkpoint of step ", step,
                  " has weights alone, as of an imported model, and no training to go on with; "
                  "begin a new run with them: ",
                  program_name(), " train CONFIG --from ", shell_word(folder), ".");
    }
    use_kept_tokenizer(folder, config_);
  }
  if (!control_.from.empty()) fill_sizes_from_run(config_, control_.from);
  config_.find_data();
}

// Takes the folder, and the comparison's where the run belongs to one, for as long as this lives.
void RunSession::lock() {
  if (!control_.of_comparison && !comparison_lock_) {
    comparison_ = comparison_of(control_.folder);
    if (comparison_) comparison_lock_.emplace(*comparison_);
  }
  if (!lock_ && fs::is_directory(control_.folder)) lock_.emplace(control_.folder);
}

bool RunSession::goes_on() const { return control_.resume || !control_.checkpoint.empty(); }

std::string RunSession::which() const {
  return control_.checkpoint.empty() ? "last" : control_.checkpoint;
}

void RunSession::refuse_present() const {
  usage_error(control_.folder, ": already holds a run at step ", store_.steps().back(),
              "; go on with --resume, or choose another folder with --out.");
}

TrainState RunSession::open(Model& model, AdamW& optimizer, const data::Task& task) {
  return store_.steps().empty() ? begin(model, optimizer, task) : go_on(model, optimizer, task);
}

namespace {

// Whether a file of metrics begins as that of a run does, which may have no step yet.
bool is_of_run(const std::string& metrics) {
  const std::string text = read_file(metrics);
  if (text.empty()) return true;
  const auto json = parse_json_if_whole<nlohmann::json>(text.substr(0, text.find('\n')));
  return json.is_object() && json.contains("step");
}

}  // namespace

TrainState RunSession::begin(Model& model, AdamW& optimizer, const data::Task& task) {
  const std::string& folder = control_.folder;
  std::string comment;
  std::optional<Origin> origin;
  if (!control_.from.empty()) {
    const CheckpointStore store(control_.from);
    const TrainState theirs =
        store.load_weights(control_.from_checkpoint, model, optimizer.cut(), WeightsOf::kAdapted);
    store.check_finite(theirs.step, model);
    origin = origin_of(control_.from, theirs);
    const std::optional<Origin> before = control_.resume ? read_origin(folder) : std::nullopt;
    if (before && before->weights != origin->weights) {
      usage_error(folder, ": began with the weights of ", before->folder, ", step ", before->step,
                  ", and has no checkpoint of its own yet, but ",
                  before->folder == origin->folder ? "those have been replaced by others"
                                                   : "now they are those of another run",
                  "; begin a new run.");
    }
    comment = str("# Began with the weights of ", origin->folder, ", step ", theirs.step, ".\n");
    progress_.line(str("the weights are those of ", control_.from, ", step ", theirs.step));
  }
  make_folders(folder);
  lock();
  if (!store_.steps().empty()) {  // another process was faster
    if (!goes_on()) refuse_present();
    return go_on(model, optimizer, task);
  }
  const std::string path = folder + "/config.toml", metrics = metrics_path(folder);
  // A run that stopped before its first checkpoint starts anew; nothing else is written over.
  if (fs::exists(metrics) && !is_of_run(metrics)) {
    usage_error(folder, ": holds 'metrics.jsonl', which is not a run's and would be overwritten; ",
                "choose another folder for the run with --out.");
  }
  if (fs::exists(path) && !fs::exists(metrics) &&
      !differences(read_toml(path), stored_config(config_)).empty()) {
    usage_error(path, ": is not the configuration of a run; choose another folder with --out.");
  }
  if (control_.resume && !control_.of_comparison) {
    progress_.line(str(folder, ": there is no checkpoint to go on from yet, so the run begins"));
  }
  forget_configs_after(folder, 0);
  if (origin) {
    write_origin(folder, *origin);
  } else {
    fs::remove(origin_path(folder));
  }
  write_run_config(folder, config_, comment);
  if (const std::string* file = config_.task->tokenizer_file()) keep_tokenizer(folder, *file);
  write_file(metrics, first_line_of_metrics(control_.group ? control_.group->size() : 1));
  const std::string hint = config_.train.long_warmup();
  if (!hint.empty() && !control_.of_comparison) progress_.line(hint);  // a comparison says it once
  TrainState state;
  state.config = to_toml(stored_config(config_));
  state.data = data_of(config_, task);
  return state;
}

// A command that is given again may name the run that this one began with, and no other: what goes
// on has weights of its own.
void RunSession::check_from() const {
  if (control_.from.empty()) return;
  const std::string& folder = control_.folder;
  const std::optional<Origin> began = read_origin(folder);
  std::error_code none;
  if (began && fs::equivalent(began->folder, control_.from, none)) return;
  usage_error("--from ", control_.from, ": ", folder, " goes on with its own weights, ",
              began ? "and began with those of " + began->folder : "and began without others'",
              "; leave --from out, or choose another folder with --out.");
}

// Throws UsageError where a run does not go on with such a change.
void RunSession::check_may_change(const Difference& d) const {
  if (may_change(d.key) && !comparison_ && !control_.of_comparison) return;
  usage_error(control_.folder, "/config.toml: the run was made with ", d.was(), ", now it is ",
              d.is(),
              comparison_ ? str("; a run of the comparison ", *comparison_,
                                " keeps its configuration: go on with a copy of its folder.")
                          : std::string("; go on with the same configuration or choose another "
                                        "folder."));
}

// What is other than when the weights of step `from` were trained: what the command asks for, and
// what has been edited in the folder's config.toml since.
std::vector<Difference> RunSession::changes_since(int64_t from,
                                                  const std::vector<Difference>& asked) {
  for (const Difference& d : asked) check_may_change(d);
  const std::string trained = store_.config(from);
  if (trained.empty()) return asked;
  std::vector<Difference> out;
  for (const Difference& d : asked) {
    if (is_place_of_data(d.key)) out.push_back(d);
  }
  RunConfig before = read_run_config(parse_toml(trained, store_.folder(from) + "/state.json"));
  for (const Difference& d : differences(stored_config(before), stored_config(config_))) {
    if (is_place_of_data(d.key)) continue;
    // The weights refuse another model when they are read; what is not theirs may be edited.
    if (!d.key.starts_with("model.") || control_.of_comparison) check_may_change(d);
    out.push_back(d);
  }
  return out;
}

// A run of which another configuration would train nothing keeps its own.
void RunSession::check_something_left(int64_t from) const {
  const std::string& folder = control_.folder;
  if (config_.train.steps <= from) {
    usage_error(folder, ": is at step ", from, ", so 'train.steps' = ", config_.train.steps,
                " leaves nothing to train, expected more.");
  }
  std::vector<EvalPoint> done = read_metrics(metrics_path(folder)).evaluations;
  std::erase_if(done, [&](const EvalPoint& point) { return point.step != from; });
  if (is_whole(config_.train, done)) {
    usage_error(folder, ": at step ", from,
                " it has reached 'train.stop_accuracy' = ", *config_.train.stop_accuracy,
                ", which leaves nothing to train, expected a higher one or none.");
  }
}

TrainState RunSession::go_on(Model& model, AdamW& optimizer, const data::Task& task) {
  check_from();
  const std::string& folder = control_.folder;
  const int64_t from = store_.find(which());
  const std::vector<Difference> asked = differences_from(folder, config_);
  const std::vector<Difference> changes = changes_since(from, asked);
  TrainState state = store_.load(from, model, optimizer);
  if (!changes.empty()) check_something_left(from);
  const std::optional<StoredData> data = data_of(config_, task);
  check_same_data(folder, control_.of_comparison, config_, task, state.data, data);
  state.config = to_toml(stored_config(config_));
  state.data = data;
  store_.drop_after(from);
  forget_best(changes, state);
  const bool forgot = forget_configs_after(folder, from);
  if (!asked.empty() || !changes.empty()) {
    restate(state.step);
  } else if (forgot) {
    write_run_config(folder, config_, config_comments(folder));
  }
  return state;
}

// Losses on other sequences cannot be compared, and the best checkpoint may be gone.
void RunSession::forget_best(const std::vector<Difference>& changes, TrainState& state) const {
  const bool others = std::any_of(changes.begin(), changes.end(), [](const Difference& d) {
    return d.key.starts_with("train.eval_") && d.key != "train.eval_every";
  });
  const auto present = store_.steps();
  const bool gone = state.best_step &&
                    std::find(present.begin(), present.end(), *state.best_step) == present.end();
  if (others || gone) state.best_step.reset();
}

// Says what goes on differently from here, and stores it. What came before `step` may not be the
// present configuration: a run that goes back goes on from that step once more.
void RunSession::restate(int64_t step) {
  const std::string& folder = control_.folder;
  const std::string trained = store_.config(step);
  const std::string kept = folder + "/" +
                           keep_config(folder, step,
                                       trained.empty() ? read_file(folder + "/config.toml")
                                                       : config_comments(folder) + trained);
  RunConfig earlier = read_run_config(read_toml(kept));
  const std::vector<Difference> changes =
      differences(stored_config(earlier), stored_config(config_));
  if (changes.empty()) fs::remove(kept);
  write_run_config(folder, config_, config_comments(folder));
  if (changes.empty()) return;
  const TrainOptions &before = earlier.train, &now = config_.train;
  std::vector<std::string> named;
  for (const Difference& d : changes) {
    named.push_back(str(d.key, " = ", d.after.empty() ? "absent" : d.after, " (was ",
                        d.before.empty() ? "absent" : d.before, ")"));
  }
  progress_.line(str(
      "goes on with ", join(named), "; the learning rate is ", formatted("%.3g", now.lr_at(step)),
      " at step ", step + 1,
      step > 0 ? str(" (it was ", formatted("%.3g", before.lr_at(step - 1)), " at step ", step, ")")
               : std::string(),
      " and ", formatted("%.3g", now.lr_at(now.steps - 1)), " at step ", now.steps,
      ", the last; the configuration before is kept as ", kept));
}

}  // namespace headloom
