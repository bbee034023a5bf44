#include "train/train.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>

#include "core/files.h"
#include "core/lock.h"
#include "core/memory.h"
#include "core/shell.h"
#include "core/text.h"
#include "model/describe.h"
#include "train/checkpoint.h"
#include "train/evaluate.h"
#include "train/load.h"
#include "train/progress.h"
#include "train/run_folder.h"
#include "train/training_memory.h"

namespace headloom {
namespace {

volatile std::sig_atomic_t g_interrupts = 0;

void on_interrupt(int signal) {
  g_interrupts = g_interrupts + 1;
  if (g_interrupts > 1) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string rounded(const char* format, double value) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, value);
  return buffer;
}

class Trainer {
 public:
  Trainer(RunConfig config, const TrainControl& control)
      : config_(std::move(config)),
        options_(config_.train),
        control_(control),
        store_(control.folder),
        progress_(control.label) {}

  TrainOutcome run() {
    lock();
    look_around();
    check_training_fits(config_);
    task_ = config_.build_task();
    if (!control_.from.empty()) check_same_model(config_, control_.from);
    seed();
    check_training_fits(*build_without_memory(config_.model), *task_, options_);
    model_ = build_model(config_.model);
    optimizer_.emplace(*model_, options_);
    for (const Tensor& p : model_->parameters()) outcome_.parameters += p.numel();
    open_folder();
    metrics_.emplace(control_.folder + "/metrics.jsonl", state_.step);
    progress_.line(str(human_count(static_cast<double>(outcome_.parameters)), " parameters, step ",
                       state_.step, " of ", options_.steps, "; ", task_->describe()));
    loop();
    outcome_.step = state_.step;
    outcome_.seconds = state_.seconds;
    outcome_.evaluations = metrics_->evaluations();
    outcome_.tokens_per_second = tokens_per_second();
    outcome_.unit = work_unit(*task_).name;
    outcome_.peak_memory = memory_.bytes();
    if (!outcome_.interrupted) outcome_.warning = metrics_->divergence();
    if (!outcome_.warning.empty()) progress_.line("warning: " + outcome_.warning);
    return outcome_;
  }

 private:
  void seed() const {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(static_cast<uint64_t>(options_.seed));
  }

  // Takes the folder, and the comparison's where the run belongs to one, for as long as this lives.
  void lock() {
    namespace fs = std::filesystem;
    if (!control_.of_comparison && !comparison_lock_) {
      comparison_ = comparison_of(control_.folder);
      if (comparison_) comparison_lock_.emplace(*comparison_);
    }
    if (!lock_ && fs::is_directory(control_.folder)) lock_.emplace(control_.folder);
  }

  // What the folder and the run to begin with say, before anything that takes long.
  void look_around() {
    const std::string& folder = control_.folder;
    const auto steps = store_.steps();
    if (steps.empty()) {
      require(control_.checkpoint.empty(), folder, ": has no checkpoint to go on from.");
    } else if (!goes_on()) {
      refuse_present();
    } else {
      const int64_t step = store_.find(which());
      if (store_.has_weights_alone(step)) {
        usage_error(folder, ": its checkpoint of step ", step,
                    " has weights alone, as of an imported model, and no training to go on with; "
                    "begin a new run with them: headloom train CONFIG --from ",
                    shell_word(folder), ".");
      }
      use_kept_tokenizer(folder, config_);
    }
    if (!control_.from.empty()) fill_sizes_from_run(config_, control_.from);
    config_.find_data();
  }

  bool goes_on() const { return control_.resume || !control_.checkpoint.empty(); }
  std::string which() const { return control_.checkpoint.empty() ? "last" : control_.checkpoint; }

  // Makes a fresh folder a run's, or restores the checkpoint of a present one.
  void open_folder() {
    namespace fs = std::filesystem;
    const std::string& folder = control_.folder;
    if (!store_.steps().empty()) {
      go_on();
      return;
    }
    std::string comment;
    if (!control_.from.empty()) {
      const TrainState theirs =
          CheckpointStore(control_.from).load_weights(control_.from_checkpoint, *model_);
      comment = str("# Began with the weights of ", fs::absolute(control_.from).string(), ", step ",
                    theirs.step, ".\n");
      progress_.line(str("the weights are those of ", control_.from, ", step ", theirs.step));
    }
    make_folders(folder);
    lock();
    if (!store_.steps().empty()) {  // another process was faster
      if (!goes_on()) refuse_present();
      go_on();
      return;
    }
    const std::string path = folder + "/config.toml", metrics = folder + "/metrics.jsonl";
    // A run that stopped before its first checkpoint starts anew; nothing else is written over.
    if (fs::exists(path) && !fs::exists(metrics) &&
        !differences(read_toml(path), stored_config(config_)).empty()) {
      usage_error(path, ": is not the configuration of a run; choose another folder with --out.");
    }
    write_run_config(folder, config_, comment);
    if (const std::string* file = config_.task->tokenizer_file()) keep_tokenizer(folder, *file);
    write_file(metrics, "");
  }

