#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "report/answer.h"
#include "report/charts.h"
#include "report/format.h"
#include "report/plot.h"
#include "report/summary.h"
#include "report/synthetic.h"

namespace headloom::report::answers_test {
namespace {

std::string answer_of(const Comparison& c) { return summarize(c).tasks[0].answer; }
std::string advice(const Comparison& c) { return summarize(c).tasks[0].recommendation; }

Relation against_baseline(const Comparison& c, const std::string& label) {
  const Summary summary = summarize(c);
  for (const Row& row : summary.tasks[0].rows) {
    if (row.model->label == label) return row.against_baseline.relation;
  }
  ADD_FAILURE() << label;
  return Relation::kNoResult;
}

// Five seeds around `mean`, `step` apart, in an order that `shift` turns, so that the differences
// of two models vary between seeds.
std::vector<double> five(double mean, double step, int shift = 0) {
  std::vector<double> out;
  for (int i = 0; i < 5; ++i) out.push_back(mean + step * ((i + shift) % 5 - 2));
  return out;
}

TEST(Answer, ClaimsADifferenceWithItsInterval) {
  const Comparison c = small({{"mha", five(1.94, 0.005)}, {"dcmha", five(1.91, 0.005, 1)}});
  // scipy.stats.ttest_rel of the two: -0.03, 95% interval -0.0439 to -0.0161, p 0.0040
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kBetter);
  EXPECT_EQ(answer_of(c),
            "On text, `dcmha` learns best: 1.910 ± 0.010 bits per byte against 1.940 ± 0.010 for "
            "the baseline `mha`, a difference of 0.030 (95% interval 0.016 to 0.044), 5 seeds.");
  EXPECT_EQ(advice(c),
            "For text and this budget, take `dcmha`, because it is better than every other model "
            "here.");
}

TEST(Answer, SaysWhichDifferenceIsStillPossible) {
  const Comparison c = small({{"mha", five(1.94, 0.02)}, {"dcmha", five(1.93, 0.02, 2)}});
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kNoDifference);
  // scipy.stats.ttest_rel: -0.01, 95% interval -0.0780 to 0.0580
  EXPECT_EQ(answer_of(c),
            "On text, no difference from the baseline `mha` (1.940 ± 0.039) is found for `dcmha` "
            "(1.930 ± 0.039, at most 0.078 apart).");
  EXPECT_EQ(advice(c),
            "For text and this budget, `mha` and `dcmha` are not separated (a difference from the "
            "baseline of up to 0.078 is still possible), so take the cheapest. "
            "Their training speeds were not measured apart from the runs, so none is called the "
            "fastest.");
}

TEST(Answer, ModelsOnUnequalTermsAreNotRecommendedForATie) {
  Comparison c = small({{"mha", five(1.94, 0.02)}, {"dcmha", five(1.93, 0.02, 2)}});
  for (const auto& [model, parameters] : {std::pair("mha", 1000), std::pair("dcmha", 1140)}) {
    c.builds.push_back({.model = model, .task = "text", .parameters = parameters});
  }
  EXPECT_TRUE(
      answer_of(c).ends_with("`dcmha` and the baseline `mha` are not compared on equal "
                             "terms: `dcmha` has 1.14× the parameters."))
      << answer_of(c);
  EXPECT_EQ(advice(c),
            "For text and this budget, nothing is recommended, because `mha` and `dcmha` are not "
            "separated (a difference from the baseline of up to 0.078 is still possible) and not "
            "compared on equal terms.");
}

TEST(Answer, ATinyDifferenceIsNotZero) {
  const TaskInfo task{.name = "text"};
  EXPECT_EQ(difference_text(task, 0.0000321), "3e-05");
  EXPECT_EQ(difference_text(task, 0), "0.0000");
  EXPECT_EQ(difference_text(task, 0.0123), "0.012");
}

TEST(Answer, NamesThoseThatTrainFastest) {
  Comparison c = small({{"mha", five(1.94, 0.02)},
                        {"dcmha", five(1.93, 0.02, 2)},
                        {"talking_heads", five(1.935, 0.02, 3)}});
  EXPECT_TRUE(
      advice(c).ends_with(" Their training speeds were not measured apart from the runs, so none "
                          "is called the fastest."))
      << advice(c);
  for (const auto& [model, speed] : {std::pair("mha", 30000.0), std::pair("dcmha", 20000.0),
                                     std::pair("talking_heads", 30001.0)}) {
    c.speeds.push_back(
        {.model = model, .task = "text", .train_tokens_per_second = {speed, speed + 2}});
  }
  EXPECT_NE(advice(c).find("`mha` and `talking_heads` train fastest; the ranges of their speeds "
                           "overlap."),
            std::string::npos)
      << advice(c);
}

TEST(Answer, CallsNothingFastestThatWasTimedOnce) {
  Comparison c = small({{"mha", five(1.94, 0.02)}, {"dcmha", five(1.93, 0.02, 2)}});
  c.speeds = {{.model = "mha", .task = "text", .train_tokens_per_second = {100}},
              {.model = "dcmha", .task = "text", .train_tokens_per_second = {200}}};
  EXPECT_TRUE(advice(c).ends_with("has no spread, so none is called the fastest.")) << advice(c);
  for (auto& speed : c.speeds) {
    speed.train_tokens_per_second.push_back(speed.train_tokens_per_second[0] + 2);
  }
  EXPECT_TRUE(advice(c).ends_with("`dcmha` trains fastest, at 201 tokens/s (200 to 202)."))
      << advice(c);
}

TEST(Answer, SeedsPair) {
  // The seeds differ far more than the models do at each of them.
  const Comparison c =
      small({{"mha", {1.5, 1.7, 1.9, 2.1, 2.3}}, {"dcmha", {1.489, 1.691, 1.890, 2.091, 2.289}}});
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kBetter);
}

