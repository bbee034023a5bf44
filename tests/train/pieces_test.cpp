// Evaluation that reads sequences in pieces with a decoding state.
#include "support.h"
#include "train/evaluate.h"

namespace headloom::test::pieces_test {
namespace {

std::shared_ptr<Model> built(RunConfig& config, const data::Task& task) {
  config.model.complete({.vocabulary = task.vocabulary(), .length = task.length()});
  at::manual_seed(2);
  const auto model = build_model(config.model);
  model->eval();
  at::NoGradGuard no_grad;
  for (Tensor p : model->parameters()) p.add_(at::randn_like(p) * 0.1);
  return model;
}

TEST(Pieces, TheLossIsTheWholes) {
  for (const char* mixer :
       {"type = 'dcmha', heads = 2", "type = 'rwkv'", "type = 'mha', heads = 2, window = 5"}) {
    RunConfig config =
        read_run_config(tiny_run("steps = 1", str("[[model.layer]]\nmixer = { ", mixer, " }")));
    const auto task = config.build_task();
    const auto model = built(config, *task);
    const Evaluation whole = evaluate(*model, *task, 16, 8);
    EXPECT_EQ(whole.state_bytes, 0);
    for (const int64_t length : {1, 3, 100}) {
      const Evaluation e = evaluate(*model, *task, 16, 8, Pieces{.length = length});
      EXPECT_NEAR(e.loss, whole.loss, 1e-5 * whole.loss) << mixer;
      EXPECT_EQ(e.accuracy, whole.accuracy) << mixer;
      EXPECT_EQ(e.tokens, whole.tokens);
      EXPECT_EQ(e.sequences, whole.sequences);
      EXPECT_GT(e.state_bytes, 0);
    }
  }
}

// The scores of 128 targets are more than are held at a time.
TEST(Evaluate, ALargeVocabularyIsScoredSomePositionsAtATime) {
  Node node = tiny_run("steps = 1");
  apply_override(node, "task.symbols=300000");
  apply_override(node, "task.count=8");
  RunConfig config = read_run_config(node);
  const auto task = config.build_task();
  const auto model = built(config, *task);
  const Evaluation together = evaluate(*model, *task, 16, 16),
                   alone = evaluate(*model, *task, 16, 1);
  EXPECT_NEAR(together.loss, alone.loss, 1e-5 * alone.loss);
  EXPECT_EQ(together.accuracy, alone.accuracy);
}

TEST(Pieces, UnderACachePolicy) {
  RunConfig config = read_run_config(tiny_run("steps = 1"));
  const auto task = config.build_task();
  const auto model = built(config, *task);
  const Evaluation whole = evaluate(*model, *task, 16, 8);
  const auto under = [&](const char* policy) {
    return evaluate(*model, *task, 16, 8, Pieces{.length = 1, .cache = CachePolicy::parse(policy)});
  };
  EXPECT_NEAR(under("tova:1000").loss, whole.loss, 1e-5 * whole.loss);
  const Evaluation few = under("tova:3");
  EXPECT_NE(few.loss, whole.loss);
  EXPECT_EQ(few.state_bytes, 2 * 3 * 2 * 16 * 4);  // layers, positions, keys and values, width
}

TEST(Pieces, WhatCannotBeReadInPiecesIsRefused) {
  const auto refusal = [&](RunConfig config) {
    const auto task = config.build_task();
    const auto model = built(config, *task);
    return message_of<UsageError>([&] { evaluate(*model, *task, 4, 4, Pieces{}); });
  };
  RunConfig encoder = read_run_config(parse_toml(
      "[model]\nkind = 'encoder_decoder'\nwidth = 16\ndepth = 1\n[task]\ntype = 'sequence'\n"
      "eval_sequences = 4\n[train]\nsteps = 1\n",
      "run.toml"));
  EXPECT_TRUE(contains(refusal(encoder), "\"encoder_decoder\" reads its input at once"));
  RunConfig aft = read_run_config(
      tiny_run("steps = 1", "[[model.layer]]\nmixer = { type = 'aft', form = 'full' }"));
  EXPECT_TRUE(contains(refusal(aft), "without a decoding state"));
}

}  // namespace
}  // namespace headloom::test::pieces_test
