// [sweep]: settings are chosen on validation data and reported on test data from fresh seeds.
#include "train/sweep.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <limits>
#include <set>

#include "core/files.h"
#include "support.h"
#include "train/compare.h"
#include "train/evaluate.h"
#include "train/interrupt.h"
#include "train/load.h"
#include "train/metrics.h"
#include "train/reported.h"
#include "train/run_folder.h"
#include "train/workers.h"

namespace headloom::test::sweep_test {
namespace {

namespace fs = std::filesystem;

constexpr double kNoLoss = std::numeric_limits<double>::infinity();

Sweep sweep_of(const std::string& text) { return Sweep::read(parse_toml(text, "sweep.toml")); }

// "0.001 0.01" of a sweep of one key.
std::string values_of(const std::vector<SweepPoint>& points) {
  std::vector<std::string> texts;
  for (const SweepPoint& point : points) {
    for (const Node& value : point) texts.push_back(inline_toml(value));
  }
  std::string all;
  for (const std::string& text : texts) all += (all.empty() ? "" : " ") + text;
  return all;
}

Tried tried(const std::string& value, double quality) {
  return {.point = {*parse_toml("x = " + value, "x").find("x")}, .quality = quality, .loss = 0};
}

TEST(Sweep, ReadsListsRangesAndGrids) {
  EXPECT_TRUE(sweep_of("").empty());
  const Sweep range = sweep_of("lr = {from = 1e-4, to = 1e-2, count = 5}");
  EXPECT_EQ(values_of(range.grid()), "1e-04 0.000316228 0.001 0.00316228 0.01");
  EXPECT_EQ(range.seeds, std::vector<int64_t>{1001});
  const Sweep grid = sweep_of(
      "seeds = [7, 8]\nextensions = 2\nlr = [1e-3, 2e-3]\nmixer.post = [true, false]\n"
      "\"model.position.type\" = [\"none\"]");
  EXPECT_EQ(values_of(grid.grid()),
            "0.001 true 'none' 0.001 false 'none' 0.002 true 'none' 0.002 false 'none'");
  EXPECT_EQ(grid.seeds, (std::vector<int64_t>{7, 8}));
  EXPECT_EQ(grid.extensions, 2);
  EXPECT_EQ(grid.keys[2].table, "model");
  EXPECT_EQ(grid.keys[2].key, "position.type");
  EXPECT_EQ(grid.text(grid.grid()[1]),
            "lr = 0.001, mixer.post = false, model.position.type = 'none'");
  EXPECT_EQ(grid.folder(grid.grid()[1]), "lr=0.001,mixer.post=false,model.position.type=none");
}

TEST(Sweep, GoesOnAtAnEdgeByItsOwnFactorUntilItMayNot) {
  const Sweep sweep = sweep_of("lr = [1e-3, 2e-3, 4e-3]\nextensions = 2");
  std::vector<Tried> all = {tried("1e-3", 3), tried("2e-3", 2), tried("4e-3", 1)};
  EXPECT_EQ(values_of(sweep.extension(all)), "0.008");
  all.push_back(tried("8e-3", 0.5));
  EXPECT_EQ(values_of(sweep.extension(all)), "0.016");
  EXPECT_EQ(sweep.at_edge(all, *best_of(all)), std::vector<std::string>{"lr"});
  std::vector<Tried> more = all;
  more.push_back(tried("0.016", 0.2));
  EXPECT_TRUE(sweep.extension(more).empty()) << "two values were added";
  EXPECT_EQ(sweep.at_edge(more, *best_of(more)), std::vector<std::string>{"lr"});
  all.push_back(tried("0.016", kNoLoss));
  EXPECT_TRUE(sweep.extension(all).empty()) << "the next one diverged";
  EXPECT_TRUE(sweep.at_edge(all, *best_of(all)).empty());
  EXPECT_EQ(inline_toml((*best_of(all))[0]), "0.008");
  EXPECT_EQ(values_of(sweep.extension({tried("1e-3", 1), tried("2e-3", 2), tried("4e-3", 3)})),
            "5e-04");
  EXPECT_FALSE(best_of({tried("1", kNoLoss)}).has_value());
}

TEST(Sweep, TheLossDecidesBetweenEqualQualities) {
  std::vector<Tried> all = {tried("1", 0.5), tried("2", 0.5), tried("3", 0.5)};
  all[0].loss = 2;
  all[1].loss = 1;
  all[2].loss = 3;
  EXPECT_EQ(inline_toml((*best_of(all))[0]), "2");
}

TEST(Sweep, OnlyNumbersAtEqualFactorsGoOn) {
  const auto extended = [](const std::string& values, const std::string& best) {
    std::vector<Tried> all;
    const Sweep sweep = sweep_of("eps = " + values);
    for (const SweepPoint& point : sweep.grid()) {
      all.push_back({point, inline_toml(point[0]) == best ? 0.0 : 1.0, 0.0});
    }
    return values_of(sweep.extension(all));
  };
  EXPECT_EQ(extended("[1e-3, 3e-3, 1e-2]", "0.01"), "0.0316228");
  EXPECT_EQ(extended("[0.1, 0.2, 0.3]", "0.3"), "");
  EXPECT_EQ(extended("[0.0, 0.1]", "0.1"), "");
  EXPECT_EQ(extended("[2, 4, 8]", "8"), "");
  EXPECT_EQ(extended("[0.1]", "0.1"), "");
  EXPECT_EQ(extended("[\"a\", \"b\"]", "\"b\""), "");
}

TEST(Sweep, RefusesWhatItCannotRead) {
  const auto refused = [](const std::string& text) {
    return message_of<UsageError>([&] { sweep_of(text); });
  };
  EXPECT_TRUE(contains(refused("lrr = [1e-3]"), "'lrr', which [train] does not have; did you"));
  EXPECT_TRUE(contains(refused("mixr.post = [true]"), "did you mean 'mixer.post'?"));
  EXPECT_TRUE(contains(refused("lr = []"), "'sweep.lr' is empty"));
  EXPECT_TRUE(contains(refused("lr = 1e-3"), "'sweep.lr' is a real number, expected a list"))
      << refused("lr = 1e-3");
  EXPECT_TRUE(contains(refused("lr = {from = 1e-2, to = 1e-3, count = 3}"),
                       "'sweep.lr.from' is 0.01, expected less than 'to' = 0.001"));
  EXPECT_TRUE(contains(refused("lr = {from = 1e-3, to = 1e-3, count = 3}"), "expected less than"));
  const std::string few = refused("lr = {from = 1e-4, to = 1e-3, count = 1}");
  EXPECT_TRUE(contains(few, "sweep.lr.count")) << few;
  EXPECT_TRUE(contains(refused("lr = {from = 1e-4, to = 1e-3}"), "has no 'count'"));
  EXPECT_TRUE(contains(refused("lr = [1e-3, 1e-3]"), "the value 0.001 twice"));
  EXPECT_TRUE(contains(refused("lr = [1e-3]\n\"train.lr\" = [2e-3]"), "the same key"));
  EXPECT_TRUE(contains(refused("steps = [3]"), "cannot be swept"));
  const std::string known = refused("mixer = [1]");
  EXPECT_TRUE(contains(known, "known keys are batch, accumulate, lr, ")) << known;
  EXPECT_FALSE(contains(known, "steps")) << known;
  EXPECT_TRUE(contains(refused("seeds = [1]"), "names no key"));
  EXPECT_TRUE(contains(refused("lr = [1e-3]\nseeds = []"), "'sweep.seeds' is empty"));
  EXPECT_TRUE(contains(refused("lr = [1e-3]\nseeds = [7, 8, 7]"),
                       "'sweep.seeds' has the seed 7 twice, expected different ones."));
}

// --- In a comparison.

Node comparison(const std::string& sweep) {
  return tiny_comparison(
      "depth = 1\n[[model.layer]]\nmixer = { heads = 2 }\n"
      "channel = { type = \"swiglu\", hidden = 24 }\n",
      "steps = 4\nwarmup = 0\n", R"([[tasks]]
name = "copy"
task = { type = "copy", symbols = 8, count = 2, eval_sequences = 41 }
[sweep]
)" + sweep);
}

TEST(SweepInAComparison, ChoosesOnValidationDataAndReportsFreshSeedsOnTestData) {
  const TempFolder folder;
  std::string corpus;
  for (int i = 0; i < 40; ++i) corpus += "The quick brown fox jumps over the lazy dog.\n";
  write_file(folder.path("corpus.txt"), corpus);
  const auto on_text = [&](const std::string& sweep) {
    Node node = comparison(sweep);
    apply_override(node, str("tasks.0.task={type=\"text\", length=16, eval_tokens=256, paths=[\"",
                             folder.path("corpus.txt"), "\"]}"));
    return node;
  };
  const Node node = on_text("lr = [1e-3, 1e-2]\nextensions = 0\nseeds = [11, 12]\n");
  const CompareOutcome outcome = compare_quietly(node, folder.path());
  const report::Comparison& c = outcome.comparison;
  EXPECT_EQ(c.swept, std::vector<std::string>{"lr"});
  EXPECT_EQ(c.sweep_seeds, (std::vector<int64_t>{11, 12}));
  EXPECT_EQ(outcome.planned, 12u);
  ASSERT_EQ(c.runs.size(), 12u);
  ASSERT_EQ(c.choices.size(), 2u);
  for (const report::Choice& choice : c.choices) {
    std::map<std::string, double> means;
    for (const report::Run& run : c.runs) {
      if (run.model == choice.model && run.sweep) {
        means[run.setting[0].value] += run.points.back().quality / 2;
      }
    }
    ASSERT_EQ(means.size(), 2u);
    const auto best =
        std::min_element(means.begin(), means.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    EXPECT_LE(means[choice.setting[0].value], best->second);
    EXPECT_EQ(choice.at_edge, std::vector<std::string>{"lr"}) << "of two values each is an edge";
  }
  for (const report::Run& run : c.runs) {
    const RunConfig config = run_config_in(folder.path(run.folder));
    EXPECT_EQ(config.train.eval_split, run.sweep ? "validation" : "test");
    EXPECT_EQ(config.train.seed, run.seed);
    EXPECT_EQ(inline_toml(*parse_toml(str("x = ", run.setting[0].value), "x").find("x")),
              run.setting[0].value);
    EXPECT_EQ(formatted("%.3g", config.train.lr), run.setting[0].value);
    EXPECT_EQ(run.sweep, run.seed > 10);
    EXPECT_GT(run.points.back().quality_error, 0);
  }

  // Again: nothing is trained again. One more value: its runs alone, and those of a new choice.
  const auto trained = [&] {
    std::map<std::string, fs::file_time_type> out;
    for (const auto& entry : fs::recursive_directory_iterator(folder.path())) {
      if (entry.path().filename() == "result.json") out[entry.path()] = entry.last_write_time();
    }
    return out;
  };
  const auto before = trained();
  EXPECT_EQ(compare_quietly(node, folder.path()).comparison.runs.size(), 12u);
  EXPECT_EQ(trained(), before);
  const CompareOutcome larger = compare_quietly(
      on_text("lr = [1e-3, 1e-2, 3e-3]\nextensions = 0\nseeds = [11, 12]\n"), folder.path());
  EXPECT_EQ(larger.comparison.runs.size(), 16u);
  for (const auto& [path, time] : trained()) {
    const auto known = before.find(path);
    if (known != before.end() && contains(path, "/sweep/")) {
      EXPECT_EQ(time, known->second) << path;
    }
  }
}

TEST(SweepInAComparison, GoesBeyondAnEdgeAndSaysSoWhereItEnds) {
  const TempFolder folder;
  // A rate this small learns nothing in four steps: the larger one is better.
  const report::Comparison c =
      compare_quietly(comparison("lr = [1e-6, 1e-5]\nextensions = 1\n"), folder.path()).comparison;
  for (const char* model : {"mha", "talking"}) {
    std::set<std::string> rates;
    for (const report::Run& run : c.runs) {
      if (run.sweep && run.model == model) rates.insert(run.setting[0].value);
    }
    EXPECT_EQ(rates.size(), 3u) << "a value beyond the edge";
  }
}

TEST(SweepInAComparison, SaysWhereNoSettingHasAFiniteLoss) {
  const TempFolder folder;
  Node node = comparison("lr = [1e30, 1e31]\n");
  apply_override(node, "train.clip=0");
  const report::Comparison c = compare_quietly(node, folder.path()).comparison;
  EXPECT_TRUE(c.choices.empty());
  size_t finals = 0;
  for (const report::Run& run : c.runs) {
    EXPECT_EQ(run.state, report::RunState::kFailed);
    if (run.sweep) continue;
    ++finals;
    EXPECT_EQ(run.problem, str("no setting of the sweep has a finite loss for model '", run.model,
                               "' on task 'copy', so none can be chosen."));
  }
  EXPECT_EQ(finals, 4u);
}

TEST(SweepInAComparison, ChecksEverythingBeforeTraining) {
  const TempFolder folder;
  const auto refused = [&](const std::string& sweep, const std::string& change = "") {
    Node node = comparison(sweep);
    if (!change.empty()) apply_override(node, change);
    const std::string message =
        message_of<UsageError>([&] { compare_quietly(node, folder.path("c")); });
    EXPECT_FALSE(fs::exists(folder.path("c")));
    return message;
  };
  EXPECT_TRUE(
      contains(refused("lr = [1e-3]\nseeds = [2]\n"), "the seed 2, which is one of 'seeds'"));
  const std::string range = refused("lr = [1e-3, -1.0]\n");
  EXPECT_TRUE(contains(range, "model 'mha' on task 'copy': sweep.lr = -1.0: 'train.lr' is -1.0"))
      << range;
  const std::string unknown = refused("mixer.post = [true]\n");
  EXPECT_TRUE(contains(unknown, "unknown key")) << unknown;
  EXPECT_TRUE(contains(refused("channel.hidden = [24, 32]\n"), "'match_parameters' is true"));
  EXPECT_TRUE(contains(refused("lr = [1e-3]\n", "tasks.0.task.eval_sequences=1"),
                       "task 'copy': the task has 1 held-out sequence, expected at least 2"));
  EXPECT_TRUE(contains(refused("lr = [1e-3]\n", "models.1.train.steps=3"), "'train.steps'"));
  EXPECT_TRUE(contains(refused("lr = [1e-3]\n", "train.eval_split=all"),
                       "--set train.eval_split: 'train.eval_split' has no effect with [sweep]"));
  EXPECT_TRUE(contains(refused("", "models.1.train={eval_split='test', stop_accuracy=0.5}"),
                       "'train.eval_split' has no effect with [sweep] or train.stop_accuracy"));
  EXPECT_TRUE(contains(refused("model.init_std = [0.01, 0.1]\n", "robustness.model.init_std=0.3"),
                       "'robustness.model.init_std' is swept by 'sweep.model.init_std'"));
  EXPECT_TRUE(contains(
      refused("model.position.base = [1e3, 1e4]\n", "robustness.model={position = {base = 1e5}}"),
      "'robustness.model.position.base' is swept by 'sweep.model.position.base'"));
}

TEST(SweepInAComparison, AModelsOwnTrainingIsShown) {
  const TempFolder folder;
  Node node = comparison("");
  node.table().erase(std::find_if(node.table().begin(), node.table().end(),
                                  [](const auto& entry) { return entry.first == "sweep"; }));
  apply_override(node, "models.1.train={weight_decay=0.0, batch=8}");
  const report::Comparison c = compare_quietly(node, folder.path()).comparison;
  EXPECT_EQ(c.builds[0].train_differences, "");
  EXPECT_EQ(c.builds[1].train_differences, "batch = 8, weight_decay = 0.0");
  for (const report::Run& run : c.runs) {
    EXPECT_EQ(run.points.back().tokens, 4 * 4 * 4) << "as many tokens in larger batches";
  }
}

TEST(SweepInAComparison, BudgetsOfOperationsAndSecondsDecideTheSteps) {
  const TempFolder folder;
  Node node = comparison("");
  apply_override(node, "train.steps=100");
  apply_override(node, "train.eval_every=100");
  apply_override(node, "models.1={name=\"deep\", model={depth=3}}");
  apply_override(node, "match_parameters=false");
  const auto steps = [&](const std::string& budget, const std::string& where) {
    Node changed = node;
    apply_override(changed, "budget=" + budget);
    const CompareConfig config = compare_config(changed);
    int measured = 0;
    const CompareControl control{.folder = folder.path(where),
                                 .progress = [](const CompareOutcome&) {},
                                 .step_seconds =
                                     [&](const RunConfig& run, const data::Task&) {
                                       ++measured;
                                       return run.model.depth == 3 ? 0.3 : 0.1 + 0.001 * measured;
                                     }};
    const std::vector<std::string> paths = plan_comparison(config, control);
    plan_comparison(config, control);
    EXPECT_EQ(measured, budget == "seconds" ? 2 : 0) << "measured once";
    std::vector<int64_t> out;
    for (const std::string& path : paths) {
      const std::string file = path.substr(0, path.find('@'));
      Node plan = read_toml(folder.path(where + "/plan/" + file + ".toml"));
      out.push_back(std::get<int64_t>(plan.find("train")->find("steps")->value));
    }
    return out;
  };
  EXPECT_EQ(steps("tokens", "t"), (std::vector<int64_t>{100, 100, 100, 100}));
  EXPECT_EQ(steps("seconds", "s"), (std::vector<int64_t>{100, 33, 100, 33}));
  const std::vector<int64_t> flops = steps("flops", "f");
  EXPECT_EQ(flops[0], 100);
  EXPECT_GT(flops[1], 30);
  EXPECT_LT(flops[1], 60);
  apply_override(node, "train.steps=1");
  const std::string message = message_of<UsageError>([&] { steps("flops", "short"); });
  EXPECT_TRUE(contains(message, "model 'deep' on task 'copy': the budget of ")) << message;
  EXPECT_TRUE(contains(message, "is shorter than a step")) << message;
}

// A setting may leave its runs less than the budget, because steps are whole.
TEST(SweepInAComparison, TheBudgetSaysWhatSettingsLeaveOfIt) {
  const TempFolder folder;
  Node node = comparison("batch = [4, 5]\nextensions = 0\n");
  apply_override(node, "train.steps=6");
  const report::Comparison c = compare_quietly(node, folder.path()).comparison;
  // 6 steps of 4 sequences are 4 steps of 5, and 4 sequences.
  EXPECT_TRUE(contains(c.budget,
                       "amount of data, rounded down to whole steps (`mha` on copy with "
                       "batch = 5 has the least, 83%): "))
      << c.budget;
}

// The steps of values by which the sweep grows are kept like the others, and a second
// initialisation trains as many.
TEST(SweepInAComparison, AStepOfAnExtensionIsMeasuredOnce) {
  const TempFolder folder;
  Node node = comparison("model.init_std = [0.02, 0.04]\nextensions = 1\n");
  apply_override(node, "budget=seconds");
  apply_override(node, "train.steps=20");
  apply_override(node, "train.eval_every=20");
  apply_override(node, "robustness.model={equal_init=true}");
  const CompareConfig config = compare_config(node);
  int measured = 0;
  const CompareControl control{.folder = folder.path("c"),
                               .progress = [](const CompareOutcome&) {},
                               .step_seconds =
                                   [&](const RunConfig&, const data::Task&) {
                                     return 0.1 / (1 + 0.1 * measured++);
                                   }};
  const auto run = [&] { return quietly([&] { return compare(config, control); }); };
  const CompareOutcome first = run();
  EXPECT_EQ(first.comparison.sweep_planned, 6) << "both models have tried a third value";
  const int before = measured;
  const CompareOutcome again = run();
  EXPECT_EQ(measured, before);
  EXPECT_EQ(again.present, again.planned);
  EXPECT_TRUE(again.left_out.empty()) << again.left_out.front();
  for (const report::Run& repeated : first.comparison.robustness.front().runs) {
    const std::string same = "runs" + repeated.folder.substr(std::string("robustness").size());
    EXPECT_EQ(run_config_in(folder.path("c/" + repeated.folder)).train.steps,
              run_config_in(folder.path("c/" + same)).train.steps);
  }
}

TEST(SweepInAComparison, PlannedRunsMayBeTrainedInAnyOrder) {
  const TempFolder folder, other;
  const Node node = comparison("lr = [1e-3, 1e-2]\nextensions = 0\n");
  const CompareConfig config = compare_config(node);
  const CompareControl control{.folder = folder.path("c"),
                               .progress = [](const CompareOutcome&) {}};
  ::testing::internal::CaptureStderr();
  std::vector<size_t> rounds;
  for (auto plan = plan_comparison(config, control); !plan.empty();
       plan = plan_comparison(config, control)) {
    rounds.push_back(plan.size());
    std::reverse(plan.begin(), plan.end());
    for (const std::string& path : plan) {
      EXPECT_EQ(train_planned(control.folder, path).state, report::RunState::kFinished);
    }
  }
  ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(rounds, (std::vector<size_t>{4, 4}));
  const report::Comparison planned = compare_quietly(node, control.folder).comparison;
  const report::Comparison plain = compare_quietly(node, other.path("c")).comparison;
  ASSERT_EQ(planned.runs.size(), plain.runs.size());
  for (size_t i = 0; i < plain.runs.size(); ++i) {
    EXPECT_EQ(planned.runs[i].points.back().loss, plain.runs[i].points.back().loss);
  }
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { train_planned(control.folder, "runs/copy/mha/seed-77"); }),
      "no such run"));
}