TEST(Answer, FewerThanFiveSeedsClaimNothing) {
  EXPECT_EQ(answer_of(small({{"mha", {1.94}}, {"dcmha", {1.50}}})),
            "On text, there are too few seeds to compare `dcmha` (1.500) with the baseline `mha` "
            "(1.940 bits per byte): 1 seed is paired, where a claim takes at least 5.");
  const Comparison c =
      small({{"mha", {1.93, 1.94, 1.95, 1.94}}, {"dcmha", {1.5, 1.51, 1.5, 1.52}}});
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kTooFewSeeds);
  EXPECT_EQ(advice(c),
            "For text and this budget, nothing is recommended, because a claim takes at least 5 "
            "seeds.");
  EXPECT_NE(summarize(c).limits.find("there are 4 seeds, where a claim takes 5"),
            std::string::npos);
}

TEST(Answer, SaysHowManySeedsADifferenceTakes) {
  // The differences are -0.02, -0.01 and 0: mean -0.01, deviation 0.01. By the power formula
  // (tests/report/statistics.cpp) that takes 13 seeds.
  const Comparison c = small({{"mha", {1.94, 1.94, 1.94}}, {"dcmha", {1.92, 1.93, 1.94}}});
  EXPECT_NE(
      answer_of(c).find("`dcmha` (1.930 ± 0.025, a difference as large as this takes about 13 "
                        "seeds) with the baseline `mha` (1.940 ± 0.000 bits per byte): 3 seeds "
                        "are paired, where a claim takes at least 5."),
      std::string::npos)
      << answer_of(c);
}

TEST(Answer, SeedsThatOnlyOneHasFinishedAreLeftOut) {
  Comparison c = small({{"mha", five(1.94, 0.005)}, {"dcmha", five(1.91, 0.005, 1)}});
  c.runs.push_back(plain_run("mha", "text", 5, 1.0));
  c.seeds.push_back(5);
  // While the other run is still to come, nothing is left out.
  EXPECT_EQ(answer_of(c).find("left out"), std::string::npos) << answer_of(c);
  c.runs.push_back(plain_run("dcmha", "text", 5, 1.0));
  c.runs.back().state = RunState::kFailed;
  const Summary summary = summarize(c);
  const Row& row = summary.tasks[0].rows[1];
  EXPECT_NE(answer_of(c).find("Seed 5 is left out of the comparison of `dcmha` with `mha`, because "
                              "only one of the two finished it."),
            std::string::npos)
      << answer_of(c);
  const Row& variant = row.baseline ? summary.tasks[0].rows[0] : row;
  EXPECT_EQ(variant.against_baseline.difference.count, 5);
  EXPECT_NEAR(variant.against_baseline.difference.mean, -0.03, 1e-12);
}

TEST(Answer, TheEvaluationsErrorWidensTheInterval) {
  Comparison c = small({{"mha", five(1.94, 0.005)}, {"dcmha", five(1.91, 0.005, 1)}});
  for (auto& run : c.runs) run.points.back().quality_error = 0.001;
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kBetter);
  for (auto& run : c.runs) run.points.back().quality_error = 0.02;
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kNoDifference);
  EXPECT_EQ(summarize(c).limits.find("sampling error"), std::string::npos);
  c.runs[0].points.back().quality_error = kUnknown;
  EXPECT_NE(summarize(c).limits.find("sampling error of the held-out data is unknown"),
            std::string::npos);
}

// Parts of the held-out data that are hard for one model are hard for the other. The error of the
// difference is that of the differences of the parts.
TEST(Answer, TheEvaluationsErrorIsPaired) {
  Comparison c = small({{"mha", five(1.94, 0.005)}, {"dcmha", five(1.91, 0.005, 1)}});
  const auto set_parts = [&](double unlike) {
    for (auto& run : c.runs) {
      Point& end = run.points.back();
      end.quality_error = 0.5 / std::sqrt(8.0);
      end.quality_parts.clear();
      for (int i = 0; i < 8; ++i) {
        const double hard = i % 2 ? 0.5 : -0.5, own = i % 4 < 2 ? unlike : -unlike;
        end.quality_parts.push_back(end.quality + hard + (run.model == "mha" ? own : -own));
      }
    }
  };
  set_parts(0.002);
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kBetter);
  const Verdict verdict = summarize(c).tasks[0].rows[0].against_baseline;
  // Differences of the parts are 0.004 above and below their mean.
  EXPECT_NEAR(verdict.difference.shared_error, 0.004 / std::sqrt(7.0), 1e-12);
  EXPECT_EQ(verdict.difference.shared_df, 7);
  set_parts(0.1);
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kNoDifference);
  // Without the parts of one run, or with others, the errors count as independent.
  for (const size_t parts : {0, 7}) {
    set_parts(0.002);
    c.runs[3].points.back().quality_parts.resize(parts);
    EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kNoDifference) << parts;
  }
}

TEST(Answer, IdenticalResultsAreSaidToBeSo) {
  Comparison c = small({{"mha", five(1.94, 0.005)}, {"twin", five(1.94, 0.005)}});
  for (auto& run : c.runs) {
    Point& end = run.points.back();
    end.quality_error = 0.1;
    for (int i = 0; i < 8; ++i) end.quality_parts.push_back(end.quality + 0.1 * i);
  }
  EXPECT_EQ(answer_of(c),
            "On text, no difference from the baseline `mha` (1.940 ± 0.196) is found for `twin` "
            "(1.940 ± 0.196, the same at every seed).");
}