  [[noreturn]] void refuse_present() const {
    usage_error(control_.folder, ": already holds a run at step ", store_.steps().back(),
                "; go on with --resume, or choose another folder with --out.");
  }

  void go_on() {
    const std::string& folder = control_.folder;
    const std::vector<Difference> changes = differences_from(folder, config_);
    for (const Difference& d : changes) {
      if (may_change(d.key) && !comparison_ && !control_.of_comparison) continue;
      usage_error(folder, "/config.toml: the run was made with ", d.was(), ", now it is ", d.is(),
                  comparison_ ? str("; a run of the comparison ", *comparison_,
                                    " keeps its configuration: go on with a copy of its folder.")
                              : std::string("; go on with the same configuration or choose another "
                                            "folder."));
    }
    const int64_t from = store_.find(which());
    if (!changes.empty() && options_.steps <= from) {
      usage_error(folder, ": is at step ", from, ", so 'train.steps' = ", options_.steps,
                  " leaves nothing to train, expected more.");
    }
    state_ = store_.load(from, *model_, *optimizer_);
    store_.drop_after(from);
    if (!changes.empty()) restate(changes);
  }

  // Says what goes on differently from here, and stores it.
  void restate(const std::vector<Difference>& changes) {
    namespace fs = std::filesystem;
    const std::string path = control_.folder + "/config.toml";
    const std::string earlier = str("config.until-step-", state_.step, ".toml");
    const std::string kept = control_.folder + "/" + earlier;
    const TrainOptions before = read_run_config(read_toml(path)).train;
    std::string comments = config_comments(control_.folder);
    if (!fs::exists(kept)) {  // else it changes twice here, and no step was made in between
      write_file(kept, read_file(path));
      comments += str("# Until step ", state_.step, " the configuration was ", earlier, ".\n");
    }
    write_run_config(control_.folder, config_, comments);
    std::vector<std::string> named;
    for (const Difference& d : changes) {
      named.push_back(str(d.key, " = ", d.after.empty() ? "absent" : d.after, " (was ",
                          d.before.empty() ? "absent" : d.before, ")"));
    }
    const auto rate = [](double lr) { return rounded("%.3g", lr); };
    progress_.line(str("goes on with ", join(named), "; the learning rate is ",
                       rate(options_.lr_at(state_.step)), " at step ", state_.step + 1,
                       state_.step > 0 ? str(" (it was ", rate(before.lr_at(state_.step - 1)),
                                             " at step ", state_.step, ")")
                                       : std::string(),
                       " and ", rate(options_.lr_at(options_.steps - 1)), " at step ",
                       options_.steps, ", the last; the configuration before is kept as ", kept));
  }

  void loop() {
    model_->train();
    const int64_t checkpoint_every = options_.checkpoint_every.value_or(options_.eval_every);
    while (state_.step < options_.steps) {
      const double start = now();
      StepPoint point = step();
      point.seconds = now() - start;
      state_.seconds += point.seconds;
      metrics_->add(point);
      if (progress_.due()) show(point.loss);
      const bool last = state_.step == options_.steps;
      if (state_.step % options_.eval_every == 0 || last) evaluate_now();
      const bool stop = interrupted() && !last;
      if (state_.step % checkpoint_every == 0 || last || stop) save();
      if (stop) {
        outcome_.interrupted = true;
        return;
      }
    }
  }

  StepPoint step() {
    const int64_t pieces = options_.accumulate;
    std::vector<data::Batch> batches;
    int64_t targets = 0;
    for (int64_t i = 0; i < pieces; ++i) {
      batches.push_back(task_->train_batch(state_.step * pieces + i, options_.batch / pieces));
      targets += batches.back().targets.ne(data::kIgnore).sum().item<int64_t>();
    }
    // Pieces are weighted by their targets, so that cutting a batch does not change its gradient.
    double loss = 0;
    StepPoint point;
    AuxiliaryOutputs auxiliary;  // its load adds up over the pieces
    for (const data::Batch& batch : batches) {
      Tensor mean;
      auxiliary.loss = Tensor();
      {
        Autocast autocast(options_.dtype);
        mean = batch_loss(*model_, batch, &auxiliary).sum / static_cast<double>(targets);
      }
      loss += mean.item<double>();
      if (auxiliary.loss.defined()) {
        const Tensor extra = auxiliary.loss / static_cast<double>(pieces);
        mean = mean + extra;
        point.balance_loss = point.balance_loss.value_or(0) + extra.item<double>();
      }
      mean.backward();
    }
    for (const auto& [layer, load] : auxiliary.load) point.expert_load[layer] = shares(load);
    if (!std::isfinite(loss)) stop_diverged("the loss", loss, state_.step + 1);
    point.lr = options_.lr_at(state_.step);
    point.gradient_norm = optimizer_->step(point.lr);
    if (!std::isfinite(point.gradient_norm)) {
      stop_diverged("the gradient's norm", point.gradient_norm, state_.step + 1);
    }
    model_->balance(auxiliary.load);
    state_.step += 1;
    state_.tokens += options_.batch * work_unit(*task_).per_sequence;
    point.step = state_.step;
    point.loss = loss;
    return point;
  }

