// A training step of GPT-2's size and of recall: tokens a second, memory, and where its time goes.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>

#include "bench/memory.h"
#include "bench/profile.h"
#include "bench/rates.h"
#include "bench/requirements.h"
#include "core/text.h"
#include "model/describe.h"
#include "ops/linear_cross_entropy/op.h"

namespace headloom::bench {
namespace {

// GPT-2 (Radford et al. 2019), 124M.
ModelConfig gpt2(int64_t length) {
  ModelConfig config;
  const Node root =
      parse_toml(str("width = 768\ndepth = 12\nvocabulary = 50257\nmax_length = ", length,
                     "\nnorm = \"layer_norm\"\nbias = true\nposition = { type = \"learned\" }\n"
                     "[[layer]]\nmixer = { type = \"mha\", heads = 12 }\n"
                     "channel = { type = \"mlp\", activation = \"gelu_tanh\" }\n"),
                 "bench");
  read_fields(root, config, "model");
  return config;
}

// The model that the task recall is told apart on: two layers of width 64.
ModelConfig recall_model() {
  ModelConfig config;
  read_fields(parse_toml("width = 64\ndepth = 2\nvocabulary = 8192\nmax_length = 64\n", "bench"),
              config, "model");
  return config;
}

constexpr int64_t kRecallLength = 64, kRecallAsked = 4, kRecallBatch = 512;

// As many targets a sequence as recall has.
data::Batch recall_batch() {
  seed_all();
  const Tensor tokens = at::randint(0, 8192, {kRecallBatch, kRecallLength}, at::kLong);
  Tensor targets = at::full_like(tokens, data::kIgnore);
  for (int64_t i = 0; i < kRecallAsked; ++i)
    targets.select(1, 8 + 2 * i).copy_(tokens.select(1, i));
  return {.inputs = tokens, .targets = targets};
}

// The operations of a step's products, by the part of the profile that does them. The head computes
// scores where there are targets.
double product_flops(const Model& model, const std::string& part, const data::Batch& batch) {
  const int64_t length = batch.inputs.size(1);
  const int64_t targets = batch.targets.ne(data::kIgnore).sum().item<int64_t>();
  const int64_t positions = part == "head and loss" ? targets : batch.inputs.numel();
  double sum = 0;
  for (const Cost& cost : model_costs(model, length).parts) {
    const bool head = cost.part.find("output") != std::string::npos;
    const bool maps = cost.part.find("maps") != std::string::npos;
    const char* of = head ? "head and loss" : maps ? "attention" : "linear maps";
    if (part == of) sum += cost.flops_per_token;
  }
  return 3 * sum * static_cast<double>(positions);  // forward, and two gradients
}

void print_profile(const std::string& name, StepBench& step, const BenchOptions& a,
                   nlohmann::ordered_json& json) {
  // Before the steps and after them: other work may have slowed down one of the two.
  const Rates before = measure_rates(at::kFloat);
  const StepProfile profile = profile_steps([&] { step(); }, 4 * a.seconds);
  const Rates after = measure_rates(at::kFloat);
  const double flops = std::max(before.flops, after.flops);
  const double bytes = std::max(before.bytes, after.bytes);
  if (!a.json) {
    std::printf(
        "%s: %.1f ms a step while it is profiled; products %.0f GFLOP/s, memory %.1f GB/s\n",
        name.c_str(), 1e3 * profile.seconds, 1e-9 * flops, 1e-9 * bytes);
    std::printf("%-20s %12s %12s %9s %12s %12s\n", "part", "forward", "backward", "share", "bound",
                "over bound");
  }
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  const auto row = [&](const std::string& part, double forward, double backward, double bound) {
    const double seconds = forward + backward;
    if (seconds == 0) return;
    if (a.json) {
      rows.push_back({{"part", part},
                      {"forward_seconds", forward},
                      {"backward_seconds", backward},
                      {"bound_seconds", bound}});
      return;
    }
    std::printf("%-20s %9.1f ms %9.1f ms %8.1f%%", part.c_str(), 1e3 * forward, 1e3 * backward,
                100 * seconds / profile.seconds);
    if (bound > 0) std::printf(" %9.1f ms %12.2f", 1e3 * bound, seconds / bound);
    std::printf("\n");
  };
  for (const StepPart& part : profile.parts) {
    const double bound = part.products
                             ? product_flops(step.model(), part.name, step.batch()) / flops
                             : part.bytes / bytes;
    row(part.name, part.forward, part.backward, bound);
  }
  row("between operators", profile.between, 0, 0);
  if (a.json) {
    json["profiles"].push_back({{"step", name},
                                {"seconds", profile.seconds},
                                {"page_faults", profile.page_faults},
                                {"flops", flops},
                                {"bytes", bytes},
                                {"parts", std::move(rows)}});
  } else {
    std::printf("%-20s %9.0f\n\n", "page faults", profile.page_faults);
  }
}

}  // namespace

void bench_step(const BenchOptions& a, nlohmann::ordered_json& json) {
  const std::string small = "GPT-2 124M, batch 4, T=256", recall = "recall, batch 512, T=64";
  if (a.profile) {
    if (a.wants(small)) {
      StepBench step(gpt2(1024), 4, 256);
      print_profile(small, step, a, json);
    }
    if (a.wants(recall)) {
      StepBench step(recall_model(), recall_batch());
      print_profile(recall, step, a, json);
    }
    return;
  }
  if (!a.json) std::printf("%-44s %12s %12s\n", "step", "a step", "tokens/s");
  const auto timed = [&](const std::string& name, const std::function<StepBench()>& make) {
    if (!a.wants(name)) return;
    StepBench step = make();
    const Spread seconds = time_pairs([&] { step(); }, [] {}, 4 * a.seconds).a;
    const double rate = static_cast<double>(step.tokens()) / seconds.median;
    if (a.json) {
      json["cases"].push_back({{"op", "step"},
                               {"case", name},
                               {"training_seconds", to_json(seconds)},
                               {"tokens_per_second", rate}});
      return;
    }
    std::printf("%-44s %9.1f ms %12s   (%.1f - %.1f)\n", name.c_str(), 1e3 * seconds.median,
                human_count(rate).c_str(), 1e3 * seconds.low, 1e3 * seconds.high);
    std::fflush(stdout);
  };
  TrainOptions narrow;
  narrow.dtype = "bfloat16";
  timed(small, [] { return StepBench(gpt2(1024), 4, 256); });
  timed(small + ", bfloat16", [&] { return StepBench(gpt2(1024), 4, 256, narrow); });
  timed(recall, [] { return StepBench(recall_model(), recall_batch()); });
  Requirements rows(a, json);
  for (const bool checkpoint : {false, true}) {
    rows.at_most(str("GPT-2 124M, batch 4, T=1024: peak memory of a step, GB",
                     checkpoint ? ", activation checkpointing" : ""),
                 checkpoint ? 3.5 : 5.5, [&] {
                   TrainOptions options;
                   options.activation_checkpointing = checkpoint;
                   StepBench step(gpt2(1024), 4, 1024, options);
                   return 1e-9 * (step.held_bytes() + peak_bytes([&] { step(); }));
                 });
  }
  rows.at_least(recall + ": speed over scores of every position", 5.0, [&] {
    StepBench step(recall_model(), recall_batch()), whole(recall_model(), recall_batch());
    return time_pairs([&] { whole.step_with_all_scores(); }, [&] { step(); }, 4 * a.seconds)
        .ratio.median;
  });
}

}  // namespace headloom::bench
