#include <cmath>
#include <nlohmann/json.hpp>

#include "report/comparison.h"
#include "report/summary.h"
#include "report/table.h"

namespace headloom::report {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no NaN.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json to_json(const Stat& stat) {
  return {{"count", stat.count},
          {"mean", number(stat.mean)},
          {"spread", number(stat.spread)},
          {"low", number(stat.low)},
          {"high", number(stat.high)}};
}

Json to_json(const Run& run) {
  Json points = Json::array();
  for (const Point& p : run.points) {
    points.push_back({{"step", p.step},
                      {"tokens", number(p.tokens)},
                      {"seconds", number(p.seconds)},
                      {"train_loss", number(p.train_loss)},
                      {"loss", number(p.loss)},
                      {"quality", number(p.quality)},
                      {"accuracy", number(p.accuracy)}});
    for (const auto& [layer, shares] : p.expert_load) {
      points.back()["expert_load"][std::to_string(layer)] = shares;
    }
  }
  const char* state = run_failed(run)                    ? "failed"
                      : run.state == RunState::kFinished ? "finished"
                                                         : "running";
  Json out{{"seed", run.seed}, {"state", state}};
  if (run_failed(run)) out["problem"] = run_problem(run);
  if (run_diverged(run)) out["warning"] = run.warning;
  out["tokens_per_second"] = number(run.tokens_per_second);
  out["peak_memory_bytes"] = number(run.peak_memory_bytes);
  out["points"] = std::move(points);
  return out;
}

Json to_json(const Row& row) {
  Json out{{"model", row.model->label}, {"baseline", row.baseline}};
  if (row.build) {
    out["parameters"] = row.build->parameters >= 0 ? Json(row.build->parameters) : Json(nullptr);
    out["flops_per_token"] = number(row.build->flops_per_token);
    out["state_bytes_per_token"] = number(row.build->state_bytes_per_token);
    out["measured_state_bytes_per_token"] = number(row.build->measured_state_bytes_per_token);
    out["mechanism_share"] = number(row.build->mechanism_share);
    out["config"] = row.build->config;
  }
  out["quality"] = to_json(row.quality);
  out["loss"] = to_json(row.loss);
  out["accuracy"] = to_json(row.accuracy);
  out["tokens_per_second"] = to_json(row.tokens_per_second);
  out["peak_memory_bytes"] = to_json(row.peak_memory);
  const Relation relation = row.against_baseline.relation;
  out["against_baseline"] = {
      {"relation", relation == Relation::kUnknown ? Json(nullptr) : Json(relation_text(relation))},
      {"caveats", row.against_baseline.caveats}};
  Json runs = Json::array();
  for (const Run* run : row.runs) runs.push_back(to_json(*run));
  out["runs"] = std::move(runs);
  return out;
}

}  // namespace

std::string to_json(const Comparison& comparison) {
  const Summary summary = summarize(comparison);
  Json tasks = Json::array();
  for (const TaskSummary& task : summary.tasks) {
    Json rows = Json::array();
    for (const Row& row : task.rows) rows.push_back(to_json(row));
    tasks.push_back(
        {{"task", task.task->name},
         {"metric", task.task->metric},
         {"unit", task.task->unit},
         {"lower_is_better", task.task->lower_is_better},
         {"chance",
          number(task.task->floors.empty() ? kUnknown : task.task->floors.back().quality)},
         {"answer", task.answer},
         {"models", std::move(rows)}});
  }
  Json machine = Json::object();
  for (const auto& [key, value] : comparison.machine) machine[key] = value;
  const Json out{{"title", comparison.title},     {"date", comparison.date},
                 {"command", comparison.command}, {"budget", comparison.budget},
                 {"seeds", comparison.seeds},     {"machine", std::move(machine)},
                 {"planned", summary.planned},    {"finished", summary.finished},
                 {"failed", summary.failed},      {"running", summary.running},
                 {"tasks", std::move(tasks)},     {"config", comparison.config}};
  // Invalid UTF-8 in a message or path must not cost the result.
  return out.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace headloom::report
