// Comparisons: every combination once, equal parameters, resumable run by run.
#include "train/compare.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "core/files.h"
#include "core/lock.h"
#include "support.h"
#include "testing/file_limit.h"
#include "train/evaluate.h"
#include "train/reported.h"
#include "train/run_report.h"

namespace headloom::test::compare_test {
namespace {

namespace fs = std::filesystem;

Node comparison(const std::string& more = "") {
  return tiny_comparison(
      "depth = 2\n[[model.layer]]\nmixer = { heads = 4 }\n"
      "channel = { type = \"swiglu\", hidden = 40 }\n",
      "steps = 3\n", R"([[models]]
name = "wide"
model = { position = { type = "none" } }
mixer = { head_dim = 6 }
[[tasks]]
name = "copy"
task = { type = "copy", symbols = 8, count = 4, eval_sequences = 8 }
[[tasks]]
name = "recall"
task = { type = "recall", vocabulary = 12, length = 8, pairs = 2, eval_sequences = 8 }
train = { steps = 2, lr = 1e-2 }
)" + more);
}

// Of the first model, to which the others on the task are matched.
double parameters_to_match(const report::Comparison& comparison, const std::string& task) {
  for (const report::Build& build : comparison.builds) {
    if (build.task == task) return static_cast<double>(build.parameters);
  }
  ADD_FAILURE() << "no model was built for " << task;
  return 0;
}

bool finished(const report::Run& run) { return run.state == report::RunState::kFinished; }

std::map<std::string, fs::file_time_type> times(const std::string& folder) {
  std::map<std::string, fs::file_time_type> out;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) out[entry.path().string()] = entry.last_write_time();
  }
  return out;
}

TEST(Compare, RunsEveryCombinationAtEqualParametersAndGoesOn) {
  const TempFolder folder;
  int calls = 0;
  const CompareOutcome outcome = compare_quietly(comparison(), folder.path(), &calls);
  const report::Comparison& first = outcome.comparison;
  ASSERT_EQ(first.runs.size(), 12u);
  ASSERT_EQ(first.builds.size(), 6u);
  EXPECT_EQ(calls, 13) << "once before and after each run";
  EXPECT_FALSE(outcome.interrupted);
  std::set<std::tuple<std::string, std::string, int64_t>> seen;
  for (const report::Run& run : first.runs) {
    EXPECT_TRUE(finished(run)) << run.problem;
    EXPECT_GT(run.tokens_per_second, 0);
    EXPECT_EQ(run.points.back().step, run.task == "copy" ? 3 : 2);
    EXPECT_EQ(run.points.size(), run.task == "copy" ? 2u : 1u);
    seen.insert({run.model, run.task, run.seed});
  }
  EXPECT_EQ(seen.size(), 12u);
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(first.runs[i].seed, 1) << "seed by seed";
  for (const report::Build& build : first.builds) {
    const double target = parameters_to_match(first, build.task);
    EXPECT_NEAR(static_cast<double>(build.parameters), target, 0.01 * target);
    EXPECT_FALSE(build.config.empty());
  }
  ASSERT_EQ(first.models.size(), 3u);
  for (const report::ModelInfo& model : first.models) EXPECT_FALSE(model.source.empty());
  EXPECT_EQ(first.budget,
            str("Every run trains on the same amount of data: ", 3 * 4 * 8, " tokens on copy, ",
                2 * 4 * 8, " tokens on recall; parameters are equal within 1% on each task."));

  // Again: nothing is redone.
  const auto before = times(folder.path());
  const report::Comparison again = compare_quietly(comparison(), folder.path()).comparison;
  EXPECT_EQ(times(folder.path()), before);
  ASSERT_EQ(again.runs.size(), 12u);
  for (size_t i = 0; i < 12; ++i) {
    EXPECT_EQ(again.runs[i].points.back().loss, first.runs[i].points.back().loss);
    EXPECT_EQ(again.runs[i].tokens_per_second, first.runs[i].tokens_per_second);
  }

  // A run that was stopped in the middle goes on; the others stay.
  const std::string run = folder.path("runs/copy/talking/seed-2");
  fs::remove(run + "/result.json");
  fs::remove_all(run + "/checkpoints/step-3");
  ASSERT_TRUE(fs::exists(run + "/checkpoints/step-2"));
  const report::Comparison resumed = compare_quietly(comparison(), folder.path()).comparison;
  for (size_t i = 0; i < 12; ++i) {
    EXPECT_EQ(resumed.runs[i].points.back().loss, first.runs[i].points.back().loss);
  }
  for (const auto& [path, time] : times(folder.path())) {
    if (path.rfind(run, 0) != 0) {
      EXPECT_EQ(time, before.at(path)) << path;
    }
  }
  EXPECT_TRUE(fs::exists(run + "/result.json"));
}

