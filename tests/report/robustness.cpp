// What a report says of a comparison that was repeated under a second initialisation.
#include <gtest/gtest.h>

#include "report/summary.h"
#include "report/synthetic.h"

namespace headloom::report::robustness_test {
namespace {

using Results = std::vector<std::pair<std::string, std::vector<double>>>;

// Five seeds around `mean`; the differences of two models with other shifts vary.
std::vector<double> five(double mean, int shift = 0) {
  std::vector<double> out;
  for (int i = 0; i < 5; ++i) out.push_back(mean + 0.002 * ((i + shift) % 5 - 2));
  return out;
}

Comparison repeated(const Results& first, const Results& second) {
  Comparison c = small(first), again = small(second);
  again.title = "equal_init = true";
  c.robustness = {again};
  return c;
}

const Results kFirst = {{"mha", five(1.94)}, {"dcmha", five(1.90, 1)}, {"aft", five(1.99, 2)}};

std::string sentence(const Results& second) {
  const Comparison c = repeated(kFirst, second);
  return summarize(c).tasks[0].robustness.at(0).answer;
}

TEST(Robustness, SaysThatEverythingHolds) {
  EXPECT_EQ(sentence(kFirst),
            "Under a second initialisation (equal_init = true) the ranking holds, and all 3 claims "
            "hold.");
}

TEST(Robustness, OfTwoModelsTheBetterOneIsTheBest) {
  const Results two = {{"mha", five(1.94)}, {"dcmha", five(1.90, 1)}};
  EXPECT_EQ(summarize(repeated(two, two)).tasks[0].robustness.at(0).answer,
            "Under a second initialisation (equal_init = true) the ranking holds, and the one "
            "claim holds.");
}

TEST(Robustness, SaysWhichClaimsDoNotHold) {
  EXPECT_EQ(sentence({{"mha", five(1.94)}, {"dcmha", five(1.939, 2)}, {"aft", five(1.99, 2)}}),
            "Under a second initialisation (equal_init = true) the ranking holds, but 2 of 3 "
            "claims do not hold: `dcmha` (better, then no difference found); that `dcmha` is the "
            "best.");
}

TEST(Robustness, SaysHowTheRankingIs) {
  EXPECT_EQ(
      sentence({{"mha", five(1.90)}, {"dcmha", five(1.94, 1)}, {"aft", five(1.99, 2)}}),
      "Under a second initialisation (equal_init = true) the ranking is `mha`, `dcmha`, `aft` "
      "instead of `dcmha`, `mha`, `aft`, and 2 of 3 claims do not hold: `dcmha` (better, then "
      "worse); that `dcmha` is the best.");
}

TEST(Robustness, EqualModelsHaveNoOrder) {
  // The order in which a file has two models that are equal is none of results.
  for (const Results& first : {Results{{"mha", five(1.9)}, {"dcmha", five(1.9)}},
                               Results{{"dcmha", five(1.9)}, {"mha", five(1.9)}}}) {
    const Comparison c = repeated(first, {{"mha", five(1.90)}, {"dcmha", five(1.901, 1)}});
    const std::string answer = summarize(c).tasks[0].robustness.at(0).answer;
    EXPECT_NE(answer.find("the ranking holds"), std::string::npos) << answer;
  }
}

TEST(Robustness, RanksNoModelsThatHaveNotLearned) {
  Comparison c = repeated(kFirst, kFirst);
  for (Comparison* one : {&c, &c.robustness[0]}) {
    one->tasks[0].floors = {{"a guess", 1.9}};
    for (auto& run : one->runs) run.points.back().quality = 1.9 + 0.001 * (run.seed % 2 ? 1 : -1);
  }
  EXPECT_EQ(summarize(c).tasks[0].robustness.at(0).answer,
            "Under a second initialisation (equal_init = true) no model is shown to have learned, "
            "as under the first.");
}

TEST(Robustness, WaitsForEveryRun) {
  EXPECT_EQ(sentence({{"mha", five(1.94)}, {"dcmha", {1.9}}, {"aft", five(1.99, 2)}}),
            "Under a second initialisation (equal_init = true) it is not known whether the results "
            "hold, because not every run has finished.");
}

TEST(Robustness, NamesTheModelsWhoseRunsFailed) {
  Comparison c = repeated(kFirst, kFirst);
  auto& run = c.robustness[0].runs.back();
  run.state = RunState::kFailed;
  run.problem = "the loss became nan.";
  EXPECT_EQ(summarize(c).tasks[0].robustness.at(0).answer,
            "Under a second initialisation (equal_init = true) it is not known whether the results "
            "hold, because a run of `aft` failed.");
}

TEST(Robustness, ThatAModelHasLearnedIsAClaim) {
  Comparison c = repeated(kFirst, kFirst);
  for (Comparison* one : {&c, &c.robustness[0]}) one->tasks[0].floors = {{"a guess", 2.5}};
  const auto answer = [&] { return summarize(c).tasks[0].robustness.at(0).answer; };
  EXPECT_EQ(answer(),
            "Under a second initialisation (equal_init = true) the ranking holds, and all 6 claims "
            "hold.");
  for (auto& run : c.robustness[0].runs) {
    if (run.model == "aft") run.points.back().quality = 2.5 + 0.1 * (run.seed % 2 ? 1 : -1);
  }
  EXPECT_EQ(answer(),
            "Under a second initialisation (equal_init = true) the ranking holds, but 2 of 6 "
            "claims do not hold: that `aft` has learned; `aft` (worse, then not past the floor).");
}

TEST(Robustness, IsInTheSameFamilyOfTests) {
  const Comparison alone = small(kFirst), with = repeated(kFirst, kFirst);
  EXPECT_GT(summarize(alone).tested, 0);
  EXPECT_EQ(summarize(with).tested, 2 * summarize(alone).tested);
  EXPECT_GT(summarize(with).tasks[0].rows[0].against_baseline.adjusted_p,
            summarize(alone).tasks[0].rows[0].against_baseline.adjusted_p);
  EXPECT_EQ(summarize(with).planned, 2 * summarize(alone).planned);
}

// Speeds are measured once. What the runs of the second initialisation were trained at is none.
TEST(Robustness, RepeatsNoSpeeds) {
  Comparison c = repeated(kFirst, kFirst);
  for (Comparison* one : {&c, &c.robustness[0]}) {
    for (auto& run : one->runs) run.tokens_per_second = 1000;
  }
  const std::string text = to_text(c, 1000);
  const size_t first = text.find("tokens/s");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(text.find("tokens/s", first + 1), std::string::npos) << text;
}

TEST(Robustness, IsInEveryFormOfTheReport) {
  const Comparison c = repeated(kFirst, kFirst);
  for (const std::string& form : {to_html(c), to_text(c, 1000), to_json(c)}) {
    EXPECT_NE(form.find("the ranking holds, and all 3 claims hold."), std::string::npos) << form;
  }
  EXPECT_NE(to_html(c).find("Results on text under a second initialisation"), std::string::npos);
  for (const std::string& form :
       {to_html(small(kFirst)), to_text(small(kFirst)), to_json(small(kFirst))}) {
    EXPECT_EQ(form.find("second initialisation"), std::string::npos);
  }
}

}  // namespace
}  // namespace headloom::report::robustness_test
