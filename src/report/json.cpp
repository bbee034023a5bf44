#include <cmath>
#include <nlohmann/json.hpp>

#include "report/comparison.h"
#include "report/scaling.h"
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
          {"median", number(stat.median)},
          {"low", number(stat.low)},
          {"high", number(stat.high)}};
}

Json to_json(const Estimate& e) {
  return {{"count", e.count},
          {"mean", number(e.mean)},
          {"deviation", number(e.deviation)},
          {"evaluation_error", number(e.shared_error)},
          {"low", number(e.low())},
          {"high", number(e.high())}};
}

Json setting(const Setting& values) {
  Json out = Json::object();
  for (const SweptValue& v : values) out[v.key] = v.value;
  return out;
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
                      {"quality_error", number(p.quality_error)},
                      {"accuracy", number(p.accuracy)}});
    for (const auto& [layer, shares] : p.expert_load) {
      points.back()["expert_load"][std::to_string(layer)] = shares;
    }
  }
  const char* state = run_failed(run)                    ? "failed"
                      : run.state == RunState::kFinished ? "finished"
                      : run.interruption                 ? "interrupted"
                                                         : "running";
  Json out{{"seed", run.seed}, {"state", state}};
  if (!run.setting.empty()) out["setting"] = setting(run.setting);
  if (!run.folder.empty()) out["folder"] = run.folder;
  if (run_failed(run)) out["problem"] = run_problem(run);
  if (run_diverged(run)) out["warning"] = run.warning;
  if (const auto& at = run.interruption) {
    out["interruption"] = {{"step", at->step},
                           {"steps", at->steps},
                           {"saved_step", at->saved_step ? Json(*at->saved_step) : Json(nullptr)},
                           {"go_on", at->go_on}};
  }
  out["tokens_per_second"] = number(run.tokens_per_second);
  out["peak_memory_bytes"] = number(run.peak_memory_bytes);
  out["points"] = std::move(points);
  return out;
}

Json to_json(const TaskSummary& task, const Row& row) {
  Json out{{"model", row.model->label}, {"baseline", row.baseline}};
  if (row.build) {
    out["parameters"] = row.build->parameters >= 0 ? Json(row.build->parameters) : Json(nullptr);
    out["flops_per_token"] = number(row.build->flops_per_token);
    out["flops_per_unit"] = number(row.build->flops_per_unit);
    out["state_bytes_per_token"] = number(row.build->state_bytes_per_token);
    out["measured_state_bytes_per_token"] = number(row.build->measured_state_bytes_per_token);
    out["state_bytes"] = number(row.build->state_bytes);
    out["mechanism_share"] = number(row.build->mechanism_share);
    out["config"] = row.build->config;
    if (!row.build->train_differences.empty()) {
      out["train_differences"] = row.build->train_differences;
    }
  }
  if (row.choice) {
    out["choice"] = {{"setting", setting(row.choice->setting)}, {"at_edge", row.choice->at_edge}};
  }
  out["result"] = to_json(row.result);
  out["quality"] = to_json(row.quality);
  out["loss"] = to_json(row.loss);
  out["accuracy"] = to_json(row.accuracy);
  out["tokens_per_second"] = to_json(row.tokens_per_second);
  out["decode_tokens_per_second"] = to_json(row.decode_tokens_per_second);
  out["peak_memory_bytes"] = to_json(row.peak_memory);
  const char* const learned[] = {nullptr, "unknown", "yes", "no"};
  if (row.learning != Learning::kNoFloor) {
    out["learned"] = learned[static_cast<int>(row.learning)];
  }
  const std::string trend = trend_text(*task.task, row.trend);
  out["trend"] = trend.empty() ? Json(nullptr) : Json(trend);
  const Verdict& verdict = row.against_baseline;
  out["against_baseline"] = {
      {"relation", verdict.relation == Relation::kNoResult ? Json(nullptr)
                                                           : Json(relation_text(verdict.relation))},
      {"difference", to_json(verdict.difference)},
      {"p", number(verdict.p)},
      {"adjusted_p", number(verdict.adjusted_p)},
      {"seeds_needed", verdict.seeds_needed > 0 ? Json(verdict.seeds_needed) : Json(nullptr)},
      {"unpaired_seeds", verdict.unpaired},
      {"caveats", verdict.caveats}};
  Json runs = Json::array();
  for (const Run* run : row.runs) runs.push_back(to_json(*run));
  out["runs"] = std::move(runs);
  return out;
}

Json to_json(const Interval& interval) {
  return Json::array({number(interval.low), number(interval.high)});
}

