// Performer's formula and its stabiliser, what its features approximate, when they are drawn again,
// its state, its costs and what it refuses. What every mixer must hold is in properties_test.cpp.
#include "support.h"
#include "testing/golden.h"

namespace headloom::performer_test {
namespace {

using test::close;
using test::parameters;
using test::shape_of;

LayerShape shape(int64_t width, bool causal, const std::string& position = "none") {
  LayerShape out = shape_of(width);
  out.causal = causal;
  out.position.type = position;
  return out;
}

// One head's row: q [D] over keys [n, D] and values [n, D], as the authors' code computes it, with
// all keys of the row in view.
Tensor row(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& features, double eps,
           bool softmax) {
  const double scale = std::pow(static_cast<double>(q.size(0)), -0.25);
  const Tensor on_q = at::matmul(features, q * scale), on_k = at::matmul(k * scale, features.t());
  Tensor of_q = at::relu(on_q) + eps, of_k = at::relu(on_k) + eps;
  if (softmax) {
    const Tensor half_q = (q * scale).square().sum() / 2;
    const Tensor half_k = (k * scale).square().sum(-1, true) / 2;
    of_q = (on_q - half_q - on_q.max()).exp() + eps;
    of_k = (on_k - half_k - on_k.max()).exp() + eps;
  }
  const Tensor weights = at::matmul(of_k, of_q);
  return at::matmul(weights, v) / weights.sum();
}

// The whole mixer, row by row in double, where positions `keys` (b, t) are seen.
using Range = std::pair<int64_t, int64_t>;
Tensor expected(const std::map<std::string, Tensor>& p, const Tensor& x, int64_t heads, double eps,
                bool softmax, const std::function<Range(int64_t, int64_t)>& keys) {
  const int64_t width = x.size(-1), dim = width / heads;
  const Tensor qkv = at::linear(x, p.at("qkv.weight"));
  const auto part = [&](int64_t which, int64_t b, int64_t head) {
    return qkv[b].narrow(-1, which * width + head * dim, dim);
  };
  Tensor out = at::zeros_like(x);
  for (int64_t b = 0; b < x.size(0); ++b) {
    for (int64_t t = 0; t < x.size(1); ++t) {
      const auto [first, last] = keys(b, t);
      for (int64_t h = 0; h < heads; ++h) {
        const auto seen = [&](int64_t which) {
          return part(which, b, h).narrow(0, first, last - first);
        };
        out[b][t]
            .narrow(0, h * dim, dim)
            .copy_(row(part(0, b, h)[t], seen(1), seen(2), p.at("features"), eps, softmax));
      }
    }
  }
  return at::linear(out, p.at("output.weight"));
}

TEST(Performer, FollowsItsFormula) {
  at::manual_seed(51);
  at::NoGradGuard no_grad;
  for (const bool softmax : {true, false}) {
    for (const bool causal : {true, false}) {
      const std::string options = str("heads = 3\nfeatures = 11\nkernel = \"",
                                      softmax ? "softmax" : "relu", "\"\neps = 0.01");
      const auto mixer = test::mixer("performer", options, shape(24, causal));
      test::add_noise(*mixer, 0.3);
      mixer->to(at::kDouble);
      const auto p = parameters(*mixer);
      const Tensor x = at::randn({2, 13, 24}, test::kDouble) * 2;
      const auto check = [&](const MixerContext& context, const Tensor& rows, const auto& keys) {
        const Tensor wanted = expected(p, x, 3, 0.01, softmax, keys);
        EXPECT_TRUE(close(mixer->forward(x, context) * rows, wanted * rows, 1e-10))
            << softmax << causal;
      };
      const Tensor all = at::ones({2, 13, 1}, test::kDouble);
      check({}, all, [&](int64_t, int64_t t) { return Range(0, causal ? t + 1 : 13); });
      // A document of 4 positions, then one of 6, then the first one's id again.
      MixerContext packed;
      packed.documents =
          at::tensor({7, 7, 7, 7, 2, 2, 2, 2, 2, 2, 7, 7, 7}, test::kLong).expand({2, 13});
      check(packed, all, [&](int64_t, int64_t t) {
        const Range own = t < 4 ? Range(0, 4) : t < 10 ? Range(4, 10) : Range(10, 13);
        return causal ? Range(own.first, t + 1) : own;
      });
      if (causal) continue;
      MixerContext padded;
      padded.lengths = at::tensor({5, 13}, test::kLong);
      const Tensor real = at::arange(13).lt(padded.lengths.unsqueeze(1)).unsqueeze(-1);
      check(padded, real, [&](int64_t b, int64_t) { return Range(0, b == 0 ? 5 : 13); });
      packed.lengths = padded.lengths;
      check(packed, real, [&](int64_t b, int64_t t) {
        return t < 4 ? Range(0, 4) : b == 0 ? Range(4, 5) : t < 10 ? Range(4, 10) : Range(10, 13);
      });
    }
  }
}

TEST(Performer, Golden) {
  for (const char* kernel : {"softmax", "relu"}) {
    const test::Tensors g = test::read_golden(str("performer_", kernel));
    const auto mixer =
        test::mixer("performer", str("heads = 6\nfeatures = 23\nkernel = \"", kernel, "\""),
                    shape(60, /*causal=*/false));
    test::set(*mixer, "qkv.weight",
              at::cat({g.at("to_q.weight"), g.at("to_k.weight"), g.at("to_v.weight")}));
    test::set(*mixer, "output.weight", g.at("to_out.weight"));
    test::set(*mixer, "features", g.at("features"));
    const Tensor x = test::leaf(g.at("x"));
    const Tensor y = mixer->forward(x, {}) + g.at("to_out.bias");
    EXPECT_TRUE(close(y, g.at("out"), 1e-4)) << kernel;
    (y * g.at("cotangent")).sum().backward();
    const auto p = parameters(*mixer);
    const auto grad = [&](const char* name) { return g.at(str("grad.", name)); };
    EXPECT_TRUE(close(x.grad(), grad("x"), 1e-3)) << kernel;
    EXPECT_TRUE(close(p.at("qkv.weight").grad(),
                      at::cat({grad("to_q.weight"), grad("to_k.weight"), grad("to_v.weight")}),
                      1e-3))
        << kernel;
    EXPECT_TRUE(close(p.at("output.weight").grad(), grad("to_out.weight"), 1e-3)) << kernel;
  }
}

// With many features and a small eps it is softmax attention, and the error falls as m^-1/2.
TEST(Performer, ApproachesSoftmaxAttention) {
  at::NoGradGuard no_grad;
  for (const bool causal : {true, false}) {
    at::manual_seed(52);
    const auto exact = test::mixer("mha", "heads = 4", shape(64, causal, "rope"));
    test::add_noise(*exact, 0.05);
    const Tensor x = at::randn({2, 40, 64});
    const Tensor wanted = exact->forward(x, {});
    const auto error = [&](int64_t features, bool orthogonal) {
      double sum = 0;
      for (int trial = 0; trial < 8; ++trial) {
        const auto mixer = test::mixer("performer",
                                       str("heads = 4\neps = 1e-9\nfeatures = ", features,
                                           "\northogonal = ", orthogonal ? "true" : "false"),
                                       shape(64, causal, "rope"));
        for (const char* name : {"qkv.weight", "output.weight"}) {
          test::set(*mixer, name, parameters(*exact).at(name));
        }
        sum += (mixer->forward(x, {}) - wanted).norm().item<double>();
      }
      return sum / (8 * wanted.norm().item<double>());
    };
    const double coarse = error(64, true), fine = error(64 * 64, true);
    EXPECT_LT(fine, 0.05);
    EXPECT_LT(fine, coarse / 4);
    // Orthogonal features have the smaller variance.
    const double orthogonal = error(16, true), independent = error(16, false);
    EXPECT_LT(orthogonal, independent);
  }
}

// A key so large that all that came before it vanishes beside it.
TEST(Performer, ALargeKeyChangesNothingBeforeIt) {
  at::manual_seed(53);
  at::NoGradGuard no_grad;
  for (const char* kernel : {"softmax", "relu"}) {
    const auto mixer = test::mixer("performer", str("heads = 4\nkernel = \"", kernel, "\""),
                                   shape(64, true, "rope"));
    test::add_noise(*mixer, 0.1);
    const Tensor x = at::randn({1, 40, 64});
    Tensor changed = x.clone();
    changed.narrow(1, 20, 1).mul_(1000);
    const Tensor before = mixer->forward(x, {}), after = mixer->forward(changed, {});
    EXPECT_TRUE(after.isfinite().all().item<bool>());
    EXPECT_TRUE(at::equal(before.narrow(1, 0, 20), after.narrow(1, 0, 20)));
    EXPECT_FALSE(close(before.narrow(1, 20, 20), after.narrow(1, 20, 20), 1e-3));
    MixerState state;
    for (int64_t at = 0; at < 40; at += 8) {
      EXPECT_TRUE(
          close(mixer->extend(changed.narrow(1, at, 8), state, {}), after.narrow(1, at, 8), 1e-5))
          << kernel << " " << at;
    }
  }
}

TEST(Performer, StaysFiniteForLargeInputs) {
  at::manual_seed(54);
  for (const bool causal : {true, false}) {
    const auto mixer = test::mixer("performer", "heads = 2\neps = 1e-9", shape(64, causal));
    test::add_noise(*mixer, 0.1);
    const Tensor x = test::leaf(at::randn({2, 30, 64}) * 100);
    MixerContext context;
    if (!causal) context.lengths = at::tensor({0, 17}, test::kLong);
    const Tensor y = mixer->forward(x, context);
    EXPECT_TRUE(y.isfinite().all().item<bool>()) << causal;
    y.square().sum().backward();
    EXPECT_TRUE(x.grad().isfinite().all().item<bool>()) << causal;
    if (!causal) {
      EXPECT_EQ(y[0].abs().max().item<double>(), 0);
    }
  }
}

TEST(Performer, DrawsOrthogonalBlocksOfGaussianLength) {
  at::manual_seed(55);
  constexpr int64_t D = 16;
  const Tensor w =
      parameters(*test::mixer("performer", "heads = 4\nfeatures = 40", shape(64, true)))
          .at("features");
  ASSERT_EQ(w.sizes(), at::IntArrayRef({40, D}));
  for (const auto& [first, rows] : {std::pair(0, 16), std::pair(16, 16), std::pair(32, 8)}) {
    const Tensor block = w.narrow(0, first, rows), products = at::matmul(block, block.t());
    EXPECT_TRUE(close(products, products.diagonal().diag(), 1e-5)) << first;
  }
  const Tensor many =
      parameters(*test::mixer("performer", "heads = 4\nfeatures = 6400", shape(64, true)))
          .at("features");
  const Tensor squares = many.square().sum(-1);  // chi squared of D degrees
  EXPECT_NEAR(squares.mean().item<double>(), D, 0.3);
  EXPECT_NEAR(squares.var().item<double>(), 2 * D, 4);
  EXPECT_NEAR(many.mean().item<double>(), 0, 0.01);
  const Tensor plain =
      parameters(*test::mixer("performer", "heads = 4\northogonal = false", shape(64, true)))
          .at("features");
  ASSERT_EQ(plain.size(0), 44);  // 16 ln 16
  const Tensor products = at::matmul(plain, plain.t());
  EXPECT_GT((products - products.diagonal().diag()).abs().max().item<double>(), 1);
}

TEST(Performer, DrawsAgainAtItsSteps) {
  const auto fresh = [](const std::string& options) {
    at::manual_seed(56);
    return test::mixer("performer", "heads = 4\n" + options, shape(64, true));
  };
  const auto features = [](const TokenMixer& mixer) {
    return parameters(mixer).at("features").clone();
  };
  const auto mixer = fresh("redraw = 3"), other = fresh("redraw = 3");
  const Tensor start = features(*mixer), random = at::rand({3});
  for (const int64_t step : {1, 2, 4, 1000}) mixer->redraw(step, 7, 0);
  EXPECT_TRUE(at::equal(features(*mixer), start));
  mixer->redraw(3, 7, 0);
  const Tensor third = features(*mixer);
  EXPECT_FALSE(at::equal(third, start));
  // A function of step, seed and layer, whatever there was before.
  mixer->redraw(6, 7, 0);
  EXPECT_FALSE(at::equal(features(*mixer), third));
  other->redraw(3, 7, 0);
  EXPECT_TRUE(at::equal(features(*other), third));
  other->redraw(3, 8, 0);
  EXPECT_FALSE(at::equal(features(*other), third));
  other->redraw(3, 7, 1);
  EXPECT_FALSE(at::equal(features(*other), third));
  // No other random number is drawn, and a forward pass draws none.
  at::manual_seed(56);
  const auto again = test::mixer("performer", "heads = 4\nredraw = 3", shape(64, true));
  again->redraw(3, 7, 0);
  again->train();
  again->forward(at::ones({1, 5, 64}), {});
  EXPECT_TRUE(at::equal(features(*again), third));
  const auto never = fresh("redraw = 0");
  for (int64_t step = 1; step < 9; ++step) never->redraw(step, 7, 0);
  EXPECT_TRUE(at::equal(features(*never), start));
  at::manual_seed(57);
  const Tensor expected_next = at::rand({2});
  at::manual_seed(57);
  again->redraw(6, 7, 0);
  EXPECT_TRUE(at::equal(at::rand({2}), expected_next));
}

TEST(Performer, CountsItsCostsAndItsState) {
  const auto mixer = test::mixer("performer", "heads = 4\nfeatures = 50", shape(64, true));
  const auto costs = mixer->costs(99);
  EXPECT_EQ(costs.at(0).flops_per_token, 8 * 64 * 64);
  EXPECT_EQ(costs.at(1).flops_per_token, 2 * 2 * 4 * 50 * 16);
  EXPECT_EQ(costs.at(2).flops_per_token, 5 * 4 * 51 * 17);
  EXPECT_EQ(mixer->state_bytes(99), 4 * (4 * 51 * 17 + 4));
  const auto relu =
      test::mixer("performer", "heads = 4\nfeatures = 50\nkernel = \"relu\"", shape(64, false));
  EXPECT_EQ(relu->costs(99).at(2).flops_per_token, 4 * 4 * 50 * 17);
  const auto p = parameters(*test::mixer("performer", "", shape(256, true)));
  EXPECT_NEAR(p.at("qkv.weight").std().item<double>(), 0.02, 0.001);
  EXPECT_NEAR(p.at("output.weight").std().item<double>(), 0.02 / std::sqrt(8.0), 0.0005);
  ASSERT_EQ(p.at("features").sizes(), at::IntArrayRef({111, 32}));
}

TEST(Performer, RefusesWhatDoesNotFit) {
  const auto message = [](const std::string& options, const LayerShape& in) {
    return test::refusal_of("performer", options, in);
  };
  EXPECT_EQ(message("heads = 7", shape(96, true)),
            "performer: heads is 7, expected a divisor of the model's width = 96.");
  EXPECT_EQ(message("", shape(96, true, "alibi")),
            "performer: there are no scores for alibi to add to, expected another "
            "model.position.type.");
  EXPECT_TRUE(test::contains(message("features = 0", shape(96, true)), "features"));
  EXPECT_TRUE(test::contains(message("eps = 0.0", shape(96, true)), "eps"));
  EXPECT_TRUE(test::contains(message("redraw = -1", shape(96, true)), "redraw"));
  EXPECT_TRUE(test::contains(message("kernel = \"exp\"", shape(96, true)), "kernel"));
  EXPECT_TRUE(test::contains(message("", shape(96, true)), "does not read a memory"));
}

}  // namespace
}  // namespace headloom::performer_test
