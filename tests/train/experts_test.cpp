// What layers with experts leave in training: a balance loss that is minimised, and records of it
// and of the load.
#include <nlohmann/json.hpp>

#include "support.h"

namespace headloom {
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
  const auto evaluations = read_evaluations(run + "/metrics.jsonl");
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
}  // namespace headloom
