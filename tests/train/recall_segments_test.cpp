// The accuracy of recall with segments: sequences count alike, however many targets they have.
#include <ATen/ATen.h>

#include "model/describe.h"
#include "support.h"
#include "train/config.h"
#include "train/evaluate.h"

namespace headloom::test::recall_segments_test {
namespace {

TEST(RecallSegments, AccuracyIsTheMeanOfTheSequencesShares) {
  RunConfig config = read_run_config(
      parse_toml("[model]\nwidth = 16\ndepth = 1\ntied = false\n[[model.layer]]\nmixer = { type = "
                 "'mha', heads = 2 }\n"
                 "channel = { type = 'none' }\n[task]\ntype = 'mqar'\nvocabulary = 24\n"
                 "segments = ['8:2:6']\neval_segments = ['4:1', '12:3']\neval_sequences = 512\n"
                 "[train]\nsteps = 1\nbatch = 4\n",
                 "run.toml"));
  const auto task = config.build_task();
  EXPECT_EQ(*config.model.max_length, 12);
  EXPECT_EQ(work_unit(*task).per_sequence, 8);
  at::manual_seed(5);
  const auto model = build_model(config.model);
  model->eval();
  at::NoGradGuard no_grad;
  for (at::Tensor p : model->parameters()) p.add_(at::randn_like(p) * 0.3);

  const data::Batch batch = task->eval_batch(0, 512);
  const at::Tensor asked = batch.targets.ne(data::kIgnore);
  const at::Tensor best = model->forward({.tokens = batch.inputs}).argmax(-1);
  const at::Tensor right = best.eq(batch.targets).logical_and(asked).sum(1).to(at::kDouble);
  const double shares = (right / asked.sum(1)).mean().item<double>();
  const double targets = right.sum().item<double>() / asked.sum().item<double>();
  ASSERT_GT(std::abs(shares - targets), 1e-3);  // the two are not the same here
  // Batches of 6 hold sequences of both lengths, and others of one only.
  EXPECT_NEAR(evaluate(*model, *task, 512, 6).accuracy, shares, 1e-12);
}

// Training is counted at the lengths that it has, not at those that are judged.
TEST(RecallSegments, WorkAndOperationsAreThoseOfTheTrainingLengths) {
  const auto config_of = [](const std::string& segments, const std::string& mixer) {
    return read_run_config(
        parse_toml(str("[model]\nwidth = 16\ndepth = 1\n[[model.layer]]\nmixer = { ", mixer,
                       " }\n[task]\ntype = 'mqar'\nvocabulary = 24\nsegments = [", segments,
                       "]\neval_segments = ['64:2']\n[train]\nsteps = 1\nbatch = 4\n"),
                   "run.toml"));
  };
  for (const std::string mixer :
       {"type = 'mha', heads = 2", "type = 'mha', heads = 2, window = 6"}) {
    RunConfig config = config_of("'8:2:6', '32:2:3'", mixer);
    const auto task = config.build_task();
    const auto model = build_model(config.model);
    EXPECT_EQ(work_unit(*task).per_sequence, (6 * 8 + 3 * 32) / 9.0);
    EXPECT_EQ(work_of(*task, 0, 4), 4 * 8);
    EXPECT_EQ(work_of(*task, 4, 4), 2 * 8 + 2 * 32);
    EXPECT_EQ(work_of(*task, 8, 20), 32 + 2 * (6 * 8 + 3 * 32) + 8);
    const double short_cost = 8 * model_costs(*model, 8).flops_per_token;
    const double long_cost = 32 * model_costs(*model, 32).flops_per_token;
    const TrainingFlops flops = training_flops(*model, *task);
    EXPECT_DOUBLE_EQ(flops.per_unit, (6 * short_cost + 3 * long_cost) / (6 * 8 + 3 * 32));
    EXPECT_DOUBLE_EQ(flops.per_position, flops.per_unit);
    // The order of the lengths changes nothing.
    RunConfig turned = config_of("'32:2:3', '8:2:6'", mixer);
    EXPECT_DOUBLE_EQ(training_flops(*model, *turned.build_task()).per_unit, flops.per_unit);
  }
}

}  // namespace
}  // namespace headloom::test::recall_segments_test
