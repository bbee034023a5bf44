#include "report/scaling.h"

#include <gtest/gtest.h>

#include <cmath>

#include "synthetic.h"

namespace headloom::report::scaling_test {
namespace {

// Sizes, budgets and noisy losses of 1.7 + 400 N^-0.34 + 600 D^-0.3.
const std::vector<double> kSizes = {1e6, 3e6, 1e7}, kTokens = {2e7, 6e7, 2e8};
const std::vector<double> kLosses = {9.2247, 8.1193, 7.2955, 8.0967, 6.9896,
                                     6.1438, 7.2415, 6.1603, 5.2981};

std::vector<std::vector<double>> grid() {
  std::vector<std::vector<double>> out;
  for (const double n : kSizes) {
    for (const double d : kTokens) out.push_back({n, d});
  }
  return out;
}

TEST(PowerLaw, IsSciPysLeastSquares) {
  // The best of scipy.optimize.least_squares (1.17.1) from 16 starts.
  const PowerLaw law = fit_power_law(grid(), kLosses);
  EXPECT_NEAR(law.floor, 1.7615881913, 1e-4);
  EXPECT_NEAR(law.factors[0], 397.967123, 0.03);
  EXPECT_NEAR(law.factors[1], 686.649256, 0.05);
  EXPECT_NEAR(law.exponents[0], 0.3396006763, 1e-5);
  EXPECT_NEAR(law.exponents[1], 0.3088897045, 1e-5);
  EXPECT_NEAR(law.error, 0.007320223972, 1e-9);

  const PowerLaw one =
      fit_power_law({{1e12}, {3e12}, {1e13}, {3e13}}, {3.1959, 2.9567, 2.7552, 2.6041});
  EXPECT_NEAR(one.floor, 2.0147445, 1e-4);
  EXPECT_NEAR(one.factors[0], 329.7733, 0.05);
  EXPECT_NEAR(one.exponents[0], 0.2038422542, 1e-5);
  EXPECT_NEAR(one.error, 0.0014667761877, 1e-9);
}

TEST(PowerLaw, ThreePointsAreMetExactly) {
  const PowerLaw law = fit_power_law({{1e12}, {1e13}, {1e14}}, {3.0, 2.5, 2.25});
  for (const auto& [x, y] : {std::pair{1e12, 3.0}, {1e13, 2.5}, {1e14, 2.25}}) {
    EXPECT_NEAR(law.at({x}), y, 1e-7);
    EXPECT_NEAR(inverse(law, y) / x, 1, 1e-5);
  }
  EXPECT_NEAR(law.floor, 2.0, 1e-6);  // the differences halve
  EXPECT_TRUE(std::isinf(inverse(law, 2.0)));
  EXPECT_TRUE(std::isinf(inverse(law, 1.0)));
  EXPECT_TRUE(fit_power_law({{1e12}, {1e13}}, {3.0, 2.5}).factors.empty());
  EXPECT_TRUE(fit_power_law({}, {}).factors.empty());
}

TEST(PowerLaw, WhatDoesNotFallHasNoFactor) {
  // Factors are not negative: the best fit of a rising loss is its mean.
  const PowerLaw law = fit_power_law({{1e12}, {1e13}, {1e14}}, {2.0, 2.1, 2.2});
  EXPECT_NEAR(law.floor, 2.1, 1e-9);
  EXPECT_EQ(law.factors[0], 0);
  EXPECT_TRUE(std::isinf(inverse(law, law.floor)));
  EXPECT_EQ(inverse(law, law.floor + 1), 0);
}

TEST(PowerLaw, TheFrontierIsTheBestSplitOfTheCompute) {
  const PowerLaw law{.floor = 1.7, .factors = {400, 600}, .exponents = {0.34, 0.3}};
  const double k = 6.5;
  const PowerLaw best = frontier(law, k);
  for (const double c : {1e12, 1e15}) {
    double least = 1e9;
    for (double n = 1e3; n < 1e12; n *= 1.001) least = std::min(least, law.at({n, c / (k * n)}));
    EXPECT_NEAR(best.at({c}), least, 1e-6);
  }
}

// Models at three sizes; `worth` is the planted factor of each but the first, which is the
// baseline.
Comparison series(const std::vector<double>& worth, int seeds, double noise, size_t points = 3) {
  Comparison c{.title = "Sizes"};
  for (int s = 1; s <= seeds; ++s) c.seeds.push_back(s);
  for (size_t m = 0; m <= worth.size(); ++m) c.models.push_back({.label = str("m", m)});
  for (size_t r = 0; r < points; ++r) {
    const std::string name = str("text-s", r + 1);
    c.tasks.push_back({.name = name, .metric = "loss", .size_of = "text"});
    const double tokens = 1e6 * std::pow(3, r), flops_per_token = 2e5 * std::pow(3, r);
    for (size_t m = 0; m < c.models.size(); ++m) {
      c.builds.push_back({.model = c.models[m].label,
                          .task = name,
                          .parameters = static_cast<int64_t>(1e5 * std::pow(3, r)),
                          .flops_per_token = flops_per_token,
                          .flops_per_unit = flops_per_token});
      const double compute = 3 * flops_per_token * tokens * (m == 0 ? 1 : worth[m - 1]);
      for (const int64_t seed : c.seeds) {
        // Seeds shift all models alike, as the same data does.
        const double shift = noise * std::sin(static_cast<double>(7 * seed + 3 * r));
        Run run{.model = c.models[m].label, .task = name, .seed = seed};
        run.state = RunState::kFinished;
        const double loss = 1.5 + 200 * std::pow(compute, -0.2) + shift;
        run.points.push_back(
            {.step = 100, .tokens = tokens, .seconds = 1, .loss = loss, .quality = loss});
        c.runs.push_back(run);
      }
    }
  }
  return c;
}

TEST(Scaling, FindsWhatComputeIsWorth) {
  const Comparison c = series({1.5, 1.0}, 5, 0.001);
  const Summary summary = summarize(c);
  const std::vector<SizeSeries> found = size_series(c, summary);
  ASSERT_EQ(found.size(), 1u);
  ASSERT_EQ(found[0].families.size(), 3u);
  const FamilyFit& base = found[0].families[0];
  EXPECT_TRUE(base.worth.empty());
  EXPECT_NEAR(base.points[1].compute, 3 * 6e5 * 3e6, 1);
  EXPECT_LE(base.exponent.low, base.law.exponents[0]);
  EXPECT_GE(base.exponent.high, base.law.exponents[0]);
  ASSERT_EQ(base.bands.size(), found[0].grid.size());
  for (const size_t m : {1, 2}) {
    const double planted = m == 1 ? 1.5 : 1.0;
    ASSERT_EQ(found[0].families[m].worth.size(), 3u);
    for (const Equivalence& e : found[0].families[m].worth) {
      EXPECT_NEAR(e.factor, planted, 0.03 * planted);
      EXPECT_LE(e.interval.low, planted * 1.03);
      EXPECT_GE(e.interval.high, planted * 0.97);
    }
  }
  EXPECT_NE(found[0].answer.find("the baseline `m0` needs 1.5"), std::string::npos)
      << found[0].answer;
  EXPECT_NE(found[0].answer.find("no difference is found"), std::string::npos) << found[0].answer;
  EXPECT_NE(found[0].answer.find("nothing tests their form"), std::string::npos);
  const Comparison four = series({1.5}, 5, 0.01, 4);
  EXPECT_NE(
      size_series(four, summarize(four))[0].answer.find("The curves miss the means by up to 0.00"),
      std::string::npos)
      << size_series(four, summarize(four))[0].answer;
  // The same every time.
  EXPECT_EQ(found[0].answer, size_series(c, summary)[0].answer);
}

// Both models follow one law, which is steeper than any that is fitted, and the second takes more
// compute for each token.
TEST(Scaling, CurvesOfAnotherFormMakeEqualModelsNoDifferent) {
  Comparison c = series({1.0}, 5, 0);
  for (Build& build : c.builds) {
    if (build.model == "m1") build.flops_per_unit *= 1.2;
  }
  for (auto& run : c.runs) {
    const auto build = std::find_if(c.builds.begin(), c.builds.end(), [&](const Build& b) {
      return b.model == run.model && b.task == run.task;
    });
    Point& last = run.points.back();
    const double compute = 3 * build->flops_per_unit * last.tokens;
    last.loss = last.quality = 1 + 2 * std::pow(compute / 1e12, -1.6) + 1e-3 * (run.seed % 2);
  }
  const SizeSeries found = size_series(c, summarize(c))[0];
  const Equivalence& top = found.families[1].worth.back();
  EXPECT_GT(found.families[1].law.error, 0.05);
  EXPECT_LT(top.interval.low, 1);
  EXPECT_GT(top.interval.high, 1);
  EXPECT_EQ(found.answer.find(" times (95% interval") != std::string::npos,
            found.answer.find("no difference is found") != std::string::npos)
      << found.answer;
}

TEST(Scaling, DoesNotExtrapolateFar) {
  // A size is 9 times the compute of the one before: at the last, 20 times lie beyond.
  const Comparison c = series({20.0}, 5, 0.001);
  const SizeSeries found = size_series(c, summarize(c))[0];
  EXPECT_TRUE(std::isnan(found.families[1].worth.back().factor));
  EXPECT_TRUE(std::isinf(found.families[1].worth.back().interval.high));
  EXPECT_NEAR(found.families[1].worth.front().factor, 20, 1);
  EXPECT_NE(found.answer.find("is not determined"), std::string::npos) << found.answer;
}

TEST(Scaling, SaysWhatItCannotKnow) {
  const Comparison two = series({1.5}, 5, 0.001, 2);
  const Summary summary = summarize(two);
  const SizeSeries few = size_series(two, summary)[0];
  EXPECT_TRUE(few.families[0].law.factors.empty());
  EXPECT_NE(few.answer.find("this takes 3 sizes"), std::string::npos) << few.answer;
  // Two sizes have rings in the figure, and neither a law nor a band.
  const Chart rings = scaling_chart(two, few);
  ASSERT_EQ(rings.drawings.size(), 1u);
  EXPECT_NE(rings.drawings[0].find("<circle class=\"mark"), std::string::npos);
  EXPECT_NE(rings.caption.find("A fit takes three sizes."), std::string::npos);
  EXPECT_EQ(rings.caption.find("band"), std::string::npos);

  const Comparison once = series({1.5}, 1, 0.001);
  const SizeSeries single = size_series(once, summarize(once))[0];
  EXPECT_TRUE(std::isnan(single.families[1].worth.back().interval.low));
  EXPECT_NEAR(single.families[1].worth.back().factor, 1.5, 0.05);
  EXPECT_NE(single.answer.find("at least 5 seeds"), std::string::npos) << single.answer;

  Comparison none = series({1.5}, 2, 0.001);
  none.runs.clear();
  EXPECT_TRUE(size_series(none, summarize(none)).empty());
  EXPECT_TRUE(size_series(small({{"a", {1}}}), summarize(small({{"a", {1}}}))).empty());
}

TEST(Scaling, ASizeBesideAnotherDoesNotShortenTheReach) {
  // The last two sizes have nearly the same compute.
  Comparison c = series({1.5}, 3, 0.001, 4);
  for (report::Build& build : c.builds) {
    if (build.task == "text-s4") build.flops_per_unit = 2e5 * 9 * 9 / 27 * 1.02;
  }
  const SizeSeries found = size_series(c, summarize(c))[0];
  EXPECT_FALSE(std::isnan(found.families[1].worth.back().factor)) << found.answer;
}

TEST(Scaling, SaysThatTheLossOfTheBaselineDoesNotFall) {
  Comparison c = series({1.5}, 3, 0.001);
  for (auto& run : c.runs) {
    if (run.model == "m0") run.points.back().loss = 9 + 1e-8 * run.points.back().tokens;
  }
  const std::string answer = size_series(c, summarize(c))[0].answer;
  EXPECT_NE(answer.find("because the loss of `m0` does not fall with the compute"),
            std::string::npos)
      << answer;
}

TEST(Scaling, SaysThatTheBaselineNeverGetsAsLow) {
  Comparison c = series({1.5}, 3, 0.001);
  for (auto& run : c.runs) {
    if (run.model == "m1") run.points.back().loss -= 3;
  }
  const std::string answer = size_series(c, summarize(c))[0].answer;
  EXPECT_NE(answer.find("because the fit of `m0` stays above that loss"), std::string::npos)
      << answer;
}

// Three sizes, each with three budgets, and a loss of either.
Comparison crossed(double (*loss)(double parameters, double tokens)) {
  Comparison c = series({}, 3, 0, 9);
  for (size_t r = 0; r < 9; ++r) {
    c.builds[r].parameters = static_cast<int64_t>(1e5 * std::pow(3, r % 3));
    c.builds[r].flops_per_unit = 6 * static_cast<double>(c.builds[r].parameters);
    for (auto& run : c.runs) {
      if (run.task != c.tasks[r].name) continue;
      Point& last = run.points.back();
      last.tokens = 1e6 * std::pow(3, r / 3);
      last.loss = loss(static_cast<double>(c.builds[r].parameters), last.tokens) +
                  1e-3 * static_cast<double>(run.seed);
    }
  }
  return c;
}

TEST(Scaling, OfAGridTheErrorIsThatOfTheFitToSizeAndData) {
  const Comparison c = crossed(
      [](double n, double d) { return 1.5 + 40 * std::pow(n, -0.3) + 60 * std::pow(d, -0.25); });
  const SizeSeries found = size_series(c, summarize(c))[0];
  ASSERT_EQ(found.families[0].surface.factors.size(), 2u);
  EXPECT_NE(found.answer.find("The fits of the loss to parameters and data miss"),
            std::string::npos)
      << found.answer;
  for (const SizePoint& point : found.families[0].points) {
    EXPECT_NEAR(found.families[0].fitted_loss(point), point.loss(), 1e-3);
  }
}

// A model that fails at the largest size has no frontier, and a curve through the rest is none.
TEST(Scaling, AFrontierIsNotComparedWithACurve) {
  Comparison c = series({1.0}, 5, 0, 9);
  for (size_t r = 0; r < 9; ++r) {
    const double n = 1e6 * std::pow(3, r / 3), d = 1e7 * std::pow(3, r % 3);
    for (auto& build : c.builds) {
      if (build.task == c.tasks[r].name) {
        build.parameters = static_cast<int64_t>(n);
        build.flops_per_token = build.flops_per_unit = 2 * n;
      }
    }
    for (auto& run : c.runs) {
      if (run.task != c.tasks[r].name) continue;
      run.points.back().tokens = d;
      run.points.back().loss = 1 + 300 * std::pow(n, -0.4) + 500 * std::pow(d, -0.4);
      if (run.model == "m1" && r >= 6) run.state = RunState::kFailed;
    }
  }
  const std::vector<SizeSeries> found = size_series(c, summarize(c));
  EXPECT_NE(found[0].answer.find("`m1` has results at too few sizes and budgets"),
            std::string::npos)
      << found[0].answer;
  EXPECT_EQ(found[0].answer.find("the compute of"), std::string::npos) << found[0].answer;
}

TEST(Scaling, OfAGridWhoseLossFallsWithDataAloneThereIsNoLawOfCompute) {
  const Comparison c =
      crossed([](double n, double d) { return 1.5 + 60 * std::pow(d, -0.25) + 1e-7 * n; });
  const SizeSeries found = size_series(c, summarize(c))[0];
  EXPECT_TRUE(found.families[0].law.factors.empty());
  EXPECT_NE(found.answer.find("falls with more data and not with more parameters, so that no size "
                              "is the best for a given compute"),
            std::string::npos)
      << found.answer;
  EXPECT_EQ(scaling_table(found).at(1).at(3), "–");
  EXPECT_NE(to_html(c).find("Loss against compute"), std::string::npos);
  EXPECT_NE(to_json(c).find("\"compute_law\": null"), std::string::npos);
}

TEST(Scaling, SeedsThatAModelHasNotFinishedAreLeftOutForAll) {
  // Equal models, of which one lacks the hardest seed.
  Comparison c = series({1.0}, 5, 0.2);
  const auto of_seed_2 = [](const auto& run) { return run.model == "m1" && run.seed == 2; };
  std::erase_if(c.runs, of_seed_2);
  const SizeSeries found = size_series(c, summarize(c))[0];
  EXPECT_NEAR(found.families[1].worth.back().factor, 1, 1e-3);
  EXPECT_NE(found.answer.find("has not finished are left out for all"), std::string::npos);
  // With one seed of a size there is no interval.
  std::erase_if(c.runs, [](const auto& run) { return run.seed > 1 && run.task == "text-s2"; });
  const SizeSeries single = size_series(c, summarize(c))[0];
  EXPECT_TRUE(std::isnan(single.families[1].worth.back().interval.low));
  EXPECT_NE(single.answer.find("Intervals take at least 5 seeds of every size and model."),
            std::string::npos)
      << single.answer;
}

TEST(Scaling, SaysOnWhichSideTheBaselineIsNotKnown) {
  Comparison c = series({1.0}, 3, 0.001);
  for (auto& run : c.runs) {
    if (run.model == "m1") run.points.back().loss += 3;
  }
  EXPECT_NE(size_series(c, summarize(c))[0].answer.find("more than one size below its first"),
            std::string::npos)
      << size_series(c, summarize(c))[0].answer;
}

TEST(Scaling, TheTokensOfASizeAreTheMeanOfItsRuns) {
  Comparison c = series({}, 2, 0.001);
  c.runs.front().points.back().tokens *= 3;  // one seed of the first size
  EXPECT_NEAR(size_series(c, summarize(c))[0].families[0].points[0].tokens, 2e6, 1);
}

TEST(Scaling, SaysThatTheFloorIsAtItsBound) {
  // Losses that fall ever faster: no loss that cannot be reduced explains them.
  Comparison c = series({}, 5, 0.001);
  for (auto& run : c.runs) {
    Point& last = run.points.back();
    last.loss = last.quality = 9 - 1e-6 * last.tokens + 1e-3 * static_cast<double>(run.seed);
  }
  const std::vector<std::string> row = scaling_table(size_series(c, summarize(c))[0]).at(1);
  EXPECT_EQ(row.at(2), "0, its bound");
}

TEST(Scaling, SaysThatAnExponentIsAtItsBound) {
  Comparison c = series({}, 5, 0.001);
  for (auto& run : c.runs) {  // as C^-2
    Point& last = run.points.back();
    last.loss = last.quality = 1.5 + std::pow(last.tokens / 1e6, -4);
  }
  const std::vector<std::string> row = scaling_table(size_series(c, summarize(c))[0]).at(1);
  EXPECT_EQ(row.at(3), "0.990 (0.990 to 0.990), at a bound of the search");
  EXPECT_NE(to_json(c).find("\"exponent_at_bound\": true"), std::string::npos);
}

TEST(Scaling, ALossThatDoesNotFallHasNoExponent) {
  Comparison c = series({}, 5, 0.001);
  for (auto& run : c.runs) {
    Point& last = run.points.back();
    last.loss = last.quality = 2 + 1e-8 * last.tokens + 1e-3 * static_cast<double>(run.seed);
  }
  const SizeSeries found = size_series(c, summarize(c))[0];
  EXPECT_EQ(scaling_table(found).at(1).at(3), "none, the loss does not fall");
  EXPECT_NE(found.answer.find("does not fall with the compute"), std::string::npos) << found.answer;
  std::string json = to_json(c);
  std::erase_if(json, [](unsigned char one) { return std::isspace(one) != 0; });
  EXPECT_NE(json.find("\"exponents\":[null]"), std::string::npos);
}

TEST(Scaling, IsInEveryFormOfTheReport) {
  const Comparison c = series({1.5}, 5, 0.001);
  for (const std::string& form : {to_html(c), to_text(c, 1000), to_json(c)}) {
    EXPECT_NE(form.find("needs 1.5"), std::string::npos);
  }
  EXPECT_NE(to_html(c).find("Loss against compute"), std::string::npos);
  EXPECT_NE(to_html(c).find("id=\"scaling-1\""), std::string::npos);
  // On a phone, where the table's head is not shown.
  EXPECT_NE(to_html(c).find("<td data-label=\"sizes\""), std::string::npos);
  EXPECT_NE(to_json(c).find("\"compute_worth\""), std::string::npos);
  EXPECT_EQ(to_html(small({{"a", {1}}})).find("id=\"scaling-"), std::string::npos);
}

}  // namespace
}  // namespace headloom::report::scaling_test
