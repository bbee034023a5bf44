#include "train/train.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <sstream>

#include "core/clock.h"
#include "core/files.h"
#include "core/median.h"
#include "core/memory.h"
#include "core/problem.h"
#include "core/text.h"
#include "distributed/gradient_sum.h"
#include "distributed/group.h"
#include "mixers/nn.h"
#include "model/describe.h"
#include "ops/kernel/capability.h"
#include "ops/product/product.h"
#include "train/checkpoint_writer.h"
#include "train/cut_model.h"
#include "train/device.h"
#include "train/evaluate.h"
#include "train/gradients.h"
#include "train/interrupt.h"
#include "train/progress.h"
#include "train/run_folder.h"
#include "train/run_past.h"
#include "train/run_session.h"
#include "train/scaling.h"
#include "train/sharded_model.h"
#include "train/state.h"
#include "train/training_memory.h"

namespace headloom {
namespace {

// Of counts [experts].
std::vector<double> shares_of(const Tensor& counts) {
  const Tensor share = (counts.to(at::kDouble) / counts.sum().clamp_min(1)).cpu();
  return {share.const_data_ptr<double>(), share.const_data_ptr<double>() + share.numel()};
}

// Throws UsageError where `processes` cannot share a run, and its batch in `shares`.
void check_shares(const TrainOptions& options, int64_t processes, int64_t shares) {
  if (processes == 1) return;
  check_equal_shares(options, shares);
  if (options.device != "cpu") {
    usage_error("'train.device' is \"", options.device, "\", expected \"cpu\" where ", processes,
                " processes share a run.");
  }
}

// Lines "CLASS=ROUTE" and back.
std::string routes_text(const std::map<std::string, std::string>& routes) {
  std::string out;
  for (const auto& [name, route] : routes) out += name + "=" + route + "\n";
  return out;
}
std::map<std::string, std::string> read_routes(const std::string& text) {
  std::map<std::string, std::string> out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.rfind('=');
    out[line.substr(0, at)] = line.substr(at + 1);
  }
  return out;
}

// The parts of a run, and the loop over them.
class Trainer {
 public:
  Trainer(RunConfig config, const TrainControl& control)
      : control_(with_origin(control)),
        group_(control_.group == nullptr ? alone_ : *control_.group),
        config_(std::move(config)),
        device_(find_device(config_.train.device)),
        progress_(control_.label, /*silent=*/!first()),
        session_(make_session()),
        grid_(RankGrid::make(options_, group_, alone_)),
        task_(make_task()),
        model_(make_model()),
        shards_(ShardedModel::make(*model_, options_, group_)),
        gradients_(model_->parameters(), grid_.data, shards()),
        optimizer_(*model_, options_, shards(), cut_.get()),
        state_(open()),
        metrics_(first() ? metrics_path(control_.folder) : "", state_.step, state_.load) {}

  TrainOutcome run() {
    try {
      return train_to_end();
    } catch (const UsageError&) {
      throw;
    } catch (const CannotWrite&) {  // a full disk says nothing of the model
      if (first()) check_folder();
      throw;
    } catch (const LostRank&) {  // nor does another process that was killed
      throw;
    } catch (const std::exception& error) {
      if (!control_.of_comparison) note_failure(problem_of(error));  // a comparison does so itself
      throw;
    }
  }

 private:
  // A run that stopped before its first checkpoint begins with the same weights again.
  static TrainControl with_origin(TrainControl control) {
    const bool begun = std::filesystem::exists(control.folder + "/config.toml");
    if (!control.resume || !control.from.empty() || !begun) return control;
    const std::optional<Origin> origin = read_origin(control.folder);
    if (!origin || !CheckpointStore(control.folder).steps().empty()) return control;
    const std::vector<int64_t> there = CheckpointStore(origin->folder).steps();
    if (std::find(there.begin(), there.end(), origin->step) == there.end()) {
      usage_error(control.folder, ": began with the weights of ", origin->folder, ", step ",
                  origin->step, ", and has no checkpoint of its own yet, but those are not there ",
                  "any more; begin a new run.");
    }
    control.from = origin->folder;
    control.from_checkpoint = std::to_string(origin->step);
    return control;
  }

  void note_failure(const std::string& problem) const {
    if (!first()) return;
    try {
      write_result(result_path(control_.folder), {.problem = problem});
    } catch (const Error&) {  // why training failed is what the user is to be told
    }
  }