TEST(Answer, OneAlwaysRightAndOneAlwaysWrongHaveAnError) {
  Comparison c =
      small({{"mha", std::vector<double>(5, 1.0)}, {"dcmha", std::vector<double>(5, 0.0)}});
  for (auto& run : c.runs) {
    run.points.back().quality_error = 0.03;
    run.points.back().quality_parts.assign(8, run.points.back().quality);
  }
  EXPECT_NEAR(summarize(c).tasks[0].rows[0].against_baseline.difference.shared_error,
              0.03 * std::sqrt(2.0), 1e-12);
}

TEST(Answer, CaveatsMakeAClaimALead) {
  const Comparison clean = small({{"mha", five(1.94, 0.005)}, {"dcmha", five(1.5, 0.005, 1)}});
  const auto check = [&](Comparison c, const std::string& caveat) {
    EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kAhead) << caveat;
    EXPECT_NE(answer_of(c).find("`dcmha` is ahead of the baseline `mha` by 0.440"),
              std::string::npos)
        << answer_of(c);
    EXPECT_NE(answer_of(c).find(", but this is no claim: " + caveat + "."), std::string::npos)
        << answer_of(c);
    const std::string none =
        "For text and this budget, nothing is recommended, because `dcmha` is ahead of the "
        "baseline `mha`, but this is no claim.";
    EXPECT_EQ(advice(c), none);
    // A tie beside it is no reason to take the cheapest.
    c.models.push_back({.label = "twin"});
    for (size_t i = 0; i < 5; ++i) {
      c.runs.push_back(c.runs[i]);
      c.runs.back().model = "twin";
    }
    EXPECT_EQ(advice(c), none);
  };
  Comparison c = clean;
  c.builds[1].parameters = 1009000;
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kBetter);
  c.builds[1].parameters = 1100000;
  check(c, "`dcmha` has 1.10× the parameters");
  c = clean;
  for (auto& run : c.runs) {
    if (run.model == "dcmha") run.points.back().tokens *= 2;
  }
  check(c, "`dcmha` has 2.00× the tokens");
  c = clean;
  c.builds[1].train_differences = "weight_decay = 0";
  check(c, "training options of `dcmha`: weight_decay = 0");
  c = clean;
  c.swept = {"lr"};
  c.choices = {{"mha", "text", {{"lr", "0.01"}}, {"lr"}}, {"dcmha", "text", {{"lr", "0.001"}}, {}}};
  check(c, "lr of `mha` at the edge of its sweep");
}

TEST(Answer, AFailedRunWeakensItsOwnModelOnly) {
  const auto six = [](double mean, int shift) {
    std::vector<double> out = five(mean, 0.005, shift);
    out.push_back(mean);
    return out;
  };
  Comparison c = small({{"mha", six(1.94, 0)}, {"dcmha", six(1.5, 1)}});
  c.runs[0].state = RunState::kFailed;
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kBetter);
  c.runs[0].state = RunState::kFinished;
  c.runs[7].points.back().quality = kUnknown;
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kAhead);
  EXPECT_NE(answer_of(c).find("1 failed run of `dcmha`"), std::string::npos);
}

TEST(Answer, ADivergedRunOfEitherModelMakesAClaimALead) {
  for (const size_t diverged : {0, 5}) {
    Comparison c = small({{"mha", five(1.94, 0.005)}, {"dcmha", five(1.5, 0.005, 1)}});
    EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kBetter);
    c.runs[diverged].warning = "the run has diverged: its training loss rose.";
    EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kAhead);
    const std::string text = to_text(c), name = c.runs[diverged].model;
    EXPECT_NE(answer_of(c).find("1 diverged run of `" + name + "`"), std::string::npos);
    EXPECT_NE(text.find("5, 1 diverged"), std::string::npos) << text;
    EXPECT_NE(text.find("diverged: " + name + ", seed "), std::string::npos) << text;
    EXPECT_NE(to_html(c).find("Diverged: "), std::string::npos);
    EXPECT_NE(to_json(c).find("\"warning\": \"the run has diverged"), std::string::npos);
  }
}

TEST(Answer, BaselineCanWin) {
  const Comparison c = small({{"mha", five(1.41, 0.005)}, {"a", five(1.91, 0.005, 1)}});
  EXPECT_EQ(answer_of(c),
            "On text, the baseline `mha` learns best: 1.410 ± 0.010 bits per byte. `a` is worse "
            "than the baseline `mha`, by 0.500 (95% interval 0.486 to 0.514), 5 seeds.");
  EXPECT_EQ(against_baseline(c, "a"), Relation::kWorse);
  EXPECT_EQ(advice(c),
            "For text and this budget, take the baseline `mha`, because it is better than every "
            "other model here.");
}

TEST(Answer, SeveralCanBeBetterWithoutABest) {
  const Comparison c = small({{"mha", five(1.94, 0.005)},
                              {"first", five(1.500, 0.005, 1)},
                              {"second", five(1.501, 0.005, 2)},
                              {"same", five(1.941, 0.005, 3)},
                              {"bad", five(2.5, 0.005, 4)}});
  EXPECT_FALSE(summarize(c).tasks[0].best_is_claimed);
  const std::string answer = answer_of(c);
  EXPECT_EQ(
      answer.find("On text, `first` is better than the baseline `mha`: 1.500 ± 0.010 bits per "
                  "byte against 1.940 ± 0.010, a difference of 0.440 (95% interval 0.426 to "
                  "0.454), 5 seeds. `second` is better than `mha`, too, by 0.439"),
      0u)
      << answer;
  EXPECT_NE(answer.find("`bad` is worse than the baseline `mha`, by 0.560"), std::string::npos);
  EXPECT_NE(
      answer.find(" No difference from the baseline `mha` (1.940 ± 0.010) is found for `same` ("),
      std::string::npos)
      << answer;
  EXPECT_NE(answer.find("Which model is the best of all is not shown."), std::string::npos);
  EXPECT_EQ(
      advice(c).find("For text and this budget, take one of `first` and `second`, because they "
                     "are better than the baseline `mha`; which of them is better is not "
                     "shown"),
      0u)
      << advice(c);
}

