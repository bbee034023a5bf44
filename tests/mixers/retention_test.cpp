// Retention against the original authors' code, its formula, its start, its costs and what it
// refuses. What every mixer must hold is in properties_test.cpp.
#include "mixers/position_table.h"
#include "support.h"
#include "testing/golden.h"

namespace headloom::retention_test {
namespace {

using test::close;
using test::contains;
using test::parameters;
using test::shape_of;

TEST(RetentionMixer, IsThePublishedOne) {
  const auto g = test::read_golden("retention_odd");
  // The recording has a parallel and a chunkwise form; ours must agree with both, whatever its
  // chunk.
  for (const char* form : {"parallel", "chunkwise"}) {
    for (const char* chunk : {"64", "5", "1"}) {
      const auto mixer = test::mixer("retention", str("heads = 6\nchunk = ", chunk), shape_of(60));
      test::set(*mixer, "qkv.weight",
                at::cat({g.at("q_proj.weight"), g.at("k_proj.weight"), g.at("v_proj.weight")}));
      test::set(*mixer, "gate.weight", g.at("g_proj.weight"));
      test::set(*mixer, "output.weight", g.at("out_proj.weight"));
      const Tensor x = test::leaf(g.at("x"));
      const Tensor y = mixer->forward(x, {});
      const std::string what = str(form, " ", chunk);
      EXPECT_TRUE(close(y, g.at(str("out_", form)), 1e-4)) << what;
      (y * g.at("cotangent")).sum().backward();
      const auto grad = [&](const std::string& name) { return g.at(str(form, ".grad.", name)); };
      const auto p = parameters(*mixer);
      EXPECT_TRUE(close(x.grad(), grad("x"), 1e-3)) << what;
      const Tensor qkv = p.at("qkv.weight").grad();
      EXPECT_TRUE(close(qkv.narrow(0, 0, 60), grad("q_proj.weight"), 1e-3)) << what;
      EXPECT_TRUE(close(qkv.narrow(0, 60, 60), grad("k_proj.weight"), 1e-3)) << what;
      EXPECT_TRUE(close(qkv.narrow(0, 120, 120), grad("v_proj.weight"), 1e-3)) << what;
      EXPECT_TRUE(close(p.at("gate.weight").grad(), grad("g_proj.weight"), 1e-3)) << what;
      EXPECT_TRUE(close(p.at("output.weight").grad(), grad("out_proj.weight"), 1e-3)) << what;
    }
  }
}

// Of a text that goes on for ever: what a position needs is made for it alone.
TEST(RetentionMixer, PositionsBeyondTheTableAreThoseOfALongerOne) {
  at::NoGradGuard no_grad;
  const auto mixer = test::mixer("retention", "heads = 2", shape_of(16)),
             whole = test::mixer("retention", "heads = 2", shape_of(16));
  for (const auto& [name, tensor] : parameters(*mixer)) test::set(*whole, name, tensor);
  const int64_t far = kMostKeptRows + 5;
  whole->forward(at::zeros({1, far + 2, 16}), {});
  const Tensor x = at::randn({2, 2, 16});
  MixerState state = mixer->initial_state({}), other = whole->initial_state({});
  for (MixerState* one : {&state, &other}) one->position.longest = far;
  EXPECT_TRUE(at::equal(mixer->extend(x, state, {}), whole->extend(x, other, {})));
  state.position.longest = int64_t{1} << 40;  // no memory would hold the table up to here
  EXPECT_TRUE(at::isfinite(mixer->extend(x, state, {})).all().item<bool>());
}

// SPEC's formula, written out in double; the rows' positive factors are left to the norm.
TEST(RetentionMixer, FollowsItsFormula) {
  at::manual_seed(41);
  constexpr int64_t T = 21, H = 3, D = 8, E = 4;
  const auto mixer = test::mixer("retention", "heads = 3\nvalue_factor = 0.5", shape_of(H * D));
  mixer->to(at::kDouble);
  auto p = parameters(*mixer);
  const Tensor x = at::randn({2, T, H * D}, test::kDouble) * 10;  // far from the norm's eps
  const Tensor qkv = at::linear(x, p["qkv.weight"]);
  const auto turned = [&](int64_t from) {
    Tensor out = qkv.narrow(-1, from, H * D).unflatten(-1, {H, D}).clone();
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t i = 0; i < D / 2; ++i) {
        const double angle = static_cast<double>(t) * std::pow(10000., -static_cast<double>(i) / 3);
        const Tensor a = out.select(1, t).select(-1, 2 * i).clone();
        const Tensor b = out.select(1, t).select(-1, 2 * i + 1).clone();
        out.select(1, t).select(-1, 2 * i).copy_(a * std::cos(angle) - b * std::sin(angle));
        out.select(1, t).select(-1, 2 * i + 1).copy_(b * std::cos(angle) + a * std::sin(angle));
      }
    }
    return out.transpose(1, 2);
  };
  const Tensor v = qkv.narrow(-1, 2 * H * D, H * E).unflatten(-1, {H, E}).transpose(1, 2);
  Tensor decay = at::zeros({H, T, T}, test::kDouble);
  for (int64_t h = 0; h < H; ++h) {
    for (int64_t n = 0; n < T; ++n) {
      for (int64_t m = 0; m <= n; ++m) {
        decay[h][n][m] =
            std::pow(1 - std::pow(2., static_cast<double>(-5 - h)), static_cast<double>(n - m));
      }
    }
  }
  at::NoGradGuard no_grad;
  const Tensor scores = at::matmul(turned(0), turned(H * D).transpose(-1, -2)) / std::sqrt(8.0);
  const Tensor o = at::matmul(scores * decay, v).transpose(1, 2);
  const Tensor normed = o / o.square().mean(-1, true).sqrt();
  const Tensor gated = at::silu(at::linear(x, p["gate.weight"])) * normed.flatten(2);
  EXPECT_TRUE(close(mixer->forward(x, {}), at::linear(gated, p["output.weight"]), 1e-3));
}

