// What a training step needs of memory, by estimate.
#pragma once

#include <string>

#include "data/task.h"
#include "model/model.h"
#include "train/config.h"

namespace headloom {

// Bytes. A real step of more than 200 MB takes between half and three times as many;
// docs/reliability.md has the figures.
struct TrainingMemory {
  // float32 (in float64 all of this is twice as much), and in bfloat16 the copies that are
  // multiplied; with train.shard the own parts as well.
  double parameters = 0;
  // float32; with train.shard the own parts, and what is whole at a time.
  double gradients = 0;
  double optimizer = 0;  // AdamW's two moments
  // What all layers leave for the backward pass; with train.activation_checkpointing their inputs,
  // and what the one leaves that is computed again.
  double activations = 0;
  // Of the targets, as many as are there at once, and the gradients that the head and its loss
  // compute together.
  double scores = 0;
  double batch = 0;  // the tokens or images of a step, inputs and targets
  // The larger of the two ends of a backward pass: activations and scores are there when it begins,
  // all gradients when it is done. With train.accumulate those of earlier pieces are there as well.
  double peak = 0;

  // "parameters 1.0 GiB, gradients 1.0 GiB, ...".
  std::string parts() const;
};

// What a step reads of one sequence.
struct SequenceSizes {
  int64_t length = 0, source_length = 0;  // positions
  double targets = 0;                     // of the loss
  double bytes = 0;                       // of its inputs and targets
};
// Of a task with these sizes. As many targets as there can be: at every position, where the model
// predicts tokens.
SequenceSizes sequence_sizes(const Model& model, const data::TaskSizes& task);
// Of each of `processes` that share every step's batch. `model` may be without memory.
TrainingMemory training_memory(const Model& model, const SequenceSizes& sequence,
                               const TrainOptions& options, int64_t processes = 1);

// Throws UsageError with the numbers where a step does not fit this process, even with the fewest
// targets that the task can have. On another device than the CPU nothing is estimated.
void check_training_fits(const Model& model, const data::Task& task, const TrainOptions& options,
                         int64_t processes = 1);
// The same before the task is built, which may take long: of what its options alone say. Fills in
// what the model takes from it.
void check_training_fits(RunConfig& config, int64_t processes = 1);

}  // namespace headloom
