#include <algorithm>
#include <cstdio>

#include "bench/requirements.h"
#include "core/text.h"

namespace headloom::bench {
namespace {

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

}  // namespace

void bench_steps(const BenchOptions& a, nlohmann::ordered_json& json) {
  if (!a.json) {
    std::printf("%-28s %12s %12s %22s\n", "train_step (5M, T=256, B=16)", "a step", "tokens/s",
                "x mha");
  }
  for (const TokenMixerEntry& entry : token_mixers()) {
    if (!entry.traits.causal || !a.wants(entry.name)) continue;
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

}  // namespace headloom::bench
