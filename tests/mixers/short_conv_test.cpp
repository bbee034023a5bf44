// What is special to the convolution before a token mixer; properties_test.cpp has every mixer
// after one.
#include "support.h"

namespace headloom::test::short_conv_test {
namespace {

LayerShape convolved(int64_t taps) {
  LayerShape shape = shape_of(32);
  shape.short_conv = taps;
  return shape;
}

// The mixer reads x + conv(x), written out in loops.
TEST(ShortConv, IsAddedToWhatTheMixerReads) {
  at::manual_seed(3);
  const auto with = mixer("mha", "heads = 4", convolved(4));
  const auto without = mixer("mha", "heads = 4", shape_of(32));
  const auto own = parameters(*with);
  for (const auto& [name, value] : parameters(*without)) set(*without, name, own.at(name));
  const Tensor filter = own.at("short_conv"), x = at::randn({2, 7, 32});
  ASSERT_EQ(filter.sizes(), (std::vector<int64_t>{32, 4}));
  at::NoGradGuard no_grad;
  Tensor read = x.clone();
  for (int64_t t = 0; t < 7; ++t) {
    for (int64_t back = 0; back < 4 && back <= t; ++back) {
      read.select(1, t).add_(x.select(1, t - back) * filter.select(1, 3 - back));
    }
  }
  EXPECT_TRUE(close(with->forward(x, {}), without->forward(read, {}), 1e-5));
  EXPECT_FALSE(close(with->forward(x, {}), without->forward(x, {}), 1e-2));
}

TEST(ShortConv, OfZerosIsNone) {
  at::manual_seed(4);
  for (const auto& entry : token_mixers()) {
    if (!entry.traits.causal) continue;
    LayerShape shape = shape_of(96);
    const auto without = mixer(entry.name, "", shape);
    shape.short_conv = 4;
    const auto with = mixer(entry.name, "", shape);
    add_noise(*without, 0.1);
    for (const auto& [name, value] : parameters(*without)) set(*with, name, value);
    const Tensor x = at::randn({2, 7, 96}), expected = without->forward(x, {});
    EXPECT_FALSE(close(with->forward(x, {}), expected, 1e-2)) << entry.name;
    set(*with, "short_conv", at::zeros({96, 4}));
    EXPECT_TRUE(close(with->forward(x, {}), expected, 1e-6)) << entry.name;
  }
}

TEST(ShortConv, StartsAsPyTorchStartsConvolutions) {
  const auto filter = parameters(*mixer("rwkv", "", convolved(4))).at("short_conv");
  EXPECT_LE(filter.abs().max().item<double>(), 0.5);
  EXPECT_GT(filter.abs().max().item<double>(), 0.4);
  EXPECT_NEAR(filter.std().item<double>(), 0.5 / std::sqrt(3.0), 0.05);
}

TEST(ShortConv, AddsItsCostsAlone) {
  const auto with = mixer("retention", "heads = 4", convolved(3));
  const auto without = mixer("retention", "heads = 4", shape_of(32));
  EXPECT_EQ(with->state_bytes(9) - without->state_bytes(9), 4.0 * 2 * 32);
  const std::vector<Cost> costs = with->costs(9);
  ASSERT_EQ(costs.size(), without->costs(9).size() + 1);
  EXPECT_EQ(costs.back().part, "short convolution");
  EXPECT_EQ(costs.back().parameters, 3 * 32);
  EXPECT_EQ(costs.back().flops_per_token, (2 * 3 + 1) * 32);
}

TEST(ShortConv, IsRefusedWhereTheModelLooksBothWays) {
  LayerShape shape = convolved(4);
  shape.causal = false;
  EXPECT_EQ(
      refusal_of("mha", "heads = 4", shape),
      "mha: short_conv is 4, which looks back only, but the model is not causal, expected 0.");
}

}  // namespace
}  // namespace headloom::test::short_conv_test