// The final losses by task, model and seed.
std::map<std::string, double> losses(const CompareOutcome& outcome) {
  std::map<std::string, double> out;
  for (const report::Run& run : outcome.comparison.runs) {
    out[str(run.task, "/", run.model, "/seed-", run.seed)] = run.points.back().loss;
  }
  return out;
}

// A model's own rates for some of its parameters are in its runs and in the report.
TEST(Compare, AModelCanHaveGroupsOfParameters) {
  const TempFolder folder;
  Node node = comparison();
  apply_override(node, "seeds=[1]");
  apply_override(node, "models.1.train={group=[{parameters='*.mixer.p*_mix', lr=0.1}]}");
  const report::Comparison c = compare_quietly(node, folder.path()).comparison;
  for (const report::Build& build : c.builds) {
    EXPECT_EQ(build.train_differences, build.model == "talking"
                                           ? "group = [{ parameters = '*.mixer.p*_mix', lr = 0.1 }]"
                                           : "");
  }
  const Node run = read_toml(folder.path("runs/copy/talking/seed-1/config.toml"));
  EXPECT_TRUE(contains(to_toml(run), "parameters = '*.mixer.p*_mix'"));
}

TEST(Compare, KeepsEveryRunWhoseConfigurationIsUnchanged) {
  const TempFolder folder;
  Node node = comparison();
  apply_override(node, "seeds=[1]");
  const auto first = losses(compare_quietly(node, folder.path()));
  ASSERT_EQ(first.size(), 6u);
  const auto before = times(folder.path());
  const auto expect_kept = [&](const std::string& run) {
    for (const auto& [path, time] : before) {
      if (path.rfind(folder.path("runs/" + run), 0) != 0) continue;
      EXPECT_EQ(fs::last_write_time(path), time) << path;
    }
  };

  // One more seed, one more model, the models that are matched in another order, another title.
  Node more = parse_toml(R"(
[[models]]
name = "mha"
[[models]]
name = "wide"
model = { position = { type = "none" } }
mixer = { head_dim = 6 }
[[models]]
name = "differential"
mixer = { type = "differential", heads = 2 }
[[models]]
name = "talking"
mixer = { type = "talking_heads" }
)",
                         "more.toml");
  Node larger = comparison();
  larger.set("models", *more.find("models"));
  apply_override(larger, "title=Another");
  std::reverse(larger.find("tasks")->array().begin(), larger.find("tasks")->array().end());
  const CompareOutcome outcome = compare_quietly(larger, folder.path());
  EXPECT_EQ(outcome.planned, 16u);
  EXPECT_EQ(outcome.present, 6u);
  EXPECT_TRUE(outcome.left_out.empty());
  const auto second = losses(outcome);
  ASSERT_EQ(second.size(), 16u);
  for (const auto& [run, loss] : first) {
    EXPECT_EQ(second.at(run), loss) << run;
    expect_kept(run);
  }

  // Fewer models and seeds: the others stay, and are named.
  Node fewer = node;
  fewer.find("models")->array().pop_back();
  const CompareOutcome rest = compare_quietly(fewer, folder.path());
  EXPECT_EQ(rest.present, 4u);
  ASSERT_EQ(rest.comparison.runs.size(), 4u);
  EXPECT_EQ(rest.left_out.size(), 12u);
  EXPECT_EQ(rest.left_out[0], "runs/copy/differential/seed-1");
  for (const auto& [run, loss] : first) expect_kept(run);

  // Another learning rate on one task: its runs are trained anew, and what was there is kept.
  Node other = node;
  apply_override(other, "tasks.1.train.lr=2e-2");
  const CompareOutcome changed = compare_quietly(other, folder.path());
  EXPECT_EQ(changed.present, 3u);
  const auto third = losses(changed);
  for (const auto& [run, loss] : first) {
    EXPECT_EQ(third.at(run) == loss, run.starts_with("copy")) << run;
    if (run.starts_with("copy")) continue;
    EXPECT_TRUE(fs::exists(folder.path("runs/" + run + ".earlier-1/result.json")));
    const std::string earlier = "runs/" + run + ".earlier-1";
    EXPECT_NE(std::find(changed.left_out.begin(), changed.left_out.end(), earlier),
              changed.left_out.end());
  }
}