TEST(Answer, TheBestOfManyIsClaimedOverAll) {
  const Comparison c =
      small({{"mha", five(1.94, 0.005)}, {"a", five(1.5, 0.005, 1)}, {"b", five(1.7, 0.005, 2)}});
  EXPECT_TRUE(summarize(c).tasks[0].best_is_claimed);
  EXPECT_EQ(summarize(c).tested, 3);
}

TEST(Answer, HigherCanBeBetter) {
  Comparison c = small({{"mha", five(.51, .005)}, {"a", five(.91, .005, 1)}});
  c.tasks[0].lower_is_better = false;
  c.tasks[0].percent = true;
  c.tasks[0].metric = "accuracy";
  EXPECT_NE(answer_of(c).find("`a` learns best: 91.0 ± 1.0% accuracy against 51.0 ± 1.0% for the "
                              "baseline `mha`, a difference of 40.0 points (95% interval 38.6 to "
                              "41.4)"),
            std::string::npos)
      << answer_of(c);
}

// Error rates beside a guess among four, as the first report of this project had them.
TEST(Answer, NothingElseIsSaidOfModelsThatHaveNotLearned) {
  Comparison c = small({{"mha", {.981, .977, .979, .98, .978}},
                        {"differential", {.962, .955, .969, .96, .964}},
                        {"multi_token", {.05, .02, .11, .04, .06}}});
  c.tasks[0].percent = true;
  c.tasks[0].metric = "error rate";
  c.tasks[0].floors = {{"a uniform guess", 0.999}, {"a guess among the blocks", 0.75}};
  EXPECT_EQ(against_baseline(c, "differential"), Relation::kNotLearned);
  EXPECT_EQ(against_baseline(c, "multi_token"), Relation::kLearned);
  EXPECT_EQ(
      answer_of(c),
      "On text, `multi_token` (5.6 ± 4.2% error rate) has learned, and the baseline `mha` is not "
      "shown to have. `differential` (96.2 ± 0.6%) and `mha` (97.9 ± 0.2%) are not shown to have "
      "learned: "
      "none of them passes the floor of what is reached without learning, a guess among the blocks "
      "(75.0%), by more than chance.");
  EXPECT_EQ(
      advice(c),
      "For text and this budget, take `multi_token`, because it alone is shown to have learned.");
  for (const std::string& shown : {to_text(c), to_html(c)}) {
    EXPECT_EQ(shown.find("is better than"), std::string::npos);
    EXPECT_EQ(shown.find("is worse than"), std::string::npos);
  }
  // Without the one that has learned.
  std::erase_if(c.runs, [](const auto& run) { return run.model == "multi_token"; });
  EXPECT_EQ(
      answer_of(c).find("On text, no model is shown to have learned. `differential` (96.2 ± 0.6%)"),
      0u);
  EXPECT_EQ(advice(c),
            "For text and this budget, nothing is recommended, because no model is shown to have "
            "learned.");
}

TEST(Answer, TheBestMeanIsNotPassedOverBecauseItIsNotShownToHaveLearned) {
  Comparison c = small({{"mha", {0, 0, 0, 0, 1}}, {"a", {.58, .59, .58, .6, .59}}});
  c.tasks[0].percent = true;
  c.tasks[0].floors = {{"a guess", 0.75}};
  EXPECT_EQ(against_baseline(c, "a"), Relation::kLearned);
  EXPECT_NE(answer_of(c).find("has learned, and the baseline `mha` is not shown to have."),
            std::string::npos)
      << answer_of(c);
  EXPECT_EQ(advice(c),
            "For text and this budget, nothing is recommended, because the baseline `mha` has the "
            "best mean and is not shown to have learned.");
}

TEST(Answer, LearningOnUnequalTermsIsNotRecommended) {
  Comparison c = small({{"mha", {.97, .98, .97, .98, .97}},
                        {"a", {.05, .02, .11, .04, .06}},
                        {"b", {.96, .97, .96, .97, .98}}});
  c.tasks[0].percent = true;
  c.tasks[0].floors = {{"a guess", 0.75}};
  c.builds[1].parameters = 1100000;
  const std::string why = "`a` has 1.10× the parameters";
  EXPECT_NE(answer_of(c).find("`a` and the baseline `mha` are not compared on equal terms: " + why),
            std::string::npos)
      << answer_of(c);
  EXPECT_NE(to_html(c).find("1.10× the parameters"), std::string::npos);
  EXPECT_EQ(advice(c),
            "For text and this budget, nothing is recommended, because `a` alone is shown to have "
            "learned, but not on equal terms: " +
                why + ".");
  // Of two that have learned, the one on equal terms is.
  for (auto& run : c.runs) {
    if (run.model == "b") run.points.back().quality -= 0.9;
  }
  EXPECT_EQ(advice(c).find("For text and this budget, take `b`, because it has learned and the "
                           "baseline is not shown to have."),
            0u)
      << advice(c);
  c.builds[2].parameters = 1100000;
  EXPECT_EQ(advice(c),
            "For text and this budget, nothing is recommended, because `a` and `b` are not "
            "compared with the baseline on equal terms.");
}

TEST(Answer, ALargeDifferenceIsNotCalledSmallBecauseSeedsAreMissing) {
  Comparison c = small({{"mha", {1, .99, 1, .99, 1}}, {"a", {.3, .35, .33}}});
  c.tasks[0].percent = true;
  c.tasks[0].floors = {{"a guess", 0.75}};
  c.runs.back().points.back().quality = 0.9;  // its pass is not carried by three seeds
  EXPECT_EQ(against_baseline(c, "a"), Relation::kTooFewSeeds);
  EXPECT_EQ(answer_of(c).find("as small as this"), std::string::npos) << answer_of(c);
}

