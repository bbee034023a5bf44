// Training of every kind of model: it learns, it resumes bit for bit, and a task of another kind is
// refused.
#include <gtest/gtest.h>

#include <filesystem>

#include "model/describe.h"
#include "support.h"
#include "train/evaluate.h"
#include "train/load.h"
#include "train/optimizer.h"

namespace headloom::test::kinds_test {
namespace {

// One batch of every goal, with padding where there may be some.
data::Batch batch_for(const std::string& kind, const std::string& head) {
  data::Batch batch;
  const auto random = [](std::vector<int64_t> sizes) { return at::randint(9, sizes, at::kLong); };
  if (kind == "vit") {
    batch.images = at::randn({8, 3, 8, 8});
    batch.targets = at::randint(3, {8}, at::kLong);
    return batch;
  }
  batch.inputs = random({8, 6});
  batch.targets = head == "label"  ? at::randint(3, {8}, at::kLong)
                  : head == "tags" ? random({8, 6}).remainder(3)
                  : head == "span" ? at::randint(2, {8, 2}, at::kLong) + at::tensor({0, 1})
                                   : random({8, 6});
  if (head == "tokens" || head == "tags") {
    batch.targets.masked_fill_(at::rand({8, 6}).lt(0.5), data::kIgnore);
  }
  if (kind == "encoder" || kind == "encoder_decoder")
    batch.lengths = at::tensor({6, 5, 6, 3, 6, 6, 4, 6}, at::kLong);
  if (head == "span") {
    batch.context = at::arange(6).lt(batch.lengths.unsqueeze(1));
    batch.segments = at::arange(6).lt(2).to(at::kLong).expand({8, 6});
  }
  if (kind == "encoder_decoder") {
    batch.source = random({8, 5});
    batch.source_lengths = at::tensor({5, 5, 2, 5, 4, 5, 5, 1}, at::kLong);
  }
  return batch;
}

TEST(Training, EveryKindOverfitsABatch) {
  for (const std::string& kind : model_kinds()) {
    for (const std::string head : {"tokens", "label", "tags", "span"}) {
      if (head != "tokens" && kind != "encoder") continue;
      at::manual_seed(5);
      ModelConfig config;
      read_fields(parse_toml("kind = '" + kind +
                                 "'\nwidth = 32\ndepth = 2\n[[layer]]\n"
                                 "mixer = { type = 'dcmha', heads = 4 }\n",
                             "model"),
                  config, "model");
      config.complete({.vocabulary = 9,
                       .length = 6,
                       .source_length = 5,
                       .classes = 3,
                       .segments = head == "span" ? 2 : 0,
                       .image = {3, 8, 8},
                       .head = head});
      const auto model = build_model(config);
      TrainOptions options;
      options.weight_decay = 0;
      AdamW optimizer(*model, options);
      const data::Batch batch = batch_for(kind, head);
      double first = 0, last = 0;
      for (int step = 0; step < 100; ++step) {
        const BatchLoss loss = batch_loss(*model, batch);
        const Tensor mean = loss.sum / static_cast<double>(loss.targets);
        mean.backward();
        optimizer.step(3e-3);
        last = mean.item<double>();
        if (step == 0) first = last;
      }
      // Positions beyond the lengths see nothing that tells them apart, but here they count too.
      EXPECT_LT(last, 0.3 * first) << kind << " " << head;
    }
  }
}

struct KindRun {
  std::string name, model, task;
  std::string mixer = "type = 'mha', heads = 4";
};

std::vector<KindRun> kind_runs(const TempFolder& folder) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += "the cat sat on the mat and the dog lay on the log.\n";
  folder.write("text.txt", text);
  const std::string masked = "type = 'masked_text'\npaths = ['" + folder.path("text.txt") +
                             "']\nlength = 16\neval_tokens = 256\nmasked = 0.3\n";
  return {{"masked", "kind = 'encoder'\ntransform = true\noutput_bias = true", masked},
          {"label", "kind = 'encoder'\npooler = true", "type = 'classify_text'\nlength = 16\n"},
          {"pairs", "kind = 'encoder'", "type = 'classify_pairs'\ncount = 4\nchanged = 4\n"},
          {"tags", "kind = 'encoder'", "type = 'tag_text'\nlength = 16\n"},
          {"span", "kind = 'encoder'", "type = 'find_span'\ncount = 3\ndigits = 2\n"},
          {"sequence", "kind = 'encoder_decoder'",
           "type = 'sequence'\nkind = 'reverse'\nsymbols = 6\ncount = 4\neval_sequences = 64\n"},
          {"compression", "kind = 'auto_encoder'",
           "type = 'compression'\nlength = 8\nexamples = 32\neval_sequences = 16\n"},
          {"images", "kind = 'vit'", "type = 'images'\nsize = 8\neval_sequences = 16\n"}};
}

KindRun kind_run(const TempFolder& folder, const std::string& name) {
  for (const KindRun& run : kind_runs(folder)) {
    if (run.name == name) return run;
  }
  fail("there is no run '", name, "'");
}

Node config_of(const KindRun& run, const std::string& train) {
  return parse_toml(str("[model]\nwidth = 32\ndepth = 2\ndropout = 0.1\n", run.model,
                        "\n[[model.layer]]\nmixer = { ", run.mixer, " }\n[task]\n", run.task,
                        "[train]\nlr = 3e-3\nwarmup = 4\n", train),
                    "run.toml");
}

TEST(Training, AUnitOfTrainingHasTheFlopsOfItsPositions) {
  const TempFolder folder;
  const auto costs = [&](const std::string& kind, const std::string& more) {
    Node node = merged(config_of(kind_run(folder, kind), "steps = 1\n"), parse_toml(more, "more"));
    RunConfig config = read_run_config(node);
    const std::shared_ptr<data::Task> task = config.build_task();
    const std::shared_ptr<Model> model = build_without_memory(config.model);
    return std::pair(model_costs(*model, task->length()).flops_per_token,
                     training_flops(*model, *task).per_unit);
  };
  const auto [token, of_token] = costs("masked", "");
  EXPECT_DOUBLE_EQ(of_token, token);
  // Training counts an image as one, and the source of a target too.
  const auto [patch, image] = costs("images", "[model]\nimage = { patch = 2 }\n");
  EXPECT_DOUBLE_EQ(image, patch * 16);
  const auto [target, either] = costs("sequence", "");
  EXPECT_LT(either, 0.6 * target);
  EXPECT_GT(either, 0.4 * target);
}

TEST(Training, EveryKindLosesInFloat64WhatItLosesInFloat32) {
  const TempFolder folder;
  for (const KindRun& run : kind_runs(folder)) {
    std::vector<double> losses;
    for (const std::string type : {"float32", "float64"}) {
      Node config =
          config_of(run, str("steps = 3\nbatch = 8\neval_sequences = 16\ndtype = '", type, "'"));
      config = merged(config, parse_toml("[model]\ndropout = 0.0\n", "model"));
      const TrainOutcome outcome = train_quietly(config, {.folder = folder.path(run.name + type)});
      losses.push_back(outcome.evaluations.back().loss);
    }
    EXPECT_NEAR(losses[0], losses[1], 1e-4) << run.name;
  }
}

TEST(Training, EveryKindResumesBitForBit) {
  const TempFolder folder;
  std::vector<KindRun> runs = kind_runs(folder);
  // A parameter that layers share, and tables that no gradient changes.
  KindRun tags = kind_run(folder, "tags");
  tags.name = "shared";
  tags.mixer = "type = 'linformer', heads = 4, rank = 5, sharing = 'layerwise'";
  runs.push_back(tags);
  tags.name = "fixed";
  tags.mixer = "type = 'synthesizer', heads = 4, scores = ['random', 'dense'], fixed = true";
  runs.push_back(tags);
  for (const KindRun& run : runs) {
    const Node config = config_of(run, "steps = 8\nbatch = 8\neval_every = 4\neval_sequences = 16");
    const std::string whole = folder.path(run.name), cut = folder.path(run.name + "-cut");
    const TrainOutcome outcome = train_quietly(config, {.folder = whole});
    EXPECT_EQ(outcome.evaluations.size(), 2u) << run.name;
    EXPECT_GT(outcome.result.tokens_per_second, 0) << run.name;
    copy_folder(whole, cut);
    train_quietly(config, {.folder = cut, .checkpoint = "4"});
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
      const std::string file = str("/checkpoints/step-8/", name);
      EXPECT_TRUE(bytes_of(whole + file) == bytes_of(cut + file)) << run.name << " " << name;
    }
    EXPECT_EQ(metrics_of(whole), metrics_of(cut)) << run.name;
    // The folder alone gives the model back.
    const LoadedRun loaded = load_run(whole, "last");
    const auto task = RunConfig(loaded.config).build_task();
    const Evaluation e = evaluate(*loaded.model, *task, 16, 8);
    EXPECT_NEAR(e.loss, outcome.evaluations.back().loss, 1e-6) << run.name;
  }
}

