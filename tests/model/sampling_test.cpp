#include "model/sampling.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "testing/errors.h"

namespace headloom::test::sampling_test {
namespace {

const std::vector<double> kLogits = {1.0, 3.0, 2.0, -1.0};  // p = 0.09, 0.66, 0.24, 0.01

std::vector<double> frequencies(const SamplingOptions& options, const Tensor& seen = {},
                                int64_t count = 4000) {
  const Tensor logits = at::tensor(kLogits).expand({count, 4});
  std::vector<at::Generator> generators;
  for (int64_t i = 0; i < count; ++i) {
    generators.push_back(at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(i)));
  }
  const Tensor drawn = sample(logits, seen.defined() ? seen.expand({count, seen.size(0)}) : seen,
                              options, generators);
  const Tensor share = at::bincount(drawn, {}, 4).to(at::kDouble) / static_cast<double>(count);
  return {share.const_data_ptr<double>(), share.const_data_ptr<double>() + 4};
}

void expect_shares(const std::vector<double>& found, const std::vector<double>& expected) {
  for (size_t i = 0; i < 4; ++i) {
    if (expected[i] == 0 || expected[i] == 1) {
      EXPECT_EQ(found[i], expected[i]) << i;
    } else {
      EXPECT_NEAR(found[i], expected[i], 0.03) << i;
    }
  }
}

TEST(Sample, GreedyTakesTheLikeliest) {
  expect_shares(frequencies({.temperature = 0}), {0, 1, 0, 0});
}

TEST(Sample, FollowsTheTemperature) {
  const Tensor p = at::softmax(at::tensor(kLogits) / 2, -1).to(at::kDouble);
  expect_shares(frequencies({.temperature = 2}),
                {p.const_data_ptr<double>(), p.const_data_ptr<double>() + 4});
}

TEST(Sample, TakesTheLikeliestHoweverColdItIs) {
  for (const double temperature : {1e-30, 1e-300, 5e-324}) {
    expect_shares(frequencies({.temperature = temperature}), {0, 1, 0, 0});
  }
}

TEST(Sample, ChoosesAmongTheLikeliestHoweverHotItIs) {
  for (const double temperature : {1e30, 1e39, 1e308}) {
    expect_shares(frequencies({.temperature = temperature, .top_k = 2}), {0, 0.5, 0.5, 0});
    expect_shares(frequencies({.temperature = temperature, .top_p = 0.3}), {0, 0.5, 0.5, 0});
    expect_shares(frequencies({.temperature = temperature}), {0.25, 0.25, 0.25, 0.25});
  }
}

TEST(Sample, RefusesScoresThatAreNotFinite) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const double temperature : {0.0, 0.8}) {
    for (const double broken : {std::nan(""), inf}) {
      Tensor logits = at::tensor(kLogits).repeat({2, 1});
      logits[1][2] = broken;
      std::vector<at::Generator> generators(2, at::make_generator<at::CPUGeneratorImpl>(1));
      const std::string message =
          message_of([&] { sample(logits, {}, {.temperature = temperature}, generators); });
      EXPECT_TRUE(contains(message, "scores of the next token are not finite")) << message;
      logits[1][2] = -inf;  // a token that cannot be
      EXPECT_EQ(sample(logits, {}, {.temperature = 0}, generators)[1].item<int64_t>(), 1);
    }
  }
}

TEST(Sample, KeepsTheTopKAndTheTopP) {
  expect_shares(frequencies({.temperature = 1, .top_k = 2}), {0, 0.731, 0.269, 0});
  // The second token is the one with which 0.7 is reached.
  expect_shares(frequencies({.temperature = 1, .top_p = 0.7}), {0, 0.731, 0.269, 0});
  expect_shares(frequencies({.temperature = 1, .top_p = 0}), {0, 1, 0, 0});
  // Among the two of top-k, the first alone has 0.73: top-p follows on what top-k left.
  expect_shares(frequencies({.temperature = 1, .top_k = 2, .top_p = 0.7}), {0, 1, 0, 0});
}

TEST(Sample, TopPFindsManyTokensOfALargeVocabulary) {
  // Token 7 i mod 1000 is the i-th likeliest. The likeliest 600 or so have 0.7.
  const Tensor rank = at::arange(1000, at::kDouble);
  const Tensor p = at::softmax(rank / -1000, 0);
  const Tensor logits = at::empty({1000});
  logits.index_put_({(7 * rank).remainder(1000).to(at::kLong)}, (rank / -1000).to(at::kFloat));
  const int64_t kept = (p.cumsum(0) - p).lt(0.7).sum().item<int64_t>(), count = 20000;
  std::vector<at::Generator> generators(
      count, at::make_generator<at::CPUGeneratorImpl>(1));  // all rows draw from one
  const Tensor drawn =
      sample(logits.expand({count, 1000}), {}, {.temperature = 1, .top_p = 0.7}, generators);
  const Tensor places = (drawn * 143).remainder(1000);  // 7 * 143 = 1001
  EXPECT_LT(places.max().item<int64_t>(), kept);
  EXPECT_GT(places.max().item<int64_t>(), kept - 30);
  const Tensor expected = p.narrow(0, 0, kept) / p.narrow(0, 0, kept).sum();
  const Tensor mean = (expected * rank.narrow(0, 0, kept)).sum();
  EXPECT_NEAR(places.to(at::kDouble).mean().item<double>(), mean.item<double>(), 6);  // 5 sigma
}