TEST(Answer, ATieWithAFailedRunIsOneOnUnequalTermsWhoeverIsInFront) {
  for (const double shift : {-0.001, 0.001}) {
    std::vector<double> other = five(1.94 + shift, 0.02, 2);
    other.push_back(1.94);
    std::vector<double> base = five(1.94, 0.02);
    base.push_back(1.94);
    Comparison c = small({{"mha", base}, {"a", other}, {"b", base}});
    c.runs[6].state = RunState::kFailed;
    EXPECT_EQ(against_baseline(c, "a"), Relation::kNoDifference);
    EXPECT_NE(answer_of(c).find("not compared on equal terms: 1 failed run of `a`"),
              std::string::npos)
        << answer_of(c);
    // The others are still a tie.
    EXPECT_EQ(advice(c).find("For text and this budget, `mha` and `b` are not separated"), 0u)
        << advice(c);
  }
}

TEST(Answer, TheBestOfAllIsNotClaimedWhileRunsAreToCome) {
  Comparison c =
      small({{"mha", five(1.94, 0.005)}, {"a", five(1.5, 0.005, 1)}, {"b", five(1.7, 0.005, 2)}});
  EXPECT_NE(advice(c).find("better than every other model here"), std::string::npos) << advice(c);
  Comparison failed = c;
  for (auto& run : failed.runs) {
    if (run.model == "b") run.state = RunState::kFailed;
  }
  EXPECT_NE(advice(failed).find("better than every other model that has a result"),
            std::string::npos)
      << advice(failed);
  c.planned = true;
  std::erase_if(c.runs, [](const auto& run) { return run.model == "b"; });
  EXPECT_EQ(answer_of(c).find("learns best"), std::string::npos) << answer_of(c);
}

TEST(Answer, ASmallDifferenceOfSharesKeepsItsDigits) {
  const TaskInfo shares{.name = "text", .metric = "error rate", .percent = true};
  EXPECT_EQ(difference_text(shares, 0.0004), "0.04 points");
  EXPECT_EQ(interval_text(shares, {.mean = 0.0004, .half_width = 0.0003}, true), "0.01 to 0.07");
  EXPECT_EQ(interval_text(shares, {.mean = 0.4, .half_width = 0.3}, true), "10.0 to 70.0");
  EXPECT_EQ(difference_text(shares, 2e-6), "0.0002 points");
  EXPECT_EQ(difference_text(shares, 0), "0.0 points");
  EXPECT_EQ(interval_text(shares, {.mean = -1e-17, .half_width = 0}, true), "0.0 to 0.0");
}

// What is advised where three models are tied and train at speeds from `low` to `high`.
std::string advice_at(const std::map<std::string, std::pair<double, double>>& speeds) {
  Comparison c =
      small({{"mha", five(1.94, 0.02)}, {"a", five(1.93, 0.02, 2)}, {"b", five(1.94, 0.02, 1)}});
  for (const auto& [model, range] : speeds) {
    c.speeds.push_back(
        {.model = model, .task = "text", .train_tokens_per_second = {range.first, range.second}});
  }
  return advice(c);
}

TEST(Answer, SpeedsThatOverlapInPairsAloneAreSaidSo) {
  const std::string said =
      advice_at({{"mha", {1000, 100000}}, {"a", {40000, 41000}}, {"b", {2000, 2100}}});
  EXPECT_NE(said.find("No training speed is called the fastest: each of `a` and `b` overlaps "
                      "with `mha`, but not all overlap with each other."),
            std::string::npos)
      << said;
}

// The baseline did not finish the seeds at which the other one is bad.
TEST(Answer, SeedsThatAreLeftOutToTheGoodOfTheLeaderAreACaveat) {
  std::vector<double> good = five(1.91, 0.005, 1), plain = five(1.94, 0.005);
  good.insert(good.end(), {3.0, 3.1});
  plain.insert(plain.end(), {1.94, 1.94});
  Comparison c = small({{"mha", plain}, {"dcmha", good}});
  for (auto& run : c.runs) {
    if (run.model == "mha" && run.seed >= 5) run.state = RunState::kFailed;
  }
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kAhead);
  EXPECT_NE(answer_of(c).find("but this is no claim: seeds at which `dcmha` is worse are left out, "
                              "because only one of the two finished them."),
            std::string::npos)
      << answer_of(c);
  // Where they would have helped it, its lead is none of theirs.
  for (auto& run : c.runs) {
    if (run.model == "dcmha" && run.seed >= 5) run.points.back().quality = 1.5;
  }
  EXPECT_EQ(against_baseline(c, "dcmha"), Relation::kBetter);
}

TEST(Answer, NoDifferenceOfSharesIsAboveAHundredPoints) {
  Comparison c = small({{"mha", {.3, .28, .32, .3, .3}}, {"dcmha", {1, 1, 1, 1, .05}}});
  c.tasks[0].metric = "error rate";
  c.tasks[0].percent = true;
  EXPECT_NE(answer_of(c).find("at most 100.0 points apart"), std::string::npos) << answer_of(c);
}

TEST(Answer, LabelsStayAsTheyAre) {
  const Comparison c = small({{"mha", five(1.94, 0.005)}, {"v1. small", five(1.99, 0.005, 1)}});
  EXPECT_NE(answer_of(c).find("`v1. small` is worse"), std::string::npos) << answer_of(c);
}

TEST(Answer, AFastOneThatASlowerOneOverlapsIsNotCalledFastest) {
  const std::string said =
      advice_at({{"mha", {16000, 21000}}, {"a", {11900, 16300}}, {"b", {12500, 15600}}});
  EXPECT_NE(said.find("No training speed is called the fastest: that of `a` overlaps that of "
                      "`mha`, but also that of `b`, which is slower than `mha`."),
            std::string::npos)
      << said;
}