// What the figures over several tasks need: the whole state of a sequence, and the tasks' options.
TEST(Compare, KnowsTheStateOfASequenceAndTheOptionsOfTasks) {
  const TempFolder folder;
  Node node = comparison();
  apply_override(node, "models.1={name=\"window\", mixer={window=4}}");
  apply_override(node, "models.2={name=\"mamba\"}");
  apply_override(node, "model.layer=[{channel={type=\"swiglu\", hidden=40}}]");
  apply_override(node, "models.2.mixer={type=\"mamba\", d_state=8, d_conv=4, expand=2}");
  apply_override(node, "match_parameters=false");
  apply_override(
      node, "tasks.0.task={type=\"recall\", vocabulary=12, length=16, pairs=2, eval_sequences=8}");
  const report::Comparison c = compare_quietly(node, folder.path("c")).comparison;
  const auto state = [&](const std::string& model, const std::string& task) {
    for (const report::Build& build : c.builds) {
      if (build.model == model && build.task == task) return build.state_bytes;
    }
    return report::kUnknown;
  };
  // Two layers, float32, width 16: keys and values of all positions, or of the three before a
  // window's last.
  EXPECT_EQ(state("mha", "recall"), 2 * 4 * 2 * 16 * 8);
  EXPECT_EQ(state("mha", "copy"), 2 * 4 * 2 * 16 * 16);
  EXPECT_EQ(state("window", "recall"), 2 * 4 * 2 * 16 * 3);
  EXPECT_EQ(state("window", "copy"), state("window", "recall"));
  // 32 channels with 8 numbers of state, and three positions of the convolution.
  EXPECT_EQ(state("mamba", "copy"), 2 * 4 * 32 * (8 + 3));
  EXPECT_EQ(state("mamba", "recall"), state("mamba", "copy"));
  const report::Setting& options = c.tasks[0].options;
  const auto has = [&](const char* key, const char* value) {
    return std::find(options.begin(), options.end(), report::SweptValue{key, value}) !=
           options.end();
  };
  EXPECT_TRUE(has("type", "recall"));
  EXPECT_TRUE(has("length", "16"));
  EXPECT_TRUE(has("pairs", "2"));
}

