// Checkpoints of a run: RUN/checkpoints/step-N/{model,optimizer}.safetensors and state.json. Where
// several processes share out the optimiser's state, each writes its own part of that,
// optimizer-00001-of-00003.safetensors and so on, and so of the parameters where it shares those.
//
// A checkpoint appears whole or not at all: it is written to a folder of another name, synced and
// renamed. state.json marks size and checksum of the tensors' files, so damage is found on reading.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/model.h"
#include "train/optimizer.h"
#include "train/state.h"

namespace headloom {

// What a checkpoint is written from, by this process.
struct Snapshot {
  NamedTensors model;  // of the first process; with model_in_parts this process's parts
  // The state of the optimiser, or this process's part of it; in part 0 also the random
  // generators'.
  NamedTensors optimizer;
  TrainState state;
  int64_t part = 0, parts = 1;
  bool model_in_parts = false;

  // Shares its tensors with model and optimiser. `released` has the parameters where the model's
  // are without memory.
  static Snapshot take(const Model& model, const AdamW& optimizer, TrainState state,
                       ParameterShards* released = nullptr);
  // Makes the tensors its own, so that training can go on while the snapshot is written.
  void copy();
  double bytes() const;
  // The names of the files that the process of this part writes.
  std::vector<std::string> files(int64_t of_part) const;
};

// Whether a checkpoint's model is the one that gets its weights, or may be one that has been
// adapted() to that.
enum class WeightsOf { kSame, kAdapted };

class CheckpointStore {
 public:
  explicit CheckpointStore(std::string run_folder);

  // Steps that have a checkpoint, ascending. A reader needs no lock: a checkpoint comes and goes as
  // a whole.
  std::vector<int64_t> steps() const;
  std::string folder(int64_t step) const;
  // The step with the lowest held-out loss, as the newest checkpoint knows it; nothing where that
  // is damaged or the step's checkpoint is not there.
  std::optional<int64_t> best() const;
  // What the newest checkpoint says of the data that the run is trained on; nothing where there is
  // none or it is damaged.
  std::optional<StoredData> data() const;

  // The configuration that the weights of `step` were trained with; "" where the checkpoint does
  // not say it or is damaged.
  std::string config(int64_t step) const;

  // The step that `which` names: "best" (the newest where that is not known), "last" or a number.
  // Throws Error where there is no checkpoint, UsageError where there is none of that name.
  int64_t find(const std::string& which) const;
  // Whether the checkpoint has weights alone, as one that was imported.
  bool has_weights_alone(int64_t step) const;

  // Makes the folder that save() fills. Before a snapshot in parts is saved the first process calls
  // it, and the others wait for that.
  void prepare() const;
  // Writes the checkpoint of a snapshot, and removes all but the two newest and the best. Of a
  // snapshot in parts the process of part 0 waits for the others' files, until `cancelled`.
  void save(const Snapshot& snapshot, const std::atomic<bool>& cancelled = false) const;
  // Writes a checkpoint of weights alone, from which no training can go on.
  void save_weights(const Model& model, TrainState state) const;
  // Restores weights, optimiser, the random generators of the CPU and of the model's device, and
  // the routes that matrix products took, so that a resumed run gives the same bits. Throws Error
  // naming the file that is missing or damaged, and an intact older step where there is one, or the
  // key in which `model` is not the one that the weights belong to.
  TrainState load(int64_t step, Model& model, AdamW& optimizer) const;
  // Weights only, of the checkpoint that find() gives; of a model that `cut` has cut, this
  // process's parts. Where the checkpoint is replaced or removed by a run that goes on while it is
  // read, it is looked for again. With kAdapted, tensors that the checkpoint's model lacks keep
  // their values.
  TrainState load_weights(const std::string& which, Model& model, const CutModel* cut = nullptr,
                          WeightsOf weights = WeightsOf::kSame) const;
  // Throws Error where a weight of `model`, which was loaded from the checkpoint of `step`, is NaN
  // or infinite.
  void check_finite(int64_t step, const torch::nn::Module& model) const;
  // Removes the checkpoints after `step`, from which a run goes on: it writes them anew.
  void drop_after(int64_t step) const;

 private:
  std::string unfinished() const { return root_ + "/writing"; }
  // Turns an error of `write` into a sentence about the checkpoint of `step`, and removes what this
  // process has written of it, the files or folders `own`.
  void guarded(int64_t step, const std::vector<std::string>& own,
               const std::function<void()>& write) const;
  std::vector<std::pair<std::string, FileMark>> write_files(const Snapshot& snapshot) const;
  // Throws Error where a file is missing or damaged. Where only the weights are wanted, those of
  // the optimiser may be.
  TrainState checked_state(int64_t step, bool with_optimizer) const;
  // A sentence naming the newest other checkpoint that is intact.
  std::string other_intact(int64_t step, bool with_optimizer) const;
  // Makes the checkpoint disappear as a whole.
  void remove(int64_t step) const;

  const std::string run_, root_;
};

}  // namespace headloom
