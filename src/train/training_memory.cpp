#include "train/training_memory.h"

#include <algorithm>

#include "core/memory.h"
#include "core/text.h"
#include "mixers/without_memory.h"
#include "model/describe.h"
#include "ops/linear_cross_entropy/op.h"
#include "train/sharded_model.h"

namespace headloom {
namespace {

// Numbers a position that a mixer's linear maps have to do with.
struct Kept {
  double numbers = 0;  // the input of each map is kept, and its output or what is made of that
  double widest = 0;   // output of a map

  void add(double in, double out) {
    numbers += in + out;
    widest = std::max(widest, out);
  }
};

void add_linear_maps(Kept& kept, const torch::nn::Module* mixer) {
  if (mixer == nullptr) return;
  for (const auto& part : mixer->modules()) {
    if (const auto* linear = dynamic_cast<const Linear*>(part.get())) {
      kept.add(static_cast<double>(linear->weight.size(1)),
               static_cast<double>(linear->weight.size(0)));
    }
  }
}

// Matrices [experts, out, in], of which a position chooses a few.
void add_experts(Kept& kept, const ChannelMixer* mixer) {
  if (mixer == nullptr) return;
  for (const Cost& cost : mixer->costs()) {
    if (cost.idle_parameters == 0) continue;
    const double chosen =
        1 - static_cast<double>(cost.idle_parameters) / static_cast<double>(cost.parameters);
    for (const Tensor& weight : mixer->parameters(/*recurse=*/false)) {
      if (weight.dim() != 3) continue;
      const double active = chosen * static_cast<double>(weight.size(0));
      kept.add(active * static_cast<double>(weight.size(2)),
               active * static_cast<double>(weight.size(1)));
    }
  }
}

void check_step_fits(const Model& model, const SequenceSizes& sequence, double fewest_targets,
                     const TrainOptions& options, int64_t processes) {
  SequenceSizes least = sequence;
  least.targets = fewest_targets;
  if (training_memory(model, least, options, processes).peak <= memory_limit().bytes) return;
  const TrainingMemory need = training_memory(model, sequence, options, processes);
  check_fits("this training needs", need.peak, need.parts(),
             "a smaller train.batch, model.width, model.depth or task.length, a larger "
             "train.accumulate, or train.activation_checkpointing = true needs less");
}

}  // namespace

std::string TrainingMemory::parts() const {
  return str("parameters ", human_bytes(parameters), ", gradients ", human_bytes(gradients),
             ", optimiser ", human_bytes(optimizer), ", activations ", human_bytes(activations),
             ", scores ", human_bytes(scores), ", batch ", human_bytes(batch));
}

SequenceSizes sequence_sizes(const Model& model, const data::TaskSizes& task) {
  const ModelConfig& config = model.config();
  SequenceSizes out{.length = config.positions(task.length), .source_length = task.source_length};
  const bool image = config.kind == "vit";
  out.targets = image || config.head == "label" ? 1
                : config.head == "span"         ? 2
                                                : static_cast<double>(out.length);
  if (image) {
    out.bytes = 4.0 * static_cast<double>(task.image[0]) * static_cast<double>(task.image[1]) *
                static_cast<double>(task.image[2]);
  } else {
    // int64 each: inputs and targets, and the source.
    out.bytes = 8.0 * static_cast<double>(2 * task.length + task.source_length);
  }
  return out;
}

namespace {

// What the layers keep of `sequences` for the backward, in float32 or bfloat16.
double activation_bytes(const Model& model, const SequenceSizes& sequence,
                        const TrainOptions& options, double sequences) {
  const double bytes = options.dtype == "bfloat16" ? 2 : 4;
  const auto width = static_cast<double>(model.config().width);
  const auto length = static_cast<double>(sequence.length);
  const auto source = static_cast<double>(sequence.source_length);
  double out = 0, largest = 0, again = 0;
  for (const Layers* layers : model.stacks()) {
    const double positions = layers->part() == "encoder" ? source : length;
    // Input and output of the last norm, in float32 as what the layers add to is.
    double kept = 4 * 2 * width * positions;
    // A layer's input, which is kept whatever else is.
    const double input = 4 * width * positions;
    for (const Layers::Layer& layer : layers->all()) {
      Kept maps, cross;
      add_linear_maps(maps, layer.mixer.get());
      add_linear_maps(maps, layer.channel.get());
      add_experts(maps, layer.channel.get());
      add_linear_maps(cross, layer.cross.get());
      const int branches = 1 + (layer.channel ? 1 : 0) + (layer.cross ? 1 : 0);
      // The sum that each branch begins from.
      double of_layer = input * branches;
      of_layer += bytes * maps.numbers * positions;
      // Half of cross-attention's maps read the source.
      of_layer += bytes * cross.numbers * (positions + source) / 2;
      kept += options.activation_checkpointing ? input : of_layer;
      if (options.activation_checkpointing) again = std::max(again, of_layer);
      // The gradient of the widest output, on its way back.
      largest = std::max(largest, bytes * maps.widest * positions);
    }
    out += sequences * kept;
  }
  return out + sequences * (largest + again);
}

// Of `targets`, in float32 or bfloat16.
double score_bytes(const ModelConfig& config, const TrainOptions& options, double targets) {
  const double bytes = options.dtype == "bfloat16" ? 2 : 4;
  const auto classes = static_cast<double>(config.has_classes() ? config.classes.value_or(0)
                                                                : config.vocabulary.value_or(0));
  if (config.has_classes() || options.dtype == "float64") {  // no fused kernel has float64
    // In float32 the logarithms of the scores' softmax, their gradient, and the scores' own.
    return 3 * 4 * targets * classes;
  }
  // The gradients of targets' hidden states and of the head's weights, and the same once more as
  // the backward scales them.
  return std::min(bytes * targets * classes, static_cast<double>(ops::kScoreBytes)) +
         2 * bytes * (targets + classes) * static_cast<double>(config.width);
}

}  // namespace

TrainingMemory training_memory(const Model& model, const SequenceSizes& sequence,
                               const TrainOptions& options, int64_t processes) {
  const bool narrow = options.dtype == "bfloat16";
  const double count = parameter_count(model);
  const auto ranks = static_cast<double>(processes);
  const double sequences =
      static_cast<double>(options.batch) / static_cast<double>(options.accumulate) / ranks;
  TrainingMemory out;
  out.parameters = (narrow ? 6 : 4) * count;
  out.gradients = 4 * count;
  out.optimizer = 8 * count / (options.shard == "none" ? 1 : ranks);
  double start = 0;
  if (options.shard != "none" && processes > 1) {
    const double whole = std::min(ShardedModel::whole_at_a_time(model), count);
    const bool frees = options.shard == "parameters";
    // The own parts. Whole gradients twice: where they are computed, and on their way.
    out.gradients = 4 * count / ranks + 8 * whole;
    if (!frees && options.accumulate > 1) out.gradients += 4 * count;
    out.parameters += 4 * count / ranks;
    if (frees) {
      // The copies that are multiplied stay until the backward, unless it makes them again.
      const double copies = narrow ? 2 * (options.activation_checkpointing ? whole : count) : 0;
      out.parameters = 4 * count / ranks + 4 * whole + copies;
      start = 4 * count;  // every process begins with the whole model
    }
  }
  out.activations = activation_bytes(model, sequence, options, sequences);
  out.scores = score_bytes(model.config(), options, sequences * sequence.targets);
  if (options.dtype == "float64") {  // what is float32 above
    for (double* part :
         {&out.parameters, &out.gradients, &out.optimizer, &out.activations, &out.scores, &start}) {
      *part *= 2;
    }
  }
  out.batch = static_cast<double>(options.batch) / ranks * sequence.bytes;
  const double passing = out.activations + out.scores;
  out.peak = out.parameters + out.optimizer + out.batch +
             (options.accumulate > 1 ? out.gradients + passing : std::max(out.gradients, passing));
  out.peak = std::max(out.peak, start);
  return out;
}

void check_training_fits(const Model& model, const data::Task& task, const TrainOptions& options,
                         int64_t processes) {
  if (options.device != "cpu") return;
  const SequenceSizes sequence = sequence_sizes(model, data::sizes_of(task));
  check_step_fits(model, sequence, 0, options, processes);
  // One sequence fits now. Others may have fewer targets: half of its own is what is counted on.
  const auto targets = task.train_batch(0, 1).targets.ne(data::kIgnore).sum().item<double>();
  check_step_fits(model, sequence, 0.5 * targets, options, processes);
}

void check_training_fits(RunConfig& config, int64_t processes) {
  const auto sizes = config.task->known_sizes();
  if (!sizes) return;
  config.fit(*sizes);
  if (config.train.device != "cpu") return;
  const auto model = build_without_memory(config.model);
  check_step_fits(*model, sequence_sizes(*model, *sizes), 0, config.train, processes);
}

}  // namespace headloom