// Data that are not there say nothing of the model.
TEST(SweepInAComparison, ARunWithoutItsDataHasNotFailed) {
  const TempFolder folder;
  const std::string text = folder.path("a.txt"), away = folder.path("b.txt");
  std::ofstream(text) << std::string(2000, 'x');
  Node node = comparison("");
  node.table().erase(std::find_if(node.table().begin(), node.table().end(),
                                  [](const auto& entry) { return entry.first == "sweep"; }));
  apply_override(node,
                 "tasks.0.task={type='text',length=16,eval_tokens=64,paths=['" + text + "']}");
  const CompareConfig config = compare_config(node);
  const CompareControl control{.folder = folder.path("c"),
                               .progress = [](const CompareOutcome&) {}};
  ::testing::internal::CaptureStderr();
  const std::vector<std::string> plan = plan_comparison(config, control);
  fs::rename(text, away);
  const std::string message = message_of<Obstacle>([&] { train_planned(control.folder, plan[0]); });
  fs::rename(away, text);
  const std::vector<std::string> again = plan_comparison(config, control);
  const report::Run trained = train_planned(control.folder, plan[0]);
  ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(message, "there is no file or folder '" + text + "'"));
  EXPECT_EQ(again, plan) << "it is trained again";
  EXPECT_EQ(trained.state, report::RunState::kFinished) << trained.problem;
}

