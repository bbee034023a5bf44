// What layers with experts leave in training: a balance loss that is minimised, and records of it
// and of the load.
#include <nlohmann/json.hpp>

#include "model/model.h"
#include "support.h"
#include "train/metrics.h"

namespace headloom::experts_test {
namespace {

using namespace test;

Node run_with(const std::string& balance, const std::string& train) {
  Node root = tiny_run(train);
  root.set("model",
           parse_toml("width = 16\ndepth = 2\n[[layer]]\nmixer = { type = 'mha', heads = 2 }\n"
                      "channel = { type = 'moe', routed = 4, shared = 1, active = 1, hidden = 8, "
                      "balance = " +
                          balance + " }\n",
                      "model"));
  return root;
}

TEST(Experts, BalanceLossAndLoadAreRecorded) {
  const TempFolder folder;
  const std::string run = folder.path() + "/run";
  const TrainOutcome outcome = train_quietly(
      run_with("0.01", "steps = 10\neval_every = 5\naccumulate = 2"), {.folder = run});
  int steps = 0;
  for (const std::string& line : lines_of(run + "/metrics.jsonl")) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("step_seconds")) {
      ++steps;
      // Two layers; equal load and scores would give 0.01 each.
      EXPECT_GE(json.at("balance_loss").get<double>(), 0.0199);
      EXPECT_LT(json.at("balance_loss").get<double>(), 0.08);
    } else {
      EXPECT_EQ(json.at("expert_load").size(), 2u);
    }
  }
  EXPECT_EQ(steps, 10);
  const auto evaluations = read_metrics(run + "/metrics.jsonl").evaluations;
  ASSERT_EQ(evaluations.size(), 2u);
  ASSERT_EQ(outcome.evaluations.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    for (const int64_t layer : {0, 1}) {
      const std::vector<double>& shares = evaluations[i].expert_load.at(layer);
      ASSERT_EQ(shares.size(), 4u);
      double sum = 0;
      for (size_t e = 0; e < 4; ++e) {
        sum += shares[e];
        EXPECT_NEAR(shares[e], outcome.evaluations[i].expert_load.at(layer)[e], 1e-6);
      }
      EXPECT_NEAR(sum, 1, 1e-5);
    }
  }
}

TEST(Experts, TheLoadBeforeAResumeCounts) {
  const TempFolder folder;
  const std::string run = folder.path() + "/run";
  const Node config = run_with("0.01", "steps = 10\neval_every = 5\ncheckpoint_every = 2");
  const TrainOutcome whole = train_quietly(config, {.folder = run});
  const TrainOutcome resumed = train_quietly(config, {.folder = run, .checkpoint = "8"});
  EXPECT_EQ(resumed.evaluations.back().step, 10);
  EXPECT_EQ(resumed.evaluations.back().expert_load, whole.evaluations.back().expert_load);
}

TEST(Experts, ABalanceLossEvensTheLoadOut) {
  const TempFolder folder;
  const auto unevenness = [&](const std::string& balance) {
    const std::string run = folder.path() + "/run" + balance;
    const TrainOutcome outcome =
        train_quietly(run_with(balance, "steps = 40\neval_every = 20\nlr = 0.01"), {.folder = run});
    double most = 0;
    for (const auto& [layer, shares] : outcome.evaluations.back().expert_load) {
      most = std::max(most, *std::max_element(shares.begin(), shares.end()));
    }
    return most;
  };
  const double free = unevenness("0.0"), pressed = unevenness("1.0");
  EXPECT_LT(pressed, 0.35);
  EXPECT_GT(free, pressed + 0.05);
}

// Both layers' biases are moved by a run; `bias_speed` so that a move is plain to see.
Node balanced_run(const std::string& train) {
  Node root = tiny_run(train);
  root.set("model",
           parse_toml("width = 16\ndepth = 2\n[[layer]]\nmixer = { type = 'mha', heads = 2 }\n"
                      "channel = { type = 'moe', routed = 4, shared = 1, active = 1, hidden = 8, "
                      "scores = 'sigmoid', bias_speed = 0.125, balance = 0.0 }\n",
                      "model"));
  return root;
}

std::map<std::string, Tensor> biases_of(const std::string& run, int64_t step) {
  std::map<std::string, Tensor> out;
  for (const auto& [name, tensor] :
       read_safetensors(str(run, "/checkpoints/step-", step, "/model.safetensors"))) {
    if (name.ends_with("choice_bias")) out[name] = tensor.clone();
  }
  return out;
}

