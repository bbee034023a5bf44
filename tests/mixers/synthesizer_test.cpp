// Synthesizer's scores of every kind and their mixtures, their start, the state, the costs and what
// it refuses. What every mixer must hold is in properties_test.cpp.
#include "support.h"

namespace headloom::synthesizer_test {
namespace {

using test::close;
using test::parameters;

constexpr int64_t kWidth = 24, kHeads = 3, kDim = 8, kLongest = 14;

LayerShape shape(bool causal, const std::string& position = "none", int64_t longest = kLongest) {
  LayerShape out = test::shape_of(kWidth);
  out.causal = causal;
  out.max_length = longest;
  out.position.type = position;
  return out;
}

// S of one kind for the rows of one sequence x [T, C], [H, T, L], number by number.
Tensor scores(const std::map<std::string, Tensor>& p, const std::string& kind, const Tensor& x) {
  const int64_t length = x.size(0);
  Tensor out = at::zeros({kHeads, length, kLongest}, test::kDouble);
  const auto hidden = [&](const std::string& name, int64_t t) {
    return at::relu(at::linear(x[t], p.at(name + ".weight"), p.at(name + ".bias")));
  };
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t t = 0; t < length; ++t) {
      const auto own = [&](const std::string& name) {
        return hidden(name, t).narrow(0, h * kDim, kDim);
      };
      Tensor to = out[h][t];
      if (kind == "dense") {
        to.copy_(at::linear(own("dense_hidden"), p.at("dense.weight"), p.at("dense.bias")));
      } else if (kind == "random") {
        to.copy_(p.at("random")[h][t]);
      } else if (kind == "factorized_random") {
        to.copy_(at::matmul(p.at("random_columns")[h], p.at("random_rows")[h][t]));
      } else if (kind == "factorized_dense") {
        // 14 columns: 4 blocks of 4.
        const Tensor both =
            at::linear(own("factor_hidden"), p.at("factors.weight"), p.at("factors.bias"));
        EXPECT_EQ(both.size(0), 8);
        for (int64_t s = 0; s < kLongest; ++s) to[s] = both[s / 4] * both[4 + s % 4];
      } else {
        const Tensor qk = at::linear(x, p.at("qk.weight")).unflatten(-1, {2, kHeads, kDim});
        const Tensor products = at::matmul(qk.select(1, 1).select(1, h), qk[t][0][h]);
        to.narrow(0, 0, length).copy_(products / std::sqrt(static_cast<double>(kDim)));
      }
    }
  }
  return out;
}

TEST(Synthesizer, FollowsItsFormula) {
  at::manual_seed(61);
  at::NoGradGuard no_grad;
  const std::vector<std::vector<std::string>> mixtures = {
      {"dense"},
      {"random"},
      {"factorized_dense"},
      {"factorized_random"},
      {"random", "dense"},
      {"dot_product", "random"},
      {"dense", "dot_product"},
      {"dense", "random", "factorized_dense", "factorized_random", "dot_product"}};
  for (const auto& kinds : mixtures) {
    for (const bool causal : {true, false}) {
      const auto mixer = test::mixer(
          "synthesizer", "heads = 3\nrank = 5\nscores = [\"" + join(kinds, "\", \"") + "\"]",
          shape(causal));
      test::add_noise(*mixer, 0.5);
      mixer->to(at::kDouble);
      auto p = parameters(*mixer);
      const Tensor x = at::randn({2, 9, kWidth}, test::kDouble);
      const Tensor alpha =
          kinds.size() > 1 ? at::softmax(p.at("mixture"), 0) : at::ones({1}, test::kDouble);
      Tensor wanted = at::zeros_like(x);
      for (int64_t b = 0; b < 2; ++b) {
        Tensor s = at::zeros({kHeads, 9, kLongest}, test::kDouble);
        for (size_t i = 0; i < kinds.size(); ++i) {
          s += alpha[static_cast<int64_t>(i)] * scores(p, kinds[i], x[b]);
        }
        s = s.narrow(-1, 0, 9);
        if (causal) {
          s = s.masked_fill(at::ones({9, 9}, at::kBool).triu(1),
                            -std::numeric_limits<double>::infinity());
        }
        const Tensor v = at::linear(x[b], p.at("value.weight")).unflatten(-1, {kHeads, kDim});
        const Tensor heads = at::matmul(at::softmax(s, -1), v.transpose(0, 1));
        wanted[b].copy_(at::linear(heads.transpose(0, 1).flatten(1), p.at("output.weight")));
      }
      EXPECT_TRUE(close(mixer->forward(x, {}), wanted, 1e-10)) << join(kinds) << causal;
    }
  }
}

