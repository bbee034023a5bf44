#include <gtest/gtest.h>

#include "report/charts.h"
#include "report/format.h"
#include "report/plot.h"
#include "report/summary.h"
#include "report/synthetic.h"

namespace headloom::report::answers_test {
namespace {

std::string answer_of(const Comparison& c) { return summarize(c).tasks[0].answer; }

Relation against_baseline(const Comparison& c, const std::string& label) {
  const Summary summary = summarize(c);
  for (const Row& row : summary.tasks[0].rows) {
    if (row.model->label == label) return row.against_baseline.relation;
  }
  ADD_FAILURE() << label;
  return Relation::kUnknown;
}

TEST(Answer, ClaimsAWinnerOverTheSpread) {
  const Comparison c = small({{"mha", {1.93, 1.94, 1.95}}, {"dcmha", {1.90, 1.91, 1.92}}});
  EXPECT_EQ(
      answer_of(c),
      "On text, `dcmha` learns best: 1.910 ± 0.010 bits per byte against 1.940 ± 0.010 for the "
      "baseline `mha`, at 1.00 times its speed.");
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kBetter);
}

TEST(Answer, DifferenceWithinTheLargerSpreadIsATie) {
  // Means 1.94 and 1.93: closer than the larger spread (0.02), though not than the smaller.
  const Comparison c = small({{"mha", {1.92, 1.94, 1.96}}, {"dcmha", {1.929, 1.93, 1.931}}});
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kTie);
  EXPECT_EQ(answer_of(c),
            "On text, `dcmha` ties with the baseline `mha`: 1.930 ± 0.001 bits per byte against "
            "1.940 ± 0.020.");
}

TEST(Answer, NothingBeatsABaselineThatTiesWithTheBest) {
  const Comparison c =
      small({{"mha", {1.92, 1.94, 1.96}}, {"a", {1.93, 1.93, 1.93}}, {"b", {3, 3, 3}}});
  EXPECT_EQ(
      answer_of(c),
      "On text, no model beats the baseline `mha`: `a` ties with it, 1.930 ± 0.000 bits per byte "
      "against 1.940 ± 0.020; `b` does worse.");
}

TEST(Answer, OneSeedClaimsNothing) {
  const Comparison c = small({{"mha", {1.94}}, {"dcmha", {1.50}}});
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kAhead);
  EXPECT_EQ(
      answer_of(c),
      "On text, `dcmha` is ahead: 1.500 bits per byte against 1.940 for the baseline `mha`, at "
      "1.00 times its speed. With one seed no spread is known, so this is what was seen and no "
      "winner is claimed.");
}

TEST(Answer, TwoSeedsAreALead) {
  const Comparison c = small({{"mha", {1.93, 1.94}}, {"dcmha", {1.50, 1.51}}});
  EXPECT_NE(answer_of(c).find("This is a lead and no claim yet: 2 seeds."), std::string::npos);
}

TEST(Answer, UnequalParametersAreALead) {
  Comparison c = small({{"mha", {1.93, 1.94, 1.95}}, {"dcmha", {1.50, 1.51, 1.52}}});
  c.builds[1].parameters = 1100000;
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kAhead);
  EXPECT_NE(answer_of(c).find("1.10× the parameters"), std::string::npos);
  c.builds[1].parameters = 1009000;
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kBetter);
}

TEST(Answer, UnequalTokensAreALead) {
  Comparison c = small({{"mha", {1.93, 1.94, 1.95}}, {"dcmha", {1.50, 1.51, 1.52}}});
  for (auto& run : c.runs) {
    if (run.model == "dcmha") run.points.back().tokens *= 2;
  }
  EXPECT_NE(answer_of(c).find("2.00× the tokens"), std::string::npos);
}

TEST(Answer, AFailedRunWeakensItsOwnModelOnly) {
  Comparison c = small({{"mha", {1.93, 1.94, 1.95, 1.94}}, {"dcmha", {1.50, 1.51, 1.52, 1.51}}});
  c.runs[0].state = RunState::kFailed;
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kBetter);
  c.runs[0].state = RunState::kFinished;
  c.runs[5].points.back().quality = kUnknown;
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kAhead);
  EXPECT_NE(answer_of(c).find("1 failed run of `dcmha`"), std::string::npos);
}

TEST(Answer, ADivergedRunOfEitherModelMakesAClaimALead) {
  for (const size_t diverged : {0, 5}) {
    Comparison c = small({{"mha", {1.93, 1.94, 1.95, 1.94}}, {"dcmha", {1.50, 1.51, 1.52, 1.51}}});
    EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kBetter);
    c.runs[diverged].warning = "the run has diverged: its training loss rose.";
    EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kAhead);
    const std::string text = to_text(c), name = c.runs[diverged].model;
    EXPECT_NE(answer_of(c).find("1 diverged run of `" + name + "`"), std::string::npos);
    EXPECT_NE(text.find("4, 1 diverged"), std::string::npos) << text;
    EXPECT_NE(text.find("diverged: " + name + ", seed "), std::string::npos) << text;
    EXPECT_NE(to_html(c).find("Diverged: "), std::string::npos);
    EXPECT_NE(to_json(c).find("\"warning\": \"the run has diverged"), std::string::npos);
  }
}