TEST(Experts, TheBiasMovesOnceAStepByTheLoadOfTheWholeBatch) {
  const TempFolder folder;
  std::map<std::string, Tensor> whole;
  for (const int64_t pieces : {1, 4}) {
    const std::string run = folder.path(str("pieces-", pieces));
    train_quietly(balanced_run(str("steps = 5\neval_every = 5\naccumulate = ", pieces)),
                  {.folder = run});
    const auto biases = biases_of(run, 5);
    ASSERT_EQ(biases.size(), 2u);
    for (const auto& [name, bias] : biases) {
      // Five moves of an eighth, each exact.
      EXPECT_GT(bias.abs().max().item<double>(), 0) << name;
      EXPECT_LE(bias.abs().max().item<double>(), 5 * 0.125) << name;
      if (pieces == 1) {
        whole[name] = bias;
      } else {
        EXPECT_TRUE(bias.equal(whole[name])) << name << "\n" << bias << whole[name];
      }
    }
  }
}

TEST(Experts, ResumingGoesOnWithTheBiasAndReadsCheckpointsThatHadItAsAParameter) {
  const TempFolder folder;
  const std::string config = "steps = 6\neval_every = 3";
  const std::string whole = folder.path("whole"), half = folder.path("half");
  train_quietly(balanced_run(config), {.folder = whole});
  copy_folder(whole, half);
  train_quietly(balanced_run(config), {.folder = half, .checkpoint = "3"});
  EXPECT_EQ(bytes_of(whole + "/checkpoints/step-6/model.safetensors"),
            bytes_of(half + "/checkpoints/step-6/model.safetensors"));

  // What such an optimiser's state held of it.
  RunConfig run = read_run_config(balanced_run(config));
  run.build_task();
  const auto model = build_model(run.model);
  AdamW optimizer(*model, run.train);
  NamedTensors state = optimizer.state();
  const size_t own = state.size();
  for (const char* part : {"mean.", "square.", "steps."}) {
    const std::string name = str(part, "layer0.channel.choice_bias");
    for (const auto& item : state) EXPECT_NE(item.first, name);
    state.emplace_back(name, at::zeros({4}));
  }
  optimizer.load(as_stored(state), "file");
  EXPECT_EQ(optimizer.state().size(), own);
}

TEST(Experts, AnEncoderAndADecoderHaveLoadsOfTheirOwn) {
  ModelConfig config;
  read_fields(parse_toml("kind = 'encoder_decoder'\nvocabulary = 9\nmax_length = 8\n"
                         "max_source_length = 8\nwidth = 16\ndepth = 1\nencoder_depth = 2\n"
                         "[[layer]]\nmixer = { type = 'mha', heads = 2 }\n"
                         "channel = { type = 'moe', routed = 4, active = 1, bias_speed = 0.5 }\n",
                         "test"),
              config, "model");
  const auto model = build_model(config);
  EXPECT_EQ(model->balanced(), (std::vector<int64_t>{0, 1, 2}));
  AuxiliaryOutputs auxiliary;
  model->hidden({.tokens = at::zeros({2, 3}, at::kLong),
                 .source = at::zeros({2, 5}, at::kLong),
                 .auxiliary = &auxiliary});
  ASSERT_EQ(auxiliary.load.size(), 3u);
  EXPECT_EQ(auxiliary.load[1].sum().item<int64_t>(), 10);
  EXPECT_EQ(auxiliary.load[2].sum().item<int64_t>(), 6);
  model->balance({{2, at::tensor({9, 1, 1, 1})}});
  const auto bias = [&](const char* name) { return model->named_buffers()[name]; };
  EXPECT_TRUE(bias("encoder.layer1.channel.choice_bias").equal(at::zeros({4})));
  EXPECT_TRUE(
      bias("decoder.layer0.channel.choice_bias").equal(at::tensor({-0.5f, 0.5f, 0.5f, 0.5f})));
}

TEST(Experts, DenseModelsHaveNoSuchRecords) {
  const TempFolder folder;
  const std::string run = folder.path() + "/run";
  train_quietly(tiny_run("steps = 4\neval_every = 2"), {.folder = run});
  for (const std::string& line : lines_of(run + "/metrics.jsonl")) {
    EXPECT_EQ(line.find("balance"), std::string::npos) << line;
    EXPECT_EQ(line.find("expert"), std::string::npos) << line;
  }
}

}  // namespace
}  // namespace headloom::experts_test