  // How the run stands after `trained` steps of this process. One that has only loaded the model
  // knows nothing of the run's memory, so that what the folder has of its end stands.
  RunResult result_after(int64_t trained, bool interrupted) {
    std::optional<RunResult> known;
    if (trained == 0 && first()) known = read_result(result_path(control_.folder));
    if (known && !known->problem.empty()) known.reset();
    if (group_.any(known.has_value())) return known.value_or(RunResult{});
    return {.problem = "",
            .warning = interrupted ? "" : divergence(),
            .tokens_per_second = tokens_per_second(metrics_.step_seconds()),
            // What a model needs on another device is not in the memory of the process.
            .peak_memory = trained > 0 && device_.is_cpu() ? memory_.bytes() : -1};
  }

  TrainOutcome train_to_end() {
    TrainOutcome out;
    for (const auto& [name, p] : model_->named_parameters().pairs()) {
      out.parameters += cut_ ? c10::multiply_integers(cut_->whole_shape(name, p)) : p.numel();
    }
    // A comparison describes its tasks once.
    progress_.line(str(human_count(static_cast<double>(out.parameters)), " parameters, step ",
                       state_.step, " of ", options_.steps,
                       control_.of_comparison ? "" : "; " + task_->describe()));
    const int64_t begun_at = state_.step;
    out.interrupted = !loop();
    out.requeue = out.interrupted && group_.any(to_be_requeued());
    out.step = state_.step;
    out.seconds = state_.seconds;
    out.evaluations = metrics_.evaluations();
    out.unit = work_unit(*task_).name;
    out.result = result_after(state_.step - begun_at, out.interrupted);
    if (!out.result.warning.empty()) progress_.line("warning: " + out.result.warning);
    // A comparison does so itself.
    if (first() && !out.interrupted && !control_.of_comparison) {
      write_result(result_path(control_.folder), out.result);
    }
    return out;
  }

  bool first() const { return group_.rank() == 0; }
  ParameterShards* shards() const { return shards_ ? &shards_->shards() : nullptr; }
  // Where the parameters have memory only while the model computes.
  ParameterShards* released() const { return shards_ && shards()->frees() ? shards() : nullptr; }

  // The first process alone holds the folder. What it takes from there into the configuration, the
  // others take from it.
  std::unique_ptr<RunSession> make_session() {
    std::unique_ptr<RunSession> session;
    if (first()) session = std::make_unique<RunSession>(control_, config_, progress_);
    if (group_.size() == 1) return session;
    const std::string text = group_.gather_text(first() ? run_config_toml(config_) : "")[0];
    if (!first()) {
      config_ = read_run_config(parse_toml(text, control_.folder + "/config.toml"));
      config_.find_data();
    }
    return session;
  }

  void check_same_data(const data::Task& task) {
    if (group_.size() == 1) return;
    const std::string own = str(task.describe(), " ", data::fingerprint(task, /*pixels=*/true));
    if (group_.gather_text(own)[0] == own) return;
    usage_error("the data are not those of rank 0 (", task.describe(),
                "); all ranks read the same files.");
  }

  // Begins the run, or goes on from the checkpoint that the first process has chosen.
  TrainState open() {
    TrainState state;
    if (first()) state = session_->open(*model_, optimizer_, *task_);
    if (group_.size() == 1) return state;
    const bool goes_on = group_.any(!state.files.empty());
    const std::string step = group_.gather_text(std::to_string(state.step))[0];
    if (goes_on) {
      const CheckpointStore store(control_.folder);
      if (!first()) state = store.load(std::stoll(step), *model_, optimizer_);
    } else if (cut_ && !control_.from.empty()) {
      // Its part is not the first process's. Of a run that still trains, that one's checkpoint need
      // not be the best or the last any more.
      const std::string taken = first() ? std::to_string(read_origin(control_.folder)->step) : "";
      const std::string which = group_.gather_text(taken)[0];
      if (!first()) {
        CheckpointStore(control_.from)
            .load_weights(which, *model_, cut_.get(), WeightsOf::kAdapted);
      }
    }
    const at::NoGradGuard no_grad;
    std::vector<Tensor> tensors;
    for (const auto& [name, tensor] : named_tensors(*model_)) {
      // Where a checkpoint was read, each process has its own part of it already.
      if (!goes_on || released() == nullptr || !shards()->has(tensor)) tensors.push_back(tensor);
    }
    grid_.data.broadcast(tensors);
    if (shards_ && !(goes_on && released() != nullptr)) shards()->take();
    take_routes(state, goes_on);
    return state;
  }

