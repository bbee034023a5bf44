// Operators, training steps and decoding beside plain attention, in one process.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstdio>

#include "cli/arguments.h"
#include "cli/bench_parts.h"
#include "cli/command.h"
#include "cli/machine.h"
#include "core/error.h"
#include "core/text.h"
#include "ops/case.h"

namespace headloom::cli {
namespace {

using Json = nlohmann::ordered_json;

void bench_operators(const std::string& family, const BenchArguments& a, Json& json) {
  std::vector<ops::OpCase> cases;
  for (const ops::OpCase& c : ops::all_cases()) {
    if (c.op == family && c.name.find(a.only) != std::string::npos) cases.push_back(c);
  }
  if (!a.json && !cases.empty()) {
    std::printf("%-28s %10s %22s %-14s %10s %22s %-14s\n", family.c_str(), "forward", "x baseline",
                "", "+ backward", "x baseline", "");
  }
  for (const ops::OpCase& c : cases) {
    const std::optional<std::string> backend =
        a.backend.empty() ? std::nullopt : std::optional<std::string>(a.backend);
    seed_all();
    Paired timed[2];
    for (const bool training : {false, true}) {
      timed[training] =
          time_pairs(work_of(c, training, backend), baseline_of(c, training), a.seconds);
    }
    const std::string used = !c.unsupported.empty() && a.backend.empty() ? "reference" : a.backend;
    if (a.json) {
      json["cases"].push_back({{"op", c.op},
                               {"case", c.name},
                               {"baseline", c.baseline_name},
                               {"backend", used.empty() ? "automatic" : used},
                               {"unsupported_by_fused", c.unsupported},
                               {"forward_seconds", to_json(timed[0].a)},
                               {"forward_ratio", to_json(timed[0].ratio)},
                               {"forward_target", c.forward_target},
                               {"training_seconds", to_json(timed[1].a)},
                               {"training_ratio", to_json(timed[1].ratio)},
                               {"training_target", c.training_target},
                               {"forward_gflops", c.forward_work.flops / timed[0].a.median / 1e9}});
      continue;
    }
    std::printf("%-28s", c.name.c_str());
    for (int i = 0; i < 2; ++i) {
      const Spread& r = timed[i].ratio;
      std::printf(" %7.2f ms %6.2f (%5.2f - %5.2f) %-14s", 1e3 * timed[i].a.median, r.median, r.low,
                  r.high, verdict(r.median, i == 0 ? c.forward_target : c.training_target).c_str());
    }
    if (!c.unsupported.empty()) std::printf(" reference, because %s", c.unsupported.c_str());
    std::printf("\n");
    std::fflush(stdout);
  }
  if (!a.backend.empty()) return;
  Requirements rows(a, json);
  bench_family_requirements(cases, a, rows);
  if (family == "composed_attention") bench_composed_requirements(a, rows);
}

ModelConfig tiny_model(const std::string& mixer) {
  Lister options;
  make_spec(token_mixers(), "token mixer", mixer)->fields(options);
  const bool has_heads = std::any_of(options.options().begin(), options.options().end(),
                                     [](const OptionInfo& o) { return o.key == "heads"; });
  const std::string heads = has_heads ? str(", heads = ", mixer == "differential" ? 4 : 8) : "";
  const Node root = parse_toml(str("width = 256\ndepth = 6\nvocabulary = 256\nmax_length = 256\n"
                                   "[[layer]]\nmixer = { type = \"",
                                   mixer, "\"", heads, " }\n"),
                               "bench");
  ModelConfig config;
  read_fields(root, config, "model");
  return config;
}

void bench_steps(const BenchArguments& a, Json& json) {
  if (!a.json) {
    std::printf("%-28s %12s %12s %22s\n", "train_step (5M, T=256, B=16)", "a step", "tokens/s",
                "x mha");
  }
  for (const TokenMixerEntry& entry : token_mixers()) {
    if (!a.only.empty() && entry.name != a.only) continue;
    StepBench step(tiny_model(entry.name), 16, 256), plain(tiny_model("mha"), 16, 256);
    const Paired timed = time_pairs([&] { step(); }, [&] { plain(); }, 2 * a.seconds);
    const double rate = static_cast<double>(step.tokens()) / timed.a.median;
    if (a.json) {
      json["cases"].push_back({{"op", "train_step"},
                               {"case", entry.name},
                               {"baseline", "mha"},
                               {"training_seconds", to_json(timed.a)},
                               {"training_ratio", to_json(timed.ratio)},
                               {"tokens_per_second", rate}});
      continue;
    }
    std::printf("%-28s %9.1f ms %12s %6.2f (%5.2f - %5.2f)\n", entry.name.c_str(),
                1e3 * timed.a.median, human_count(rate).c_str(), timed.ratio.median,
                timed.ratio.low, timed.ratio.high);
    std::fflush(stdout);
  }
}

int run_bench(const BenchArguments& a) {
  if (a.threads > 0) at::set_num_threads(static_cast<int>(a.threads));
  std::vector<std::string> families;
  for (const ops::OpCase& c : ops::all_cases()) {
    if (families.empty() || families.back() != c.op) families.push_back(c.op);
  }
  families.push_back("train_step");
  families.push_back("models");
  families.push_back("decode");
  const std::vector<std::string> chosen = a.cases.empty() ? families : a.cases;
  for (const std::string& name : chosen) {
    if (std::find(families.begin(), families.end(), name) != families.end()) continue;
    const std::string near = nearest(name, families);
    usage_error("there is no benchmark '", name, "'",
                near.empty() ? str("; there are ", join(families), ".")
                             : str("; did you mean '", near, "'?"));
  }
  Json json = {{"machine", Json::object()}};
  for (const auto& [key, value] : machine_facts()) {
    json["machine"][key] = value;
    if (!a.json) std::printf("%s: %s\n", key.c_str(), value.c_str());
  }
  if (!a.json)
    std::printf("medians (lowest - highest); ratios are taken pair by pair in one process\n\n");
  for (const std::string& name : chosen) {
    if (name == "train_step") {
      bench_steps(a, json);
    } else if (name == "models") {
      Requirements rows(a, json);
      bench_model_steps(a, rows);
    } else if (name == "decode") {
      Requirements rows(a, json);
      bench_decode(a, rows);
    } else {
      bench_operators(name, a, json);
    }
    if (!a.json) std::printf("\n");
  }
  if (a.json) std::printf("%s\n", json.dump(1).c_str());
  return 0;
}

}  // namespace

Command bench_command() {
  return {"bench", "operators, training steps and decoding beside plain attention, in one process",
          "headloom bench composed_attention --only T=2048",
          [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<BenchArguments>();
            app.add_option("cases", a->cases, "which benchmarks; all by default");
            app.add_option("--only", a->only, "only cases and figures whose name has this in it");
            app.add_option("--backend", a->backend, "force the operator's backend")
                ->check(one_of({"reference", "fused"}));
            app.add_option("--seconds", a->seconds, "time for each measurement")
                ->check(real_number(positive()))
                ->capture_default_str();
            app.add_option("--threads", a->threads, "threads; PyTorch's choice by default")
                ->check(whole_number(1, 1024));
            app.add_flag("--json", a->json, "print as JSON");
            return [a] { return run_bench(*a); };
          }};
}

}  // namespace headloom::cli