TEST(Compare, FloorsAreOfTheSequencesThatRunsAreJudgedBy) {
  const auto spec = data::make_task_spec("tag_text");
  const auto task = spec->build(1);
  for (const char* split : {"all", "test"}) {
    TrainOptions train;
    train.eval_split = split;
    train.eval_sequences = 3;
    const auto judged = sequence_numbers(*task, split_named(split), 3);
    EXPECT_EQ(judged,
              split[0] == 'a' ? (std::vector<int64_t>{0, 1, 2}) : (std::vector<int64_t>{1, 2, 4}));
    const auto expected = task->floors_of(judged), all = task->floors();
    const auto floors = report_task("tags", *task, *spec, train).floors;
    ASSERT_EQ(floors.size(), expected.size());
    EXPECT_DOUBLE_EQ(floors.back().quality, 1 - expected.back().accuracy);
    EXPECT_NE(floors.back().quality, 1 - all.back().accuracy);
  }
}

TEST(Compare, HoldsItsFolder) {
  const TempFolder folder;
  const FolderLock lock(folder.path());
  EXPECT_TRUE(contains(message_of([&] { compare_quietly(comparison(), folder.path()); }),
                       str(folder.path(), " is in use by process ", ::getpid(), " on host ")));
  EXPECT_FALSE(fs::exists(folder.path("runs")));
}

TEST(Compare, TakesTasksOfEveryKind) {
  const TempFolder folder;
  const report::Comparison compared = compare_quietly(parse_toml(R"(
seeds = [1]
[model]
width = 32
depth = 2
[[model.layer]]
mixer = { heads = 4 }
[train]
steps = 2
batch = 4
eval_sequences = 8
[[models]]
name = "mha"
[[models]]
name = "dcmha"
mixer = { type = "dcmha" }
[[tasks]]
name = "labels"
task = { type = "classify_text", length = 16, eval_sequences = 8 }
model = { kind = "encoder" }
[[tasks]]
name = "spans"
task = { type = "find_span", count = 3, eval_sequences = 8 }
model = { kind = "encoder" }
[[tasks]]
name = "reverse"
task = { type = "sequence", kind = "reverse", symbols = 6, count = 4, eval_sequences = 8 }
model = { kind = "encoder_decoder" }
[[tasks]]
name = "shapes"
task = { type = "images", size = 8, eval_sequences = 8 }
model = { kind = "vit" }
)",
                                                                 "compare.toml"),
                                                      folder.path())
                                          .comparison;
  ASSERT_EQ(compared.runs.size(), 8u);
  for (const report::Run& run : compared.runs) EXPECT_TRUE(finished(run)) << run.problem;
  for (const report::Build& build : compared.builds) {
    const double target = parameters_to_match(compared, build.task);
    EXPECT_NEAR(static_cast<double>(build.parameters), target, 0.01 * target);
    EXPECT_EQ(build.mechanism_share > 0, build.model == "dcmha");
    EXPECT_EQ(build.state_bytes_per_token > 0, build.task == "reverse");
  }
  const std::string source_and_target = str(" ", 2 * 4 * (4 + 5), " tokens on reverse,");
  EXPECT_TRUE(contains(compared.budget, source_and_target)) << compared.budget;
  EXPECT_TRUE(contains(compared.budget, str(" ", 2 * 4, " images on shapes;"))) << compared.budget;
  EXPECT_EQ(compared.tasks[3].unit, "images");
}

TEST(Compare, RecordsAFailedRunAndGoesOn) {
  const TempFolder folder;
  const Node node = comparison(
      "[[tasks]]\nname = 'bad'\ntask = { type = 'copy', symbols = 8, count = 4 }\n"
      "train = { steps = 4, lr = 1e30, clip = 0, warmup = 0 }\n[[tasks]]\nname = 'after'\n"
      "task = { type = 'copy', symbols = 8, count = 4, eval_sequences = 8 }\n");
  Node shorter = node;
  apply_override(shorter, "seeds=[1]");
  for (int round = 0; round < 2; ++round) {
    const report::Comparison compared = compare_quietly(shorter, folder.path()).comparison;
    ASSERT_EQ(compared.runs.size(), 12u);
    for (const report::Run& run : compared.runs) {
      EXPECT_EQ(run.state,
                run.task == "bad" ? report::RunState::kFailed : report::RunState::kFinished);
      EXPECT_EQ(run.problem.empty(), run.task != "bad");
      if (run.task == "bad") {
        EXPECT_TRUE(contains(run.problem, "at step "));
      }
    }
  }
}