  // The routes of products that this process had when the checkpoint was written.
  void take_routes(const TrainState& state, bool goes_on) {
    auto routes = goes_on ? state.product_routes : ops::product_routes();
    const auto rank = static_cast<size_t>(group_.rank());
    if (rank > 0 && state.other_routes.size() + 1 == static_cast<size_t>(group_.size())) {
      routes = state.other_routes[rank - 1];
      ops::use_product_routes(routes);
    }
    // Processes that share out the layers compute the rest of the model alike, each by itself.
    // Where two of them rounded differently, their weights would drift apart.
    if (!cut_) return;
    ops::keep_product_routes(read_routes(grid_.layers.gather_text(routes_text(routes))[0]));
  }

  std::shared_ptr<data::Task> make_task() {
    share_memory(group_.on_this_machine(), group_.in_this_control_group());
    check_shares(options_, group_.size(), grid_.shares());
    config_.model.tensor_parallel = tensor_parallel(grid_.layers);
    config_.model.context_parallel = context_parallel(grid_.context);
    check_training_fits(config_, grid_.data.size());
    auto task = config_.build_task();
    check_same_data(*task);
    check_split(*task, split_named(config_.train.eval_split), config_.train.eval_sequences);
    if (config_.train.stop_accuracy) {
      check_split(*task, Split::validation, config_.train.eval_sequences);
    }
    if (!control_.from.empty()) check_same_model(config_, control_.from);
    if (grid_.context.size() > 1 && task->goal() != data::Goal::next_token) {
      usage_error("'train.context_parallel' is ", grid_.context.size(), ", but a model of kind \"",
                  config_.model.kind, "\" is trained, expected a decoder.");
    }
    return task;
  }

  std::shared_ptr<Model> make_model() {
    seed_random(static_cast<uint64_t>(options_.seed), device_);
    check_training_fits(*build_without_memory(config_.model), *task_, options_, grid_.data.size());
    auto model = build_model(config_.model);
    model->to(device_);
    hold_in(options_.dtype, *model);
    if (grid_.layers.size() > 1) {
      check_same_instructions();
      cut_ = std::make_unique<CutModel>(*model, grid_.layers);
    }
    return model;
  }

  // Processes that share out the layers compute the rest alike, to the bit.
  void check_same_instructions() {
    const bool bfloat16 = ops::capability() == ops::Capability::kAvx512Bf16;
    const auto all =
        grid_.layers.gather_text(str(at::get_cpu_capability(), bfloat16 ? " with bfloat16" : "",
                                     ops::has_amx() ? " and AMX" : ""));
    for (size_t i = 1; i < all.size(); ++i) {
      if (all[i] == all[0]) continue;
      usage_error("'train.tensor_parallel' is ", all.size(),
                  ", and of its processes the first has ", all[0], " and number ", i + 1, " has ",
                  all[i], ", expected the same instruction set.");
    }
  }

  // Returns whether the run is finished; false: it was interrupted, and is saved.
  bool loop() {
    model_->train();
    const int64_t checkpoint_every = options_.checkpoint_every.value_or(options_.eval_every);
    const int64_t begun_at = state_.step;
    while (state_.step < options_.steps && !reached_accuracy()) {
      // How it ended before does not hold any more.
      if (first() && state_.step == begun_at) std::filesystem::remove(result_path(control_.folder));
      step();
      const bool at_end = state_.step == options_.steps;
      if (state_.step % options_.eval_every == 0 || at_end) evaluate_now();
      const bool last = at_end || reached_accuracy();
      const bool stop = group_.any(interrupted()) && !last;
      if (state_.step % checkpoint_every == 0 || last || stop) save(last || stop);
      if (stop) return false;
    }
    if (state_.step == begun_at && !control_.of_comparison) {
      progress_.line(str("nothing is left to train: the run is finished",
                         state_.step != options_.steps ? ", it has reached train.stop_accuracy"
                         : comparison_of(control_.folder)
                             ? ", and it keeps its configuration as a part of a comparison"
                             : "; --set train.steps=N with more steps trains it longer"));
    }
    return true;
  }