TEST(Training, MaskedTextIsLearned) {
  const TempFolder folder;
  const Node config = config_of(kind_runs(folder)[0],
                                "steps = 360\neval_every = 180\nbatch = 32\neval_sequences = 16");
  const TrainOutcome outcome = train_quietly(config, {.folder = folder.path("run")});
  // Letters alone, without what stands around them, leave about 2.6 nats.
  EXPECT_LT(outcome.evaluations.back().loss, 1.3);
}

TEST(Training, ReversingIsLearned) {
  const TempFolder folder;
  Node config = config_of(kind_run(folder, "sequence"),
                          "steps = 150\neval_every = 150\nbatch = 32\neval_sequences = 64");
  for (const char* change :
       {"model.dropout=0", "model.position.type=\"learned\"", "train.lr=6e-3"}) {
    apply_override(config, change);
  }
  const TrainOutcome outcome = train_quietly(config, {.folder = folder.path("run")});
  EXPECT_GT(outcome.evaluations.back().accuracy, 0.9) << "whole sequences";
}

TEST(Training, PairsTagsAndSpansAreLearned) {
  const TempFolder folder;
  // Right are of guesses 50%; of letters without their neighbours 59%; of letters with digits 33%.
  struct Learned {
    const char* name;
    double right;
    int steps;
  };
  // When spans begin to be found depends on rounding: after 140 to 250 steps half of them are.
  for (const auto& [name, right, steps] :
       {Learned{"pairs", 0.9, 250}, Learned{"tags", 0.75, 250}, Learned{"span", 0.8, 500}}) {
    Node config = config_of(kind_run(folder, name), str("steps = ", steps, "\neval_every = ", steps,
                                                        "\nbatch = 32\neval_sequences = 128"));
    apply_override(config, "model.dropout=0");
    const TrainOutcome outcome = train_quietly(config, {.folder = folder.path(name)});
    EXPECT_GT(outcome.evaluations.back().accuracy, right) << name;
  }
}