TEST(Compare, AFullDiskEndsItAndTheNextCallGoesOn) {
  const TempFolder folder;
  const Node config = parse_toml(
      "seeds = [1, 2]\n[model]\nwidth = 16\ndepth = 1\n[train]\nsteps = 2\nbatch = 8\n"
      "[[models]]\nname = 'mha'\n[[tasks]]\nname = 'copy'\n"
      "task = { type = 'copy', symbols = 8, count = 4, eval_sequences = 8 }\n",
      "compare.toml");
  std::string message;
  {
    const FileSizeLimit limit(4000);  // configurations fit, weights do not
    message = message_of([&] { compare_quietly(config, folder.path()); });
  }
  EXPECT_TRUE(contains(message, "the checkpoint of step 2 could not be saved")) << message;
  const report::Comparison compared = compare_quietly(config, folder.path()).comparison;
  ASSERT_EQ(compared.runs.size(), 2u);
  for (const report::Run& run : compared.runs) EXPECT_TRUE(finished(run)) << run.problem;
}

TEST(Compare, ARunThatHasLostItsConfigurationOrItsLastEvaluationIsTrainedAgain) {
  const TempFolder folder;
  const Node config = parse_toml(
      "seeds = [1, 2, 3, 4]\n[model]\nwidth = 16\ndepth = 1\n[train]\nsteps = 2\nbatch = 8\n"
      "eval_every = 1\n[speed]\nrounds = 0\n[[models]]\nname = 'mha'\n[[tasks]]\nname = 'copy'\n"
      "task = { type = 'copy', symbols = 8, count = 4, eval_sequences = 8 }\n",
      "compare.toml");
  const auto before = losses(compare_quietly(config, folder.path()));
  const std::string runs = folder.path("runs/copy/mha/seed-");
  fs::remove(runs + "1/config.toml");
  fs::remove(runs + "2/metrics.jsonl");
  std::string kept;  // up to the first evaluation
  for (const std::string& line : lines_of(runs + "3/metrics.jsonl")) {
    kept += line + "\n";
    if (contains(line, "eval_loss")) break;
  }
  write_file(runs + "3/metrics.jsonl", kept);
  write_file(folder.path("config.toml"), to_toml(config));
  const report::Comparison damaged = RunReport({folder.path()}).read();
  int whole = 0;
  for (const report::Run& run : damaged.runs) whole += finished(run) ? 1 : 0;
  EXPECT_EQ(whole, 1) << "seed 4 alone";

  const CompareOutcome outcome = compare_quietly(config, folder.path());
  EXPECT_EQ(outcome.present, 1u);
  EXPECT_EQ(losses(outcome), before);
  EXPECT_TRUE(fs::exists(runs + "3.earlier-1/checkpoints"));
}