TEST(RetentionMixer, StartsAsPublished) {
  at::manual_seed(42);
  const auto p = parameters(*test::mixer("retention", "heads = 4", shape_of(128)));
  const auto expect_within = [](const Tensor& weight, double bound) {
    EXPECT_LE(weight.abs().max().item<double>(), bound);
    EXPECT_GT(weight.abs().max().item<double>(), 0.99 * bound);
  };
  const double gain = std::pow(2, -2.5);
  const Tensor qkv = p.at("qkv.weight");
  ASSERT_EQ(qkv.sizes(), at::IntArrayRef({512, 128}));
  expect_within(qkv.narrow(0, 0, 128), gain * std::sqrt(6.0 / 256));
  expect_within(qkv.narrow(0, 128, 128), gain * std::sqrt(6.0 / 256));
  expect_within(qkv.narrow(0, 256, 256), gain * std::sqrt(6.0 / 384));
  expect_within(p.at("gate.weight"), gain * std::sqrt(6.0 / 384));
  expect_within(p.at("output.weight"), std::sqrt(6.0 / 384));
}

// gamma = 1 - 2^(-5 - h) is 1 in float64 from head 49 on, and 2^(-5 - h) is 0 from head 1070 on:
// such heads forget nothing.
TEST(RetentionMixer, TakesAnyNumberOfHeads) {
  at::manual_seed(43);
  at::NoGradGuard no_grad;
  for (const int64_t heads : {50, 1100}) {
    const auto mixer =
        test::mixer("retention", str("heads = ", heads, "\nchunk = 4"), shape_of(2 * heads));
    const Tensor x = at::randn({2, 11, 2 * heads});
    MixerContext documents;
    documents.documents = at::arange(11, test::kLong).div(6, "floor").expand({2, 11});
    const Tensor y = mixer->forward(x, {}), apart = mixer->forward(x, documents);
    MixerState state = mixer->initial_state({});
    Tensor pieces;
    for (const auto& [from, length] : {std::pair(0, 3), {3, 1}, {4, 7}}) {
      const Tensor piece = mixer->extend(x.narrow(1, from, length), state, {});
      pieces = pieces.defined() ? at::cat({pieces, piece}, 1) : piece;
    }
    EXPECT_TRUE(close(pieces, y, 1e-4)) << heads;
    EXPECT_TRUE(close(apart.narrow(1, 6, 5), mixer->forward(x.narrow(1, 6, 5), {}), 1e-4));
    mixer->to(at::kDouble);
    EXPECT_TRUE(close(y, mixer->forward(x.to(at::kDouble), {}), 1e-4)) << heads;
  }
}

TEST(RetentionMixer, CostGrowsWithTheLengthAndTheStateDoesNot) {
  const auto mixer = test::mixer("retention", "heads = 4", shape_of(128));
  EXPECT_EQ(mixer->state_bytes(7), 4 * 4 * 32 * 64);
  EXPECT_EQ(mixer->state_bytes(7000), mixer->state_bytes(7));
  const auto flops = [&](int64_t length) { return mixer->costs(length).at(1).flops_per_token; };
  EXPECT_EQ(flops(64), 2 * 4 * (32.5 * (32 + 64) + 2 * 32 * 64));
  EXPECT_EQ(flops(100000), flops(64));
  EXPECT_EQ(flops(1), 2 * 4 * (32 + 64 + 2 * 32 * 64));
}

TEST(RetentionMixer, RefusesWhatDoesNotFit) {
  const auto message = [](const std::string& options, const LayerShape& shape) {
    return test::refusal_of("retention", options, shape);
  };
  LayerShape looks_ahead = shape_of(96);
  looks_ahead.causal = false;
  EXPECT_TRUE(contains(message("heads = 7", shape_of(96)), "heads is 7"));
  EXPECT_TRUE(contains(message("heads = 32", shape_of(96)), "heads of an even size"));
  EXPECT_TRUE(contains(message("heads = 0", shape_of(96)), "heads"));
  EXPECT_TRUE(contains(message("value_factor = 0.3", shape_of(96)), "value_factor is 0.3"));
  EXPECT_TRUE(contains(message("value_factor = 0.0", shape_of(96)), "value_factor"));
  EXPECT_TRUE(contains(message("chunk = 0", shape_of(96)), "chunk"));
  EXPECT_TRUE(contains(message("", looks_ahead), "not causal"));
  EXPECT_TRUE(contains(message("", shape_of(96)), "does not read a memory"));
}

}  // namespace
}  // namespace headloom::retention_test