// The loss and the best span by loops over begins and ends within the context.
TEST(Training, SpansAreScoredWithinTheirContext) {
  at::manual_seed(3);
  ModelConfig config;
  read_fields(parse_toml("kind = 'encoder'\nwidth = 16\ndepth = 1\nhead = 'span'\n"
                         "vocabulary = 9\nmax_length = 7",
                         "model"),
              config, "model");
  const auto model = build_model(config);
  for (const Tensor& p : model->parameters()) p.detach().normal_(0, 0.5);
  model->eval();
  at::NoGradGuard no_grad;
  data::Batch batch{.inputs = at::randint(9, {5, 7}, at::kLong),
                    .targets = at::tensor({2, 2, 2, 5, 3, 4, 4, 4, 2, 6}, at::kLong).view({5, 2}),
                    .lengths = at::full({5}, 7, at::kLong),
                    .context = at::arange(7).ge(2).expand({5, 7}).clone()};
  batch.context.select(1, 6).select(0, 1).fill_(false);
  const BatchLoss loss = batch_loss(*model, batch);
  EXPECT_EQ(loss.targets, 10);
  const Tensor scores = model->forward(model_input(batch)).to(at::kDouble);
  const Tensor& best = loss.best;
  double sum = 0;
  for (int64_t b = 0; b < 5; ++b) {
    const auto score = [&](int64_t t, int64_t end) { return scores[b][t][end].item<double>(); };
    const auto inside = [&](int64_t t) { return batch.context[b][t].item<bool>(); };
    for (int64_t end = 0; end < 2; ++end) {
      double total = 0;
      for (int64_t t = 0; t < 7; ++t) total += inside(t) ? std::exp(score(t, end)) : 0;
      sum += std::log(total) - score(batch.targets[b][end].item<int64_t>(), end);
    }
    double most = -1e9;
    std::pair<int64_t, int64_t> wanted;
    for (int64_t i = 0; i < 7; ++i) {
      for (int64_t j = i; j < 7; ++j) {
        if (!inside(i) || !inside(j) || score(i, 0) + score(j, 1) <= most) continue;
        most = score(i, 0) + score(j, 1);
        wanted = {i, j};
      }
    }
    EXPECT_EQ(best[2 * b].item<int64_t>(), wanted.first);
    EXPECT_EQ(best[2 * b + 1].item<int64_t>(), wanted.second);
  }
  EXPECT_NEAR(loss.sum.item<double>(), sum, 1e-4);
  model->to(at::kDouble);
  EXPECT_EQ(batch_loss(*model, batch).sum.scalar_type(), at::kDouble);
}