TEST(Compare, GoesOnWithTheSameDataInAnotherPlaceAndWithNoOther) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 300; ++i)
    text += str("the ", i * i % 97, " looms and ", i % 11, " threads. ");
  write_file(folder.path("a.txt"), text);
  const auto config = [&](const std::string& file, const std::string& seeds) {
    return parse_toml(
        "seeds = " + seeds +
            "\nbudget = 'seconds'\n[model]\nwidth = 16\ndepth = 1\n[train]\nsteps = 4\nbatch = 8\n"
            "eval_every = 2\n[[models]]\nname = 'mha'\n[[tasks]]\nname = 'text'\n"
            "task = { type = 'text', length = 16, eval_tokens = 64, paths = ['" +
            folder.path(file) + "'] }\n",
        "compare.toml");
  };
  int timed = 0;
  const auto compared = [&](const std::string& file, const std::string& seeds) {
    CompareControl control{.folder = folder.path("c"), .progress = [](const CompareOutcome&) {}};
    control.step_seconds = [&](const RunConfig&, const data::Task&) {
      ++timed;
      return 0.5;
    };
    return quietly([&] { return compare(compare_config(config(file, seeds)), control); });
  };
  const std::string run = folder.path("c/runs/text/mha/seed-");
  const auto before = losses(compared("a.txt", "[1, 2]"));
  fs::remove(run + "2/result.json");  // interrupted after step 2
  fs::remove_all(run + "2/checkpoints/step-4");
  fs::rename(folder.path("a.txt"), folder.path("b.txt"));
  const fs::file_time_type finished = fs::last_write_time(run + "1/result.json");
  const CompareOutcome moved = compared("b.txt", "[1, 2]");
  EXPECT_EQ(moved.present, 2u);
  EXPECT_EQ(losses(moved), before);
  EXPECT_EQ(fs::last_write_time(run + "1/result.json"), finished);
  EXPECT_FALSE(fs::exists(run + "1.earlier-1") || fs::exists(run + "2.earlier-1"));
  for (const char* seed : {"1", "2"}) {
    EXPECT_TRUE(contains(bytes_of(run + seed + "/config.toml"), folder.path("b.txt")));
  }
  EXPECT_EQ(timed, 1) << "the place of the data changes no step's time";
  RunReport({run + "1", run + "2"}).read();  // which needs the data

  // Other data in the place of a finished run's are not mixed with it.
  write_file(folder.path("b.txt"), "An" + text);
  EXPECT_TRUE(contains(message_of([&] { compared("b.txt", "[1, 2, 3]"); }),
                       run + "1: the data of 'task.paths' are not those that the run was trained "
                             "on"));
  EXPECT_FALSE(fs::exists(run + "3"));
  // In another place they are another configuration.
  fs::rename(folder.path("b.txt"), folder.path("c.txt"));
  EXPECT_EQ(compared("c.txt", "[1, 2]").present, 0u);
  EXPECT_TRUE(fs::exists(run + "1.earlier-1/result.json"));
}

TEST(Compare, SaysWhereBudgetsAndStopsDiffer) {
  const TempFolder folder;
  const Node config = parse_toml(
      "seeds = [1]\n[model]\nwidth = 16\ndepth = 1\n[train]\nsteps = 5\nbatch = 2\n"
      "eval_every = 5\n[[models]]\nname = 'mha'\n[[models]]\nname = 'other'\n"
      "train = { batch = 3, stop_accuracy = 0.9 }\n[[tasks]]\nname = 'copy'\n"
      "task = { type = 'copy', symbols = 8, count = 4, eval_sequences = 8 }\n",
      "compare.toml");
  const report::Comparison compared = compare_quietly(config, folder.path()).comparison;
  EXPECT_TRUE(contains(compared.budget,
                       "rounded down to whole steps (`other` on copy has the "
                       "least, 90%), unless it reaches"))
      << compared.budget;
  EXPECT_EQ(compared.tasks[0].stopping, kSomeStop);
}

TEST(Compare, ADivergedRunIsFinishedWithAWarningThatItsResultKeeps) {
  const TempFolder folder;
  const Node config = parse_toml(
      "seeds = [1]\n[model]\nwidth = 16\ndepth = 1\n[train]\nsteps = 20\nbatch = 8\n"
      "eval_every = 10\nlr = 10.0\nclip = 0.0\n"
      "[[models]]\nname = 'mha'\n[[tasks]]\nname = 'copy'\n"
      "task = { type = 'copy', symbols = 8, count = 4, eval_sequences = 8 }\n",
      "compare.toml");
  for (int again = 0; again < 2; ++again) {
    const report::Comparison compared = compare_quietly(config, folder.path()).comparison;
    ASSERT_EQ(compared.runs.size(), 1u);
    EXPECT_TRUE(finished(compared.runs[0]));
    EXPECT_EQ(compared.runs[0].problem, "");
    EXPECT_TRUE(contains(compared.runs[0].warning, "the run has diverged")) << again;
  }
}

