#include "model/describe.h"

namespace headloom {
namespace {

void add(std::vector<Cost>& parts, const Cost& cost) {
  for (Cost& present : parts) {
    if (present.part == cost.part && present.formula == cost.formula) {
      present.parameters += cost.parameters;
      present.flops_per_token += cost.flops_per_token;
      return;
    }
  }
  parts.push_back(cost);
}

}  // namespace

ModelCosts model_costs(const Decoder& model, int64_t length) {
  const ModelConfig& config = model.config();
  const int64_t table = *config.vocabulary * config.width;
  ModelCosts out;
  for (size_t i = 0; i < model.mixers().size(); ++i) {
    for (const Cost& cost : model.mixers()[i]->costs(length)) add(out.parts, cost);
    if (model.channels()[i]) {
      for (const Cost& cost : model.channels()[i]->costs()) add(out.parts, cost);
    }
    out.state_bytes_per_token += model.mixers()[i]->state_bytes_per_token();
  }
  out.parts.push_back(
      {.part = config.tied ? "output (tied to the embedding)" : "embedding and output",
       .formula = "2 C V",
       .parameters = config.tied ? table : 2 * table,
       .flops_per_token = 2.0 * static_cast<double>(table)});
  for (const Tensor& p : model.parameters()) out.parameters += p.numel();
  int64_t counted = 0;
  for (const Cost& part : out.parts) counted += part.parameters;
  if (out.parameters > counted) {
    out.parts.push_back(
        {.part = "norms and positions", .formula = "-", .parameters = out.parameters - counted});
  }
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
