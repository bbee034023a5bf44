#include "train/compare.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "bench/machine.h"
#include "cli/command.h"
#include "core/error.h"
#include "core/files.h"
#include "core/shell.h"
#include "core/text.h"
#include "report/comparison.h"
#include "train/interrupt.h"
#include "train/train.h"

namespace headloom::cli {
namespace {

struct CompareArguments {
  ConfigArguments config;
  std::string out;
  bool fresh = false;
  bool json = false;
};

double metric(const ComparedTaskInfo& task, const EvalPoint& p) {
  return task.bytes_per_token > 0 ? p.loss / std::log(2.0) / task.bytes_per_token : 1 - p.accuracy;
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  char buffer[32];
  std::strftime(buffer, sizeof buffer, "%Y-%m-%d", std::localtime(&now));
  return buffer;
}

report::Comparison to_report(const CompareConfig& config, const CompareOutcome& outcome,
                             const CompareArguments& a, const std::string& toml) {
  report::Comparison out;
  out.title = config.title;
  for (int64_t seed : config.seeds) out.seeds.push_back(static_cast<uint64_t>(seed));
  for (const ComparedModel& m : config.models) out.models.push_back({m.name, m.description, ""});
  for (const ComparedBuild& b : outcome.builds) {
    out.models[b.model].source = b.source;
    out.builds.push_back({.model = config.models[b.model].name,
                          .task = config.tasks[b.task].name,
                          .parameters = b.parameters,
                          .flops_per_token = b.flops_per_token,
                          .state_bytes_per_token = b.state_bytes_per_token,
                          .measured_state_bytes_per_token =
                              b.measured_state_bytes_per_token.value_or(report::kUnknown),
                          .mechanism_share = b.mechanism_share,
                          .config = b.toml});
  }
  std::vector<std::string> budgets;
  for (size_t t = 0; t < config.tasks.size(); ++t) {
    const ComparedTaskInfo& task = outcome.tasks[t];
    const bool text = task.bytes_per_token > 0;
    out.tasks.push_back({.name = config.tasks[t].name,
                         .description = task.description,
                         .metric = text ? "bits per byte" : "error rate",
                         .unit = task.unit,
                         .lower_is_better = true,
                         .percent = !text});
    budgets.push_back(str(human_count(task.tokens), " ", task.unit, " on ", config.tasks[t].name));
  }
  out.budget = str("Every run trains on the same amount of data: ", join(budgets), "; ",
                   config.match_parameters ? "parameters are equal within 1% on each task."
                                           : "parameters are not matched.");
  for (const ComparedRun& r : outcome.runs) {
    report::Run run;
    run.model = config.models[r.model].name;
    run.task = config.tasks[r.task].name;
    run.seed = static_cast<uint64_t>(r.seed);
    run.state = r.finished          ? report::RunState::kFinished
                : r.problem.empty() ? report::RunState::kRunning
                                    : report::RunState::kFailed;
    run.problem = r.problem;
    run.warning = r.warning;
    for (const EvalPoint& p : r.points) {
      run.points.push_back(
          {.step = p.step,
           .tokens = static_cast<double>(p.tokens),
           .seconds = p.seconds,
           .train_loss = p.train_loss,
           .loss = p.loss,
           .quality = metric(outcome.tasks[r.task], p),
           .accuracy = outcome.tasks[r.task].bytes_per_token > 0 ? report::kUnknown : p.accuracy,
           .expert_load = p.expert_load});
    }
    run.tokens_per_second = r.tokens_per_second;
    run.peak_memory_bytes =
        r.peak_memory < 0 ? report::kUnknown : static_cast<double>(r.peak_memory);
    out.runs.push_back(std::move(run));
  }
  out.machine = bench::machine_facts();
  out.config = toml;
  out.command = str("headloom compare ", shell_word(a.config.path));
  for (const std::string& s : a.config.overrides) out.command += " --set " + shell_word(s);
  out.command += " --out " + shell_word(a.out);
  out.date = today();
  return out;
}

// What an earlier comparison in the folder has left.
void say_what_is_there(const CompareOutcome& outcome, const std::string& folder) {
  if (outcome.present > 0) {
    std::fprintf(stderr,
                 "%zu of the %zu runs are there already, and go on or are kept as they are\n",
                 outcome.present, outcome.planned);
  }
  if (!outcome.left_out.empty()) {
    std::fprintf(
        stderr,
        "%zu runs in %s/runs are of other models, tasks, seeds or configurations; they are "
        "kept and left out of the report: %s\n",
        outcome.left_out.size(), folder.c_str(), join(outcome.left_out).c_str());
  }
}

int run_compare(CompareArguments& a) {
  namespace fs = std::filesystem;
  if (a.out.empty()) a.out = "runs/" + fs::path(a.config.path).stem().string();
  const Node root = a.config.read();
  expect_comparison(root, a.config.path, true);
  CompareConfig config;
  read_fields(root, config);
  const std::string toml = to_toml(root);
  const std::string stored = a.out + "/config.toml";
  // Only what a comparison wrote is removed, never a folder that is something else.
  require(!a.fresh || !fs::exists(a.out) ||
              (fs::exists(stored) && fs::exists(a.out + "/comparison.json")),
          a.out, ": is not a comparison's folder, so --fresh does not empty it.");
  // Nor is the configuration of a run written over.
  if (fs::exists(stored) && read_toml(stored).find("models") == nullptr) {
    usage_error(stored,
                ": is not the configuration of a comparison; choose another folder with --out.");
  }
  install_interrupt_handler();
  report::Comparison result;
  bool said = false;
  const auto progress = [&](const CompareOutcome& so_far) {
    if (!said) say_what_is_there(so_far, a.out);
    said = true;
    result = to_report(config, so_far, a, toml);
    write_file(stored, toml);
    write_file(a.out + "/report.html", report::to_html(result));
    write_file(a.out + "/comparison.json", report::to_json(result));
  };
  const CompareOutcome outcome =
      compare(config, {.folder = a.out, .fresh = a.fresh, .progress = progress});
  std::printf("%s\n", a.json ? report::to_json(result).c_str() : report::to_text(result).c_str());
  if (outcome.interrupted) {
    std::fprintf(stderr,
                 "headloom: interrupted; finished runs are kept. The same command goes on.\n");
    return 1;
  }
  std::fprintf(stderr, "report: %s/report.html\n", a.out.c_str());
  int failed = 0;
  for (const ComparedRun& r : outcome.runs) failed += r.finished ? 0 : 1;
  if (failed > 0)
    std::fprintf(stderr, "headloom: %d of the runs failed; the report says why.\n", failed);
  return failed > 0 ? 1 : 0;
}

}  // namespace

Command compare_command() {
  return {"compare", "several models at equal budget and several seeds: table and report.html",
          "headloom compare configs/quickstart.toml --out runs/quickstart",
          [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<CompareArguments>();
            a->config.add(app, "configuration file with [[models]] and [[tasks]]");
            app.add_option("--out", a->out, "folder of the comparison; runs/NAME by default");
            app.add_flag("--fresh", a->fresh, "start over instead of going on");
            app.add_flag("--json", a->json, "print the result as JSON");
            return [a] { return run_compare(*a); };
          }};
}

}  // namespace headloom::cli
