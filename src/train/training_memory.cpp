#include "train/training_memory.h"

#include <algorithm>

#include "core/memory.h"
#include "core/text.h"
#include "mixers/without_memory.h"

namespace headloom {
namespace {

// Numbers a position that the linear maps of `module` leave: the output of each, or what is made of
// it, is kept by whatever comes next.
double kept_a_position(const torch::nn::Module* module) {
  double kept = 0;
  if (module == nullptr) return kept;
  for (const auto& part : module->modules()) {
    if (const auto* linear = dynamic_cast<const Linear*>(part.get())) {
      kept += static_cast<double>(linear->weight.size(0));
    }
  }
  return kept;
}

}  // namespace

std::string TrainingMemory::parts() const {
  return str("parameters ", human_bytes(parameters), ", gradients ", human_bytes(gradients),
             ", optimiser ", human_bytes(optimizer), ", activations ", human_bytes(activations),
             ", scores ", human_bytes(scores), ", batch ", human_bytes(batch));
}

SequenceSizes sequence_sizes(const Model& model, const data::Task& task) {
  SequenceSizes out{.length = model.config().positions(task.length()),
                    .source_length = task.source_length()};
  if (task.goal() == data::Goal::image_label) {
    const auto image = task.image_shape();
    out.bytes = 4.0 * static_cast<double>(image[0]) * static_cast<double>(image[1]) *
                static_cast<double>(image[2]);
  } else {
    // int64 each.
    out.bytes = 8.0 * static_cast<double>(task.length() + task.source_length());
  }
  return out;
}

TrainingMemory training_memory(const Model& model, const SequenceSizes& sequence,
                               const TrainOptions& options) {
  TrainingMemory out;
  out.parameters = 4 * parameter_count(model);
  out.gradients = out.parameters;
  out.optimizer = 2 * out.parameters;
  const double pieces = static_cast<double>(options.accumulate);
  const double sequences = static_cast<double>(options.batch) / pieces;
  const double bytes = options.dtype == "bfloat16" ? 2 : 4;
  for (const Layers* layers : model.stacks()) {
    const bool reads_source = layers->part() == "encoder";
    const auto positions =
        static_cast<double>(reads_source ? sequence.source_length : sequence.length);
    for (const Layers::Layer& layer : layers->all()) {
      const double kept = kept_a_position(layer.mixer.get()) + kept_a_position(layer.channel.get());
      out.activations += bytes * sequences * positions * kept;
    }
  }
  const ModelConfig& config = model.config();
  const double classes = static_cast<double>(
      config.has_classes() ? config.classes.value_or(0) : config.vocabulary.value_or(0));
  // Scores in float32 and the logarithms of their softmax.
  out.scores = 2 * 4 * sequences * sequence.targets * classes;
  out.batch = static_cast<double>(options.batch) * sequence.bytes;
  const double passing = out.activations + out.scores;
  out.peak = out.parameters + out.optimizer + out.batch +
             (options.accumulate > 1 ? out.gradients + passing : std::max(out.gradients, passing));
  return out;
}

void check_training_fits(const Model& model, const data::Task& task, const TrainOptions& options) {
  SequenceSizes sequence = sequence_sizes(model, task);
  const auto check = [&] {
    const TrainingMemory need = training_memory(model, sequence, options);
    check_fits("this training needs", need.peak, need.parts(),
               "a smaller model.width, model.depth or train.batch or a larger train.accumulate "
               "needs less");
  };
  check();
  // One sequence fits now. Others may have fewer targets: half of its own is what is counted on.
  sequence.targets =
      0.5 * task.train_batch(0, 1).targets.ne(data::kIgnore).sum().item<double>();
  check();
}

}  // namespace headloom
