#include "model/describe.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/arguments.h"
#include "cli/command.h"
#include "core/sizes.h"
#include "core/text.h"
#include "model/branches.h"
#include "train/config.h"
#include "train/device.h"
#include "train/run_folder.h"
#include "train/scaling.h"
#include "train/training_memory.h"

namespace headloom::cli {
namespace {

struct DescribeArguments {
  ConfigArguments config;
  int64_t length = 0;
  int64_t machines = 1;
  double bandwidth = 0, speed = 0;  // Gbit/s, GFLOP/s
  bool json = false;
};

// Fills in the sizes that the file leaves to the task, whose data are read only where nothing else
// tells them. Returns the task's sizes, where they are known.
std::optional<data::TaskSizes> complete(RunConfig& config) {
  try {
    if (const auto sizes = config.task->known_sizes()) {
      config.fit(*sizes);
      return sizes;
    }
  } catch (const Error&) {
    // A whole model needs no task: that of an imported one has no data, and the tokenizer of a
    // run's configuration is beside it, wherever that is.
    if (!config.model.is_complete()) throw;
  }
  if (config.model.is_complete()) return std::nullopt;
  try {
    config.find_data();
  } catch (const Error& error) {
    fail("the configuration leaves ", join(config.model.open_sizes()), " to the data of the task ",
         config.task->type(), ", but ", error.what());
  }
  return data::sizes_of(*config.build_task());
}

// Of a task that the model would read whole.
data::TaskSizes longest(const ModelConfig& model) {
  data::TaskSizes out{.length = model.max_length.value_or(0),
                      .source_length = model.max_source_length.value_or(0)};
  if (model.kind == "vit") out.image = model.image.shape();
  return out;
}

// The first and the last layer of each kind: those that one entry of the configuration's list
// describes.
std::vector<std::pair<BranchScale, BranchScale>> ends_of_kinds(
    const ModelConfig& model, const std::vector<BranchScale>& layers) {
  std::vector<std::pair<BranchScale, BranchScale>> kinds;
  std::map<std::pair<std::string, size_t>, size_t> place;
  for (const BranchScale& layer : layers) {
    const bool of_encoder = layer.part == "encoder" && !model.encoder_layers.empty();
    const size_t entries = of_encoder ? model.encoder_layers.size() : model.layers.size();
    const std::pair kind{layer.part, static_cast<size_t>(layer.layer) % entries};
    const auto [found, first] = place.emplace(kind, kinds.size());
    if (first) {
      kinds.emplace_back(layer, layer);
    } else {
      kinds[found->second].second = layer;
    }
  }
  return kinds;
}

void print_branches(const ModelConfig& model,
                    const std::optional<std::vector<BranchScale>>& branches) {
  if (!branches) {
    std::printf(
        "outputs at the start  not measured: the model has more than %s parameters or does not fit "
        "into memory\n",
        human_count(static_cast<double>(kMostBranchParameters)).c_str());
    return;
  }
  const char* title = "outputs at the start ";
  for (const auto& [first, last] : ends_of_kinds(model, *branches)) {
    const std::string part = first.part.empty() ? "" : first.part + " ";
    std::string line = str(part, first.mixer, " ", formatted("%.3g", first.ratio()),
                           " of the residual stream in layer ", first.layer);
    if (last.layer != first.layer) {
      line += str(", ", formatted("%.3g", last.ratio()), " in layer ", last.layer);
    }
    std::printf("%s %s\n", title, line.c_str());
    title = "                     ";
  }
}

// What a step costs, shared in one way.
struct ShardCost {
  StepCost cost;
  double memory = 0;  // bytes a machine
};

// One row of what machines cost that share a step.
struct ScalingRow {
  int64_t machines = 1;
  ShardCost none = {}, optimizer = {}, parameters = {};  // by train.shard
  std::optional<ShardCost> tensor = {};                  // where so many can share out the layers
};

struct Scaling {
  std::vector<ScalingRow> rows = {};
  double hidden_up_to = 0, limit_step = 0;
};

// Where the layers are shared out by `machines`; nothing where they cannot be.
std::optional<ShardCost> tensor_cost(const Model& whole, const SequenceSizes& sequence,
                                     const TrainOptions& options, const SharedStep& step,
                                     int64_t machines) {
  ModelConfig config = whole.config();
  config.tensor_parallel =
      std::make_shared<TensorParallel>(TensorParallel{.size = machines, .rank = 0, .sum = {}});
  std::shared_ptr<Model> part;
  try {
    part = build_without_memory(config);
  } catch (const UsageError&) {
    return std::nullopt;
  }
  double other = 0, mixers = 0;
  for (const Cost& cost : whole.own_costs(sequence.length)) other += cost.flops_per_token;
  for (const Layers* stack : whole.stacks()) {
    for (const Layers::Layer& layer : stack->all()) {
      mixers += 1 + (layer.cross ? 1 : 0) + (layer.channel ? 1 : 0);
    }
  }
  const double tokens = static_cast<double>(options.batch) * static_cast<double>(sequence.length);
  // Of each mixer in the forward and in the backward, which may compute the forward again.
  const double sums = mixers * (options.activation_checkpointing ? 3 : 2);
  const CutStep cut{.layer_flops = step.flops - 3 * other * tokens,
                    .other_flops = 3 * other * tokens,
                    .summed_bytes = sums * 4 * tokens * static_cast<double>(config.width),
                    .machine_flops = step.machine_flops,
                    .bytes_a_second = step.bytes_a_second};
  return ShardCost{step_cost(cut, machines), training_memory(*part, sequence, options).peak};
}

// For 1, 2, 4, ... machines that can share a batch equally, up to a.machines.
Scaling scaling(const DescribeArguments& a, const Model& model, const SequenceSizes& sequence,
                const ModelCosts& costs, TrainOptions options) {
  if (a.bandwidth <= 0 || a.speed <= 0) {
    usage_error("--machines ", a.machines,
                " needs --bandwidth, the Gbit/s between two machines, and --speed, the GFLOP/s "
                "that one reaches in training.");
  }
  check_equal_shares(options, a.machines);
  // The backward of a matrix product is two of them.
  SharedStep step{.flops = 3 * costs.flops_per_token * static_cast<double>(options.batch) *
                           static_cast<double>(sequence.length),
                  .parameters = static_cast<double>(costs.parameters),
                  .machine_flops = 1e9 * a.speed,
                  .bytes_a_second = 1e9 / 8 * a.bandwidth};
  Scaling out{.hidden_up_to = hidden_up_to(step),
              .limit_step = 8 * step.parameters / step.bytes_a_second};
  std::vector<int64_t> numbers;
  for (int64_t n = 1; n < a.machines; n *= 2) numbers.push_back(n);
  numbers.push_back(a.machines);
  for (const int64_t n : numbers) {
    if (options.batch % (options.accumulate * n) != 0) continue;
    ScalingRow row{.machines = n};
    const auto cost = [&](const char* shard) {
      step.shard = options.shard = shard;
      return ShardCost{step_cost(step, n), training_memory(model, sequence, options, n).peak};
    };
    row.none = cost("none");
    row.optimizer = cost("optimizer");
    row.parameters = cost("parameters");
    options.shard = "none";
    if (n > 1) row.tensor = tensor_cost(model, sequence, options, step, n);
    out.rows.push_back(row);
  }
  return out;
}

void print_scaling(const DescribeArguments& a, const Scaling& found) {
  std::printf("\n%8s %10s %10s %10s %10s %11s %10s   %-22s %-22s %s\n", "machines", "compute",
              "sent", "reduce", "step", "efficiency", "memory", "shard = \"optimizer\"",
              "shard = \"parameters\"", "tensor_parallel");
  for (const ScalingRow& row : found.rows) {
    const StepCost& none = row.none.cost;
    const auto other = [](const ShardCost& c) {
      return str(formatted("%.3g s", c.cost.step), ", ", human_bytes(c.memory));
    };
    std::printf("%8lld %8.3g s %10s %8.3g s %8.3g s %10.1f%% %10s   %-22s %-22s %s\n",
                static_cast<long long>(row.machines), none.compute, human_bytes(none.bytes).c_str(),
                none.reduce, none.step, 100 * none.efficiency, human_bytes(row.none.memory).c_str(),
                other(row.optimizer).c_str(), other(row.parameters).c_str(),
                row.tensor ? other(*row.tensor).c_str() : "-");
  }
  std::printf(
      "at %g GFLOP/s a machine and %g Gbit/s between them, the sums of gradients are hidden behind "
      "the backward up to %.3g machines; with ever more machines a step nears %.3g s.\n",
      a.speed, a.bandwidth, found.hidden_up_to, found.limit_step);
}

nlohmann::ordered_json scaling_json(const Scaling& found) {
  nlohmann::ordered_json json = {{"hidden_up_to", found.hidden_up_to},
                                 {"limit_step_seconds", found.limit_step}};
  for (const ScalingRow& row : found.rows) {
    const auto cost = [](const ShardCost& c) {
      return nlohmann::ordered_json{
          {"bytes_sent", c.cost.bytes},      {"reduce_seconds", c.cost.reduce},
          {"gather_seconds", c.cost.gather}, {"step_seconds", c.cost.step},
          {"efficiency", c.cost.efficiency}, {"memory", c.memory}};
    };
    json["numbers"].push_back({{"machines", row.machines},
                               {"compute_seconds", row.none.cost.compute},
                               {"none", cost(row.none)},
                               {"optimizer", cost(row.optimizer)},
                               {"parameters", cost(row.parameters)}});
    if (row.tensor) json["numbers"].back()["tensor_parallel"] = cost(*row.tensor);
  }
  return json;
}

// Everything that describe prints.
struct Description {
  RunConfig config;
  int64_t length;  // of a sequence, in the model's positions
  ModelCosts costs;
  std::optional<MeasuredState> measured;
  std::optional<std::vector<BranchScale>> branches;
  TrainingMemory training;
  std::optional<Scaling> machines = {};
};

Description description(DescribeArguments a) {
  if (a.machines == 1 && (a.bandwidth > 0 || a.speed > 0)) {
    usage_error(a.bandwidth > 0 ? "--bandwidth" : "--speed",
                " is of --machines, which is missing or 1.");
  }
  const std::string folder = a.config.path;
  const bool of_run = is_folder(folder);
  if (of_run) a.config.path += "/config.toml";
  const Node root = a.config.read();
  expect_comparison(root, a.config.path, false);
  RunConfig config = read_run_config(root);
  if (of_run) use_kept_tokenizer(folder, config);
  // A file with [model] alone can be described too: its sizes get plain defaults.
  ModelConfig& model = config.model;
  if (a.length > 0 && model.kind == "vit") {
    usage_error("--length: the sequence of a vit is the patches of an image, expected another ",
                "'model.image' where it is to be longer.");
  }
  std::optional<data::TaskSizes> known;
  if (root.find("task") != nullptr) known = complete(config);
  check_device_name(config.train.device);
  model.complete({.vocabulary = 256,
                  .length = a.length > 0 ? a.length : 1024,
                  .source_length = a.length > 0 ? a.length : 1024,
                  .classes = model.kind == "vit" ? 1000 : 2,
                  .image = {3, 224, 224}});
  data::TaskSizes sizes = known ? *known : longest(model);
  if (a.length > 0) {
    sizes.length = a.length;
    if (model.kind == "encoder_decoder") sizes.source_length = a.length;
  }
  const int64_t length = model.positions(std::max(sizes.length, sizes.source_length));
  const auto built = build_without_memory(model);
  const SequenceSizes sequence = sequence_sizes(*built, sizes);
  Description out{.config = config,
                  .length = length,
                  .costs = model_costs(*built, length),
                  .measured = measured_state(*built, length),
                  .branches = measured_branches(model, length),
                  .training = training_memory(*built, sequence, config.train)};
  if (a.machines > 1) out.machines = scaling(a, *built, sequence, out.costs, config.train);
  return out;
}

nlohmann::ordered_json description_json(const Description& d) {
  const ModelCosts& costs = d.costs;
  nlohmann::ordered_json json = {{"length", d.length},
                                 {"parameters", costs.parameters},
                                 {"active_parameters", costs.active_parameters},
                                 {"flops_per_token", costs.flops_per_token},
                                 {"mechanism_flops_share", costs.mechanism_share},
                                 {"mechanism_parameters_share", costs.mechanism_parameters},
                                 {"state_bytes", costs.state_bytes},
                                 {"state_bytes_per_token", costs.state_bytes_per_token}};
  if (d.measured) {
    json["measured_state"] = {{"length", d.measured->length},
                              {"bytes", d.measured->bytes},
                              {"bytes_per_token", d.measured->bytes_per_token}};
  }
  if (d.branches) {
    json["initial_branches"] = nlohmann::ordered_json::array();
    for (const BranchScale& b : *d.branches) {
      json["initial_branches"].push_back({{"part", b.part},
                                          {"layer", b.layer},
                                          {"mixer", b.mixer},
                                          {"output_rms", b.output},
                                          {"residual_rms", b.residual},
                                          {"ratio", b.ratio()}});
    }
  }
  json["training_memory"] = {
      {"batch", d.config.train.batch},         {"parameters", d.training.parameters},
      {"gradients", d.training.gradients},     {"optimizer", d.training.optimizer},
      {"activations", d.training.activations}, {"scores", d.training.scores},
      {"batch_bytes", d.training.batch},       {"peak", d.training.peak}};
  if (d.machines) json["machines"] = scaling_json(*d.machines);
  for (const Cost& c : costs.parts) {
    json["parts"].push_back({{"part", c.part},
                             {"formula", c.formula},
                             {"parameters", c.parameters},
                             {"flops_per_token", c.flops_per_token},
                             {"mechanism", c.mechanism}});
  }
  return json;
}

void print_description(const DescribeArguments& a, const Description& d) {
  const ModelConfig& model = d.config.model;
  const ModelCosts& costs = d.costs;
  const std::string flops = flops_name(model);
  std::printf("%-30s %12s %16s %7s  %s\n", "part", "parameters", flops.c_str(), "share",
              (flops + " and layer").c_str());
  for (const Cost& c : costs.parts) {
    std::printf("%-30s %12s %16s %6.2f%%  %s\n", ((c.mechanism ? "+ " : "  ") + c.part).c_str(),
                human_count(static_cast<double>(c.parameters)).c_str(),
                human_count(c.flops_per_token).c_str(),
                100 * c.flops_per_token / costs.flops_per_token, c.formula.c_str());
  }
  std::printf("\nparameters            %s\n",
              human_count(static_cast<double>(costs.parameters)).c_str());
  if (costs.active_parameters < costs.parameters) {
    std::printf("active parameters     %s, those that work for a token\n",
                human_count(static_cast<double>(costs.active_parameters)).c_str());
  }
  std::printf("%-21s %s at length %lld\n", ("forward " + flops).c_str(),
              human_count(costs.flops_per_token).c_str(), static_cast<long long>(d.length));
  const bool generates = model.kind == "decoder" || model.kind == "encoder_decoder";
  if (generates && std::isnan(costs.state_bytes)) {
    std::printf("decoding state        none: a mixer of this model has none\n");
  } else if (generates) {
    std::printf("decoding state        %s at length %lld, to which each token adds %s (float32)\n",
                human_bytes(costs.state_bytes).c_str(), static_cast<long long>(d.length),
                human_bytes(costs.state_bytes_per_token).c_str());
    if (d.measured) {
      std::printf("  measured            %s at length %lld, to which each token adds %s\n",
                  human_bytes(d.measured->bytes).c_str(),
                  static_cast<long long>(d.measured->length),
                  human_bytes(d.measured->bytes_per_token).c_str());
    }
  }
  std::printf("training memory       %s or more at train.batch = %lld: %s\n",
              human_bytes(d.training.peak).c_str(), static_cast<long long>(d.config.train.batch),
              d.training.parts().c_str());
  print_branches(model, d.branches);
  const auto is_mechanism = [](const Cost& c) { return c.mechanism; };
  // A mixer that takes the place of attention adds nothing to it.
  if (std::any_of(costs.parts.begin(), costs.parts.end(), is_mechanism)) {
    std::printf(
        "the mechanism (+)     adds %.2f%% parameters and %.2f%% FLOPs to plain "
        "attention\n",
        100 * costs.mechanism_parameters, 100 * costs.mechanism_share);
  }
  if (d.machines) print_scaling(a, *d.machines);
  std::printf(
      "\nC width, H score maps, H' output maps, Gk and Gv key and value heads, D and E their "
      "sizes, K mean visible keys, R rank, I hidden or inner width, N numbers of state a channel, "
      "W positions of a convolution, M random features, T length, V vocabulary.\n");
}

int run_describe(const DescribeArguments& a) {
  const Description found = description(a);
  if (a.json) {
    std::printf("%s\n", printed(description_json(found)).c_str());
  } else {
    print_description(a, found);
  }
  return 0;
}

}  // namespace

Command describe_command() {
  return {"describe", "parameters, FLOPs, decoding state and what the mechanism adds",
          "headloom describe configs/text.toml --length 2048",
          [](CLI::App& app) -> std::function<int()> {
            auto a = std::make_shared<DescribeArguments>();
            a->config.add(app, "configuration file, or the folder of a run");
            app.add_option("--length", a->length, "sequence length; the task's by default")
                ->check(whole_number(1, kLargestSize));
            app.add_option("--machines", a->machines,
                           "estimate a training step that so many machines share")
                ->check(whole_number(1, 1024));
            app.add_option("--bandwidth", a->bandwidth, "between two machines, in Gbit/s")
                ->check(real_number(Range<double>{.low = 1e-6, .high = 1e9}));
            app.add_option("--speed", a->speed, "that a machine reaches in training, in GFLOP/s")
                ->check(real_number(Range<double>{.low = 1e-6, .high = 1e12}));
            app.add_flag("--json", a->json, "print the result as JSON");
            return [a] { return run_describe(*a); };
          }};
}

}  // namespace headloom::cli
