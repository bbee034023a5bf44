#include "bench/speeds.h"

#include <algorithm>
#include <cstdio>

#include "bench/decode_step.h"
#include "bench/harness.h"
#include "bench/memory.h"
#include "core/clock.h"
#include "train/device.h"
#include "train/interrupt.h"
#include "train/speeds.h"

namespace headloom::bench {
namespace {

constexpr int kSteps = 3, kTokens = 16;
// A budget depends on one measurement. A few steps of a small model would all be slow when another
// process takes the machine for some hundredths of a second.
constexpr double kSecondsOfBudget = 0.3;

// The median seconds of a call. A first call does not count; then there are at least `count` calls,
// and more until they have taken `least` seconds together.
template <typename Step>
double median_seconds(Step& step, int count, double least = 0) {
  step();
  std::vector<double> seconds;
  const double end = seconds_now() + least;
  while (std::ssize(seconds) < count || seconds_now() < end) {
    const double start = seconds_now();
    step();
    seconds.push_back(seconds_now() - start);
  }
  return spread_of(seconds).median;
}

// Sequences that are in memory at once.
int64_t micro_batch(const RunConfig& config) {
  return config.train.batch / config.train.accumulate;
}

// Steps on each length of training sequences.
struct StepTime {
  double seconds = 0;  // of the mean step
  double peak_bytes = 0;
};

StepTime time_steps(const RunConfig& config, const data::Task& task, int count, double least = 0) {
  StepTime out;
  const std::vector<data::TrainLength> lengths = task.train_lengths();
  double all = 0;
  for (const data::TrainLength& part : lengths) all += static_cast<double>(part.sequences);
  int64_t first = 0;
  for (const data::TrainLength& part : lengths) {
    const int64_t middle = first + part.sequences / 2;
    StepBench step(config.model,
                   task.train_batch(middle / micro_batch(config), micro_batch(config)),
                   config.train);
    const double share = static_cast<double>(part.sequences) / all;
    out.seconds += share * median_seconds(step, count, least);
    out.peak_bytes = std::max(out.peak_bytes, step.held_bytes() + peak_bytes([&] { step(); }));
    first += part.sequences;
  }
  return out;
}

// One round of one model.
void measure(const RunConfig& config, const data::Task& task, report::Speed& speed) {
  const StepTime step = time_steps(config, task, kSteps);
  const double tokens = static_cast<double>(micro_batch(config)) * work_unit(task).per_sequence;
  speed.train_tokens_per_second.push_back(tokens / step.seconds);
  speed.peak_memory_bytes.push_back(step.peak_bytes);
  seed_all();
  const auto decoder = std::dynamic_pointer_cast<Decoder>(build_model(config.model));
  if (decoder == nullptr || task.goal() != data::Goal::next_token ||
      !decoder->stacks()[0]->stateful()) {
    return;
  }
  hold_in(config.train.dtype, *decoder);
  DecodeStep token(decoder, std::max<int64_t>(task.length() / 2, 1), config.train.dtype);
  speed.decode_tokens_per_second.push_back(1 / median_seconds(token, kTokens));
}

}  // namespace

double step_seconds(const RunConfig& config, const data::Task& task) {
  if (config.train.device != "cpu") {
    usage_error("'budget' is \"seconds\" and 'train.device' is \"", config.train.device,
                "\", expected \"cpu\", because steps are timed there alone.");
  }
  return time_steps(config, task, 2 * kSteps, kSecondsOfBudget).seconds *
         static_cast<double>(config.train.accumulate);
}

bool measure_speeds(const std::string& folder, int64_t rounds,
                    const report::Comparison& comparison) {
  KeptSpeeds kept(folder);
  for (const report::TaskInfo& info : comparison.tasks) {
    std::vector<TimedModel> models = timed_models(info.name, folder, comparison);
    std::vector<report::Speed> speeds;
    if (models.empty()) continue;
    if (kept.take(info.name, rounds, models, /*anywhere=*/false, speeds)) continue;
    std::fprintf(stderr, "measuring the speed of %zu models on %s\n", models.size(),
                 info.name.c_str());
    const auto task = models[0].config.build_task();
    for (const TimedModel& m : models) speeds.push_back({.model = m.model, .task = info.name});
    for (int64_t round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < models.size(); ++i) {
        if (interrupted()) return false;
        measure(models[i].config, *task, speeds[i]);
      }
    }
    kept.keep(info.name, rounds, models, speeds);
  }
  return true;
}

}  // namespace headloom::bench
