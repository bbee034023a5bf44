#include "model/describe.h"

#include "core/memory.h"
#include "mixers/without_memory.h"
#include "model/autoregressive.h"

namespace headloom {
namespace {

void add(std::vector<Cost>& parts, const Cost& cost) {
  for (Cost& present : parts) {
    if (present.part == cost.part && present.formula == cost.formula) {
      present.parameters += cost.parameters;
      present.idle_parameters += cost.idle_parameters;
      present.flops_per_token += cost.flops_per_token;
      return;
    }
  }
  parts.push_back(cost);
}

}  // namespace

std::shared_ptr<Model> build_without_memory(const ModelConfig& config) {
  return built_without_memory([&] { return build_model(config); });
}

std::optional<MeasuredState> measured_state(const Model& model, int64_t length) {
  const auto* decoder = dynamic_cast<const AutoregressiveModel*>(&model);
  if (decoder == nullptr || !decoder->decoder_layers().stateful()) return {};
  const double parameters = parameter_count(model);
  if (parameters > static_cast<double>(kMeasuredParameters) ||
      4.0 * parameters > memory_limit().bytes) {
    return {};
  }
  std::shared_ptr<Model> built;
  if (model.parameters()[0].is_meta()) {
    const WithoutValues fast;
    built = build_model(model.config());
    decoder = dynamic_cast<const AutoregressiveModel*>(built.get());
  }
  const auto& layers = decoder->decoder_layers().all();
  MeasuredState out{.length = std::min(length, kMeasuredPositions)};
  int64_t longest = kMeasuredPositions;
  for (const Layers::Layer& layer : layers) {
    longest = std::min(longest, layer.mixer->longest().value_or(longest));
  }
  out.length = std::min(out.length, longest);
  at::NoGradGuard no_grad;
  // After so many positions, of the source too where there is one.
  const auto bytes_after = [&](int64_t positions) {
    double bytes = 0;
    const Tensor x = at::zeros({1, positions, model.config().width});
    for (const Layers::Layer& layer : layers) {
      LayerState state{.mixer = layer.mixer->initial_state({})};
      MixerContext context;
      context.state = &state;
      if (layer.cross) state.cross = layer.cross->build_cross_cache(x, {});
      layer.mixer->run(x, context);
      if (layer.cross) layer.cross->run_cross(x, context);
      if (layer.channel) layer.channel->run(x, context);
      bytes += static_cast<double>(state.bytes());
    }
    return bytes;
  };
  out.bytes = bytes_after(out.length);
  // What is there from the first token on is none that each token adds.
  const int64_t half = std::max<int64_t>(out.length / 2, 1);
  const int64_t whole = std::min(std::max(out.length, half + 1), longest);
  if (whole == half) return out;
  const double of_whole = whole == out.length ? out.bytes : bytes_after(whole);
  out.bytes_per_token = (of_whole - bytes_after(half)) / static_cast<double>(whole - half);
  return out;
}

std::string flops_name(const ModelConfig& config) {
  // The positions of an image are its patches.
  return config.kind == "vit" ? "FLOPs a position" : "FLOPs a token";
}

ModelCosts model_costs(const Model& model, int64_t length) {
  check_countable(model);
  length = model.config().positions(length);
  ModelCosts out;
  for (const Layers* layers : model.stacks()) {
    // What is read in both directions is read at once, and an auto-encoder writes nothing.
    const bool decodes = dynamic_cast<const AutoregressiveModel*>(&model) != nullptr &&
                         layers->causal() && layers->stateful();
    if (decodes) out.state_bytes = out.state_bytes_per_token = 0;
    const auto add_all = [&](std::vector<Cost> costs, const std::string& before) {
      for (Cost& cost : costs) {
        cost.part = before + cost.part;
        add(out.parts, cost);
      }
    };
    const std::string part = layers->part().empty() ? "" : layers->part() + " ";
    for (const Layers::Layer& layer : layers->all()) {
      add_all(layer.mixer->costs(length), part);
      if (layer.cross) add_all(layer.cross->costs(length), "cross ");
      if (layer.channel) add_all(layer.channel->costs(), part);
      if (!decodes) continue;
      const int64_t earlier = length / 2;
      double half = layer.mixer->state_bytes(earlier), whole = layer.mixer->state_bytes(length);
      if (layer.cross) {
        half += layer.cross->state_bytes(earlier);
        whole += layer.cross->state_bytes(length);
      }
      out.state_bytes += whole + (layer.channel ? layer.channel->state_bytes() : 0);
      out.state_bytes_per_token += (whole - half) / static_cast<double>(length - earlier);
    }
  }
  for (const Cost& cost : model.own_costs(length)) out.parts.push_back(cost);
  out.parameters = static_cast<int64_t>(parameter_count(model));
  int64_t counted = 0;
  for (const Cost& part : out.parts) counted += part.parameters;
  if (out.parameters > counted) {
    out.parts.push_back(
        {.part = "norms and positions", .formula = "-", .parameters = out.parameters - counted});
  }
  out.active_parameters = out.parameters;
  for (const Cost& part : out.parts) out.active_parameters -= part.idle_parameters;
  double mechanism = 0, mechanism_parameters = 0;
  for (const Cost& part : out.parts) {
    out.flops_per_token += part.flops_per_token;
    if (!part.mechanism) continue;
    mechanism += part.flops_per_token;
    mechanism_parameters += static_cast<double>(part.parameters);
  }
  out.mechanism_share = mechanism / (out.flops_per_token - mechanism);
  out.mechanism_parameters =
      mechanism_parameters / (static_cast<double>(out.parameters) - mechanism_parameters);
  return out;
}

}  // namespace headloom