  // Of counts [experts].
  static std::vector<double> shares(const Tensor& counts) {
    const Tensor share = counts.to(at::kDouble) / counts.sum().clamp_min(1);
    return {share.const_data_ptr<double>(), share.const_data_ptr<double>() + share.numel()};
  }

  [[noreturn]] void stop_diverged(const char* what, double value, int64_t step) const {
    const auto steps = store_.steps();
    fail(control_.folder, ": ", what, " became ", value, " at step ", step,
         steps.empty() ? "; there is no checkpoint before it."
                       : str("; the last good checkpoint is ", store_.folder(steps.back()), "."),
         " A lower train.lr or a longer train.warmup may help.");
  }

  void evaluate_now() {
    Evaluation e;
    {
      Autocast autocast(options_.dtype);
      e = evaluate(*model_, *task_, options_.eval_sequences,
                   std::max<int64_t>(options_.batch / options_.accumulate, 1));
    }
    if (!std::isfinite(e.loss)) stop_diverged("the held-out loss", e.loss, state_.step);
    const EvalPoint point{.step = state_.step,
                          .tokens = state_.tokens,
                          .seconds = state_.seconds,
                          .loss = e.loss,
                          .accuracy = e.accuracy,
                          .train_loss = metrics_->mean_loss(),
                          .expert_load = metrics_->mean_load()};
    if (!state_.best_step || e.loss < state_.best_loss) {
      state_.best_step = state_.step;
      state_.best_loss = e.loss;
    }
    metrics_->add(point);
    progress_.line(str("step ", state_.step, "/", options_.steps, "  held-out loss ",
                       rounded("%.4f", e.loss), quality(e), "  ", speed()));
  }

  std::string quality(const Evaluation& e) const {
    if (task_->bytes_per_token() > 0) {
      return rounded("  %.4f bits per byte", e.loss / std::log(2.0) / task_->bytes_per_token());
    }
    return rounded("  accuracy %.1f%%", 100 * e.accuracy);
  }

  void show(double loss) {
    const double left =
        static_cast<double>(options_.steps - state_.step) * median(metrics_->step_seconds());
    progress_.update(str("step ", state_.step, "/", options_.steps, "  loss ",
                         rounded("%.4f", loss), "  ", speed(), "  ", human_seconds(left), " left"));
  }

  void save() {
    // The update after the last loss may have ruined the weights: that is no good checkpoint.
    at::NoGradGuard no_grad;
    const double norm = at::stack(at::_foreach_norm(model_->parameters())).sum().item<double>();
    if (!std::isfinite(norm)) stop_diverged("the weights' norm", norm, state_.step);
    store_.save(*model_, *optimizer_, state_);
  }

  std::string speed() const {
    return str(human_count(tokens_per_second()), " ", work_unit(*task_).name, "/s");
  }

  double tokens_per_second() const {
    const double seconds = median(metrics_->step_seconds());
    return seconds > 0
               ? static_cast<double>(options_.batch * work_unit(*task_).per_sequence) / seconds
               : 0;
  }

  RunConfig config_;
  std::optional<std::string> comparison_;  // that the run belongs to
  std::optional<FolderLock> comparison_lock_, lock_;
  const TrainOptions options_;
  const TrainControl control_;
  const CheckpointStore store_;
  Progress progress_;
  PeakMemory memory_;
  TrainState state_;
  TrainOutcome outcome_;
  std::shared_ptr<data::Task> task_;
  std::shared_ptr<Model> model_;
  std::optional<AdamW> optimizer_;
  std::optional<Metrics> metrics_;
};

}  // namespace

void install_interrupt_handler() {
  std::signal(SIGINT, on_interrupt);
  std::signal(SIGTERM, on_interrupt);
}
bool interrupted() { return g_interrupts > 0; }

TrainOutcome train(const Node& config, const TrainControl& control) {
  Node filled = config;
  if (!control.from.empty()) fill_from_run(filled, control.from);
  return Trainer(read_run_config(filled), control).run();
}

}  // namespace headloom