TEST(Sample, NeverDrawsWhatCannotBe) {
  Tensor logits = at::full({1, 300}, -std::numeric_limits<double>::infinity());
  logits[0][17] = -3;
  logits[0][250] = -3;
  const Tensor seen = at::tensor({5}, at::kLong).unsqueeze(0);
  std::vector<at::Generator> generators = {at::make_generator<at::CPUGeneratorImpl>(1)};
  std::vector<int64_t> found(300);
  for (const SamplingOptions& o :
       {SamplingOptions{}, SamplingOptions{.top_k = 200}, SamplingOptions{.top_p = 0.999},
        SamplingOptions{.min_p = 0.5}, SamplingOptions{.temperature = 1e308},
        SamplingOptions{.temperature = 1e20, .repetition_penalty = 2}}) {
    std::fill(found.begin(), found.end(), 0);
    for (int64_t i = 0; i < 100; ++i) {
      ++found[static_cast<size_t>(sample(logits, seen, o, generators).item<int64_t>())];
    }
    EXPECT_EQ(found[17] + found[250], 100);
    EXPECT_GT(std::min(found[17], found[250]), 20);
  }
}

TEST(Sample, KeepsWhatIsLikelyBesideTheLikeliest) {
  // e^-2 = 0.135 of the likeliest, e^-1 = 0.37.
  expect_shares(frequencies({.temperature = 1, .min_p = 0.2}), {0, 0.731, 0.269, 0});
  expect_shares(frequencies({.temperature = 1, .min_p = 0.5}), {0, 1, 0, 0});
}

TEST(Sample, PenalizesWhatWasSeen) {
  // Token 1 falls from 3 to 1, token 3 from -1 to -3.
  const Tensor p = at::softmax(at::tensor({1.0, 1.0, 2.0, -3.0}), -1).to(at::kDouble);
  expect_shares(
      frequencies({.temperature = 1, .repetition_penalty = 3}, at::tensor({1, 3, 1}, at::kLong)),
      {p.const_data_ptr<double>(), p.const_data_ptr<double>() + 4});
}

TEST(Sample, TheStrongestPenaltiesLeaveScoresFinite) {
  const Tensor logits = at::tensor({2.0, 0.0, -1.0, 1.0}).unsqueeze(0);
  const Tensor seen = at::tensor({0, 1}, at::kLong).unsqueeze(0);
  for (const double temperature : {0.0, 1e-300, 0.8}) {
    std::vector<at::Generator> generators = {at::make_generator<at::CPUGeneratorImpl>(1)};
    const auto chosen = [&](double penalty) {
      return sample(logits, seen, {.temperature = temperature, .repetition_penalty = penalty},
                    generators)
          .item<int64_t>();
    };
    EXPECT_EQ(chosen(1e-300), 0);
    EXPECT_NE(chosen(1e300), 2);  // tokens 0 and 1 have 0, token 3 has 1
  }
}

TEST(Sample, RefusesOptionsThatAreOutOfRange) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto said = [](const SamplingOptions& options) {
    return message_of<UsageError>([&] { check_sampling(options); });
  };
  check_sampling({});
  check_sampling({.temperature = 0, .top_p = 0, .min_p = 1});
  EXPECT_EQ(said({.temperature = -1}),
            "sampling: temperature is -1, expected a finite number of at least 0.");
  EXPECT_TRUE(contains(said({.temperature = nan}), "temperature is nan"));
  EXPECT_TRUE(contains(said({.top_k = -1}), "top_k is -1"));
  EXPECT_TRUE(contains(said({.top_p = 1.5}), "top_p is 1.5"));
  EXPECT_TRUE(contains(said({.min_p = nan}), "min_p is nan"));
  EXPECT_TRUE(contains(said({.repetition_penalty = 0}), "repetition_penalty is 0"));
  std::vector<at::Generator> none;
  EXPECT_TRUE(contains(message_of<Error>([&] { sample(at::randn({2, 5}), {}, {}, none); }),
                       "0 generators for 2 rows"));
}

TEST(Sample, ARowsDrawDoesNotDependOnItsNeighbours) {
  // The first row is sure of one token; of the others top-p needs more, and all of them have equal
  // scores, whose order depends on how many are looked at.
  Tensor logits = at::randint(-6, 7, {9, 5000}).to(at::kBFloat16);
  logits[0][3] = 50;
  logits[1].zero_();
  const auto generators = [](int64_t first, int64_t count) {
    std::vector<at::Generator> out;
    for (int64_t i = first; i < first + count; ++i) {
      out.push_back(at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(i)));
    }
    return out;
  };
  for (const double top_p : {1.0, 0.9, 0.1, 0.01}) {
    const SamplingOptions options{.temperature = 0.7, .top_p = top_p};
    auto all = generators(0, 9);
    const Tensor together = sample(logits, {}, options, all);
    for (int64_t i = 0; i < 9; ++i) {
      auto own = generators(i, 1);
      EXPECT_EQ(sample(logits.narrow(0, i, 1), {}, options, own).item<int64_t>(),
                together[i].item<int64_t>());
    }
  }
}

}  // namespace
}  // namespace headloom::test::sampling_test
