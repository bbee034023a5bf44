// Training steps of whole models beside a transformer of the same size.
#include "bench/requirements.h"
#include "core/text.h"

namespace headloom::bench {
namespace {

constexpr int64_t kLength = 2048;

struct ModelCase {
  std::string name;
  std::string toml;  // over the common sizes
  std::string baseline;
  double target;
};

// 12.6M parameters in the layers: small enough to time, wide enough that the layers and not the
// overhead of single operations decide. Every model is brought to the transformer's parameters by
// its channel mixers; mamba, which has none, by its depth.
const std::vector<ModelCase>& model_cases() {
  static const std::string transformer = "preset = \"transformer++-tiny\"\ndepth = 4\n";
  const auto block = [](const char* type) {
    return str("depth = 4\n[[layer]]\nmixer = { type = \"mha\", heads = 8 }\n",
               "channel = { type = \"mlp\" }\nblock = { type = \"", type, "\" }\n");
  };
  static const std::vector<ModelCase> cases = {
      {"mamba", "preset = \"mamba-tiny\"\ndepth = 8\n", transformer, 1.2},
      {"rwkv", "preset = \"rwkv-tiny\"\ndepth = 4\n", transformer, 1.0},
      {"retnet", "preset = \"retnet-tiny\"\ndepth = 4\n", transformer, 1.0},
      {"parallel block", block("parallel"), block("sequential"), 1.0},
  };
  return cases;
}

ModelConfig model_of(const std::string& toml) {
  ModelConfig config;
  const std::string sizes = str("width = 512\nvocabulary = 256\nmax_length = ", kLength, "\n");
  read_fields(parse_toml(sizes + toml, "bench"), config, "model");
  return config;
}

}  // namespace

void bench_model_steps(const BenchOptions& a, Requirements& rows) {
  for (const ModelCase& c : model_cases()) {
    const ModelConfig plain = model_of(c.baseline);
    ModelConfig config = model_of(c.toml);
    const int64_t target = count_parameters(plain);
    bool has_width = false;
    for (LayerConfig& layer : config.layers)
      has_width |= layer.channel->hidden(config.width).has_value();
    const int64_t count = has_width ? match_parameters(config, target) : count_parameters(config);
    rows.at_most(
        str(c.name, " step over transformer's, T=", kLength, ", ",
            human_count(static_cast<double>(count)), " over ",
            human_count(static_cast<double>(target)), " parameters"),
        c.target, [&] {
          StepBench step(config, 1, kLength), baseline(plain, 1, kLength);
          // The first steps find the memory that later ones use again.
          for (int i = 0; i < 4; ++i) step(), baseline();
          return time_pairs([&] { step(); }, [&] { baseline(); }, 8 * a.seconds).ratio.median;
        });
  }
}

}  // namespace headloom::bench
