// AdamW against its formula in double precision, learning rates, accumulation of gradients.
#include "train/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "support.h"
#include "testing/compare.h"

namespace headloom::test {
namespace {

struct Parts : torch::nn::Module {
  Parts() {
    for (const auto& [name, shape] : std::vector<std::pair<const char*, std::vector<int64_t>>>{
             {"matrix", {3, 4}}, {"vector", {5}}, {"kernel", {2, 3, 2}}, {"unused", {2, 2}}}) {
      register_parameter(name, at::randn(shape, kDouble));
    }
  }
};

TEST(AdamW, IsTheFormula) {
  at::manual_seed(1);
  Parts parts;
  TrainOptions o;
  o.weight_decay = 0.3;
  o.clip = 1.5;
  o.beta2 = 0.99;
  AdamW optimizer(parts, o);
  std::map<std::string, Tensor> w, m, v;
  for (const auto& item : parts.named_parameters()) {
    w[item.key()] = item.value().detach().clone();
    m[item.key()] = at::zeros_like(item.value());
    v[item.key()] = at::zeros_like(item.value());
  }
  const Tensor unused = w["unused"].clone();
  bool clipped = false, free = false;
  for (int t = 1; t <= 12; ++t) {
    const double lr = 0.1 / t;
    double square = 0;
    std::map<std::string, Tensor> g;
    for (auto& item : parts.named_parameters()) {
      if (item.key() == "unused") continue;
      g[item.key()] = at::randn(item.value().sizes(), kDouble) * (t % 2 == 0 ? 0.1 : 2.0);
      // A gradient laid out unlike its parameter must not be misread.
      const bool transposed = item.key() == "matrix" && t % 3 == 0;
      item.value().mutable_grad() =
          transposed ? g[item.key()].t().contiguous().t() : g[item.key()].clone();
      square += g[item.key()].square().sum().item<double>();
    }
    const double norm = std::sqrt(square);
    const double factor = norm > 1.5 ? 1.5 / (norm + 1e-6) : 1.0;
    (norm > 1.5 ? clipped : free) = true;
    for (auto& [name, gradient] : g) {
      const Tensor scaled = gradient * factor;
      const double decay = name == "vector" ? 0.0 : 0.3;
      w[name] = w[name] * (1 - lr * decay);
      m[name] = 0.9 * m[name] + 0.1 * scaled;
      v[name] = 0.99 * v[name] + 0.01 * scaled.square();
      const Tensor mean = m[name] / (1 - std::pow(0.9, t));
      const Tensor root = at::sqrt(v[name] / (1 - std::pow(0.99, t)));
      w[name] = w[name] - lr * mean / (root + 1e-8);
    }
    EXPECT_NEAR(optimizer.step(lr), norm, 1e-9 * norm);
  }
  EXPECT_TRUE(clipped && free);
  for (const auto& item : parts.named_parameters()) {
    EXPECT_TRUE(close(item.value(), w[item.key()], 1e-9)) << item.key();
    EXPECT_FALSE(item.value().grad().defined()) << "gradients are cleared";
  }
  EXPECT_TRUE(w["unused"].equal(unused));
  for (const auto& [name, tensor] : optimizer.state()) {
    if (name == "mean.kernel") {
      EXPECT_TRUE(close(tensor, m["kernel"], 1e-9));
    }
    if (name == "steps.vector") {
      EXPECT_EQ(tensor.item<double>(), 12);
    }
  }
}

TEST(AdamW, LoadRefusesAStateThatDoesNotFit) {
  Parts parts;
  AdamW optimizer(parts, {});
  NamedTensors state = optimizer.state();
  optimizer.load(state, "file");
  NamedTensors missing(state.begin() + 1, state.end());
  EXPECT_TRUE(contains(message_of([&] { optimizer.load(missing, "file"); }),
                       "file: has no tensor 'mean.matrix'"));
  NamedTensors extra = state;
  extra.emplace_back("other", at::ones({1}));
  EXPECT_TRUE(contains(message_of([&] { optimizer.load(extra, "file"); }), "has a tensor 'other'"));
  state[0].second = at::ones({4, 3});
  EXPECT_TRUE(contains(message_of([&] { optimizer.load(state, "file"); }),
                       "'mean.matrix' has shape [4, 3], expected [3, 4]"));
}

TEST(LearningRate, WarmsUpAndFollowsItsSchedule) {
  TrainOptions o;
  o.lr = 0.5;
  o.steps = 110;
  o.warmup = 10;
  o.min_lr = 0.2;
  for (const char* schedule : {"cosine", "constant", "inverse_sqrt"}) {
    o.schedule = schedule;
    for (int64_t step = 0; step < 10; ++step) {
      EXPECT_DOUBLE_EQ(o.lr_at(step), 0.5 * static_cast<double>(step + 1) / 10) << schedule;
    }
  }
  EXPECT_NEAR(o.lr_at(9), 0.5, 1e-12);
  EXPECT_NEAR(o.lr_at(39), 0.5 * std::sqrt(10.0 / 40), 1e-12);
  o.schedule = "constant";
  EXPECT_EQ(o.lr_at(109), 0.5);
  o.schedule = "cosine";
  EXPECT_NEAR(o.lr_at(10), 0.5, 1e-12);
  EXPECT_NEAR(o.lr_at(60), 0.5 * (0.2 + 0.8 * 0.5), 1e-12);
  EXPECT_NEAR(o.lr_at(35), 0.5 * (0.2 + 0.4 * (1 + std::cos(std::numbers::pi / 4))), 1e-12);
  EXPECT_NEAR(o.lr_at(110), 0.1, 1e-12);
  o.warmup = 0;
  EXPECT_NEAR(o.lr_at(0), 0.5, 1e-12);
  o.schedule = "inverse_sqrt";
  EXPECT_NEAR(o.lr_at(0), 0.5, 1e-12);
  EXPECT_NEAR(o.lr_at(3), 0.25, 1e-12);
  o.warmup = 200;  // longer than the run
  o.schedule = "cosine";
  EXPECT_NEAR(o.lr_at(109), 0.5 * 110 / 200, 1e-12);
}

TEST(Accumulation, PiecesGiveTheGradientOfTheWholeBatch) {
  const TempFolder folder;
  std::vector<NamedTensors> weights;
  std::vector<TrainOutcome> outcomes;
  for (const int64_t pieces : {1, 4}) {
    const std::string run = folder.path(str("pieces-", pieces));
    outcomes.push_back(train_quietly(
        tiny_run(str("steps = 4\neval_every = 4\naccumulate = ", pieces)), {.folder = run}));
    weights.push_back(read_safetensors(run + "/checkpoints/step-4/model.safetensors"));
  }
  for (size_t i = 0; i < weights[0].size(); ++i) {
    EXPECT_TRUE(close(weights[1][i].second, weights[0][i].second, 1e-4)) << weights[0][i].first;
  }
  EXPECT_NEAR(outcomes[0].evaluations[0].train_loss, outcomes[1].evaluations[0].train_loss, 1e-5);
  EXPECT_NEAR(outcomes[0].evaluations[0].loss, outcomes[1].evaluations[0].loss, 1e-5);
  EXPECT_TRUE(contains(message_of<UsageError>([&] {
                         train_quietly(tiny_run("accumulate = 3"), {.folder = folder.path("x")});
                       }),
                       "'train.accumulate' is 3, expected a divisor of train.batch = 8"));
}

}  // namespace
}  // namespace headloom::test
