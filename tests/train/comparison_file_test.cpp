// comparison.json is written by the report and read by the trainer, key by key: what is written is
// what is read.
#include "train/comparison_file.h"
#include "core/files.h"
#include "report/comparison.h"
#include "support.h"

namespace headloom::test::comparison_file_test {
namespace {

using report::Comparison;

report::Run run_of(report::RunState state, const char* problem) {
  report::Point point{.step = 7,
                      .tokens = 8,
                      .seconds = 9.5,
                      .train_loss = 1.25,
                      .loss = 1.5,
                      .quality = 0.75,
                      .quality_error = 0.125,
                      .accuracy = 0.25};
  return {.model = "mha",
          .task = "copy",
          .seed = 3,
          .setting = {{"lr", "0.002"}},
          .folder = "runs/copy/mha/seed-3",
          .state = state,
          .problem = problem,
          .points = {point},
          .tokens_per_second = 11,
          .peak_memory_bytes = 12};
}

Comparison written() {
  Comparison c{.title = "title", .budget = "a budget", .config = "seeds = [3]"};
  c.models = {{.label = "mha"}};
  c.tasks = {{.name = "copy",
              .description = "described",
              .metric = "error rate",
              .unit = "images",
              .lower_is_better = false,
              .percent = true,
              .floors = {{.name = "a guess", .quality = 0.875}},
              .options = {{"length", "64"}},
              .stopping = "runs end early"}};
  c.seeds = {3, 4};  // the second run has not begun
  c.swept = {"lr"};
  c.sweep_planned = 5;
  c.machine = {{"Processor", "a processor"}, {"Threads", "2"}};
  c.choices = {{.model = "mha", .task = "copy", .setting = {{"lr", "0.002"}}, .at_edge = {"lr"}}};
  c.builds = {{.model = "mha",
               .task = "copy",
               .parameters = 21,
               .flops_per_token = 22,
               .flops_per_unit = 23,
               .state_bytes_per_token = 24,
               .measured_state_bytes_per_token = 25,
               .state_bytes = 26,
               .mechanism_share = 0.5,
               .config = "width = 4",
               .train_differences = "lr = 1"}};
  report::Run swept = run_of(report::RunState::kFinished, "");
  swept.sweep = true;
  swept.warning = "it has diverged";
  c.runs = {swept, run_of(report::RunState::kFailed, "no memory")};
  c.go_on = "headloom compare";
  c.by_commands = true;
  return c;
}

void expect_same(const report::Run& a, const report::Run& b) {
  EXPECT_EQ(a.model, b.model);
  EXPECT_EQ(a.task, b.task);
  EXPECT_EQ(a.seed, b.seed);
  EXPECT_EQ(a.setting, b.setting);
  EXPECT_EQ(a.sweep, b.sweep);
  EXPECT_EQ(a.folder, b.folder);
  EXPECT_EQ(a.state, b.state);
  EXPECT_EQ(a.problem, b.problem);
  EXPECT_EQ(a.warning, b.warning);
  EXPECT_EQ(a.tokens_per_second, b.tokens_per_second);
  EXPECT_EQ(a.peak_memory_bytes, b.peak_memory_bytes);
  ASSERT_EQ(a.points.size(), b.points.size());
  for (size_t i = 0; i < a.points.size(); ++i) {
    const report::Point &p = a.points[i], &q = b.points[i];
    EXPECT_EQ(p.step, q.step);
    EXPECT_EQ(p.tokens, q.tokens);
    EXPECT_EQ(p.seconds, q.seconds);
    EXPECT_EQ(p.train_loss, q.train_loss);
    EXPECT_EQ(p.loss, q.loss);
    EXPECT_EQ(p.quality, q.quality);
    EXPECT_EQ(p.quality_error, q.quality_error);
    EXPECT_EQ(p.accuracy, q.accuracy);
  }
}

TEST(ComparisonFile, WhatIsWrittenIsRead) {
  const TempFolder folder;
  const Comparison c = written();
  write_file(folder.path("comparison.json"), report::to_json(c));
  const WrittenComparison found = read_comparison_file(folder.path());
  EXPECT_EQ(found.budget, c.budget);
  EXPECT_EQ(found.config, c.config);
  EXPECT_EQ(found.machine, c.machine);
  EXPECT_EQ(found.sweep_planned, c.sweep_planned);
  EXPECT_TRUE(found.by_commands);

  ASSERT_EQ(found.tasks.size(), 1u);
  const report::TaskInfo &task = found.tasks[0], &expected = c.tasks[0];
  EXPECT_EQ(task.name, expected.name);
  EXPECT_EQ(task.description, expected.description);
  EXPECT_EQ(task.metric, expected.metric);
  EXPECT_EQ(task.unit, expected.unit);
  EXPECT_EQ(task.lower_is_better, expected.lower_is_better);
  EXPECT_EQ(task.percent, expected.percent);
  EXPECT_EQ(task.options, expected.options);
  EXPECT_EQ(task.stopping, expected.stopping);
  ASSERT_EQ(task.floors.size(), 1u);
  EXPECT_EQ(task.floors[0].name, expected.floors[0].name);
  EXPECT_EQ(task.floors[0].quality, expected.floors[0].quality);

  ASSERT_EQ(found.builds.size(), 1u);
  const report::Build &build = found.builds[0], &of = c.builds[0];
  EXPECT_EQ(build.model, of.model);
  EXPECT_EQ(build.task, of.task);
  EXPECT_EQ(build.parameters, of.parameters);
  EXPECT_EQ(build.flops_per_token, of.flops_per_token);
  EXPECT_EQ(build.flops_per_unit, of.flops_per_unit);
  EXPECT_EQ(build.state_bytes_per_token, of.state_bytes_per_token);
  EXPECT_EQ(build.measured_state_bytes_per_token, of.measured_state_bytes_per_token);
  EXPECT_EQ(build.state_bytes, of.state_bytes);
  EXPECT_EQ(build.mechanism_share, of.mechanism_share);
  EXPECT_EQ(build.config, of.config);
  EXPECT_EQ(build.train_differences, of.train_differences);

  ASSERT_EQ(found.choices.size(), 1u);
  EXPECT_EQ(found.choices[0].model, c.choices[0].model);
  EXPECT_EQ(found.choices[0].task, c.choices[0].task);
  EXPECT_EQ(found.choices[0].setting, c.choices[0].setting);
  EXPECT_EQ(found.choices[0].at_edge, c.choices[0].at_edge);

  ASSERT_EQ(found.sweep_runs.size(), 1u);
  expect_same(found.sweep_runs[0], c.runs[0]);
  ASSERT_EQ(found.failed.size(), 1u);
  expect_same(found.failed[0], c.runs[1]);
}

}  // namespace
}  // namespace headloom::test::comparison_file_test