TEST(Answer, APassThatTheSeedsDoNotCarryIsNoLearning) {
  // Two of five seeds learn: the mean is below the floor, but not by its interval.
  Comparison c = small({{"mha", {.05, .75, .74, .06, .76}}, {"a", {.04, .05, .06, .05, .04}}});
  c.tasks[0].percent = true;
  c.tasks[0].floors = {{"a guess", 0.75}};
  const Summary summary = summarize(c);
  for (const Row& row : summary.tasks[0].rows) {
    EXPECT_EQ(row.learning, row.baseline ? Learning::kNotLearned : Learning::kLearned);
  }
}

// Two seeds have so wide an interval that 9% errors do not pass a floor of 75% by it.
TEST(Answer, APassThatTooFewSeedsCannotCarryIsNotKnown) {
  Comparison c = small({{"mha", {.06, .12}}, {"a", {.04, .15}}, {"b", {.76, .78}}});
  c.tasks[0].percent = true;
  c.tasks[0].metric = "error rate";
  c.tasks[0].floors = {{"a guess", 0.75}};
  EXPECT_EQ(against_baseline(c, "a"), Relation::kTooFewSeeds);
  EXPECT_EQ(against_baseline(c, "b"), Relation::kNotLearned);
  const std::string open =
      ": its mean passes the floor of what is reached without learning, a guess (75.0%), but there "
      "are too few seeds to tell that from chance; train from at least 5 seeds.";
  EXPECT_NE(answer_of(c).find("2 seeds are paired, where a claim takes at least 5. Whether `mha` "
                              "(9.0 ± 38.1%) and `a` (9.5 ± 69.9%) have learned is not known: "
                              "their means pass the floor "),
            std::string::npos)
      << answer_of(c);
  EXPECT_NE(answer_of(c).find("seeds. `b` (77.0 ± 12.7%) is not shown to have learned: "),
            std::string::npos)
      << answer_of(c);
  const std::string nothing =
      "For text and this budget, nothing is recommended, because a claim takes at least 5 seeds.";
  EXPECT_EQ(advice(c), nothing);
  // Where no other model has passed, the baseline is not said to have learned, either.
  std::erase_if(c.runs, [](const auto& run) { return run.model == "a" || run.seed > 0; });
  EXPECT_EQ(answer_of(c).find("On text, whether `mha` (6.0%) has learned is not known" + open), 0u)
      << answer_of(c);
  EXPECT_EQ(advice(c), nothing);
  // A pass that two seeds do carry is one.
  c = small({{"mha", {.090, .091}}});
  c.tasks[0].floors = {{"a guess", 0.75}};
  EXPECT_EQ(summarize(c).tasks[0].rows[0].learning, Learning::kLearned);
}

TEST(Answer, TheSmallerStateIsNamedWithItsPrice) {
  Comparison c =
      small({{"mha", five(1.94, 0.005)}, {"a", five(1.5, 0.005, 1)}, {"b", five(1.7, 0.005, 2)}});
  c.builds[0].state_bytes_per_token = c.builds[1].state_bytes_per_token = 4096;
  c.builds[2].state_bytes_per_token = 512;
  EXPECT_NE(advice(c).find("If decoding memory matters, take `b`: each token of context adds 512 B "
                           "of state against 4.0 KiB, and it is better than the baseline by 0.240"),
            std::string::npos)
      << advice(c);
  // Not where its whole state is larger at the length of the task.
  c.builds[0].state_bytes = c.builds[1].state_bytes = 8192;
  c.builds[2].state_bytes = 16384;
  EXPECT_EQ(advice(c).find("decoding memory"), std::string::npos) << advice(c);
}

TEST(Answer, LimitsSayWhereCurvesAreNotKnown) {
  Comparison c = small({{"mha", {1.9, 1.9}}, {"b", {1.8, 1.8}}});
  EXPECT_NE(summarize(c).limits.find("whether curves still move at the end is not known (all "),
            std::string::npos)
      << "there is one evaluation of each: " << summarize(c).limits;
  for (auto& run : c.runs) {
    Point early = run.points[0];
    early.step = early.step * 3 / 4;
    run.points.insert(run.points.begin(), early);
  }
  EXPECT_EQ(summarize(c).limits.find("whether curves"), std::string::npos) << summarize(c).limits;
}

TEST(Answer, LimitsComeFirst) {
  const std::string limits = summarize(quickstart()).limits;
  EXPECT_EQ(
      limits.find("What limits this: the models are tiny (1.32M parameters); training is short "
                  "(2.4M tokens, 1.8 per parameter"),
      0u)
      << limits;
  EXPECT_NE(limits.find("no training option was swept"), std::string::npos);
  EXPECT_LT(to_html(quickstart()).find("What limits this"),
            to_html(quickstart()).find("On text, "));
}

TEST(ShownPage, SaysAtMostWhereTheBaselineIsMetAtTheFirstEvaluation) {
  Comparison c = small({{"mha", {1.9, 1.9}}, {"b", {1.8, 1.8}}});
  EXPECT_EQ(to_html(c).find("to match"), std::string::npos) << "there is one evaluation of each";
  for (auto& run : c.runs) {
    Point early = run.points[0];
    early.step = 50;
    early.tokens = 0.5e6;
    early.quality = run.model == "b" ? 1.85 : 2.0;
    run.points.insert(run.points.begin(), early);
  }
  EXPECT_NE(to_html(c).find(">at most 0.50×<"), std::string::npos);
  EXPECT_NE(to_html(c).find("at its first evaluation already."), std::string::npos);
  EXPECT_EQ(to_html(c).find("</i>, where it has not met it."), std::string::npos);
  c.models.push_back({.label = "worse"});
  for (report::Run run : std::vector(c.runs)) {
    if (run.model != "b") continue;
    run.model = "worse";
    for (Point& p : run.points) p.quality += 1;
    c.runs.push_back(std::move(run));
  }
  EXPECT_NE(to_html(c).find("<i>–</i>, where it has not met it."), std::string::npos);
  for (auto& run : c.runs) run.points[0].quality = 2.0;
  const std::string page = to_html(c);
  EXPECT_EQ(page.find("at most 0."), std::string::npos);
  EXPECT_NE(page.find(">0.75×<"), std::string::npos);
}

