#include "bench/run.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>

#include "bench/machine.h"
#include "bench/requirements.h"
#include "core/error.h"
#include "core/text.h"
#include "ops/case.h"

namespace headloom::bench {
namespace {

void run_family(const std::string& name, const BenchOptions& a, nlohmann::ordered_json& json) {
  if (name == "train_step") return bench_steps(a, json);
  if (name == "step") return bench_step(a, json);
  if (name != "models" && name != "decode") return bench_operators(name, a, json);
  Requirements rows(a, json);
  name == "models" ? bench_model_steps(a, rows) : bench_decode(a, rows);
}

}  // namespace

void run(const std::vector<std::string>& wanted, const BenchOptions& a) {
  if (a.threads > 0) at::set_num_threads(static_cast<int>(a.threads));
  std::vector<std::string> families;
  for (const ops::OpCase& c : ops::all_cases()) {
    if (families.empty() || families.back() != c.op) families.push_back(c.op);
  }
  // These measure whole models, which choose by themselves.
  std::vector<std::string> chosen = families;
  for (const char* name : {"step", "train_step", "models", "decode"}) {
    families.emplace_back(name);
    if (a.backend.empty()) {
      chosen.emplace_back(name);
    } else if (std::find(wanted.begin(), wanted.end(), name) != wanted.end()) {
      usage_error("--backend is of an operator, but '", name,
                  "' measures whole models: leave it out.");
    }
  }
  if (!wanted.empty()) chosen = wanted;
  for (const std::string& name : chosen) {
    if (std::find(families.begin(), families.end(), name) != families.end()) continue;
    usage_error("there is no benchmark '", name, "'", did_you_mean(name, families));
  }
  if (a.profile && std::find(chosen.begin(), chosen.end(), "step") == chosen.end()) {
    usage_error("--profile is of 'step', which is not asked for: leave it out.");
  }
  if (!a.only.empty()) {
    BenchOptions names = a;
    names.names_only = names.json = true;
    nlohmann::ordered_json nothing;
    for (const std::string& name : chosen) run_family(name, names, nothing);
    if (!names.matched) {
      usage_error("--only is '", a.only, "', but no case or figure of ",
                  wanted.empty() ? "any benchmark" : join(chosen), " has that in its name.");
    }
  }
  nlohmann::ordered_json json = {{"machine", nlohmann::ordered_json::object()}};
  for (const auto& [key, value] : machine_facts()) {
    json["machine"][key] = value;
    if (!a.json) std::printf("%s: %s\n", key.c_str(), value.c_str());
  }
  if (!a.json)
    std::printf("medians (lowest - highest); ratios are taken pair by pair in one process\n\n");
  for (const std::string& name : chosen) {
    run_family(name, a, json);
    if (!a.json) std::printf("\n");
  }
  if (a.json) std::printf("%s\n", json.dump(1).c_str());
}

}  // namespace headloom::bench
