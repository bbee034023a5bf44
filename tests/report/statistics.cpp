#include "report/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace headloom::report::statistics_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

void expect_close(double value, double expected, double relative) {
  EXPECT_NEAR(value, expected, relative * std::abs(expected));
}

// The expected values are those of SciPy 1.17.1.

TEST(StudentT, CdfIsSciPys) {
  struct {
    double t, df, expected;
  } const cases[] = {
      // scipy.stats.t.cdf(t, df)
      {0.5, 1, 0.6475836176504333},
      {2.46, 2, 0.9334749606462616},
      {-2.776445105, 4, 0.02500000000505973},
      {1.0, 3.7, 0.8109293001197737},
      {8.61, 4, 0.999499932938086},
      {1.959963985, 1e6, 0.9749998613792707},
      {40, 9, 0.9999999999905085},
      {-3, 30, 0.0026949820328259727},
      {0.001, 2, 0.500353553302205},
      {-25, 4, 7.598762881657867e-06},
      {-7.5, 10, 1.0313985480590903e-05},
      {-60, 2, 0.00013883104529733938},
  };
  for (const auto& c : cases) expect_close(student_t_cdf(c.t, c.df), c.expected, 1e-10);
}

TEST(StudentT, QuantileIsSciPys) {
  struct {
    double p, df, expected;
  } const cases[] = {
      // scipy.stats.t.ppf(p, df)
      {0.975, 2, 4.302652729749462},
      {0.975, 4, 2.7764451051977934},
      {0.9, 4, 1.533206274058944},
      {0.9995, 4, 8.610301581379522},
      {0.975, 1, 12.706204736174694},
      {0.6, 3.7, 0.27216446429206953},
      {0.025, 9, -2.2621571627982053},
      {0.99999, 2, 223.60344363454604},
      {0.975, 1e6, 1.959966356814107},
      // scipy.stats.norm.ppf(0.975)
      {0.975, kInfinity, 1.959963984540054},
  };
  for (const auto& c : cases) expect_close(student_t_quantile(c.p, c.df), c.expected, 1e-9);
  EXPECT_NEAR(student_t_quantile(0.5, 3), 0, 1e-12);
}

TEST(Estimate, PairedDifferenceIsSciPys) {
  // a = [1.901, 1.913, 1.897, 1.908, 1.921]; b = [1.934, 1.941, 1.922, 1.949, 1.938]
  // r = scipy.stats.ttest_rel(a, b); r.pvalue, r.confidence_interval(0.95)
  const Estimate d =
      estimate({1.901 - 1.934, 1.913 - 1.941, 1.897 - 1.922, 1.908 - 1.949, 1.921 - 1.938}, kNan);
  EXPECT_EQ(d.count, 5);
  expect_close(p_value(d, 0), 0.0019814163203070003, 1e-10);
  expect_close(d.low(), -0.039919653980754866, 1e-10);
  expect_close(d.high(), -0.017680346019245098, 1e-10);
  // scipy.stats.ttest_rel([.962, .955, .969], [.981, .977, .979])
  const Estimate three = estimate({.962 - .981, .955 - .977, .969 - .979}, kNan);
  expect_close(p_value(three, 0), 0.04215851130768121, 1e-10);
  expect_close(three.low(), -0.03251343503762682, 1e-10);
}

TEST(Estimate, OneSampleIsSciPys) {
  // scipy.stats.ttest_1samp([.70, .66, .72, .69, .71], .75): twice the one-sided value
  const Estimate e = estimate({.70, .66, .72, .69, .71}, kNan);
  expect_close(p_value(e, .75), 2 * 0.0031594646712981137, 1e-10);
}

TEST(Estimate, TheEvaluationsErrorDoesNotShrinkWithSeeds) {
  std::vector<double> few, many;
  for (int i = 0; i < 400; ++i) (i < 4 ? few : many).push_back(i % 2 ? 1.01 : 0.99);
  const double z = 1.959963984540054;
  EXPECT_GT(estimate(many, 0.1).half_width, 0.1 * z);
  expect_close(estimate(many, 0.1).half_width, 0.1 * z, 1e-3);
  const Estimate alone = estimate(few, 0), both = estimate(few, 0.1);
  expect_close(both.half_width, std::hypot(alone.half_width, 0.1 * z), 1e-12);
}