TEST(Training, AnotherKindOfTaskIsRefused) {
  const TempFolder folder;
  const auto refused = [&](const KindRun& run) {
    return message_of<UsageError>(
        [&] { train_quietly(config_of(run, "steps = 1"), {.folder = folder.path("run")}); });
  };
  auto runs = kind_runs(folder);
  const std::string masked = runs[0].task, sequence = kind_run(folder, "sequence").task,
                    images = kind_run(folder, "images").task;
  EXPECT_EQ(
      refused({"", "kind = 'decoder'", masked}),
      "'model.kind' is \"decoder\", but the task masked_text asks for hidden tokens, expected "
      "\"encoder\".");
  EXPECT_TRUE(
      contains(refused({"", "kind = 'encoder'\nhead = 'label'", masked}),
               "'model.head' is \"label\", but the task masked_text asks for hidden tokens"));
  EXPECT_TRUE(contains(refused({"", "kind = 'encoder'", "type = 'copy'\n"}),
                       "copy asks for the next token, expected \"decoder\""));
  EXPECT_TRUE(contains(refused({"", "kind = 'vit'", sequence}), "expected \"encoder_decoder\""));
  EXPECT_TRUE(contains(refused({"", "kind = 'vit'\nimage = { width = 16 }", images}),
                       "'model.image.width' is 16, expected the 8 of the task's images"));
  EXPECT_TRUE(contains(refused({"", "kind = 'vit'\nclasses = 1", images}),
                       "'model.classes' is 1, expected at least the"));
  EXPECT_TRUE(contains(refused({"", "kind = 'encoder_decoder'\nmax_source_length = 2", sequence}),
                       "'model.max_source_length' is 2"));
  EXPECT_TRUE(contains(refused({"", "kind = 'encoder'\nsegments = 0", "type = 'find_span'\n"}),
                       "'model.segments' is 0, expected at least the 2 kinds of segments"));
  EXPECT_TRUE(contains(refused({"", "kind = 'encoder'\nsegments = 1", "type = 'classify_pairs'\n"}),
                       "'model.segments' is 1, expected at least the 2 kinds of segments"));
  EXPECT_TRUE(contains(refused({"", "kind = 'encoder'\nclasses = 3", "type = 'tag_text'\n"}),
                       "'model.classes' is 3, expected at least the 4 classes of the task"));
  EXPECT_TRUE(
      contains(refused({"", "kind = 'encoder'\nhead = 'span'", "type = 'tag_text'\n"}),
               "'model.head' is \"span\", but the task tag_text asks for the tags of tokens"));
  EXPECT_FALSE(std::filesystem::exists(folder.path("run")));
}

TEST(Training, ARunFromBeforeAnOptionGoesOn) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  const Node config = tiny_run("steps = 2\neval_every = 1");
  train_quietly(config, {.folder = run});
  std::string text = bytes_of(run + "/config.toml");
  const size_t at = text.find("embedding_norm = false\n");
  ASSERT_NE(at, std::string::npos);
  folder.write("run/config.toml", text.erase(at, std::string("embedding_norm = false\n").size()));
  EXPECT_EQ(train_quietly(config, {.folder = run, .resume = true}).step, 2);
}

}  // namespace
}  // namespace headloom::test::kinds_test
