#include "train/compare.h"

#include <unistd.h>

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

std::string today() {
  const std::time_t now = std::time(nullptr);
  char buffer[32];
  std::strftime(buffer, sizeof buffer, "%Y-%m-%d", std::localtime(&now));
  return buffer;
}

// What compare() does not know of a comparison: its configuration's text, and where, how and when
// it was run.
void add_circumstances(report::Comparison& out, const CompareArguments& a,
                       const std::string& toml) {
  out.machine = bench::machine_facts();
  out.config = toml;
  out.command = str("headloom compare ", shell_word(a.config.path));
  for (const std::string& s : a.config.overrides) out.command += " --set " + shell_word(s);
  out.command += " --out " + shell_word(a.out);
  out.date = today();
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
    result = so_far.comparison;
    add_circumstances(result, a, toml);
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
  for (const report::Run& r : result.runs) failed += r.state != report::RunState::kFinished;
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
