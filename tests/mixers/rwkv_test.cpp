// RWKV-4's two mixers against the original authors' code, their start, and what they refuse. What
// every mixer must hold is in properties_test.cpp.
#include "support.h"
#include "testing/errors.h"
#include "testing/golden.h"

namespace headloom::rwkv_test {
namespace {

using test::close;
using test::parameters;
using test::shape_of;

std::shared_ptr<ChannelMixer> channel(const std::string& options, const LayerShape& shape) {
  return test::channel_mixer("rwkv_channel", options, shape);
}

Tensor flat(const Tensor& t) { return t.flatten(); }

TEST(RwkvMixer, IsThePublishedOne) {
  const auto g = test::read_golden("rwkv4_timemix_C60");
  const auto mixer = test::mixer("rwkv", "", shape_of(60));
  const auto mixes = [&](const std::string& prefix) {
    return at::stack({flat(g.at(prefix + "time_mix_key")), flat(g.at(prefix + "time_mix_value")),
                      flat(g.at(prefix + "time_mix_receptance"))});
  };
  test::set(*mixer, "mix", mixes(""));
  test::set(*mixer, "time_decay", g.at("time_decay"));
  test::set(*mixer, "bonus", g.at("time_first"));
  const char* const maps[] = {"key.weight", "value.weight", "receptance.weight", "output.weight"};
  for (const char* name : maps) test::set(*mixer, name, g.at(name));
  const Tensor x = test::leaf(g.at("x"));
  const Tensor y = mixer->forward(x, {});
  EXPECT_TRUE(close(y, g.at("out"), 1e-4));
  (y * g.at("cotangent")).sum().backward();
  const auto p = parameters(*mixer);
  EXPECT_TRUE(close(x.grad(), g.at("grad.x"), 1e-3));
  EXPECT_TRUE(close(p.at("mix").grad(), mixes("grad."), 1e-3));
  EXPECT_TRUE(close(p.at("time_decay").grad(), g.at("grad.time_decay"), 1e-3));
  EXPECT_TRUE(close(p.at("bonus").grad(), g.at("grad.time_first"), 1e-3));
  for (const char* name : maps) {
    EXPECT_TRUE(close(p.at(name).grad(), g.at(std::string("grad.") + name), 1e-3)) << name;
  }

  // In two pieces, with the states recorded between and after them.
  at::NoGradGuard no_grad;
  MixerState state;
  const auto expect_state = [&](const std::string& when) {
    EXPECT_TRUE(close(state.recurrent["shift"], g.at(when + "_state1"), 1e-5)) << when;
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(
          close(state.recurrent["wkv"].select(1, i), g.at(str(when, "_state", i + 2)), 1e-5))
          << when << i;
    }
  };
  const Tensor head = mixer->extend(x.narrow(1, 0, 8), state, {});
  expect_state("mid");
  const Tensor tail = mixer->extend(x.narrow(1, 8, 11), state, {});
  expect_state("final");
  EXPECT_TRUE(close(at::cat({head, tail}, 1), g.at("out_2chunks"), 1e-4));
}

TEST(RwkvChannel, IsThePublishedOne) {
  const auto g = test::read_golden("rwkv4_channelmix_C60");
  const auto mixer = channel("hidden = 150", shape_of(60));
  const auto mixes = [&](const std::string& prefix) {
    return at::stack(
        {flat(g.at(prefix + "time_mix_key")), flat(g.at(prefix + "time_mix_receptance"))});
  };
  test::set(*mixer, "mix", mixes(""));
  const char* const maps[] = {"key.weight", "receptance.weight", "value.weight"};
  for (const char* name : maps) test::set(*mixer, name, g.at(name));
  const Tensor x = test::leaf(g.at("x"));
  const Tensor y = mixer->forward(x, {});
  EXPECT_TRUE(close(y, g.at("out"), 1e-4));
  (y * g.at("cotangent")).sum().backward();
  const auto p = parameters(*mixer);
  EXPECT_TRUE(close(x.grad(), g.at("grad.x"), 1e-3));
  EXPECT_TRUE(close(p.at("mix").grad(), mixes("grad."), 1e-3));
  for (const char* name : maps) {
    EXPECT_TRUE(close(p.at(name).grad(), g.at(std::string("grad.") + name), 1e-3)) << name;
  }
  at::NoGradGuard no_grad;
  LayerState state;
  MixerContext context;
  context.state = &state;
  const Tensor head = mixer->forward(x.narrow(1, 0, 8), context);
  EXPECT_TRUE(close(state.channel.recurrent["shift"], g.at("mid_state0"), 1e-6));
  const Tensor tail = mixer->forward(x.narrow(1, 8, 11), context);
  EXPECT_TRUE(close(state.channel.recurrent["shift"], g.at("final_state0"), 1e-6));
  EXPECT_TRUE(close(at::cat({head, tail}, 1), g.at("out_2chunks"), 1e-4));
}

TEST(RwkvChannel, DocumentsAreIsolated) {
  at::manual_seed(3);
  const auto mixer = channel("", shape_of(24, 1));
  const Tensor a = at::randn({1, 5, 24}), b = at::randn({1, 4, 24});
  MixerContext context;
  context.documents = at::tensor({7, 7, 7, 7, 7, 2, 2, 2, 2}, test::kLong).unsqueeze(0);
  const Tensor packed = mixer->forward(at::cat({a, b}, 1), context);
  EXPECT_TRUE(close(packed.narrow(1, 0, 5), mixer->forward(a, {}), 1e-5));
  EXPECT_TRUE(close(packed.narrow(1, 5, 4), mixer->forward(b, {}), 1e-5));
}

TEST(RwkvMixer, StartsAsPublished) {
  const auto first = parameters(*test::mixer("rwkv", "", shape_of(5, 0)));
  const auto last = parameters(*test::mixer("rwkv", "", shape_of(5, 3)));
  const auto row = [](at::ArrayRef<double> values) { return at::tensor(values, test::kDouble); };
  const double low = std::log(0.3) - 0.5, middle = std::log(0.3), high = std::log(0.3) + 0.5;
  EXPECT_TRUE(close(first.at("bonus"), row({middle, high, low, middle, high}), 1e-6));
  EXPECT_TRUE(close(first.at("mix")[0], row({0, 0.2, 0.4, 0.6, 0.8}), 1e-6));
  EXPECT_TRUE(close(first.at("mix")[1], row({0, 0.2, 0.4, 0.6, 0.8}), 1e-6));
  EXPECT_TRUE(close(first.at("mix")[2].square(), row({0, 0.2, 0.4, 0.6, 0.8}), 1e-6));
  // The last of four: powers of 1/4 and 1/8, values 0.3 more, decays by the square.
  EXPECT_TRUE(close(last.at("mix")[0].pow(4), row({0, 0.2, 0.4, 0.6, 0.8}), 1e-6));
  EXPECT_TRUE(close(last.at("mix")[1], last.at("mix")[0] + 0.3, 1e-6));
  EXPECT_TRUE(close(last.at("mix")[2].pow(8), row({0, 0.2, 0.4, 0.6, 0.8}), 1e-6));
  EXPECT_TRUE(close(last.at("time_decay"), row({-5, -4.5, -3, -0.5, 3}), 1e-6));
  EXPECT_NEAR(first.at("time_decay")[2].item<double>(), -5 + 8 * std::pow(0.5, 0.7), 1e-5);
  const auto of_channel = parameters(*channel("", shape_of(5, 0)));
  EXPECT_TRUE(close(of_channel.at("mix")[0], row({0, 0.2, 0.4, 0.6, 0.8}), 1e-6));
  EXPECT_TRUE(close(of_channel.at("mix")[1], row({0, 0.2, 0.4, 0.6, 0.8}), 1e-6));
  // A model of one layer.
  LayerShape alone = shape_of(5);
  alone.depth = 1;
  EXPECT_TRUE(close(parameters(*test::mixer("rwkv", "", alone)).at("time_decay"),
                    first.at("time_decay"), 0));
}

TEST(RwkvMixer, CostsByHand) {
  const auto costs = test::mixer("rwkv", "", shape_of(60))->costs(100);
  double flops = 0;
  for (const Cost& cost : costs) flops += cost.flops_per_token;
  EXPECT_DOUBLE_EQ(flops, 2.0 * 4 * 60 * 60 + 25 * 60);
}

TEST(RwkvMixer, RefusesToLookAhead) {
  LayerShape both = shape_of(12);
  both.causal = false;
  EXPECT_TRUE(test::contains(test::message_of<UsageError>([&] { test::mixer("rwkv", "", both); }),
                             "looks back only"));
  EXPECT_TRUE(test::contains(test::message_of<UsageError>([&] { channel("", both); }),
                             "rwkv_channel looks back only"));
  const auto mixer = test::mixer("rwkv", "", shape_of(12));
  MixerContext context;
  context.memory = at::zeros({1, 3, 12});
  EXPECT_TRUE(test::contains(
      test::message_of<UsageError>([&] { mixer->forward(at::zeros({1, 3, 12}), context); }),
      "does not read a memory"));
}

}  // namespace
}  // namespace headloom::rwkv_test