TEST(Estimate, ThePValueIsTheLevelOfTheIntervalThatJustReaches) {
  for (const double shared : {0.0, 0.003, 0.01, 1.0}) {
    const Estimate e = estimate({1.0, 1.02, 0.97, 1.01, 1.005}, shared);
    EXPECT_NEAR(p_value(e, e.high()), 0.05, 1e-9) << shared;
    EXPECT_NEAR(p_value(e, e.low()), 0.05, 1e-9) << shared;
    EXPECT_EQ(p_value(e, e.mean), 1) << shared;
  }
  // Without any spread between seeds only the evaluation's error is left.
  EXPECT_NEAR(p_value(estimate({1, 1, 1}, 0.5), 1 - 0.5 * 1.959963984540054), 0.05, 1e-9);
  EXPECT_EQ(p_value(estimate({1, 1, 1}, 0), 1), 1);
  EXPECT_EQ(p_value(estimate({1, 1, 1}, 0), 2), 0);
  EXPECT_TRUE(std::isnan(p_value(estimate({1}, 0), 2)));
  EXPECT_TRUE(std::isnan(estimate({}, 0).mean));
}

TEST(Estimate, IndependentErrorsAdd) {
  EXPECT_DOUBLE_EQ(independent_error(3, 4), 5);
  EXPECT_DOUBLE_EQ(independent_error(kNan, 4), 4);
}

TEST(Estimate, AnErrorFromPartsHasTheirDegreesOfFreedom) {
  // scipy.stats.sem([1, 2, 4, 4.5])
  EXPECT_NEAR(standard_error({1, 2, 4, 4.5}), 0.8260094833999587, 1e-12);
  EXPECT_TRUE(std::isnan(standard_error({1})));
  // scipy.stats.t.ppf(.975, 3) = 3.182446305284263
  EXPECT_NEAR(estimate({1, 1, 1}, 0.5, 3).half_width, 0.5 * 3.182446305284263, 1e-9);
  const Estimate e = estimate({1.0, 1.02, 0.97, 1.01, 1.005}, 0.01, 31);
  EXPECT_NEAR(p_value(e, e.high()), 0.05, 1e-9);
  EXPECT_GT(e.half_width, estimate({1.0, 1.02, 0.97, 1.01, 1.005}, 0.01).half_width);
}

// scipy: the smallest n with
// (t.ppf(.975, n - 1) + t.ppf(.9, n - 1)) ** 2 * s ** 2 / n + (norm.ppf(.975) + norm.ppf(.9)) ** 2
// * v <= mean ** 2
TEST(Seeds, AsManyAsThePowerFormulaAsksFor) {
  const auto needed = [](double mean, double s, double error) {
    return seeds_needed(
        {.count = 3, .mean = mean, .deviation = s, .shared_error = error, .half_width = 0}, 5);
  };
  EXPECT_EQ(needed(1, 1, 0), 13);
  EXPECT_EQ(needed(-0.5, 1, 0), 45);
  EXPECT_EQ(needed(0.03, 0.02, 0), 7);
  EXPECT_EQ(needed(1, 1, 0.2), 21);
  EXPECT_EQ(needed(0.1, 1, 0), -1);
  EXPECT_EQ(needed(1, 0.01, 0), 5);
  EXPECT_EQ(needed(1, 100, 0), -1);
  EXPECT_EQ(needed(1, 0.1, 0.5), -1);
  EXPECT_EQ(needed(0, 1, 0), -1);
  // An error of the evaluation that few parts of the data tell of.
  const auto of_few_parts = [](double s, double error) {
    return seeds_needed({.count = 3,
                         .mean = 1,
                         .deviation = s,
                         .shared_error = error,
                         .shared_df = 7,
                         .half_width = 0},
                        5);
  };
  EXPECT_EQ(of_few_parts(1, 0.2), 27);
  EXPECT_EQ(of_few_parts(0.5, 0.25), 27);
}

TEST(Holm, IsStatsmodels) {
  // statsmodels 0.15.0: multipletests([0.01, 0.04, 0.03, 0.005, 0.5, 0.013], method="holm")[1]
  const std::vector<double> adjusted = holm({0.01, 0.04, 0.03, 0.005, 0.5, 0.013});
  const double expected[] = {0.05, 0.09, 0.09, 0.03, 0.5, 0.052};
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(adjusted[i], expected[i], 1e-12);
  EXPECT_EQ(holm({0.9, 0.8}), (std::vector<double>{1, 1}));
  EXPECT_TRUE(holm({}).empty());
}

// A result that is far from the reference is not lost in the search for its level.
TEST(PValue, FarResultsHaveSmallLevels) {
  Estimate e;
  e.count = 5;
  e.deviation = 0.0189;
  e.shared_error = 0.018;
  double before = 1;
  for (const double mean : {0.74, 0.7, 0.6, 0.4, 0.2, 0.09, 0.0}) {
    e.mean = mean;
    const double p = p_value(e, 0.75);
    EXPECT_LT(p, before) << mean;
    before = p;
  }
  EXPECT_LT(before, 1e-6);
}

}  // namespace
}  // namespace headloom::report::statistics_test
