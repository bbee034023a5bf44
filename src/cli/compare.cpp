#include "train/compare.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "bench/machine.h"
#include "bench/speeds.h"
#include "cli/arguments.h"
#include "cli/command.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/files.h"
#include "core/platform.h"
#include "core/shell.h"
#include "core/text.h"
#include "report/comparison.h"
#include "train/experiment.h"
#include "train/interrupt.h"
#include "train/run_folder.h"
#include "train/speeds.h"
#include "train/train.h"
#include "train/workers.h"

namespace headloom::cli {
namespace {

struct CompareArguments {
  ConfigArguments config;
  std::string out;
  bool fresh = false;
  bool json = false;
  bool plan = false;
  int64_t jobs = 1;
  std::string run;
};

// What compare() does not know of a comparison: the text of its configuration `root`, and where,
// how and when it was run.
void add_circumstances(report::Comparison& out, const CompareArguments& a, const Node& root) {
  out.machine = bench::machine_facts();
  out.config = to_toml(root);
  // By its plain name: a page that is passed on has no path of this machine.
  out.command = str("headloom compare ", shell_word(a.config.path));
  for (const std::string& s : a.config.overrides) out.command += " --set " + shell_word(s);
  out.command += " --out " + shell_word(a.out);
  out.date = today();
}

// The tasks, what is odd about their training, and what an earlier comparison in the folder has
// left.
void say_what_is_there(const CompareOutcome& outcome, const std::string& folder) {
  for (const report::TaskInfo& task : outcome.comparison.tasks) {
    std::fprintf(stderr, "%s: %s\n", task.name.c_str(), task.description.c_str());
  }
  if (!outcome.hint.empty() && outcome.present < outcome.planned) {
    std::fprintf(stderr, "%s\n", outcome.hint.c_str());
  }
  if (outcome.present > 0) {
    std::fprintf(stderr,
                 "%zu of the %zu runs %s already: finished ones are kept, others are resumed\n",
                 outcome.present, outcome.planned, outcome.present == 1 ? "exists" : "exist");
  }
  if (!outcome.left_out.empty()) {
    const bool one = outcome.left_out.size() == 1;
    std::fprintf(stderr,
                 "%s in %s %s of other models, tasks, seeds or configurations; %s kept and "
                 "left out of the report: %s\n",
                 counted(static_cast<int64_t>(outcome.left_out.size()), "run").c_str(),
                 folder.c_str(), one ? "is" : "are", one ? "it is" : "they are",
                 join(outcome.left_out).c_str());
  }
}

// Only a comparison's folder is written to or emptied.
void check_folder(const CompareArguments& a) {
  namespace fs = std::filesystem;
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
}

report::Run trained(const CompareArguments& a) {
  try {
    return train_planned(a.out, a.run);
  } catch (const Obstacle& error) {
    throw Obstacle(error.what() + std::string(kWorkerObstacle));
  }
}

// Trains one of the runs that --plan has printed.
int run_one(const CompareArguments& a) {
  install_interrupt_handler();
  const report::Run run = trained(a);
  if (run.state == report::RunState::kFinished) return 0;
  if (run.state == report::RunState::kRunning) {
    std::fputs(kWorkerInterrupted.data(), stderr);
  } else {
    std::fprintf(stderr, "headloom: the run failed: %s\n", run.problem.c_str());
  }
  return 1;
}

// Finds the configuration and the folder, where the arguments leave them open.
void find_places(CompareArguments& a) {
  namespace fs = std::filesystem;
  // A comparison's folder in place of a configuration goes on with that comparison.
  if (is_folder(a.config.path)) {
    if (a.out.empty()) a.out = a.config.path;
    a.config.path += "/config.toml";
  }
  if (!a.run.empty() && a.out.empty() && !fs::exists(a.config.path)) {
    fail(a.config.path, ": is not the folder of a comparison",
         did_you_mean_folder(a.config.path, FolderOf::comparison));
  }
  if (a.out.empty()) a.out = "runs/" + fs::path(a.config.path).stem().string();
}

void write_comparison(const std::string& folder, const Node& root,
                      const report::Comparison& result) {
  write_file(folder + "/config.toml", to_toml(with_absolute_paths(root)));
  write_file(folder + "/report.html", report::to_html(result));
  write_file(folder + "/comparison.json", report::to_json(result));
}

// A command for every run that --plan has found.
void print_plan(const std::string& folder, const std::vector<std::string>& runs) {
  for (const std::string& run : runs) {
    std::printf("%s compare %s --run %s\n", program_name().c_str(), shell_word(folder).c_str(),
                shell_word(run).c_str());
  }
}

// Says how many runs failed. Returns whether any did beside those of the sweep.
bool say_what_failed(const report::Comparison& result) {
  int failed = 0, of_sweep = 0;
  for (const report::Run& r : result.runs) {
    (r.sweep ? of_sweep : failed) += r.state != report::RunState::kFinished;
  }
  for (const report::Comparison& again : result.robustness) {
    for (const report::Run& r : again.runs) failed += r.state != report::RunState::kFinished;
  }
  // A setting that fails is infinitely bad, which is an answer.
  if (of_sweep > 0) {
    std::fprintf(stderr, "%d of the sweep's runs failed; the report says why.\n", of_sweep);
  }
  if (failed > 0)
    std::fprintf(stderr, "headloom: %d of the runs failed; the report says why.\n", failed);
  return failed > 0;
}

int run_compare(CompareArguments& a) {
  find_places(a);
  if (!a.run.empty()) return run_one(a);
  const Node root = a.config.read();
  expect_comparison(root, a.config.path, true);
  CompareConfig config;
  read_fields(root, config);
  check_folder(a);
  install_interrupt_handler("\nheadloom: ending; press Ctrl-C again to stop at once.\n");
  CompareControl control{.folder = a.out, .fresh = a.fresh, .jobs = a.jobs};
  control.command = [&](const std::string& run) {
    return std::vector<std::string>{program_path(), "compare", a.out, "--run", run};
  };
  control.step_seconds = bench::step_seconds;
  report::Comparison result;
  bool said = false;
  control.progress = [&](const CompareOutcome& so_far) {
    if (!said) say_what_is_there(so_far, a.out);
    said = true;
    result = so_far.comparison;
    // Also where nothing is measured now: with --plan, and before and after an interruption.
    if (config.speed.rounds > 0)
      take_kept_speeds(a.out, config.speed.rounds, /*anywhere=*/false, result);
    add_circumstances(result, a, root);
    write_comparison(a.out, root, result);
  };
  if (config.speed.rounds > 0) {
    control.measure = [&](const report::Comparison& finished) {
      return bench::measure_speeds(a.out, config.speed.rounds, finished);
    };
  }
  if (a.plan) {
    print_plan(a.out, plan_comparison(config, control));
    return 0;
  }
  const CompareOutcome outcome = compare(config, control);
  std::printf("%s\n", a.json ? report::to_json(result).c_str() : report::to_text(result).c_str());
  std::fflush(stdout);  // before what follows on stderr, where both go to one file
  if (outcome.interrupted) {
    std::fprintf(stderr, "headloom: interrupted; finished runs are kept. The same command %s.\n",
                 a.fresh ? "without --fresh goes on" : "goes on");
    return 1;
  }
  std::fprintf(stderr, "report: %s/report.html\n", a.out.c_str());
  return say_what_failed(result) ? 1 : 0;
}

}  // namespace

Command compare_command() {
  return {"compare", "several models at equal budget and several seeds: table and report.html",
          "headloom compare configs/quickstart.toml --out runs/quickstart",
          [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<CompareArguments>();
            a->config.folders = FolderOf::comparison;
            a->config.add(app,
                          "configuration file with [[models]] and [[tasks]], or the folder of a "
                          "comparison to go on with");
            app.add_option("--out", a->out, "folder of the comparison; runs/NAME by default")
                ->check(not_empty());
            auto* fresh = app.add_flag("--fresh", a->fresh, "start over instead of going on");
            auto* json = app.add_flag("--json", a->json, "print the result as JSON");
            auto* jobs =
                app.add_option(
                       "--jobs", a->jobs,
                       "train this many runs side by side, each in a process of its own with "
                       "one thread, unless OMP_NUM_THREADS says otherwise")
                    ->check(whole_number(1, 1024));
            auto* plan = app.add_flag(
                "--plan", a->plan,
                "train nothing: print a command for every run that can be trained now");
            plan->excludes(json)->excludes(jobs);
            app.add_option("--run", a->run, "the run to train, one of those that --plan printed")
                ->type_name("PATH")
                ->check(not_empty())
                ->excludes(plan)
                ->excludes(fresh)
                ->excludes(json)
                ->excludes(jobs)
                ->excludes(app.get_option("--set"));
            return [a] { return run_compare(*a); };
          }};
}

}  // namespace headloom::cli
