#include "train/train.h"

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "core/error.h"
#include "core/text.h"

namespace headloom::cli {
namespace {

struct Arguments {
  ConfigArguments config;
  std::string out;
  bool resume = false;
  std::optional<int64_t> from;
  bool json = false;
};

int run(Arguments& a) {
  namespace fs = std::filesystem;
  // A run folder in place of a configuration goes on with that run.
  if (fs::is_directory(a.config.path)) {
    if (a.out.empty()) a.out = a.config.path;
    a.config.path += "/config.toml";
  }
  if (a.out.empty()) a.out = "runs/" + fs::path(a.config.path).stem().string();
  install_interrupt_handler();
  const TrainOutcome outcome =
      train(a.config.read(), {.folder = a.out, .resume = a.resume, .from = a.from, .label = ""});
  if (outcome.interrupted) {
    std::fprintf(
        stderr,
        "headloom: interrupted; step %lld is saved. Go on with: headloom train %s --resume\n",
        static_cast<long long>(outcome.step), a.out.c_str());
    return 1;
  }
  const EvalPoint last = outcome.evaluations.empty() ? EvalPoint{} : outcome.evaluations.back();
  if (a.json) {
    const nlohmann::ordered_json json = {{"run", a.out},
                                         {"step", outcome.step},
                                         {"parameters", outcome.parameters},
                                         {"loss", last.loss},
                                         {"accuracy", last.accuracy},
                                         {"tokens_per_second", outcome.tokens_per_second},
                                         {"peak_memory_bytes", outcome.peak_memory},
                                         {"seconds", outcome.seconds}};
    std::printf("%s\n", json.dump(1).c_str());
  } else {
    std::printf("%s: step %lld, held-out loss %.4f, accuracy %.1f%%, %s %s/s, %s\n", a.out.c_str(),
                static_cast<long long>(outcome.step), last.loss, 100 * last.accuracy,
                human_count(outcome.tokens_per_second).c_str(), outcome.unit.c_str(),
                human_seconds(outcome.seconds).c_str());
  }
  return 0;
}

}  // namespace

Command train_command() {
  return {"train", "train one model; resumable", "headloom train configs/text.toml --out runs/text",
          [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<Arguments>();
            a->config.add(app, "configuration file, or the folder of a run to go on with");
            app.add_option("--out", a->out, "folder of the run; runs/NAME by default");
            app.add_flag("--resume", a->resume, "go on from the newest checkpoint in the folder");
            app.add_option("--from", a->from,
                           "go on from the checkpoint of this step; newer ones are dropped")
                ->type_name("STEP");
            app.add_flag("--json", a->json, "print the result as JSON");
            return [a] { return run(*a); };
          }};
}

}  // namespace headloom::cli
