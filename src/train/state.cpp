#include "train/state.h"

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"
#include "core/files.h"

namespace headloom {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no NaN; null stands for it.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

double real(const Json& json, const char* key) {
  return json.contains(key) && json[key].is_number() ? json[key].get<double>() : std::nan("");
}

std::optional<EvalPoint> evaluation(const Json& json) {
  if (!json.is_object() || !json.contains("eval_loss")) return std::nullopt;
  return EvalPoint{.step = json.value("step", int64_t{0}),
                   .tokens = json.value("tokens", int64_t{0}),
                   .seconds = real(json, "seconds"),
                   .loss = real(json, "eval_loss"),
                   .accuracy = real(json, "accuracy"),
                   .train_loss = real(json, "train_loss")};
}

}  // namespace

std::string state_json(const TrainState& state) {
  Json json = {{"format", 1},
               {"step", state.step},
               {"tokens", state.tokens},
               {"seconds", state.seconds},
               {"best_step", state.best_step ? Json(*state.best_step) : Json(nullptr)},
               {"best_loss", number(state.best_loss)}};
  for (const auto& [name, file] : state.files) {
    json["files"][name] = {{"bytes", file.bytes}, {"crc64", file.crc}};
  }
  return json.dump(1) + "\n";
}

TrainState parse_state(const std::string& text, const std::string& path) {
  const Json json = Json::parse(text, nullptr, false);
  TrainState state;
  try {
    state.step = json.at("step").get<int64_t>();
    state.tokens = json.at("tokens").get<int64_t>();
    state.seconds = json.at("seconds").get<double>();
    if (!json.at("best_step").is_null()) state.best_step = json.at("best_step").get<int64_t>();
    state.best_loss = real(json, "best_loss");
    for (const auto& [name, file] : json.at("files").items()) {
      state.files[name] = {file.at("bytes").get<int64_t>(), file.at("crc64").get<uint64_t>()};
    }
  } catch (const Json::exception&) {
    fail(path, ": is damaged or not a checkpoint's state.");
  }
  return state;
}

Metrics::Metrics(std::string path, int64_t step) : path_(std::move(path)) {
  std::string kept;
  bool dropped = false;
  if (std::filesystem::exists(path_)) {
    std::istringstream lines(read_file(path_));
    std::string line;
    while (std::getline(lines, line)) {
      const Json json = Json::parse(line, nullptr, false);
      // A line cut off by a crash is not JSON and is dropped too.
      if (!json.is_object() || json.value("step", step + 1) > step) {
        dropped = true;
        continue;
      }
      kept += line + "\n";
      if (const auto point = evaluation(json)) evaluations_.push_back(*point);
    }
  }
  if (dropped || kept.empty()) write_file(path_, kept);
}

void Metrics::append(const std::string& line) {
  std::ofstream file(path_, std::ios::app);
  file << line << "\n";
  file.flush();
  if (!file) fail(path_, ": cannot be written (is the disk full?).");
}

void Metrics::add(const StepPoint& p) {
  append(Json{{"step", p.step},
              {"loss", number(p.loss)},
              {"lr", p.lr},
              {"gradient_norm", number(p.gradient_norm)},
              {"step_seconds", p.seconds}}
             .dump());
}

void Metrics::add(const EvalPoint& p) {
  evaluations_.push_back(p);
  append(Json{{"step", p.step},
              {"tokens", p.tokens},
              {"seconds", p.seconds},
              {"eval_loss", number(p.loss)},
              {"accuracy", number(p.accuracy)},
              {"train_loss", number(p.train_loss)}}
             .dump());
}

std::vector<EvalPoint> read_evaluations(const std::string& metrics_path) {
  std::vector<EvalPoint> points;
  std::istringstream lines(read_file(metrics_path));
  std::string line;
  while (std::getline(lines, line)) {
    if (const auto point = evaluation(Json::parse(line, nullptr, false))) points.push_back(*point);
  }
  return points;
}

}  // namespace headloom