// [robustness]: the same runs once more under a second initialisation, after the others.
TEST(Compare, RepeatsEveryModelUnderASecondInitialisation) {
  const TempFolder folder;
  Node node = comparison("[robustness]\nmodel = { equal_init = true }\n");
  apply_override(node, "seeds=[1]");
  const CompareOutcome outcome = compare_quietly(node, folder.path());
  EXPECT_EQ(outcome.planned, 12u);
  EXPECT_TRUE(outcome.left_out.empty());
  ASSERT_EQ(outcome.comparison.runs.size(), 6u);
  ASSERT_EQ(outcome.comparison.robustness.size(), 1u);
  const report::Comparison& again = outcome.comparison.robustness[0];
  EXPECT_EQ(again.title, "equal_init = true");
  ASSERT_EQ(again.runs.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    const report::Run &first = outcome.comparison.runs[i], &second = again.runs[i];
    EXPECT_TRUE(finished(second)) << second.problem;
    EXPECT_EQ(second.model, first.model);
    EXPECT_EQ(second.task, first.task);
    EXPECT_EQ(second.folder, str("robustness/", second.task, "/", second.model, "/seed-1"));
    EXPECT_EQ(second.points.back().tokens, first.points.back().tokens);
    EXPECT_NE(second.points.back().loss, first.points.back().loss);
  }
  // Nothing is trained again.
  const auto before = times(folder.path());
  EXPECT_EQ(compare_quietly(node, folder.path()).present, 12u);
  EXPECT_EQ(times(folder.path()), before);
}

TEST(Compare, TrainsEveryTaskAtEverySize) {
  const TempFolder folder;
  Node node = comparison(R"(
[[sizes]]
name = "small"
[[sizes]]
name = "large"
model = { width = 32 }
train = { steps = 5 }
)");
  apply_override(node, "seeds=[1]");
  const CompareOutcome outcome = compare_quietly(node, folder.path());
  EXPECT_EQ(outcome.planned, 12u);
  const report::Comparison& c = outcome.comparison;
  ASSERT_EQ(c.tasks.size(), 4u);
  EXPECT_EQ(c.tasks[1].name, "copy-large");
  EXPECT_EQ(c.tasks[1].size_of, "copy");
  EXPECT_EQ(c.tasks[2].name, "recall-small");
  EXPECT_EQ(c.tasks[2].size_of, "recall");
  // A size's options are merged over the task's, and every model of a size has as many parameters.
  for (const report::Run& run : c.runs) {
    ASSERT_TRUE(finished(run)) << run.problem;
    const int64_t steps = run.task.ends_with("large") ? 5 : run.task == "copy-small" ? 3 : 2;
    EXPECT_EQ(run.points.back().step, steps) << run.task;
  }
  EXPECT_GT(parameters_to_match(c, "copy-large"), 2 * parameters_to_match(c, "copy-small"));
  for (const report::Build& build : c.builds) {
    EXPECT_NEAR(static_cast<double>(build.parameters) / parameters_to_match(c, build.task), 1,
                0.01);
  }
  apply_override(node, "sizes.1.name=small");
  EXPECT_TRUE(contains(message_of<UsageError>([&] { compare_quietly(node, folder.path("c")); }),
                       "two of [[sizes]] are named 'small'"));
  // One folder would be that of two tasks.
  apply_override(node, "sizes.0.name=b-small");
  apply_override(node, "tasks.1.name=copy-b");
  EXPECT_EQ(message_of<UsageError>([&] { compare_quietly(node, folder.path("c")); }),
            "'copy' and 'copy-b' of [[tasks]] are both called 'copy-b-small' at one of [[sizes]], "
            "expected other names.");
}