TEST(ShownPage, GivesStepsToAnAccuracyWhereRunsHaveSeveralEvaluations) {
  Comparison c = quickstart();
  EXPECT_NE(to_html(c).find("steps to 90%"), std::string::npos);
  for (auto& run : c.runs) {
    if (run.points.size() > 1) run.points.erase(run.points.begin(), run.points.end() - 1);
  }
  EXPECT_EQ(to_html(c).find("steps to 90%"), std::string::npos);
}

TEST(ShownPage, NamesUnitsOnAPhoneToo) {
  const std::string page = to_html(quickstart());
  EXPECT_NE(page.find("data-label=\"training\ntokens/s\""), std::string::npos);
  EXPECT_NE(page.find("<span class=\"seeds\">; under <i>each seed</i>"), std::string::npos);
}

TEST(ShownPage, SaysWhyTasksOfOneNameAreApart) {
  Comparison c = quickstart();
  c.tasks[0].apart = "differs from `find_block` in `tokenizer` ('a.model', not 'bytes')";
  EXPECT_NE(summarize(c).limits.find("; the task `text` differs from `find_block` in `tokenizer` "
                                     "('a.model', not 'bytes'), so that the two are not compared"),
            std::string::npos)
      << summarize(c).limits;
  EXPECT_NE(to_html(c).find("It differs from <code>find_block</code>"), std::string::npos);
}

TEST(ShownPage, LeavesOutModelsWithoutRunsWhereNothingIsPlanned) {
  Comparison c = small({{"mha", {1.9, 1.9}}, {"b", {1.8, 1.8}}, {"d", {1.7, 1.7}}});
  c.planned = false;
  std::erase_if(c.runs, [](const auto& run) { return run.model == "mha"; });
  const Summary summary = summarize(c);
  ASSERT_EQ(summary.tasks[0].rows.size(), 2u);
  EXPECT_FALSE(summary.tasks[0].rows[0].baseline);
  EXPECT_TRUE(summary.tasks[0].rows[1].baseline);
  EXPECT_EQ(to_text(c).find("mha"), std::string::npos);
  EXPECT_EQ(to_html(c).find("Difference from <code>mha"), std::string::npos);
}

TEST(Trend, ComparesTheEndWithThreeQuarters) {
  Comparison c = small({{"mha", {2.0, 2.0}}});
  const auto trend = [&](double before, int64_t step) {
    for (auto& run : c.runs) {
      run.points = {{.step = step, .quality = before}, {.step = 100, .quality = 2.0}};
    }
    return summarize(c).tasks[0].rows[0].trend;
  };
  EXPECT_EQ(trend(2.03, 75), Trend::kMoving);
  EXPECT_EQ(trend(2.01, 75), Trend::kPlateau);
  EXPECT_EQ(trend(1.90, 75), Trend::kPlateau);
  EXPECT_EQ(trend(2.03, 20), Trend::kNotKnown);
  EXPECT_EQ(trend_text(c.tasks[0], Trend::kMoving), "still falling");
}

// Reports of equal models. A report is wrong when it states any difference at all.
struct Equal {
  int models;
  double evaluation;  // standard error of the held-out data, relative to the deviation of a seed
  bool two_humps;     // runs either learn or do not
  int parts = 0;      // of the held-out data, as each run records them
};

double false_reports(const Equal& e, int reports) {
  std::mt19937_64 random(20261123);
  std::normal_distribution<double> normal;
  std::bernoulli_distribution learns(0.5);
  int wrong = 0;
  for (int i = 0; i < reports; ++i) {
    std::vector<std::pair<std::string, std::vector<double>>> results;
    std::vector<std::vector<double>> parts;  // of each model
    std::vector<double> seeds(5);
    for (double& s : seeds) s = normal(random);
    for (int m = 0; m < e.models; ++m) {
      // The error that the held-out data makes for this model at every seed.
      double shared = e.evaluation * normal(random);
      if (e.parts > 0) {
        // The parts are hard for all models alike, and harder for some.
        std::vector<double>& of_model = parts.emplace_back();
        for (int k = 0; k < e.parts; ++k) {
          of_model.push_back(5 * (k % 2) + e.evaluation * std::sqrt(e.parts) * normal(random));
        }
        shared = std::accumulate(of_model.begin(), of_model.end(), 0.0) / e.parts;
      }
      std::vector<double> values;
      for (const double s : seeds) {
        const double own = e.two_humps ? 4 * learns(random) + 0.3 * normal(random) : normal(random);
        values.push_back(100 + s + own + shared);
      }
      results.push_back({"m" + std::to_string(m), values});
    }
    Comparison c = small(results);
    for (auto& run : c.runs) {
      Point& end = run.points.back();
      end.quality_error = e.evaluation;
      if (e.parts == 0) continue;
      const std::vector<double>& of_model = parts[std::stoul(run.model.substr(1))];
      const double mean = std::accumulate(of_model.begin(), of_model.end(), 0.0) / e.parts;
      for (const double part : of_model) end.quality_parts.push_back(end.quality + part - mean);
    }
    const Summary summary = summarize(c);
    bool states = summary.tasks[0].best_is_claimed;
    for (const Row& row : summary.tasks[0].rows) {
      const Relation r = row.against_baseline.relation;
      states |= r == Relation::kBetter || r == Relation::kWorse;
    }
    wrong += states;
  }
  return static_cast<double>(wrong) / reports;
}