// A mixture that is all dot_product is plain attention.
TEST(Synthesizer, WithoutItsScoresIsPlainAttention) {
  at::manual_seed(62);
  at::NoGradGuard no_grad;
  for (const char* position : {"rope", "none"}) {
    const auto mixer = test::mixer(
        "synthesizer", "heads = 3\nscores = [\"random\", \"dot_product\"]", shape(true, position));
    const auto plain = test::mixer("mha", "heads = 3", shape(true, position));
    test::add_noise(*mixer, 0.3);
    test::set(*mixer, "mixture", at::tensor({-100.0f, 100.0f}));
    const auto p = parameters(*mixer);
    test::set(*plain, "qkv.weight", at::cat({p.at("qk.weight"), p.at("value.weight")}));
    test::set(*plain, "output.weight", p.at("output.weight"));
    const Tensor x = at::randn({2, 11, kWidth});
    EXPECT_TRUE(close(mixer->forward(x, {}), plain->forward(x, {}), 1e-5)) << position;
  }
}

TEST(Synthesizer, KeepsFixedScoresAsBuffers) {
  at::manual_seed(63);
  for (const char* kind : {"random", "factorized_random"}) {
    for (const bool fixed : {false, true}) {
      const auto mixer =
          test::mixer("synthesizer",
                      str("heads = 3\nscores = \"", kind, "\"\nfixed = ", fixed ? "true" : "false"),
                      shape(true));
      EXPECT_EQ(mixer->named_buffers().is_empty(), !fixed) << kind;
      EXPECT_EQ(mixer->named_parameters().size(), fixed ? 2 : kind[0] == 'r' ? 3 : 4) << kind;
      mixer->forward(at::randn({1, 5, kWidth}), {}).sum().backward();
    }
  }
}

TEST(Synthesizer, StartsNearTheMean) {
  at::manual_seed(64);
  LayerShape wide = test::shape_of(128);
  const auto mixer = test::mixer(
      "synthesizer",
      "scores = [\"dense\", \"random\", \"factorized_random\", \"factorized_dense\"]", wide);
  const auto p = parameters(*mixer);
  ASSERT_EQ(p.at("random").sizes(), at::IntArrayRef({8, 256, 256}));
  ASSERT_EQ(p.at("random_rows").sizes(), at::IntArrayRef({8, 256, 8}));
  ASSERT_EQ(p.at("dense.weight").sizes(), at::IntArrayRef({256, 16}));
  ASSERT_EQ(p.at("factors.weight").sizes(), at::IntArrayRef({32, 16}));
  for (const char* name : {"random", "random_rows", "random_columns", "dense.weight",
                           "dense_hidden.weight", "factors.weight", "value.weight"}) {
    EXPECT_NEAR(p.at(name).std().item<double>(), 0.02, 0.002) << name;
  }
  EXPECT_NEAR(p.at("output.weight").std().item<double>(), 0.02 / std::sqrt(8.0), 0.0005);
  EXPECT_TRUE(at::equal(p.at("mixture"), at::zeros({4})));
  EXPECT_TRUE(at::equal(p.at("dense.bias"), at::zeros({256})));
}

