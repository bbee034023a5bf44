#include "train/config.h"

#include <cmath>
#include <filesystem>
#include <numbers>

#include "core/sizes.h"
#include "core/text.h"
#include "data/corpus.h"
#include "model/describe.h"

namespace headloom {

void ParameterGroup::fields(Fields& f) {
  f.field("parameters", parameters,
          "names of parameters, in which * stands for any characters and ? for one: "
          "\"*.time_decay\"");
  f.field("lr", lr, "their learning rate, times train.lr", at_least(0.0));
  f.field("weight_decay", weight_decay, "their weight decay; absent: as the others'",
          at_least(0.0));
}

void TrainOptions::fields(Fields& f) {
  f.field("steps", steps, "optimiser steps", at_least(1));
  f.field("batch", batch, "sequences a step", size_from(1));
  f.field("accumulate", accumulate, "pieces a step's batch is cut into to save memory",
          at_least(1));
  f.field("lr", lr, "peak learning rate", positive());
  f.field("schedule", schedule, "after the warm-up", {"cosine", "constant", "inverse_sqrt"});
  f.field("warmup", warmup, "steps of linear warm-up", at_least(0));
  f.field("min_lr", min_lr,
          "cosine: share of lr to which the learning rate has fallen after the last step",
          between(0.0, 1.0));
  f.field("beta1", beta1, "AdamW: decay of the mean", fraction());
  f.field("beta2", beta2, "AdamW: decay of the mean square", fraction());
  f.field("eps", eps, "AdamW: added to the root", positive());
  f.field("weight_decay", weight_decay,
          "AdamW: decay of matrices; vectors, and what its paper exempts, have none",
          at_least(0.0));
  f.field("clip", clip, "largest norm of all gradients together; 0: no limit", at_least(0.0));
  f.field(
      "dtype", dtype,
      "type that is computed in; bfloat16 is autocast, with parameters in float32; in float64 the "
      "parameters and the optimiser are float64 too, and there are no fused kernels",
      {"float32", "bfloat16", "float64"});
  f.field("device", device, "where it is trained: cpu, cuda (the first) or cuda:N");
  f.field(
      "activation_checkpointing", activation_checkpointing,
      "the backward computes each layer again from its input, which alone is kept: less memory, "
      "a third more time");
  f.field("eval_every", eval_every, "steps between evaluations", at_least(1));
  f.field("eval_sequences", eval_sequences, "held-out sequences an evaluation reads at most",
          at_least(1));
  f.field("eval_split", eval_split,
          "held-out sequences that are read: all, or one of the two halves validation and test, "
          "which take turns everywhere in the data. A comparison with a [sweep] sets it",
          {"all", "validation", "test"});
  f.field("stop_accuracy", stop_accuracy,
          "the run ends at the first evaluation that reaches this accuracy on validation data; "
          "absent: never early",
          Range<double>{.low = 0.0, .high = 1.0, .open_low = true});
  f.field("checkpoint_every", checkpoint_every, "steps between checkpoints; absent: eval_every",
          at_least(1));
  f.field("seed", seed, "of weights, data order and dropout", at_least(0));
  f.field("shard", shard,
          "what several processes share out instead of keeping all of it: nothing, the optimiser's "
          "state and the gradients (ZeRO-2), or the parameters as well (ZeRO-3)",
          {"none", "optimizer", "parameters"});
  f.field("tensor_parallel", tensor_parallel,
          "processes that share out the heads and hidden units of every layer; the others share "
          "the batch",
          at_least(1));
  f.field("context_parallel", context_parallel,
          "processes that share out the positions of every sequence; the others share the batch",
          at_least(1));
  f.list("group", groups,
         "parameters with a rate or weight decay of their own; the first group that names a "
         "parameter counts");
  if (tensor_parallel > 1 && shard != "none") {
    usage_error("'train.tensor_parallel' is ", tensor_parallel, " and 'train.shard' is \"", shard,
                "\", expected \"none\" where processes share out the layers.");
  }
  if (batch % accumulate != 0) {
    usage_error("'train.accumulate' is ", accumulate,
                ", expected a divisor of train.batch = ", batch, ".");
  }
}

double TrainOptions::lr_at(int64_t step) const {
  if (step < warmup) return lr * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (schedule == "constant") return lr;
  if (schedule == "inverse_sqrt") {
    const double start = static_cast<double>(std::max<int64_t>(warmup, 1));
    return lr * std::sqrt(start / static_cast<double>(std::max(step + 1, warmup)));
  }
  const double span = static_cast<double>(std::max<int64_t>(steps - warmup, 1));
  const double done = std::min(1.0, static_cast<double>(step - warmup) / span);
  return lr * (min_lr + (1 - min_lr) * 0.5 * (1 + std::cos(std::numbers::pi * done)));
}

std::string TrainOptions::long_warmup() const {
  if (warmup < steps) return "";
  return str("train.warmup = ", warmup, " is not shorter than train.steps = ", steps,
             ": the learning rate only rises, to ", formatted("%.3g", lr_at(steps - 1)),
             " at the last step; a shorter warm-up is set by train.warmup = ", steps / 10,
             ", for example");
}

RunConfig::RunConfig() : task(data::make_task_spec("text")) {}

void RunConfig::fields(Fields& f) {
  f.table("model", model, "the model");
  f.variant<data::TaskSpec>("task", task, "what it learns", data::task_names(),
                            data::make_task_spec);
  f.table("train", train, "how it is trained");
}

namespace {

struct Wanted {
  const char* kind;
  const char* head;  // of an encoder
  const char* what;
};

Wanted wanted(data::Goal goal) {
  switch (goal) {
    case data::Goal::masked_token:
      return {"encoder", "tokens", "hidden tokens"};
    case data::Goal::label:
      return {"encoder", "label", "a label"};
    case data::Goal::tags:
      return {"encoder", "tags", "the tags of tokens"};
    case data::Goal::span:
      return {"encoder", "span", "a span of its context"};
    case data::Goal::sequence:
      return {"encoder_decoder", "", "a sequence given another"};
    case data::Goal::image_label:
      return {"vit", "", "the label of an image"};
    case data::Goal::reconstruction:
      return {"auto_encoder", "", "its input once more"};
    case data::Goal::next_token:
      break;
  }
  return {"decoder", "", "the next token"};
}

void at_least_the_task(const char* key, const std::optional<int64_t>& present, int64_t needed,
                       const char* what) {
  if (needed > 0 && *present < needed) {
    usage_error("'model.", key, "' is ", *present, ", expected at least the ", needed, " ", what,
                " of the task.");
  }
}

}  // namespace

std::shared_ptr<data::Task> RunConfig::build_task() {
  const auto built = task->build(static_cast<uint64_t>(train.seed));
  fit(data::sizes_of(*built));
  if (std::vector<std::string>* labels = task->labels()) *labels = built->labels();
  return built;
}

void RunConfig::fit(const data::TaskSizes& sizes) {
  const Wanted want = wanted(sizes.goal);
  if (model.kind != want.kind) {
    usage_error("'model.kind' is \"", model.kind, "\", but the task ", task->type(), " asks for ",
                want.what, ", expected \"", want.kind, "\".");
  }
  if (model.kind == "encoder" && model.head && *model.head != want.head) {
    usage_error("'model.head' is \"", *model.head, "\", but the task ", task->type(), " asks for ",
                want.what, ", expected \"", want.head, "\".");
  }
  model.complete({.vocabulary = sizes.vocabulary,
                  .length = sizes.length,
                  .source_length = sizes.source_length,
                  .classes = sizes.classes,
                  .segments = sizes.segments,
                  .image = sizes.image,
                  .head = want.head});
  if (model.kind == "vit") {
    const auto shape = model.image.shape();
    for (size_t i = 0; i < 3; ++i) {
      if (shape[i] == sizes.image[i]) continue;
      const char* keys[] = {"channels", "height", "width"};
      usage_error("'model.image.", keys[i], "' is ", shape[i], ", expected the ", sizes.image[i],
                  " of the task's images.");
    }
  } else {
    at_least_the_task("vocabulary", model.vocabulary, sizes.vocabulary, "tokens");
    at_least_the_task("max_length", model.max_length, sizes.length, "positions");
  }
  at_least_the_task("max_source_length", model.max_source_length, sizes.source_length,
                    "source positions");
  at_least_the_task("classes", model.classes, sizes.classes, "classes");
  at_least_the_task("segments", model.segments, sizes.segments, "kinds of segments");
}

std::optional<data::DataPath> RunConfig::missing_data() const {
  for (const data::DataPath& data : task->data_paths()) {
    std::error_code error;
    if (std::filesystem::exists(*data.path, error)) continue;
    const bool is_glob = data.path->find_first_of("*?[") != std::string::npos;
    if (is_glob && !data::expand_glob(*data.path).empty()) continue;
    return data;
  }
  return std::nullopt;
}

void RunConfig::find_data(const std::string& table) const {
  const std::optional<data::DataPath> missing = missing_data();
  if (!missing) return;
  const std::string key = str(table, ".", missing->key);
  const bool list = std::string(missing->key) == "paths";
  throw Obstacle(str("there is no file or folder '", *missing->path, "', which '", key,
                     "' names; say where the data is with --set '", key,
                     list ? "=[\"PATH\"]'." : "=\"PATH\"'."));
}

WorkUnit work_unit(const data::Task& task) {
  if (task.goal() == data::Goal::image_label) return {1, "images"};
  return {task.train_length() + static_cast<double>(task.source_length()), "tokens"};
}

int64_t work_of(const data::Task& task, int64_t first, int64_t count) {
  if (task.goal() == data::Goal::image_label) return count;
  return task.train_positions(first, count) + count * task.source_length();
}

TrainingFlops training_flops(const Model& model, const data::Task& task) {
  double flops = 0, sequences = 0, positions = 0;
  for (const data::TrainLength& part : task.train_lengths()) {
    const auto count = static_cast<double>(part.sequences);
    const double here = count * static_cast<double>(model.config().positions(part.length));
    flops += here * model_costs(model, part.length).flops_per_token;
    positions += here;
    sequences += count;
  }
  return {.per_position = flops / positions,
          .per_unit = flops / (sequences * work_unit(task).per_sequence)};
}

RunConfig read_run_config(const Node& root) {
  if (const Node* models = root.find("models")) {
    usage_error(models->origin,
                ": [[models]] belong to a comparison (headloom compare), expected [model], [task] "
                "and [train].");
  }
  RunConfig config;
  read_fields(root, config);
  return config;
}

std::string run_config_toml(RunConfig& config) { return to_toml(write_fields(config)); }

}  // namespace headloom