  // Whether the evaluation of this step ends the run early. What is reported is not asked: of many
  // evaluations the first that is good enough is better than it deserves.
  bool reached_accuracy() {
    if (!options_.stop_accuracy) return false;
    const std::vector<EvalPoint>& done = metrics_.evaluations();
    // The first process has those from before a resume, too.
    return group_.any(first() && !done.empty() && done.back().step == state_.step &&
                      done.back().validation_accuracy >= *options_.stop_accuracy);
  }

  void step() {
    writer_.check();
    const double start = seconds_now();
    const StepLoss found = gradients_of_step(state_.step);
    StepPoint point{.step = state_.step + 1,
                    .loss = found.loss,
                    .lr = options_.lr_at(state_.step),
                    .balance_loss = found.balance_loss,
                    .processes = group_.size()};
    if (!std::isfinite(point.loss)) stop_diverged("the loss", point.loss, point.step);
    point.gradient_norm = optimizer_.step(point.lr);
    if (!std::isfinite(point.gradient_norm)) {
      stop_diverged("the gradient's norm", point.gradient_norm, point.step);
    }
    model_->balance(found.load);
    model_->redraw(point.step, static_cast<uint64_t>(options_.seed));
    for (const auto& [layer, load] : found.load) point.expert_load[layer] = shares_of(load);
    state_.step = point.step;
    state_.tokens += work_of_step(point.step);
    point.seconds = seconds_now() - start;
    state_.seconds += point.seconds;
    metrics_.add(point);
    if (progress_.due()) show(point.loss);
  }

  StepLoss gradients_of_step(int64_t step) {
    const ShardedModel::Use use(shards_.get());
    StepLoss loss = accumulate_gradients(*model_, *task_, options_, step, device_, gradients_);
    if (cut_) cut_->sum_gradients();
    return loss;
  }

  // A sentence where the finished run has diverged: where its loss is above that of its first step
  // by more than a tenth and by more than 0.1. Another batch may be that much harder, so the first
  // one is computed again where the latest losses say so.
  std::string divergence() {
    const double first_loss = metrics_.first_loss().value_or(0);
    const auto is_above = [&](double loss) {
      return loss > 1.1 * first_loss && loss > first_loss + 0.1;
    };
    const std::vector<EvalPoint>& done = metrics_.evaluations();
    // The first process has those from before a resume, too.
    const bool suspected = first() && metrics_.first_loss().has_value() && !done.empty() &&
                           is_above(done.back().train_loss);
    if (!group_.any(suspected)) return "";
    const double now = gradients_of_step(0).loss;
    if (!first() || !is_above(now)) return "";
    return str("the run has diverged: the loss of its first batch was ", first_loss,
               " before training and is ", now,
               " after it; a lower train.lr or a longer train.warmup may help.");
  }

  Evaluation evaluated(Split split) {
    const ShardedModel::Use use(shards_.get());
    const Autocast autocast(options_.dtype, device_.type());
    return evaluate(*model_, *task_, options_.eval_sequences,
                    std::max<int64_t>(options_.batch / options_.accumulate / grid_.shares(), 1), {},
                    split, &grid_.data);
  }

  // NaN where nothing asks for it. `e` is the evaluation that is reported.
  double validation_accuracy(const Evaluation& e) {
    if (!options_.stop_accuracy) return std::numeric_limits<double>::quiet_NaN();
    if (options_.eval_split == "validation") return e.accuracy;
    return evaluated(Split::validation).accuracy;
  }

  void evaluate_now() {
    const Evaluation e = evaluated(split_named(options_.eval_split));
    if (!std::isfinite(e.loss)) stop_diverged("the held-out loss", e.loss, state_.step);
    const EvalPoint point{.step = state_.step,
                          .tokens = state_.tokens,
                          .seconds = state_.seconds,
                          .loss = e.loss,
                          .accuracy = e.accuracy,
                          .train_loss = metrics_.mean_loss(),
                          .expert_load = metrics_.mean_load(),
                          .loss_error = e.loss_error,
                          .accuracy_error = e.accuracy_error,
                          .loss_parts = e.loss_parts,
                          .accuracy_parts = e.accuracy_parts,
                          .validation_accuracy = validation_accuracy(e),
                          .ranks = used()};
    metrics_.add(point);
    progress_.line(str("step ", state_.step, "/", options_.steps, "  held-out loss ",
                       formatted("%.4f", e.loss), quality(e), "  ", pace()));
  }

