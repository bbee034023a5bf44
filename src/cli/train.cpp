#include "train/train.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/arguments.h"
#include "cli/command.h"
#include "core/error.h"
#include "core/platform.h"
#include "core/shell.h"
#include "core/text.h"
#include "distributed/group.h"
#include "distributed/start.h"
#include "train/device.h"
#include "train/interrupt.h"
#include "train/metrics.h"
#include "train/run_folder.h"

namespace headloom::cli {
namespace {

struct TrainArguments {
  ConfigArguments config;
  std::string out;
  bool resume = false;
  std::string checkpoint, from, device;
  bool json = false;
  int64_t processes = 1;
  GroupOptions group;
};

// CONFIG with what it leaves to the run in --from, then its --set overrides.
Node read_config(const TrainArguments& a) {
  namespace fs = std::filesystem;
  Node root = a.config.read_file();
  // The configuration in a run's folder names the tokenizer beside it.
  const fs::path folder = fs::path(a.config.path).parent_path();
  Node* task = root.find("task");
  Node* tokenizer = task != nullptr && task->is_table() ? task->find("tokenizer") : nullptr;
  if (tokenizer != nullptr && std::holds_alternative<std::string>(tokenizer->value)) {
    std::string& file = std::get<std::string>(tokenizer->value);
    if (fs::exists(folder / "checkpoints") && fs::exists(folder / file)) {
      file = (folder / file).string();
    }
  }
  if (!a.from.empty()) fill_from_run(root, a.from);
  for (const std::string& assignment : a.config.overrides) apply_override(root, assignment);
  if (!a.device.empty()) {
    find_device(a.device, "--device");
    apply_override(root, str("train.device=\"", a.device, "\""));
  }
  return root;
}

// The command that a rank runs: this one without --processes.
std::vector<std::string> rank_command(const TrainArguments& a) {
  std::vector<std::string> out = {program_path(), "train", a.config.path, "--out", a.out};
  for (const std::string& one : a.config.overrides) out.insert(out.end(), {"--set", one});
  if (a.resume) out.emplace_back("--resume");
  if (!a.checkpoint.empty()) out.insert(out.end(), {"--checkpoint", a.checkpoint});
  if (!a.from.empty()) out.insert(out.end(), {"--from", a.from});
  if (!a.device.empty()) out.insert(out.end(), {"--device", a.device});
  if (a.json) out.emplace_back("--json");
  out.insert(out.end(), {"--timeout", str(a.group.timeout)});
  if (!a.group.interface.empty()) out.insert(out.end(), {"--interface", a.group.interface});
  return out;
}

// What must be the same for all ranks.
std::string configuration_text(const TrainArguments& a) {
  return str(to_toml(read_config(a)), "\n", a.out, "\n", a.resume, "\n", a.checkpoint, "\n",
             a.from);
}

int train_here(const TrainArguments& a, Communicator* group);

// Has Slurm begin the job again, where this is one. It ends the present processes of the job.
void requeue() {
  const char* const job = std::getenv("SLURM_JOB_ID");
  if (job == nullptr) return;
  const std::string command = str("scontrol requeue ", shell_word(job));
  std::fprintf(stderr, "headloom: requeuing the job: %s\n", command.c_str());
  if (std::system(command.c_str()) != 0) {
    std::fprintf(stderr, "headloom: '%s' failed; submit the job again to go on.\n",
                 command.c_str());
  }
}

int run_train(TrainArguments& a) {
  namespace fs = std::filesystem;
  // A run's folder in place of a configuration stands for that run and its configuration.
  if (is_folder(a.config.path)) {
    run_toml_in(a.config.path);  // which refuses what is not a run
    if (a.out.empty()) a.out = a.config.path;
    a.config.path += "/config.toml";
  }
  if (a.out.empty()) a.out = "runs/" + fs::path(a.config.path).stem().string();
  if (a.from.find_first_not_of("0123456789") == std::string::npos && !a.from.empty() &&
      !fs::exists(a.from)) {
    usage_error("--from ", a.from,
                ": is not the folder of a run whose weights to begin with; to go "
                "on from the checkpoint of step ",
                a.from, " say --checkpoint ", a.from, ".");
  }
  install_interrupt_handler(
      "\nheadloom: ending after this step, which is kept; press Ctrl-C again to stop at once.\n");
  const std::optional<Place> place = place_among_ranks();
  if (a.processes > 1) {
    if (place) {
      usage_error("--processes ", a.processes, ": ", place->launcher, " has started ", place->size,
                  " processes already, and each would start more; leave one of the two out.");
    }
    check_can_distribute();
    expect_comparison(read_config(a), a.config.path, false);  // before any process is started
    const int code = start_ranks(a.processes, rank_command(a), interrupted);
    if (code != 0 && to_be_requeued()) requeue();
    return code;
  }
  if (!place) {
    const char* const given = !a.group.interface.empty()                  ? "--interface"
                              : a.group.timeout != GroupOptions{}.timeout ? "--timeout"
                                                                          : nullptr;
    if (given != nullptr) {
      usage_error(given,
                  " is for several processes, but one trains: leave it out, or say how many ",
                  "with --processes.");
    }
    return train_here(a, nullptr);
  }
  if (place->ours) a.processes = place->size;  // for the command that goes on
  const std::unique_ptr<Group> group = Group::connect(*place, a.group);
  return group->run([&] {
    group->meet(configuration_text(a));
    return train_here(a, group.get());
  });
}

int train_here(const TrainArguments& a, Communicator* group) {
  const TrainControl control{.folder = a.out,
                             .resume = a.resume,
                             .checkpoint = a.from.empty() ? a.checkpoint : "",
                             .from = a.from,
                             .from_checkpoint = a.checkpoint.empty() ? "best" : a.checkpoint,
                             .group = group};
  const Node root = read_config(a);
  expect_comparison(root, a.config.path, false);
  if (root.find("model") == nullptr && a.from.empty() && (group == nullptr || group->rank() == 0)) {
    read_run_config(root);  // refuses a table's misspelt name
    std::fprintf(stderr,
                 "%s has no [model], so all of the model's options have their defaults; "
                 "'describe' prints them.\n",
                 a.config.path.c_str());
  }
  const TrainOutcome outcome = train(root, control);
  if (group != nullptr && group->rank() > 0) return outcome.interrupted ? 1 : 0;
  if (outcome.interrupted) {
    const std::string processes = a.processes > 1 ? str(" --processes ", a.processes) : "";
    std::fprintf(stderr,
                 "headloom: interrupted; step %lld is saved. Go on with: %s train %s --resume%s\n",
                 static_cast<long long>(outcome.step), program_name().c_str(),
                 shell_word(a.out).c_str(), processes.c_str());
    if (outcome.requeue) requeue();
    return 1;
  }
  const EvalPoint last = outcome.evaluations.empty() ? EvalPoint{} : outcome.evaluations.back();
  if (a.json) {
    nlohmann::ordered_json json = {{"run", a.out},
                                   {"step", outcome.step},
                                   {"parameters", outcome.parameters},
                                   {"loss", last.loss},
                                   {"accuracy", last.accuracy},
                                   {"tokens_per_second", outcome.result.tokens_per_second},
                                   {"peak_memory_bytes", nullptr},
                                   {"seconds", outcome.seconds}};
    if (outcome.result.peak_memory >= 0) json["peak_memory_bytes"] = outcome.result.peak_memory;
    if (!outcome.result.warning.empty()) json["warning"] = outcome.result.warning;
    std::printf("%s\n", printed(json).c_str());
  } else {
    std::printf("%s: step %lld, held-out loss %s, accuracy %.1f%%, %s %s/s, %s\n", a.out.c_str(),
                static_cast<long long>(outcome.step), formatted("%.4f", last.loss).c_str(),
                100 * last.accuracy, human_count(outcome.result.tokens_per_second).c_str(),
                outcome.unit.c_str(), human_seconds(outcome.seconds).c_str());
  }
  return 0;
}

}  // namespace

Command train_command() {
  return {"train", "train one model; resumable", "headloom train configs/text.toml --out runs/text",
          [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<TrainArguments>();
            a->config.add(app,
                          "configuration file, or with --resume the folder of a run to go on with");
            app.add_option("--out", a->out, "folder of the run; runs/NAME by default")
                ->check(not_empty());
            app.add_flag("--resume", a->resume, "go on from the newest checkpoint in the folder");
            add_device_option(app, a->device);
            app.add_option("--from", a->from,
                           "begin with the weights of this run or imported checkpoint; [model] and "
                           "the tokenizer are then its own")
                ->check(not_empty())
                ->type_name("RUN");
            app.add_option("--checkpoint", a->checkpoint,
                           "best, last or a step: with --from the one to begin with (best by "
                           "default); else go on from it and drop newer ones")
                ->check(not_empty());
            app.add_option("--processes", a->processes,
                           "processes of this machine that share every batch; torchrun, mpirun and "
                           "srun start them by themselves, on several machines too")
                ->check(whole_number(1, 1024));
            app.add_option("--interface", a->group.interface,
                           "network by which the processes talk, as 'ip link' names it; by default "
                           "the one that reaches the first")
                ->check(not_empty())
                ->type_name("NAME");
            app.add_option("--timeout", a->group.timeout,
                           "seconds that a process waits for the others before all end")
                ->check(real_number(Range<double>{.low = 1, .high = 1e6}));
            app.add_flag("--json", a->json, "print the result as JSON");
            return [a] { return run_train(*a); };
          }};
}

}  // namespace headloom::cli
