#include "bench/run.h"
#include "cli/arguments.h"
#include "cli/command.h"

namespace headloom::cli {
namespace {

struct BenchArguments {
  std::vector<std::string> families;
  bench::BenchOptions options;
};

}  // namespace

Command bench_command() {
  return {"bench", "operators, training steps and decoding beside plain attention, in one process",
          "headloom bench composed_attention --only T=2048",
          [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<BenchArguments>();
            bench::BenchOptions& o = a->options;
            app.footer(app.get_footer() +
                       "\n\nA column 'x baseline' is the time divided by that of the baseline, "
                       "plain attention or\nPyTorch's own operators: below 1 the benchmarked case "
                       "is faster.");
            app.add_option("cases", a->families,
                           "which benchmarks: operators, as 'list operators' names them, step, "
                           "train_step, models or decode; all by default");
            app.add_option("--only", o.only, "only cases and figures whose name has this in it")
                ->check(not_empty());
            app.add_option("--backend", o.backend, "force the operator's backend")
                ->check(one_of({"reference", "fused"}));
            app.add_option("--seconds", o.seconds, "time for each measurement")
                ->check(real_number(positive()))
                ->capture_default_str();
            app.add_option("--threads", o.threads, "threads; PyTorch's choice by default")
                ->check(whole_number(1, 1024));
            app.add_flag("--profile", o.profile, "of step: where the time goes, and its bounds");
            app.add_flag("--json", o.json, "print as JSON");
            return [a] {
              bench::run(a->families, a->options);
              return 0;
            };
          }};
}

}  // namespace headloom::cli