  // What each process has used.
  std::vector<RankUse> used() {
    if (group_.size() == 1) return {};
    const Tensor own =
        at::tensor({static_cast<double>(memory_.bytes()), group_.waited()}, at::kDouble);
    std::vector<RankUse> out;
    for (const Tensor& one : group_.gather(own)) {
      out.push_back({.peak_memory = static_cast<int64_t>(one[0].item<double>()),
                     .waiting = one[1].item<double>()});
    }
    return out;
  }

  // The best checkpoint has the lowest held-out loss of those at whose step the model is evaluated.
  void note_best() {
    const std::vector<EvalPoint>& done = metrics_.evaluations();
    if (done.empty() || done.back().step != state_.step) return;
    if (state_.best_step && state_.best_loss <= done.back().loss) return;
    state_.best_step = state_.step;
    state_.best_loss = done.back().loss;
  }

  // The first process's writer needs the files of the others, but does not notice that one of them
  // was killed or hangs. The group does. So all meet there when the others have written theirs.
  void wait_for_writer() {
    if (optimizer_.parts() > 1) {
      if (!first()) writer_.wait();
      group_.any(false);
    }
    writer_.wait();
  }

  // Training goes on while a copy is written, except after the last step and where memory has no
  // room for a copy.
  void save(bool last) {
    wait_for_writer();  // for the checkpoint before
    // The update after the last loss may have ruined the weights: that is no good checkpoint.
    check_weights();
    state_.other_routes.clear();
    if (group_.size() > 1) {
      const auto all = group_.gather_text(routes_text(ops::product_routes()));
      for (size_t i = 1; i < all.size(); ++i) state_.other_routes.push_back(read_routes(all[i]));
    }
    note_best();
    state_.load = metrics_.load();
    metrics_.sync();  // the checkpoint goes on from them
    const CheckpointStore store(control_.folder);
    if (optimizer_.parts() > 1) {
      if (first()) store.prepare();
      group_.any(false);  // nobody writes before the folder is there
    }
    // Of processes with the same part of a cut model one writes it.
    const bool writes = cut_ ? grid_.data.rank() == 0 : first() || optimizer_.parts() > 1;
    Snapshot snapshot;
    if (writes) snapshot = Snapshot::take(*model_, optimizer_, state_, released());
    bool waits =
        last || static_cast<double>(memory_.bytes()) + snapshot.bytes() >= memory_limit().bytes;
    if (optimizer_.parts() > 1) waits = group_.any(waits);  // all wait, or none
    if (writes) {
      if (!waits) snapshot.copy();
      writer_.start([store, snapshot = std::move(snapshot)](const CheckpointWriter::Cancelled& c) {
        store.save(snapshot, c);
      });
    }
    if (waits) wait_for_writer();
    if (last) group_.any(false);  // nobody ends before the checkpoint is there
  }

  // Throws CannotWrite where the run's folder is no longer there: the reason why one of its files
  // could not be written.
  void check_folder() const {
    if (is_there(control_.folder + "/config.toml")) return;
    throw CannotWrite(str(control_.folder, ": step ", state_.step,
                          " is not saved, because the run's folder was moved or removed while it "
                          "trained."));
  }

  // Weights that several processes have are the same in these: all compute the same update.
  void check_weights() {
    at::NoGradGuard no_grad;
    const at::TensorOptions real = at::kDouble;
    Tensor whole = at::zeros({1}, real), cut = at::zeros({1}, real);
    for (const auto& [name, p] : model_->named_parameters().pairs()) {
      const Tensor own = released() != nullptr ? released()->own(p) : p;
      (cut_ && cut_->is_cut(name) ? cut : whole) += at::linalg_vector_norm(own).cpu();
    }
    const std::vector<Tensor> norms = group_.gather(at::cat({whole, cut}));
    const auto layers = static_cast<size_t>(grid_.layers.size());
    for (size_t i = 0; i < norms.size(); ++i) {
      const auto norm = norms[i].sum().item<double>();
      if (!std::isfinite(norm)) stop_diverged("the weights' norm", norm, state_.step);
      const size_t peer = i % layers;  // has the same part of what is cut
      const bool same = norms[i][0].equal(norms[0][0]) && norms[i][1].equal(norms[peer][1]);
      if (released() != nullptr || same) continue;
      fail("the weights of rank ", i, " are no longer those of rank ",
           norms[i][0].equal(norms[0][0]) ? peer : 0, " after step ", state_.step,
           "; nothing was saved.");
    }
  }