TEST(Simulation, AtMostOneReportInTwentyIsWrongOnEqualModels) {
  constexpr int kReports = 1000;
  // Two standard errors of the simulation itself; for two models without an evaluation error the
  // test's level is 5% exactly.
  const double most = 0.05 + 2 * std::sqrt(0.05 * 0.95 / kReports);
  double least = 1;
  for (const int models : {2, 3, 5, 11}) {
    for (const double evaluation : {0.0, 0.5}) {
      const double rate = false_reports({models, evaluation, false}, kReports);
      EXPECT_LE(rate, most) << models << " models, evaluation error " << evaluation;
      least = std::min(least, rate);
    }
  }
  for (const int models : {2, 5}) {
    const double rate = false_reports({models, 0.5, false, 8}, kReports);
    EXPECT_LE(rate, most) << models << " models, evaluation error of 8 parts";
    least = std::min(least, rate);
  }
  EXPECT_LE(false_reports({2, 0, true}, kReports), most);
  EXPECT_LE(false_reports({11, 0, true}, kReports), most);
  // A test that never finds anything would pass, too.
  EXPECT_GE(least, 0.005);
}

TEST(Simulation, ModelsThatOnlyGuessAreNotSaidToHaveLearned) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  constexpr int kReports = 1000;
  int wrong = 0;
  for (int i = 0; i < kReports; ++i) {
    std::vector<std::pair<std::string, std::vector<double>>> results;
    for (int m = 0; m < 8; ++m) {
      std::vector<double> values;
      for (int s = 0; s < 5; ++s) values.push_back(0.75 + 0.01 * normal(random));
      results.push_back({"m" + std::to_string(m), values});
    }
    Comparison c = small(results);
    c.tasks[0].percent = true;
    c.tasks[0].floors = {{"a guess", 0.75}};
    const Summary summary = summarize(c);
    const auto& rows = summary.tasks[0].rows;
    wrong += std::any_of(rows.begin(), rows.end(),
                         [](const Row& row) { return row.learning == Learning::kLearned; });
  }
  EXPECT_LE(wrong, 0.05 * kReports);
}

TEST(Simulation, FindsDifferencesOfUsefulSize) {
  // Four variants, of which one differs by four times the deviation of a paired difference.
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  constexpr int kReports = 500;
  int found = 0;
  for (int i = 0; i < kReports; ++i) {
    std::vector<std::pair<std::string, std::vector<double>>> results;
    for (int m = 0; m < 5; ++m) {
      std::vector<double> values;
      for (int s = 0; s < 5; ++s) {
        values.push_back(100 - (m == 1 ? 4 * std::sqrt(2.0) : 0) + normal(random));
      }
      results.push_back({"m" + std::to_string(m), values});
    }
    found += against_baseline(small(results), "m1") == Relation::kBetter;
  }
  EXPECT_GE(found, 0.8 * kReports);
}

TEST(Stat, MedianAndRange) {
  const Stat stat = stat_of({3, 1, 2, kUnknown});
  EXPECT_EQ(stat.count, 3);
  EXPECT_DOUBLE_EQ(stat.mean, 2);
  EXPECT_DOUBLE_EQ(stat.median, 2);
  EXPECT_DOUBLE_EQ(stat.low, 1);
  EXPECT_DOUBLE_EQ(stat.high, 3);
  EXPECT_DOUBLE_EQ(stat_of({1, 4}).median, 2.5);
  EXPECT_TRUE(std::isnan(stat_of({}).median));
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
  const Axis time = make_axis("t", Unit::kSeconds, 0, 0.21);
  texts.clear();
  for (const double v : time.ticks()) texts.push_back(time.tick_text(v));
  EXPECT_EQ(texts, (std::vector<std::string>{"0", "0.05s", "0.10s", "0.15s", "0.20s"}));
  texts = {"2.0", "2.2", "2.4"};
  const Axis log = make_axis("y", Unit::kPlain, 0.01, 2, true);
  for (const double v : log.ticks()) texts.push_back(log.tick_text(v));
  EXPECT_EQ(texts[3], "0.01");
  for (const double v : make_axis("z", Unit::kPlain, 5, 5).ticks()) EXPECT_TRUE(std::isfinite(v));
  // Where all differences are 0, small ones would be seen.
  EXPECT_LE(make_axis("z", Unit::kPoints, 0, 0).high, 0.01);
}

TEST(Format, Numbers) {
  EXPECT_EQ(times(0.613), "0.61×");
  EXPECT_EQ(signed_text(-0.3, "0.30"), "−0.30");
  EXPECT_EQ(signed_text(-1e-9, "0.00"), "0.00");
  EXPECT_EQ(metric_text(TaskInfo{}, 0.00034), "0.00034");
  EXPECT_EQ(metric_text(TaskInfo{}, 0.034), "0.034");
  EXPECT_EQ(percent(0.1234), "12.3%");
  EXPECT_EQ(grouped(1234567), "1,234,567");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(fixed(kUnknown, 3), "–");
  EXPECT_EQ(fixed(-0.004, 2), "0.00");
  EXPECT_EQ(fixed(-0.006, 2), "-0.01");
  EXPECT_EQ(bytes(-1), "–");
  EXPECT_EQ(rich("a `<b>` c"), "a <code>&lt;b&gt;</code> c");
  EXPECT_EQ(pad("±1", 4, true), "  ±1");
}

}  // namespace
}  // namespace headloom::report::answers_test