TEST(Synthesizer, CountsItsCostsAndItsState) {
  const auto costs = [](const std::string& kinds) {
    return test::mixer("synthesizer", "heads = 3\nrank = 5\nscores = " + kinds, shape(true))
        ->costs(9);
  };
  const auto dense = costs("\"dense\"");
  EXPECT_EQ(dense.at(0).flops_per_token, 4 * kWidth * kWidth);
  EXPECT_EQ(dense.at(1).flops_per_token, 2 * kWidth * kWidth + 2 * kWidth * 9);
  EXPECT_EQ(dense.at(2).flops_per_token, 2 * 5 * kWidth);
  const auto mixed = costs("[\"factorized_random\", \"dot_product\"]");
  EXPECT_EQ(mixed.at(0).flops_per_token, 8 * kWidth * kWidth);
  EXPECT_EQ(mixed.at(1).parameters, 2 * kHeads * kLongest * 5);
  EXPECT_EQ(mixed.at(1).flops_per_token, 2 * kHeads * 5 * 9);
  EXPECT_EQ(mixed.at(3).flops_per_token, 4 * 5 * kWidth);
  EXPECT_EQ(costs("\"random\"").at(1).parameters, kHeads * kLongest * kLongest);
  const auto bytes = [](const std::string& kinds) {
    return test::mixer("synthesizer", "heads = 3\nscores = " + kinds, shape(true))->state_bytes(9);
  };
  EXPECT_EQ(bytes("\"random\""), 4 * 9 * kWidth);
  EXPECT_EQ(bytes("[\"random\", \"dot_product\"]"), 4 * 9 * 2 * kWidth);
}

TEST(Synthesizer, RefusesWhatDoesNotFit) {
  const auto message = [](const std::string& options, const LayerShape& in) {
    return test::refusal_of("synthesizer", options, in);
  };
  EXPECT_EQ(message("heads = 7", shape(true)),
            "synthesizer: heads is 7, expected a divisor of the model's width = 24.");
  EXPECT_EQ(message("heads = 3", shape(true, "alibi")),
            "synthesizer: its scores belong to positions already, expected another "
            "model.position.type than alibi.");
  EXPECT_EQ(message("scores = []", shape(true)),
            "synthesizer: scores is empty, expected one or more.");
  EXPECT_EQ(message("scores = [\"random\", \"dense\", \"random\"]", shape(true)),
            "synthesizer: scores has \"random\" twice, expected each once.");
  EXPECT_EQ(message("scores = \"dot_product\"", shape(true)),
            "synthesizer: scores is \"dot_product\" alone, which is mha, expected it in a "
            "mixture.");
  EXPECT_TRUE(test::contains(message("scores = \"sparse\"", shape(true)), "sparse"));
  EXPECT_TRUE(test::contains(message("heads = 3", shape(true)), "does not read a memory"));
  at::NoGradGuard no_grad;
  const auto mixer = test::mixer("synthesizer", "heads = 3", shape(true));
  const std::string limit =
      "synthesizer: the sequence has 15 positions, but its scores are for 14 at most "
      "(model.max_length).";
  EXPECT_EQ(test::message_of<UsageError>([&] { mixer->forward(at::zeros({1, 15, kWidth}), {}); }),
            limit);
  MixerState state;
  mixer->extend(at::zeros({1, 14, kWidth}), state, {});
  EXPECT_EQ(
      test::message_of<UsageError>([&] { mixer->extend(at::zeros({1, 1, kWidth}), state, {}); }),
      limit);
  EXPECT_EQ(*mixer->longest(), 14);
  for (const auto& [policy, dtype] :
       {std::pair("window:4", ""), std::pair("full", "int8"), std::pair("tova:4", "int8")}) {
    EXPECT_TRUE(test::contains(test::message_of<UsageError>([&] {
                                 mixer->initial_state(CachePolicy::parse(policy, dtype));
                               }),
                               policy))
        << policy;
  }
}

}  // namespace
}  // namespace headloom::synthesizer_test
