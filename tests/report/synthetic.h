// Made-up comparisons that look like real ones.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "report/comparison.h"

namespace headloom::report {

struct Curve {
  double end = 2.0;          // metric at the end of training
  double noise = 0.004;      // between seeds
  double speed = 1.0;        // relative to 40,000 tokens/s
  double answer = kUnknown;  // accuracy at the end, for tasks with answers
};

inline Run make_run(const std::string& model, const std::string& task, int64_t seed, Curve curve) {
  std::mt19937_64 random(seed * 977 + std::hash<std::string>{}(model + task));
  std::normal_distribution<double> normal;
  Run run{.model = model, .task = task, .seed = seed, .state = RunState::kFinished};
  run.tokens_per_second = 40000 * curve.speed * (1 + 0.01 * normal(random));
  run.peak_memory_bytes = 612e6 / curve.speed;
  const double end = curve.end + curve.noise * normal(random);
  const bool answers = std::isfinite(curve.answer);
  for (int i = 0; i <= 24; ++i) {
    const double t = i / 24.0;
    Point p{.step = 50 * i, .tokens = 2.4e6 * t};
    p.seconds = p.tokens / run.tokens_per_second;
    const double gap = std::exp(-9 * t) - std::exp(-9.0);
    if (answers) {
      p.accuracy = curve.answer / (1 + std::exp(-14 * (t - 0.6)));
      p.quality = 1 - p.accuracy;
      p.loss = 3.25 * (1 - 0.9 * p.accuracy);
    } else {
      p.quality = end + (8 - end) * gap + 0.3 * std::exp(-4 * t) - 0.3 * std::exp(-4.0);
      p.loss = p.quality * 0.693147;
    }
    p.train_loss = i == 0 ? kUnknown : p.loss * 0.99;
    run.points.push_back(p);
  }
  return run;
}

// A run whose last metric is exactly `quality`.
inline Run plain_run(const std::string& model, const std::string& task, int64_t seed,
                     double quality) {
  Run run{.model = model, .task = task, .seed = seed, .state = RunState::kFinished};
  run.points.push_back(
      {.step = 100, .tokens = 1e6, .seconds = 20, .loss = quality, .quality = quality});
  run.tokens_per_second = 50000;
  return run;
}

// One task "text", given each model's metric by seed.
inline Comparison small(const std::vector<std::pair<std::string, std::vector<double>>>& results) {
  Comparison c{.title = "Small"};
  c.tasks = {{.name = "text", .description = "Bytes.", .metric = "bits per byte"}};
  for (const auto& [label, values] : results) {
    c.models.push_back({.label = label});
    c.builds.push_back({.model = label, .task = "text", .parameters = 1000000});
    for (size_t i = 0; i < values.size(); ++i) {
      if (c.seeds.size() <= i) c.seeds.push_back(i);
      c.runs.push_back(plain_run(label, "text", i, values[i]));
    }
  }
  return c;
}

inline Comparison quickstart() {
  Comparison c{.title = "Five ways of combining attention heads"};
  c.models = {{"mha", "plain multi-head attention", "Vaswani et al. 2017"},
              {"talking_heads", "heads mixed before and after softmax", "Shazeer et al. 2020"},
              {"dcmha", "dynamically composed heads, rank 2", "Xiao et al. 2024"},
              {"differential", "pairs of maps subtracted", "Ye et al. 2024"},
              {"multi_token", "key-query convolution before softmax", "Golovneva et al. 2025"}};
  c.tasks = {
      {.name = "text",
       .description = "The next byte of the sources and headers of the installed PyTorch.",
       .metric = "bits per byte"},
      {.name = "find_block",
       .description = "Eight blocks of five letters, then two letters of one: answer that block.",
       .metric = "error rate",
       .percent = true,
       .floors = {{.name = "a uniform guess", .quality = 0.999}}}};
  c.seeds = {1, 2, 3, 4, 5};
  const Curve text[] = {{1.934, .005, 1.0},
                        {1.931, .005, .71},
                        {1.905, .004, .58},
                        {1.936, .006, .8},
                        {1.917, .004, .62}};
  const Curve block[] = {
      {0, 0, 1.02, .012}, {0, 0, .7, .05}, {0, 0, .6, .11}, {0, 0, .83, .02}, {0, 0, .61, .86}};
  for (size_t m = 0; m < c.models.size(); ++m) {
    const std::string& label = c.models[m].label;
    for (const int64_t seed : c.seeds) {
      c.runs.push_back(make_run(label, "text", seed, text[m]));
      Curve curve = block[m];
      curve.answer *= 0.91 + 0.03 * static_cast<double>(seed);
      c.runs.push_back(make_run(label, "find_block", seed, curve));
    }
    const double extra = 0.03 * static_cast<double>(m);
    for (const TaskInfo& task : c.tasks) {
      c.builds.push_back({.model = label,
                          .task = task.name,
                          .parameters = 1318400 + static_cast<int64_t>(900 * m),
                          .flops_per_token = 2.9e6 * (1 + extra),
                          .flops_per_unit = 2.9e6 * (1 + extra),
                          .state_bytes_per_token = 4096 * (1 + 2 * extra),
                          .state_bytes = 256 * 4096 * (1 + 2 * extra),
                          .mechanism_share = extra,
                          .config = "[model]\nkind = \"decoder\"\nwidth = 128\ndepth = 4\n\n"
                                    "[[model.layer]]\nmixer = { type = \"" +
                                    label + "\", heads = 4 }\nchannel = { type = \"swiglu\" }\n"});
    }
  }
  c.budget =
      "Every run trains on 2.4M tokens (1,200 steps of 8 x 256), with parameters matched "
      "within 1% by the channel mixer's width.";
  c.machine = {{"Processor", "Example CPU @ 2.7 GHz"},
               {"Threads", "2"},
               {"Memory", "15.6 GiB"},
               {"PyTorch", "2.13.0, AVX-512"}};
  c.config =
      "[compare]\nmodels = [\"mha\", \"talking_heads\"]\ntasks = [\"text\", \"find_block\"]\n"
      "seeds = [1, 2, 3, 4, 5]\n";
  c.command = "headloom compare configs/quickstart.toml";
  c.date = "2026-11-20";
  return c;
}

// Recall at four lengths: two models with a state that grows and one with a constant state, whose
// accuracy falls. Accuracies are exact: 0.1 less a step, and 0.01 more with each seed.
inline Comparison lengths() {
  Comparison c{.title = "Recall at four lengths"};
  c.models = {{"mha", "plain attention", ""}, {"window", "local", ""}, {"mamba", "a state", ""}};
  c.seeds = {1, 2, 3, 4, 5};
  for (int i = 0; i < 4; ++i) {
    const int length = 64 << i;
    const std::string task = "mqar-" + std::to_string(length);
    c.tasks.push_back({.name = task,
                       .description = "Recall.",
                       .metric = "error rate",
                       .percent = true,
                       .floors = {{"any token", 0.999}, {"one of the values shown", 0.75}},
                       .options = {{"type", "mqar"},
                                   {"length", std::to_string(length)},
                                   {"pairs", "4"},
                                   {"eval_sequences", std::to_string(500 + i)}}});
    for (size_t m = 0; m < c.models.size(); ++m) {
      const std::string& model = c.models[m].label;
      c.builds.push_back({.model = model,
                          .task = task,
                          .parameters = 100000,
                          .state_bytes_per_token = m == 2 ? 0 : 512.0,
                          .state_bytes = m == 2   ? 8192.0
                                         : m == 1 ? 512.0 * std::min(length, 128)
                                                  : 512.0 * length});
      for (const int64_t seed : c.seeds) {
        const double accuracy = (m == 0 ? 0.9 : 0.85 - 0.1 * i) + 0.01 * static_cast<double>(seed);
        Run run{.model = model, .task = task, .seed = seed, .state = RunState::kFinished};
        for (const int step : {100, 200}) {
          // Halfway all models are the same.
          const double now = step == 100 ? 0.5 : accuracy;
          run.points.push_back({.step = step,
                                .tokens = 1e3 * step,
                                .seconds = 0.2 * step,
                                .loss = 3 * (1 - now),
                                .quality = 1 - now,
                                .accuracy = now});
        }
        c.runs.push_back(run);
      }
    }
  }
  return c;
}

// The quickstart with a sweep before it, measured speeds, floors and folders.
inline Comparison swept() {
  Comparison c = quickstart();
  c.swept = {"lr", "norm"};
  c.sweep_seeds = {101, 102};
  c.tasks[1].floors.push_back({"a guess among the blocks", 0.875});
  for (Run& run : c.runs) {
    run.folder = "runs/" + run.model + " " + run.task + "-" + std::to_string(run.seed);
    for (Point& p : run.points) p.quality_error = run.task == "text" ? 0.002 : 0.006;
  }
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  for (const ModelInfo& model : c.models) {
    // One model does best at the largest rate that was tried.
    const bool late = model.label == "differential";
    const char* const chosen = late ? "0.008" : "0.004";
    for (const TaskInfo& task : c.tasks) {
      c.choices.push_back({model.label, task.name, {{"lr", chosen}, {"norm", "rms"}}, {}});
      if (late) c.choices.back().at_edge = {"lr"};
      for (const char* rate : {"0.0005", "0.001", "0.002", "0.004", "0.008"}) {
        for (const char* norm : {"rms", "layer"}) {
          for (const int64_t seed : c.sweep_seeds) {
            const double off = std::log2(std::stod(rate) / std::stod(chosen));
            const double quality = (task.percent ? 0.2 : 1.9) + 0.02 * off * off +
                                   0.003 * normal(random) + (norm[0] == 'l' ? 0.03 : 0);
            c.runs.push_back(plain_run(model.label, task.name, seed, quality));
            c.runs.back().sweep = true;
            c.runs.back().setting = {{"lr", rate}, {"norm", norm}};
          }
        }
      }
      Speed speed{.model = model.label, .task = task.name};
      const double slower = 1 + 0.2 * static_cast<double>(&model - c.models.data());
      for (int round = 0; round < 5; ++round) {
        const double noise = 1 + 0.02 * normal(random);
        speed.train_tokens_per_second.push_back(40000 / slower * noise);
        speed.decode_tokens_per_second.push_back(900 / slower * noise);
        speed.peak_memory_bytes.push_back(612e6 * slower);
      }
      c.speeds.push_back(speed);
    }
  }
  c.builds[4].state_bytes_per_token = c.builds[5].state_bytes_per_token = 512;
  return c;
}

}  // namespace headloom::report