// Names of folders have an end.
TEST(Sweep, AFolderOfManyKeysHasAHashInPlaceOfSome) {
  std::string keys;
  SweepPoint point;
  for (int i = 0; i < 20; ++i) {
    keys += str("model.key_of_some_length_", i, " = [\"a\", \"b\"]\n");
    point.push_back({.value = std::string("a")});
  }
  const Sweep sweep = sweep_of(keys);
  const std::string first = sweep.folder(point);
  point.back().value = std::string("b");
  const std::string second = sweep.folder(point);
  EXPECT_EQ(first.size(), 200u);
  EXPECT_TRUE(first.starts_with("model.key_of_some_length_0=a,model.key_of_some_length_1=a,"));
  EXPECT_NE(first, second);
}

// What was printed for one configuration never trains another.
TEST(SweepInAComparison, ACommandOfAnEarlierPlanIsRefused) {
  const TempFolder folder;
  const auto planned = [&](const char* change) {
    Node node = comparison("");
    apply_override(node, change);
    const CompareConfig config = compare_config(node);
    const CompareControl control{.folder = folder.path("c"),
                                 .progress = [](const CompareOutcome&) {}};
    return plan_comparison(config, control);
  };
  const auto refused = [&](const std::string& name) {
    return message_of<UsageError>([&] { train_planned(folder.path("c"), name); });
  };
  const std::vector<std::string> first = planned("train.lr=1e-3"), again = planned("train.lr=1e-3");
  EXPECT_EQ(first, again) << "the same configuration has the same commands";
  const std::vector<std::string> second = planned("train.lr=2e-3");
  ASSERT_EQ(second.size(), first.size());
  EXPECT_NE(second[0], first[0]);
  EXPECT_EQ(second[0].substr(0, second[0].find('@')), first[0].substr(0, first[0].find('@')));
  EXPECT_TRUE(contains(refused(first[0]), "with another configuration by now"))
      << refused(first[0]);
  EXPECT_TRUE(contains(refused(first[0].substr(0, first[0].find('@'))), "has no '@' and hash"));
  // The comparison itself may have gone on without a plan.
  Node changed = comparison("");
  apply_override(changed, "train.lr=3e-3");
  compare_quietly(changed, folder.path("c"));
  EXPECT_TRUE(contains(refused(second[0]), "there is no such run in the plan"))
      << refused(second[0]);
}