TEST(Answer, AClaimOverTheBaselineStandsWithoutOneOverAll) {
  Comparison c =
      small({{"mha", {1.93, 1.94, 1.95}}, {"a", {1.4, 1.41, 1.42}}, {"b", {1.5, 1.51, 1.52}}});
  c.runs[6].state = RunState::kFailed;
  EXPECT_EQ(
      answer_of(c),
      "On text, `a` beats the baseline `mha`: 1.410 ± 0.010 bits per byte against 1.940 ± 0.010, "
      "at 1.00 times its speed. `b` is also ahead of `mha`. That `a` is best of all is no claim "
      "yet: 2 seeds of `b`. 1 of 3 runs of `b` failed.");
}

TEST(Answer, BaselineCanWin) {
  const Comparison c = small({{"mha", {1.4, 1.41, 1.42}}, {"a", {1.9, 1.91, 1.92}}});
  EXPECT_EQ(
      answer_of(c),
      "On text, the baseline `mha` learns best: 1.410 ± 0.010 bits per byte against 1.910 ± 0.010 "
      "for the next, `a`.");
  EXPECT_EQ(against_baseline(c, "a"), Relation::kWorse);
}

TEST(Answer, SaysWhatTheOthersDo) {
  const Comparison c = small({{"mha", {1.93, 1.94, 1.95}},
                              {"first", {1.50, 1.51, 1.52}},
                              {"second", {1.70, 1.71, 1.72}},
                              {"same", {1.935, 1.941, 1.946}},
                              {"bad", {2.5, 2.51, 2.52}}});
  EXPECT_NE(
      answer_of(c).find(" `second` also beats `mha`; `same` ties with `mha`; `bad` does worse."),
      std::string::npos)
      << answer_of(c);
}

TEST(Answer, SeveralCanBeBest) {
  const Comparison c =
      small({{"mha", {1.93, 1.94, 1.95}}, {"a", {1.50, 1.51, 1.52}}, {"b", {1.505, 1.511, 1.52}}});
  EXPECT_EQ(answer_of(c).find("On text, `a` and `b` tie for best: "), 0u) << answer_of(c);
}

TEST(Answer, HigherCanBeBetter) {
  Comparison c = small({{"mha", {.5, .51, .52}}, {"a", {.9, .91, .92}}});
  c.tasks[0].lower_is_better = false;
  c.tasks[0].percent = true;
  c.tasks[0].metric = "accuracy";
  EXPECT_NE(answer_of(c).find("`a` learns best: 91.0 ± 1.0% accuracy"), std::string::npos)
      << answer_of(c);
}

TEST(Stat, SpreadIsTheSampleDeviation) {
  const Stat stat = stat_of({1, 2, 3, kUnknown});
  EXPECT_EQ(stat.count, 3);
  EXPECT_DOUBLE_EQ(stat.mean, 2);
  EXPECT_DOUBLE_EQ(stat.spread, 1);
  EXPECT_TRUE(std::isnan(stat_of({1}).spread));
}

TEST(Curve, MeansOnlyStepsThatEveryRunHas) {
  Comparison c = small({{"mha", {2.0, 4.0}}});
  c.runs[0].points.insert(c.runs[0].points.begin(), {.step = 50, .tokens = 5e5, .quality = 3.0});
  const Summary summary = summarize(c);
  const auto curve = mean_curve(summary.tasks[0].rows[0], &Point::tokens, &Point::quality);
  ASSERT_EQ(curve.size(), 1u);
  EXPECT_DOUBLE_EQ(curve[0].y, 3.0);
  EXPECT_DOUBLE_EQ(curve[0].low, 2.0);
  EXPECT_DOUBLE_EQ(curve[0].high, 4.0);
}

TEST(Curve, FirstReachInterpolates) {
  const std::vector<LinePoint> curve{{0, 4, 4, 4}, {10, 2, 2, 2}, {20, 1, 1, 1}};
  EXPECT_DOUBLE_EQ(first_reach(curve, 3, true), 5);
  EXPECT_DOUBLE_EQ(first_reach(curve, 1, true), 20);
  EXPECT_TRUE(std::isnan(first_reach(curve, 0.5, true)));
}

TEST(Axis, TicksAreNiceAndInside) {
  const Axis axis = make_axis("x", Unit::kPlain, 1.87, 2.41);
  std::vector<std::string> texts;
  for (const double v : axis.ticks()) {
    EXPECT_GE(v, axis.low - 1e-9);
    EXPECT_LE(v, axis.high + 1e-9);
    texts.push_back(axis.tick_text(v));
  }
  EXPECT_EQ(texts, (std::vector<std::string>{"2.0", "2.2", "2.4"}));
  const Axis log = make_axis("y", Unit::kPlain, 0.01, 2, true);
  for (const double v : log.ticks()) texts.push_back(log.tick_text(v));
  EXPECT_EQ(texts[3], "0.01");
  for (const double v : make_axis("z", Unit::kPlain, 5, 5).ticks()) EXPECT_TRUE(std::isfinite(v));
}

TEST(Format, Numbers) {
  EXPECT_EQ(times(0.613), "0.61×");
  EXPECT_EQ(percent(0.1234), "12.3%");
  EXPECT_EQ(grouped(1234567), "1,234,567");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(fixed(kUnknown, 3), "–");
  EXPECT_EQ(bytes(-1), "–");
  EXPECT_EQ(rich("a `<b>` c"), "a <code>&lt;b&gt;</code> c");
  EXPECT_EQ(pad("±1", 4, true), "  ±1");
}

}  // namespace
}  // namespace headloom::report::answers_test
