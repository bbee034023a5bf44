// The accuracy of recall with segments: sequences count alike, however many targets they have.
#include <ATen/ATen.h>

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

}  // namespace
}  // namespace headloom::test::recall_segments_test