// min_lr is a share: what lies beyond 1 is not tried.
TEST(SweepInAComparison, AnExtensionStopsWhereTheKeysRangeEnds) {
  const TempFolder folder;
  std::string corpus;
  for (int i = 0; i < 40; ++i) corpus += "The quick brown fox jumps over the lazy dog.\n";
  write_file(folder.path("corpus.txt"), corpus);
  Node node = comparison("min_lr = [0.5, 1.0]\n");
  for (const std::string& change :
       {std::string("train.lr=1e-4"), std::string("train.steps=40"),
        std::string("train.eval_every=40"),
        str("tasks.0.task={type=\"text\", length=16, eval_tokens=256, paths=[\"",
            folder.path("corpus.txt"), "\"]}")}) {
    apply_override(node, change);
  }
  const report::Comparison c = compare_quietly(node, folder.path("c")).comparison;
  std::set<std::string> values;
  for (const report::Run& run : c.runs) {
    if (run.sweep) values.insert(run.setting[0].value);
    EXPECT_EQ(run.state, report::RunState::kFinished) << run.problem;
  }
  // So early in training a larger rate is better.
  EXPECT_EQ(values, (std::set<std::string>{"0.5", "1.0"}));
  ASSERT_EQ(c.choices.size(), 2u);
  for (const report::Choice& choice : c.choices) {
    EXPECT_EQ(choice.setting[0].value, "1.0");
    EXPECT_EQ(choice.at_edge, std::vector<std::string>{"min_lr"});
  }
}

