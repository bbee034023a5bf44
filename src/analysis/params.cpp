// Parameters and FLOPs of each part, and the share that a mechanism adds (Xiao et al. 2024, table
// 2).
#include "analysis/analysis.h"
#include "core/text.h"
#include "model/describe.h"

namespace headloom::analysis {

Findings params(const Subject& subject) {
  // Python's modules hold their parameters themselves, so they are counted in another of the kind.
  const std::shared_ptr<Model> built = build_without_memory(subject.model->config());
  const Model& model = *built;
  const int64_t length = model.config().positions(model.config().max_length.value_or(1024));
  const ModelCosts costs = model_costs(model, length);
  const std::string flops = flops_name(model.config());
  Findings out{.title = "Parameters and FLOPs"};
  Table table{.title = str("Parts, at length ", length),
              .columns = {"part", "adds to attention", "parameters", "share", flops,
                          "share of FLOPs", "formula"}};
  for (const Cost& cost : costs.parts) {
    table.rows.push_back({cost.part, std::string(cost.mechanism ? "yes" : "no"), cost.parameters,
                          static_cast<double>(cost.parameters) /
                              static_cast<double>(std::max<int64_t>(costs.parameters, 1)),
                          cost.flops_per_token, cost.flops_per_token / costs.flops_per_token,
                          cost.formula});
  }
  out.tables.push_back(std::move(table));
  out.sentences.push_back(str("The model has ", costs.parameters, " parameters and takes ",
                              human_count(costs.flops_per_token), " ", flops,
                              " forward, at length ", length, "."));
  if (costs.mechanism_share == 0 && costs.mechanism_parameters == 0) {
    out.sentences.emplace_back("Nothing in it is an addition to plain attention.");
    return out;
  }
  out.sentences.push_back(str("Its mechanism adds ",
                              formatted("%.2f%%", 100 * costs.mechanism_parameters),
                              " parameters and ", formatted("%.2f%%", 100 * costs.mechanism_share),
                              " FLOPs to plain attention."));
  return out;
}

}  // namespace headloom::analysis
