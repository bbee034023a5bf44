// What the benchmarks share.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_timing.h"
#include "model/decoder.h"
#include "train/evaluate.h"
#include "train/optimizer.h"

namespace headloom::cli {

struct BenchArguments {
  std::vector<std::string> cases;
  std::string only;
  std::string backend;
  double seconds = 2;
  int64_t threads = 0;
  bool json = false;
};

void seed_all();
nlohmann::ordered_json to_json(const Spread& s);
// "PASS 1.30" or "short of 1.30"; "" without a target.
std::string verdict(double ratio, double target);

// `run` forward under no-grad, or forward and backward through the first `differentiable` inputs.
std::function<void()> work(const std::function<Tensor(const std::vector<Tensor>&)>& run,
                           std::vector<Tensor> inputs, size_t differentiable, bool training);

// A whole optimiser step on random tokens: forward, loss, backward, clipping, AdamW.
class StepBench {
 public:
  StepBench(const ModelConfig& config, int64_t batch, int64_t length);
  void operator()();
  int64_t tokens() const { return batch_.inputs.numel(); }

 private:
  std::shared_ptr<Decoder> model_;
  std::optional<AdamW> optimizer_;
  data::Batch batch_;
};

// What composed attention must reach beside its cases: types, threads, instruction sets, memory,
// whole layers and training steps.
void bench_composed_requirements(const BenchArguments& arguments, nlohmann::ordered_json& json);

}  // namespace headloom::cli
