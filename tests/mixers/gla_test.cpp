// Gated linear attention's formula, its start, its state, its costs and what it refuses. What every
// mixer must hold is in properties_test.cpp.
#include "ops/gated_linear_attention/op.h"
#include "support.h"

namespace headloom::gla_test {
namespace {

using test::close;
using test::parameters;
using test::shape_of;

// The formula at the head of gla.cpp, step by step in double.
TEST(GlaMixer, FollowsItsFormula) {
  at::manual_seed(41);
  constexpr int64_t T = 21, C = 24, H = 3, D = 6, E = 10, R = 5;
  for (const bool bias : {false, true}) {
    LayerShape shape = shape_of(C);
    shape.bias = bias;
    const auto mixer = test::mixer(
        "gla", "heads = 3\nexpand_k = 0.75\nexpand_v = 1.25\ngate_rank = 5\ngate_normalizer = 3.0",
        shape);
    test::add_noise(*mixer, 0.3);
    mixer->to(at::kDouble);
    auto p = parameters(*mixer);
    ASSERT_EQ(p["decay_down.weight"].sizes(), at::IntArrayRef({R, C}));
    at::NoGradGuard no_grad;
    const Tensor x = at::randn({2, T, C}, test::kDouble);
    const auto map = [&](const std::string& name, const Tensor& from) {
      return at::linear(from, p[name + ".weight"], p[name + ".bias"]);
    };
    const Tensor qkv = map("qkv", x);
    const auto rows = [&](const Tensor& t, int64_t size) { return t.unflatten(-1, {H, size}); };
    const Tensor q = rows(qkv.narrow(-1, 0, H * D), D) / std::sqrt(6.0);
    const Tensor k = rows(qkv.narrow(-1, H * D, H * D), D);
    const Tensor v = rows(qkv.narrow(-1, 2 * H * D, H * E), E);
    const Tensor alpha =
        rows(at::pow(at::sigmoid(map("decay_up", map("decay_down", x))), 1.0 / 3), D);
    Tensor state = at::zeros({2, H, D, E}, test::kDouble);
    std::vector<Tensor> outputs;
    for (int64_t t = 0; t < T; ++t) {
      state = alpha.select(1, t).unsqueeze(-1) * state +
              k.select(1, t).unsqueeze(-1) * v.select(1, t).unsqueeze(-2);
      const Tensor o = (q.select(1, t).unsqueeze(-1) * state).sum(-2);
      outputs.push_back(o / (o.square().mean(-1, true) + 1e-6).sqrt() * p["norm"]);
    }
    const Tensor gated = at::silu(map("gate", x)) * at::stack(outputs, 1).flatten(2);
    EXPECT_TRUE(close(mixer->forward(x, {}), map("output", gated), 1e-10)) << bias;
  }
}

// A state that has seen a beginning is the operator's.
TEST(GlaMixer, KeepsTheOperatorsState) {
  at::manual_seed(42);
  at::NoGradGuard no_grad;
  const auto mixer = test::mixer("gla", "", shape_of(32));
  test::add_noise(*mixer, 0.3);
  auto p = parameters(*mixer);
  const Tensor x = at::randn({2, 9, 32});
  MixerState state = mixer->initial_state({});
  mixer->extend(x.narrow(1, 0, 4), state, {});
  mixer->extend(x.narrow(1, 4, 5), state, {});
  const auto by_head = [&](const Tensor& t) { return t.unflatten(-1, {4, t.size(-1) / 4}); };
  const Tensor qkv = at::linear(x, p["qkv.weight"]);
  const Tensor gate =
      at::linear(at::linear(x, p["decay_down.weight"]), p["decay_up.weight"], p["decay_up.bias"]);
  const Tensor last = std::get<1>(ops::gated_linear_attention(
      by_head(qkv.narrow(-1, 0, 16)), by_head(qkv.narrow(-1, 16, 16)),
      by_head(qkv.narrow(-1, 32, 32)), by_head(at::log_sigmoid(gate) / 16), {}));
  EXPECT_TRUE(close(state.recurrent.at("gla"), last, 1e-5));
  EXPECT_EQ(mixer->state_bytes(9), static_cast<double>(last.nbytes() / 2));
  EXPECT_EQ(mixer->state_bytes(7000), mixer->state_bytes(9));
}

TEST(GlaMixer, StartsForgettingSlowly) {
  at::manual_seed(43);
  const auto mixer = test::mixer("gla", "", shape_of(128));
  const auto p = parameters(*mixer);
  ASSERT_EQ(p.at("qkv.weight").sizes(), at::IntArrayRef({64 + 64 + 128, 128}));
  ASSERT_EQ(p.at("norm").sizes(), at::IntArrayRef({32}));
  for (const char* name : {"qkv", "gate", "decay_down", "decay_up"}) {
    const Tensor weight = p.at(std::string(name) + ".weight");
    EXPECT_NEAR(weight.std().item<double>(), 0.02, 0.002) << name;
  }
  EXPECT_NEAR(p.at("output.weight").std().item<double>(), 0.02 / std::sqrt(8.0), 0.0005);
  EXPECT_TRUE(at::equal(p.at("norm"), at::ones({32})));
  EXPECT_TRUE(at::equal(p.at("decay_up.bias"), at::zeros({64})));
  EXPECT_EQ(p.count("decay_down.bias") + p.count("qkv.bias"), 0);
}

TEST(GlaMixer, CountsItsCosts) {
  const auto mixer = test::mixer("gla", "heads = 4", shape_of(128));
  const auto costs = mixer->costs(64);
  EXPECT_EQ(costs.at(0).flops_per_token, 2 * (128 * 4 * (2 * 16 + 3 * 32) + 16 * (128 + 64)));
  EXPECT_EQ(costs.at(1).flops_per_token, 5 * 4 * 16 * 32);
  EXPECT_EQ(costs.at(2).parameters, 32);
}

TEST(GlaMixer, RefusesWhatDoesNotFit) {
  const auto message = [](const std::string& options, const LayerShape& shape) {
    return test::refusal_of("gla", options, shape);
  };
  LayerShape both = shape_of(96);
  both.causal = false;
  EXPECT_TRUE(test::contains(message("heads = 7", shape_of(96)),
                             "gla: expand_k is 0.5, which makes 48 keys at width 96, expected a "
                             "multiple of heads = 7."));
  EXPECT_TRUE(test::contains(message("expand_v = 0.99", shape_of(96)), "expand_v is 0.99"));
  EXPECT_TRUE(test::contains(message("expand_k = 0.0", shape_of(96)), "expand_k"));
  EXPECT_TRUE(test::contains(message("gate_rank = 0", shape_of(96)), "gate_rank"));
  EXPECT_TRUE(test::contains(message("gate_normalizer = 0.0", shape_of(96)), "gate_normalizer"));
  EXPECT_TRUE(test::contains(message("", both), "looks back only"));
  EXPECT_TRUE(test::contains(message("", shape_of(96)), "does not read a memory"));
}

}  // namespace
}  // namespace headloom::gla_test
