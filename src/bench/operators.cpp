#include <cstdio>

#include "bench/requirements.h"
#include "core/problem.h"
#include "core/text.h"
#include "ops/case.h"

namespace headloom::bench {
namespace {

// "PASS 1.30" or "short of 1.30"; "" without a target.
std::string verdict(double ratio, double target) {
  if (target == 0) return "";
  return formatted(ratio <= target ? "PASS %.2f" : "short of %.2f", target);
}

}  // namespace

void bench_operators(const std::string& family, const BenchOptions& a,
                     nlohmann::ordered_json& json) {
  std::vector<ops::OpCase> of_family, cases;
  for (const ops::OpCase& c : ops::all_cases()) {
    if (c.op != family) continue;
    of_family.push_back(c);
    if (a.wants(c.name)) cases.push_back(c);
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
    try {
      for (const bool training : {false, true}) {
        timed[training] =
            time_pairs(step_of(c, training, backend), baseline_of(c, training), a.seconds);
      }
    } catch (const std::exception& error) {  // the other cases can be measured still
      if (a.json) {
        json["cases"].push_back({{"op", c.op}, {"case", c.name}, {"error", problem_of(error)}});
      } else {
        std::printf("%-28s not measured: %s\n", c.name.c_str(), problem_of(error).c_str());
      }
      continue;
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
  bench_family_requirements(of_family, a, rows);
  if (family == "composed_attention") bench_composed_requirements(a, rows);
}

}  // namespace headloom::bench
