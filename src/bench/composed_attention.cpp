#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstdio>

#include "bench/memory.h"
#include "bench/requirements.h"
#include "core/error.h"
#include "core/platform.h"
#include "core/shell.h"
#include "ops/case.h"

namespace headloom::bench {
namespace {

using Json = nlohmann::ordered_json;

const ops::OpCase& find_case(const std::vector<ops::OpCase>& cases, const std::string& name) {
  for (const ops::OpCase& c : cases) {
    if (c.op == "composed_attention" && c.name == name) return c;
  }
  fail("bench: there is no case '", name, "'.");
}

// Median seconds of the case's forward in a process that is held to AVX2: which kernels run is
// decided once a process.
double avx2_seconds(const std::string& name, const BenchOptions& a) {
  const std::string level = "ATEN_CPU_CAPABILITY=avx2 ";
  const std::string arguments =
      str(" bench composed_attention --json --backend fused --only '", name, "' --seconds ",
          a.seconds, " --threads ", at::get_num_threads());
  const std::string command = level + program_path() + arguments + " 2>/dev/null";
  // NOLINTNEXTLINE(bugprone-command-processor): `name` is a case of the table in src/ops.
  std::FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) fail("a process with AVX2 does not start.");
  std::string text;
  char buffer[4096];
  size_t count = 0;
  while ((count = std::fread(buffer, 1, sizeof buffer, pipe)) > 0) text.append(buffer, count);
  ::pclose(pipe);
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_object() && json.contains("cases")) {
    for (const Json& c : json["cases"]) {
      if (c["case"] == name && c.contains("forward_seconds")) {
        return c["forward_seconds"]["median"].get<double>();
      }
    }
  }
  fail("the process with AVX2 has not measured it; this command says why: ", level, program_name(),
       arguments);
}

std::function<void()> layer_work(const std::string& type) {
  seed_all();
  LayerShape shape;
  shape.width = 512;
  shape.max_length = 2048;
  const std::shared_ptr<TokenMixer> layer =
      make_spec(token_mixers(), "token mixer", type)->build(shape);
  const Tensor x = at::randn({1, 2048, 512}).requires_grad_(true);
  const Tensor cotangent = at::randn({1, 2048, 512});
  return [=]() mutable {
    layer->forward(x, {}).backward(cotangent);
    for (Tensor& p : layer->parameters()) p.mutable_grad() = Tensor();
    x.mutable_grad() = Tensor();
  };
}

// The 405M shape cut to 4 layers, with a vocabulary so small that it does not dilute the ratio.
ModelConfig cut_preset(const std::string& preset) {
  ModelConfig config;
  read_fields(
      parse_toml("preset = \"" + preset + "\"\ndepth = 4\nvocabulary = 256\nmax_length = 1024\n",
                 "bench"),
      config, "model");
  return config;
}

}  // namespace

void bench_composed_requirements(const BenchOptions& a, Requirements& rows) {
  const auto cases = ops::all_cases();
  const ops::OpCase& dcmha = find_case(cases, "dcmha T=2048");
  const ops::OpCase& half = find_case(cases, "dcmha T=2048 bfloat16");
  const int threads = at::get_num_threads();
  for (const bool training : {false, true}) {
    const char* part = training ? "forward + backward" : "forward";
    const double target = training ? 1.6 : 1.8;
    rows.at_least(str("bfloat16 over float32 speed, dcmha T=2048, ", part), target, [&] {
      return time_pairs(step_of(dcmha, training), step_of(half, training), a.seconds).ratio.median;
    });
    if (threads < 2) continue;
    rows.at_least(str("two threads over one, dcmha T=2048, ", part), 1.8, [&] {
      const auto f = step_of(dcmha, training);
      const auto with = [&](int count) {
        return [&f, count] {
          at::set_num_threads(count);
          f();
        };
      };
      const Paired scaling = time_pairs(with(1), with(2), a.seconds);
      at::set_num_threads(threads);
      return scaling.ratio.median;
    });
  }
  if (at::get_cpu_capability() == "AVX512") {
    rows.at_most("AVX2 time over AVX-512 time, dcmha T=2048, forward", 1.8, [&] {
      const auto f = step_of(dcmha, false);
      return avx2_seconds(dcmha.name, a) / time_pairs(f, f, a.seconds).a.median;
    });
  }
  const auto peak_at = [&](const char* name) {
    return peak_bytes(step_of(find_case(cases, name), true));
  };
  std::optional<double> long_peak;  // of two figures, measured once
  const auto peak_at_8192 = [&] {
    if (!long_peak) long_peak = peak_at("dcmha T=8192");
    return *long_peak;
  };
  rows.at_most("peak memory over plain attention's, dcmha T=8192, training", 4.0, [&] {
    return peak_at_8192() / peak_bytes(baseline_of(find_case(cases, "dcmha T=8192"), true));
  });
  rows.at_most("peak memory T=8192 over T=4096, dcmha, training", 2.0,
               [&] { return peak_at_8192() / peak_at("dcmha T=4096"); });
  rows.at_most("dcmha layer over mha layer, width 512, 8 heads, T=2048, training", 1.5, [&] {
    return time_pairs(layer_work("dcmha"), layer_work("mha"), 2 * a.seconds).ratio.median;
  });
  rows.at_most("dcformer++ step over transformer++ step, 4 layers, T=1024", 1.25, [&] {
    StepBench composed(cut_preset("dcformer++"), 1, 1024),
        plain(cut_preset("transformer++"), 1, 1024);
    return time_pairs([&] { composed(); }, [&] { plain(); }, 4 * a.seconds).ratio.median;
  });
}

}  // namespace headloom::bench