  // Every process comes here at the same step: loss and gradients are sums over all of them.
  [[noreturn]] void stop_diverged(const char* what, double value, int64_t step) {
    wait_for_writer();
    group_.any(false);  // all look for checkpoints after the first process has written its last
    const CheckpointStore store(control_.folder);
    const auto steps = store.steps();
    // The sign of a NaN means nothing.
    fail(control_.folder, ": ", what, " became ", std::isnan(value) ? "nan" : str(value),
         " at step ", step,
         steps.empty() ? "; there is no checkpoint before it."
                       : str("; the last good checkpoint is ", store.folder(steps.back()), "."),
         " A lower train.lr or a longer train.warmup may help.");
  }

  std::string quality(const Evaluation& e) const {
    if (task_->bytes_per_token() > 0) {
      return formatted("  %.4f bits per byte", e.loss / std::log(2.0) / task_->bytes_per_token());
    }
    return formatted("  accuracy %.1f%%", 100 * e.accuracy);
  }

  void show(double loss) {
    progress_.update(str("step ", state_.step, "/", options_.steps, "  loss ",
                         formatted("%.4f", loss), "  ", pace()));
  }

  // Seconds of the latest steps: what is shown follows the machine, also after a resume.
  std::vector<double> recent_steps() const {
    constexpr std::ptrdiff_t kRecent = 50;
    const std::vector<double>& all = metrics_.step_seconds();
    return {all.end() - std::min(kRecent, std::ssize(all)), all.end()};
  }

  // "17k tokens/s  12 s left".
  std::string pace() const {
    const std::vector<double> recent = recent_steps();
    const std::string speed =
        str(human_count(tokens_per_second(recent)), " ", work_unit(*task_).name, "/s");
    if (state_.step >= options_.steps || recent.empty()) return speed;
    const double left = static_cast<double>(options_.steps - state_.step) * median(recent);
    return str(speed, "  ", human_seconds(left), " left");
  }

  // What step number `step`, from 1, trains on.
  int64_t work_of_step(int64_t step) const {
    return work_of(*task_, (step - 1) * options_.batch, options_.batch);
  }

  // By the median time of the last steps or, where their sequences have several lengths, by that of
  // the steps of each.
  double tokens_per_second(const std::vector<double>& step_seconds) const {
    std::map<int64_t, std::vector<double>> by_work;
    int64_t step = state_.step - std::ssize(step_seconds);
    for (const double seconds : step_seconds) by_work[work_of_step(++step)].push_back(seconds);
    double work = 0, time = 0;
    for (const auto& [of_step, seconds] : by_work) {
      const auto steps = static_cast<double>(seconds.size());
      work += steps * static_cast<double>(of_step);
      time += steps * median(seconds);
    }
    return time > 0 ? work / time : 0;
  }

  // Made in this order: each needs those before it.
  const TrainControl control_;
  Communicator alone_, &group_;
  RunConfig config_;
  const TrainOptions& options_ = config_.train;
  const at::Device device_;
  PeakMemory memory_;
  Progress progress_;
  const std::unique_ptr<RunSession> session_;  // of the first process
  const RankGrid grid_;
  const std::shared_ptr<data::Task> task_;
  std::unique_ptr<CutModel> cut_;  // null where this process has whole layers
  const std::shared_ptr<Model> model_;
  const std::unique_ptr<ShardedModel> shards_;  // null where nothing is shared out
  GradientSum gradients_;
  AdamW optimizer_;
  TrainState state_;
  Metrics metrics_;
  CheckpointWriter writer_;
};

}  // namespace

TrainOutcome train(const Node& config, const TrainControl& control) {
  Node filled = config;
  if (!control.from.empty()) fill_from_run(filled, control.from);
  RunConfig read = read_run_config(filled);
  if (filled.find("task") == nullptr) {
    usage_error(filled.place(),
                "the configuration has no table [task], which says what the model learns: ",
                "type = \"text\" with paths = [\"my/texts\"], for example.");
  }
  return Trainer(std::move(read), control).run();
}

}  // namespace headloom
