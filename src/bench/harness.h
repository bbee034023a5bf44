// What the benchmarks share: options, random inputs, and the steps that are timed.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/timing.h"
#include "model/model.h"
#include "ops/case.h"
#include "train/evaluate.h"
#include "train/optimizer.h"

namespace headloom::bench {

struct BenchOptions {
  std::string only;              // a part of the names of what is measured
  bool names_only = false;       // measures nothing and only sets `matched`
  mutable bool matched = false;  // whether wants() was given a name that has `only` in it
  std::string backend;
  double seconds = 2;
  int64_t threads = 0;
  bool json = false;
  bool profile = false;  // of `step`: where its time goes

  bool wants(const std::string& name) const {
    const bool wanted = name.find(only) != std::string::npos;
    matched = matched || wanted;
    return wanted && !names_only;
  }
};

void seed_all();
nlohmann::ordered_json to_json(const Spread& s);

// `run` forward under no-grad, or forward and backward through the first `differentiable` inputs.
std::function<void()> work(const std::function<Tensor(const std::vector<Tensor>&)>& run,
                           std::vector<Tensor> inputs, size_t differentiable, bool training);

// A whole optimiser step on random tokens or a batch: forward, loss, backward, clipping, AdamW. Of
// the options its type and activation checkpointing count.
class StepBench {
 public:
  StepBench(const ModelConfig& config, int64_t batch, int64_t length,
            const TrainOptions& options = {});
  StepBench(const ModelConfig& config, data::Batch batch, const TrainOptions& options = {});
  void operator()();
  // The same step by way of the scores of every position.
  void step_with_all_scores();
  const Model& model() const { return *model_; }
  const data::Batch& batch() const { return batch_; }
  int64_t tokens() const { return batch_.inputs.numel(); }
  // Parameters and the optimiser's state.
  double held_bytes() const;

 private:
  void update(const Tensor& loss);

  TrainOptions options_;
  std::shared_ptr<Model> model_;
  std::unique_ptr<AdamW> optimizer_;
  data::Batch batch_;
};

// Forward, or forward and backward, of a case and of what it is timed against.
std::function<void()> step_of(const ops::OpCase& c, bool training,
                              const std::optional<std::string>& backend = std::nullopt);
std::function<void()> baseline_of(const ops::OpCase& c, bool training);

}  // namespace headloom::bench