TEST(SweepInAComparison, AWrongValueIsNamedByItsKey) {
  const TempFolder folder;
  Node node = comparison("");
  apply_override(node, "sweep={lr=[1e-3, -1.0]}");
  const std::string message = message_of<UsageError>([&] { compare_quietly(node, folder.path()); });
  EXPECT_TRUE(contains(message, "sweep.lr = -1.0: 'train.lr' is -1.0, expected above 0"))
      << message;
}

TEST(SweepInAComparison, ARunWhoseProcessDiesTwiceIsGivenUpAndDecidesNothing) {
  const TempFolder folder;
  const CompareConfig config = compare_config(comparison("lr = [1e-3, 1e-2]\n"));
  int started = 0;
  const CompareControl control{.folder = folder.path("c"),
                               .progress = [](const CompareOutcome&) {},
                               .jobs = 3,
                               .command =
                                   [&](const std::string&) {
                                     ++started;
                                     return std::vector<std::string>{
                                         "/bin/sh", "-c", "echo 'headloom: no luck.' >&2; exit 1"};
                                   }};
  const report::Comparison c = compare(config, control).comparison;
  EXPECT_EQ(started, 8) << "two models, two rates, twice each";
  EXPECT_TRUE(c.choices.empty());
  ASSERT_EQ(c.runs.size(), 4u);
  for (const report::Run& run : c.runs) {
    EXPECT_EQ(run.state, report::RunState::kFailed);
    EXPECT_EQ(run.problem,
              "the process that trained it ended with exit code 1, for the second time: no luck.");
  }
  // The next call trains them.
  EXPECT_EQ(compare_quietly(comparison("lr = [1e-3, 1e-2]\nextensions = 0\n"), control.folder)
                .comparison.runs.size(),
            8u);
}