Json to_json(const PowerLaw& law) {
  if (law.factors.empty()) return nullptr;
  Json exponents = Json::array();
  for (size_t k = 0; k < law.factors.size(); ++k) {
    exponents.push_back(number(law.falls(k) ? law.exponents[k] : kUnknown));
  }
  return {{"floor", number(law.floor)},
          {"factors", law.factors},
          {"exponents", std::move(exponents)},
          {"error", number(law.error)}};
}

Json to_json(const SizeSeries& series) {
  Json models = Json::array();
  for (const FamilyFit& family : series.families) {
    Json points = Json::array();
    for (size_t i = 0; i < family.points.size(); ++i) {
      const SizePoint& point = family.points[i];
      points.push_back({{"task", point.task->task->name},
                        {"parameters", number(point.parameters)},
                        {"tokens", number(point.tokens)},
                        {"flops", number(point.compute)},
                        {"loss", number(point.loss())},
                        {"seeds", point.losses.size()}});
      if (i >= family.worth.size()) continue;
      points.back()["compute_worth"] = number(family.worth[i].factor);
      points.back()["compute_worth_interval"] = to_json(family.worth[i].interval);
    }
    models.push_back({{"model", family.model->label},
                      {"sizes", std::move(points)},
                      {"compute_law", to_json(family.law)},
                      {"floor_interval", to_json(family.floor)},
                      {"exponent_interval", to_json(family.exponent)},
                      {"exponent_at_bound", family.searched().at_bound()},
                      {"size_and_data_law", to_json(family.surface)}});
  }
  return {{"task", series.name}, {"answer", series.answer}, {"models", std::move(models)}};
}

Json json_rows(const TaskSummary& task) {
  Json rows = Json::array();
  for (const Row& row : task.rows) rows.push_back(to_json(task, row));
  return rows;
}

Json json_task(const Comparison& comparison, const TaskSummary& task) {
  Json floors = Json::array();
  for (const Floor& floor : task.task->floors) {
    floors.push_back({{"name", floor.name}, {"quality", number(floor.quality)}});
  }
  Json out{{"task", task.task->name},
           {"description", task.task->description},
           {"options", setting(task.task->options)},
           {"metric", task.task->metric},
           {"unit", task.task->unit},
           {"lower_is_better", task.task->lower_is_better},
           {"floors", std::move(floors)},
           {"stopping", task.task->stopping},
           {"answer", task.answer},
           {"recommendation", task.recommendation},
           {"best_is_claimed", task.best_is_claimed},
           {"models", json_rows(task)}};
  for (const TaskSummary& again : task.robustness) {
    out["robustness"] = {{"initialisation", comparison.robustness.front().title},
                         {"answer", again.answer},
                         {"best_is_claimed", again.best_is_claimed},
                         {"models", json_rows(again)}};
  }
  return out;
}

Json json_sweep_runs(const Comparison& comparison) {
  Json runs = Json::array();
  for (const Run& run : comparison.runs) {
    if (!run.sweep) continue;
    runs.push_back(to_json(run));
    runs.back()["model"] = run.model;
    runs.back()["task"] = run.task;
  }
  return runs;
}

}  // namespace

std::string to_json(const Comparison& comparison) {
  const Summary summary = summarize(comparison);
  Json tasks = Json::array();
  for (const TaskSummary& task : summary.tasks) tasks.push_back(json_task(comparison, task));
  Json scaling = Json::array();
  for (const SizeSeries& series : size_series(comparison, summary)) {
    scaling.push_back(to_json(series));
  }
  Json machine = Json::object();
  for (const auto& [key, value] : comparison.machine) machine[key] = value;
  Json out{{"title", comparison.title},
           {"date", comparison.date},
           {"command", comparison.command},
           {"budget", comparison.budget},
           {"seeds", comparison.seeds},
           {"machine", std::move(machine)},
           {"planned", summary.planned},
           {"finished", summary.finished},
           {"failed", summary.failed},
           {"running", summary.running},
           {"interrupted", summary.interrupted},
           {"tested", summary.tested},
           {"limits", summary.limits},
           {"swept", comparison.swept},
           {"sweep_planned", comparison.sweep_planned},
           {"sweep_runs", json_sweep_runs(comparison)},
           {"scaling", std::move(scaling)},
           {"tasks", std::move(tasks)},
           {"config", comparison.config}};
  if (!summary.go_on.empty()) out["go_on"] = summary.go_on;
  if (comparison.by_commands && !summary.progress.empty()) out["by_commands"] = true;
  // Invalid UTF-8 in a message or path must not cost the result.
  return out.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace headloom::report
