// The whole of one training run as plain structs: [model], [task], [train].
#pragma once

#include "core/fields.h"
#include "data/task.h"
#include "model/config.h"

namespace headloom {

class Model;

// Parameters that are trained at a rate or with a weight decay of their own.
struct ParameterGroup {
  std::string parameters;              // a pattern of names: * is any characters, ? is one
  double lr = 1;                       // times train.lr
  std::optional<double> weight_decay;  // as the other parameters' where absent

  void fields(Fields& f);
};

struct TrainOptions {
  int64_t steps = 1000;
  int64_t batch = 32;
  int64_t accumulate = 1;
  double lr = 1e-3;
  std::string schedule = "cosine";
  int64_t warmup = 50;
  double min_lr = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double clip = 1.0;
  std::string dtype = "float32";
  std::string device = "cpu";
  bool activation_checkpointing = false;
  int64_t eval_every = 100;
  int64_t eval_sequences = 256;
  std::string eval_split = "all";
  std::optional<double> stop_accuracy;
  std::optional<int64_t> checkpoint_every;  // eval_every when absent
  int64_t seed = 1;
  std::string shard = "none";
  int64_t tensor_parallel = 1;
  int64_t context_parallel = 1;
  std::vector<ParameterGroup> groups;  // a parameter belongs to the first that names it

  void fields(Fields& f);
  // The learning rate of step `step` (from 0): linear warm-up, then the schedule.
  double lr_at(int64_t step) const;
  // A sentence where the warm-up is not shorter than the run; "" elsewhere.
  std::string long_warmup() const;
};

struct RunConfig {
  ModelConfig model;
  std::shared_ptr<data::TaskSpec> task;
  TrainOptions train;

  RunConfig();
  void fields(Fields& f);
  // Builds the task and fills in what the model takes from it (vocabulary, max_length, classes,
  // ...). Throws UsageError where the model is of a kind that cannot do the task, or too small.
  std::shared_ptr<data::Task> build_task();
  // The second half of that, from the task's sizes.
  void fit(const data::TaskSizes& sizes);
  // The first file or folder of the task's data that is not there.
  std::optional<data::DataPath> missing_data() const;
  // Throws Error naming that, and the option below `table` that names it, which --set can change.
  void find_data(const std::string& table = "task") const;
};

// How a task's training is counted: the positions of a sequence, source and target, or images.
struct WorkUnit {
  double per_sequence = 0;  // the mean where sequences have several lengths
  const char* name = "tokens";
};
WorkUnit work_unit(const data::Task& task);
// Of `count` training sequences from number `first` on, in such units.
int64_t work_of(const data::Task& task, int64_t first, int64_t count);
// FLOPs of the forward pass over training sequences of all lengths: for a position, and for a unit
// of work. An image costs what all its positions cost. For an
// encoder-decoder, model_costs() counts the source with each target token, and training counts the
// source's tokens too, so that the cost is spread over both.
struct TrainingFlops {
  double per_position = 0, per_unit = 0;
};
TrainingFlops training_flops(const Model& model, const data::Task& task);

RunConfig read_run_config(const Node& root);
std::string run_config_toml(RunConfig& config);

}  // namespace headloom
