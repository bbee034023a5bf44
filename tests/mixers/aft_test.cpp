// The attention-free mixer against its formula, its forms against each other, its start, costs and
// refusals. What every mixer must hold is in properties_test.cpp.
#include "support.h"
#include "testing/errors.h"

namespace headloom::aft_test {
namespace {

using test::close;
using test::parameters;

LayerShape shape_of(bool causal = true) {
  LayerShape out = test::shape_of(12);
  out.max_length = 10;
  out.causal = causal;
  return out;
}

// y = (sigmoid(q) * softmax over the keys of (k + w) times v) Wo, channel by channel.
TEST(AftMixer, FollowsItsFormula) {
  at::manual_seed(41);
  for (const bool causal : {true, false}) {
    const auto mixer = test::mixer("aft", "form = \"full\"", shape_of(causal));
    mixer->to(at::kDouble);
    auto p = parameters(*mixer);
    const Tensor x = at::randn({2, 7, 12}, test::kDouble) * 20;
    const auto parts = at::linear(x, p["qkv.weight"]).chunk(3, -1);
    Tensor w = p["bias"].narrow(0, 0, 7).narrow(1, 0, 7);
    if (causal) {
      const Tensor future = at::ones({7, 7}, test::kLong).triu(1).to(at::kBool);
      w = w.masked_fill(future, -std::numeric_limits<double>::infinity());
    }
    const Tensor scores = parts[1].unsqueeze(1) + w.view({1, 7, 7, 1});  // [B, T, S, C]
    const Tensor y = (at::softmax(scores, 2) * parts[2].unsqueeze(1)).sum(2);
    const Tensor expected = at::linear(at::sigmoid(parts[0]) * y, p["output.weight"]);
    EXPECT_TRUE(close(mixer->forward(x, {}), expected, 1e-12)) << causal;
  }
}

TEST(AftMixer, WithoutBiasesEveryFormIsSimple) {
  for (const bool causal : {true, false}) {
    const Tensor x = at::randn({2, 9, 12}) * 20;
    at::manual_seed(5);
    const Tensor simple = test::mixer("aft", "form = \"simple\"", shape_of(causal))->forward(x, {});
    for (const char* form : {"local", "full", "conv"}) {
      at::manual_seed(5);
      const auto mixer = test::mixer(
          "aft", str("local_window = 3\nheads = 4\nform = \"", form, "\""), shape_of(causal));
      EXPECT_FALSE(close(mixer->forward(x, {}), simple, 1e-5)) << form << causal;
      test::set(*mixer, "bias", at::zeros_like(parameters(*mixer).at("bias")));
      EXPECT_TRUE(close(mixer->forward(x, {}), simple, 1e-5)) << form << causal;
    }
  }
}

TEST(AftMixer, FactorsMakeTheBias) {
  at::manual_seed(6);
  const auto factors = test::mixer("aft", "form = \"full\"\nfactor = 3", shape_of());
  const auto dense = test::mixer("aft", "form = \"full\"", shape_of());
  for (const char* name : {"bias_u", "bias_v"}) {
    test::set(*factors, name, at::randn({10, 3}));
  }
  auto p = parameters(*factors);
  test::set(*dense, "bias", at::matmul(p["bias_u"], p["bias_v"].t()));
  for (const char* name : {"qkv.weight", "output.weight"}) test::set(*dense, name, p[name]);
  const Tensor x = at::randn({2, 10, 12});
  EXPECT_TRUE(close(factors->forward(x, {}), dense->forward(x, {}), 1e-6));
}

TEST(AftMixer, StartsSmall) {
  const auto bias = parameters(*test::mixer("aft", "", shape_of())).at("bias");
  EXPECT_EQ(bias.sizes(), (std::vector<int64_t>{10, 32}));
  EXPECT_NEAR(bias.std().item<double>(), 0.01, 0.002);
  EXPECT_EQ(parameters(*test::mixer("aft", "", shape_of(false))).at("bias").size(1), 63);
  EXPECT_EQ(parameters(*test::mixer("aft", "form = \"simple\"", shape_of())).size(), 2u);
}

TEST(AftMixer, CostsByHand) {
  const auto flops = [](const std::string& options) {
    double sum = 0;
    for (const Cost& cost : test::mixer("aft", options, shape_of())->costs(10)) {
      sum += cost.flops_per_token;
    }
    return sum;
  };
  const double maps = 2.0 * 4 * 144, gate = 8 * 12;
  EXPECT_DOUBLE_EQ(flops("form = \"simple\""), maps + gate);
  EXPECT_DOUBLE_EQ(flops("local_window = 3"), maps + gate + 4 * 3 * 12);
  EXPECT_DOUBLE_EQ(flops("form = \"full\""), maps + gate + 4 * 5.5 * 12);
  EXPECT_DOUBLE_EQ(flops("form = \"full\"\nfactor = 2"), maps + gate + 4 * 5.5 * 12 + 2 * 10 * 2);
}

TEST(AftMixer, RefusesInOneSentence) {
  const auto message = [](const std::function<void()>& f) {
    return test::message_of<UsageError>(f);
  };
  EXPECT_TRUE(
      test::contains(message([] { test::mixer("aft", "form = \"conv\"\nheads = 5", shape_of()); }),
                     "aft: heads is 5, expected a divisor of the model's width = 12."));
  for (const char* form : {"local", "full"}) {
    const auto mixer = test::mixer("aft", str("form = \"", form, "\""), shape_of());
    EXPECT_TRUE(test::contains(message([&] { mixer->forward(at::zeros({1, 11, 12}), {}); }),
                               "for 10 positions (model.max_length), but the sequence has 11."));
  }
  const auto mixer = test::mixer("aft", "", shape_of());
  MixerContext context;
  context.memory = at::zeros({1, 3, 12});
  EXPECT_TRUE(test::contains(message([&] { mixer->forward(at::zeros({1, 3, 12}), context); }),
                             "does not read a memory"));
  MixerState state;
  mixer->extend(at::zeros({1, 10, 12}), state, {});
  EXPECT_TRUE(test::contains(message([&] { mixer->extend(at::zeros({1, 1, 12}), state, {}); }),
                             "but the sequence has 11."));
}

}  // namespace
}  // namespace headloom::aft_test