TEST(Compare, ChecksEverythingBeforeTraining) {
  const TempFolder folder;
  const auto refused = [&](const std::string& override_text) {
    Node node = comparison();
    apply_override(node, override_text);
    const std::string message =
        message_of<UsageError>([&] { compare_quietly(node, folder.path("c")); });
    EXPECT_FALSE(fs::exists(folder.path("c/runs")));
    return message;
  };
  EXPECT_TRUE(contains(refused("seeds=[]"), "'seeds' is empty"));
  EXPECT_TRUE(contains(refused("seeds=5"),
                       "'seeds' is 5, expected a list, such as [1, 2, 3], or [5] for one."));
  EXPECT_TRUE(contains(refused("seeds=[2, 5, 2]"), "'seeds' has the seed 2 twice"));
  EXPECT_TRUE(contains(refused("models=[]"), "no [[models]]"));
  EXPECT_TRUE(contains(refused("models.1.name=mha"), "named 'mha'"));
  EXPECT_TRUE(contains(refused("models.1.name=''"), "entry 2 of [[models]] has no 'name'"));
  EXPECT_TRUE(contains(refused("models.1.name=../up"), "'../up'"));
  EXPECT_TRUE(contains(refused("models.2.mixer.head_dimm=6"), "head_dim"));
  EXPECT_TRUE(contains(refused("models.1.mixer.heads=5"), "model 'talking' on task 'copy'"));
  const std::string unmatched = refused("models.2.mixer.head_dim=400");
  EXPECT_TRUE(contains(unmatched, "model 'wide' on task 'copy'"));
  EXPECT_TRUE(contains(unmatched, "within 1%"));
  EXPECT_TRUE(contains(refused("train.stepps=6"), "train.steps"));
  EXPECT_TRUE(contains(refused("seeds=[1,1]"), "seeds"));
  EXPECT_TRUE(contains(refused("train.seed=5"), "[train] has the key 'seed', but every model"));
  EXPECT_TRUE(contains(refused("models.1.train.seed=5"), "[models.train] has the key 'seed'"));
  const std::string group = refused("models.1.train={group=[{parameters='*.nothing', lr=0.1}]}");
  EXPECT_TRUE(contains(group, "model 'talking' on task 'copy'")) << group;
  EXPECT_TRUE(contains(group, "names no parameter")) << group;
  EXPECT_TRUE(contains(refused("robustness.model.width=32"), "'robustness.model': the model has "));
  EXPECT_TRUE(contains(refused("robustness.model.dropout=0.0"),
                       "model 'mha' on task 'copy': 'robustness.model': changes nothing of the "));
  Node one = comparison();  // has what the others are changed to
  apply_override(one, "robustness.model.equal_init=true");
  apply_override(one, "models.1.model={equal_init = true}");
  EXPECT_TRUE(contains(message_of<UsageError>([&] { compare_quietly(one, folder.path("c")); }),
                       "model 'talking' on task 'copy': 'robustness.model': changes nothing of "));
  EXPECT_TRUE(contains(refused("robustness.model={}"), "'robustness.model' is empty, expected"));
  EXPECT_TRUE(contains(refused("models.1.name=' '"), "no space at either end"));
  EXPECT_TRUE(contains(refused("models.1.name='mha '"), "has the name 'mha ', expected"));
  EXPECT_TRUE(contains(refused("models.1.name=" + std::string(121, 'a')),
                       "has a name of 121 characters, expected at most 120: 'aaa"));
  Node own_steps = comparison();  // of every task
  apply_override(own_steps, "tasks.0.train.steps=2");
  apply_override(own_steps, "train.steps=5");
  EXPECT_EQ(message_of<UsageError>([&] { compare_quietly(own_steps, folder.path("c")); }),
            "--set train.steps: changes nothing, because every task has its own 'train.steps', "
            "expected --set tasks.0.train.steps and so on.");
  EXPECT_TRUE(contains(refused("robustness.model.equal_int=true"), "equal_init"));
}

}  // namespace
}  // namespace headloom::test::compare_test