TEST(SweepInAComparison, ARunThatCannotBeWrittenStopsItAndHasNotFailed) {
  const TempFolder folder;
  const CompareConfig config = compare_config(comparison("lr = [1e-3, 1e-2]\n"));
  int started = 0;
  report::Comparison last;
  const CompareControl control{
      .folder = folder.path("c"),
      .progress = [&](const CompareOutcome& so_far) { last = so_far.comparison; },
      .jobs = 2,
      .command =
          [&](const std::string&) {
            ++started;
            return std::vector<std::string>{
                "/bin/sh", "-c",
                str("echo 'headloom: x: cannot be written.", kWorkerObstacle, "' >&2; exit 1")};
          }};
  const std::string message = message_of([&] { compare(config, control); });
  EXPECT_TRUE(contains(message, "could not be trained, as is said above, so the comparison stops"))
      << message;
  EXPECT_EQ(started, 2);
  EXPECT_TRUE(last.runs.empty());
}

// In a process of its own, since an interrupt stays.
TEST(SweepInAComparison, ASignalBeforeTheFirstRunInterruptsIt) {
  const TempFolder folder;
  const CompareConfig config = compare_config(comparison("lr = [1e-3, 1e-2]\n"));
  const pid_t process = ::fork();
  if (process == 0) {
    install_interrupt_handler();
    int said = 0;
    std::string go_on;
    const CompareControl control{.folder = folder.path("c"),
                                 .progress =
                                     [&](const CompareOutcome& so_far) {
                                       if (++said == 1) std::raise(SIGTERM);
                                       go_on = so_far.comparison.go_on;
                                     },
                                 .jobs = 2,
                                 .command = [](const std::string&) -> std::vector<std::string> {
                                   ::_exit(2);
                                 }};
    const bool stopped = compare(config, control).interrupted;
    ::_exit(stopped && said == 2 && go_on.starts_with("headloom compare ") ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(process, &status, 0), process);
  EXPECT_EQ(status, 0);
}

TEST(Split, ValidationAndTestDataAreApart) {
  const TempFolder folder;
  Node config = tiny_run("steps = 2\neval_every = 2\n");
  apply_override(config, "task.eval_sequences=9");
  train_quietly(config, {.folder = folder.path("run")});
  RunConfig run = run_config_in(folder.path("run"));
  const auto task = run.build_task();
  const auto model = build_model(run.model);
  const auto read = [&](Split split, int64_t sequences = 100) {
    return evaluate(*model, *task, sequences, 2, {}, split);
  };
  const Evaluation all = read(Split::all), validation = read(Split::validation),
                   test = read(Split::test);
  EXPECT_EQ(all.sequences, 9);
  EXPECT_EQ(validation.sequences, 4);
  EXPECT_EQ(test.sequences, 4);
  EXPECT_EQ(read(Split::test, 3).sequences, 3);
  EXPECT_TRUE(std::isnan(read(Split::test, 1).loss_error));
  // By hand, from each sequence alone.
  double squares = 0;
  std::vector<double> losses;
  for (int64_t i = 0; i < 9; ++i) {
    at::NoGradGuard no_grad;
    model->eval();
    const BatchLoss one = batch_loss(*model, task->eval_batch(i, 1));
    losses.push_back(one.sum.item<double>() / static_cast<double>(one.targets));
  }
  // Numbers 0, 3, 5, 6 have an even number of ones.
  EXPECT_NEAR(validation.loss, (losses[0] + losses[3] + losses[5] + losses[6]) / 4, 1e-5);
  EXPECT_NEAR(test.loss, (losses[1] + losses[2] + losses[4] + losses[7]) / 4, 1e-5);
  for (const double loss : losses) squares += (loss - all.loss) * (loss - all.loss);
  EXPECT_NEAR(all.loss_error, std::sqrt(squares / 8 / 9), 1e-5) << "targets are equally many";
  // Nine parts of one sequence each.
  ASSERT_EQ(all.loss_parts.size(), losses.size());
  for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(all.loss_parts[i], losses[i], 1e-5);
  // What a run writes of its last evaluation.
  const EvalPoint written = read_metrics(folder.path("run/metrics.jsonl")).evaluations.back();
  EXPECT_EQ(written.loss_parts.size(), 9u);
  EXPECT_EQ(written.accuracy_parts.size(), 9u);
}

// By hand, from each sequence alone: 80 of them are dealt to 32 parts.
TEST(Evaluate, PartsAndErrorsAreThoseOfTheSequences) {
  const auto evaluated = [](const std::string& task_override, std::vector<double>* losses) {
    Node node = tiny_run("steps = 1");
    apply_override(node, task_override);
    RunConfig config = read_run_config(node);
    const auto task = config.build_task();
    config.model.complete({.vocabulary = task->vocabulary(), .length = task->length()});
    at::manual_seed(3);
    const auto model = build_model(config.model);
    model->eval();
    const at::NoGradGuard no_grad;
    for (Tensor p : model->parameters()) p.add_(at::randn_like(p) * 0.5);
    for (int64_t i = 0; losses != nullptr && i < 80; ++i) {
      const BatchLoss one = batch_loss(*model, task->eval_batch(i, 1));
      losses->push_back(one.sum.item<double>() / static_cast<double>(one.targets));
    }
    return evaluate(*model, *task, 80, 10);
  };
  std::vector<double> losses, sums(32), counts(32);
  const Evaluation wrong = evaluated("task.eval_sequences=80", &losses);
  for (size_t i = 0; i < losses.size(); ++i) {
    const size_t part = (i + i / 32) % 32;
    sums[part] += losses[i];
    ++counts[part];
  }
  ASSERT_EQ(wrong.loss_parts.size(), 32u);
  for (size_t i = 0; i < 32; ++i) EXPECT_NEAR(wrong.loss_parts[i], sums[i] / counts[i], 1e-5);
  // One more right answer and one more wrong one would be 1 of 82.
  ASSERT_EQ(wrong.accuracy, 0);
  EXPECT_NEAR(wrong.accuracy_error, std::sqrt(1.0 / 82 * (81.0 / 82) / 82), 1e-12);
  const Evaluation some =
      evaluated("task={type=\"induction\", vocabulary=3, length=8, eval_sequences=80}", nullptr);
  const double share = some.accuracy;
  ASSERT_GT(share, 0.05);
  ASSERT_LT(share, 0.95);
  EXPECT_NEAR(some.accuracy_error, std::sqrt(share * (1 - share) / 79), 1e-9);
}

// The windows of a text are numbered by their places with the bits reversed. Both halves must come
// from everywhere in it: even and odd numbers are its first and its second half.
TEST(Split, BothHalvesAreSpreadOverAText) {
  constexpr int64_t kWindows = 256, kPart = 16;
  for (const Split split : {Split::validation, Split::test}) {
    std::vector<int64_t> in_part(kWindows / kPart);
    for (int64_t i = 0; i < kWindows / 2; ++i) {
      int64_t rest = sequence_number(split, i), place = 0;
      for (int64_t bit = 1; bit < kWindows; bit *= 2, rest /= 2) place = 2 * place + rest % 2;
      ++in_part[static_cast<size_t>(place / kPart)];
    }
    for (const int64_t n : in_part) EXPECT_EQ(n, kPart / 2);
  }
}

TEST(StopAccuracy, EndsTheRunAtTheEvaluationThatReachesIt) {
  const TempFolder folder;
  Node config = tiny_run("steps = 400\neval_every = 20\nstop_accuracy = 0.4\n");
  apply_override(config, "task={type=\"induction\", vocabulary=3, length=8, eval_sequences=64}");
  const TrainOutcome first = train_quietly(config, {.folder = folder.path("run")});
  const std::vector<EvalPoint>& points = first.evaluations;
  for (size_t i = 0; i + 1 < points.size(); ++i) EXPECT_LT(points[i].validation_accuracy, 0.4);
  EXPECT_GE(points.back().validation_accuracy, 0.4);
  EXPECT_LT(first.step, 400);
  EXPECT_EQ(first.step, points.back().step);
  EXPECT_EQ(points.back().tokens, points[0].tokens / points[0].step * first.step);
  const TrainOutcome again = train_quietly(config, {.folder = folder.path("run"), .resume = true});
  EXPECT_EQ(again.step, first.step) << "a run that has stopped does not go on";
  // Without it nothing reads validation data apart.
  apply_override(config, "train.steps=20");
  std::erase_if(config.find("train")->table(),
                [](const auto& entry) { return entry.first == "stop_accuracy"; });
  const TrainOutcome plain = train_quietly(config, {.folder = folder.path("plain")});
  EXPECT_TRUE(std::isnan(plain.evaluations.back().validation_accuracy));
}

// What ends a run is not what it is reported by.
TEST(StopAccuracy, LooksAtValidationDataAndComparisonsReportTestData) {
  const TempFolder folder;
  Node node = comparison("");
  for (const char* change :
       {"train.steps=200", "train.eval_every=10", "train.lr=1e-2",
        "tasks.0.task={type=\"induction\", vocabulary=3, length=8, eval_sequences=64}",
        "models.1.train={stop_accuracy=0.4}"}) {
    apply_override(node, change);
  }
  const report::Comparison c = compare_quietly(node, folder.path()).comparison;
  EXPECT_EQ(c.tasks[0].stopping, kSomeStop) << "one of the models does";
  EXPECT_TRUE(contains(c.budget,
                       "same amount of data, unless it reaches train.stop_accuracy before: "))
      << c.budget;
  for (const report::Run& run : c.runs) {
    RunConfig config = run_config_in(folder.path(run.folder));
    EXPECT_EQ(config.train.eval_split, "test") << "of all models, so that they are comparable";
    const std::vector<EvalPoint> points =
        read_metrics(folder.path(run.folder + "/metrics.jsonl")).evaluations;
    if (run.model == "mha") {
      EXPECT_EQ(points.back().step, 200);
      continue;
    }
    EXPECT_LT(points.back().step, 200);
    // The recorded accuracy is that of the saved model on the other half of the data.
    const auto task = config.build_task();
    const auto model = load_run(folder.path(run.folder), "last");
    const auto on = [&](Split split) {
      return evaluate(*model.model, *task, 100, 4, {}, split).accuracy;
    };
    EXPECT_NEAR(points.back().validation_accuracy, on(Split::validation), 1e-9);
    EXPECT_NEAR(points.back().accuracy, on(Split::test), 1e-9);
    EXPECT_GE(points.back().validation_accuracy, 0.4);
  }
}

}  // namespace
}  // namespace headloom::test::sweep_test
