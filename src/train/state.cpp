#include "train/state.h"

#include <cmath>

#include "core/error.h"
#include "core/json_text.h"
#include "storage/crc64.h"

namespace headloom {
namespace {

using Json = nlohmann::ordered_json;

uint64_t checksum(const Json& json) {
  const std::string text = json.dump();
  return crc64(0, text.data(), text.size());
}

}  // namespace

std::string state_json(const TrainState& state) {
  Json json = {
      {"format", 1},
      {"step", state.step},
      {"tokens", state.tokens},
      {"seconds", state.seconds},
      {"best_step", state.best_step ? Json(*state.best_step) : Json(nullptr)},
      {"best_loss", std::isfinite(state.best_loss) ? Json(state.best_loss) : Json(nullptr)}};
  if (!state.model.empty()) json["model"] = state.model;
  if (!state.config.empty()) json["config"] = state.config;
  for (const auto& [name, file] : state.files) {
    json["files"][name] = {{"bytes", file.bytes}, {"crc64", file.crc}};
  }
  for (const auto& [name, cut] : state.cuts) {
    json["cuts"][name] = {{"dim", cut.dim}, {"segments", cut.segments}};
  }
  if (!state.product_routes.empty()) json["product_routes"] = state.product_routes;
  if (!state.other_routes.empty()) json["product_routes_of_ranks"] = state.other_routes;
  if (state.data) {
    json["data"] = {{"count", state.data->count}, {"fingerprint", state.data->fingerprint}};
  }
  if (!state.load.sum.empty()) {
    json["expert_load"] = {{"sum", state.load.sum}, {"steps", state.load.steps}};
  }
  json["crc64"] = checksum(json);
  return json.dump(1) + "\n";
}

TrainState parse_state(const std::string& text, const std::string& path) {
  Json json = parse_json<Json>(text, path);
  TrainState state;
  try {
    const uint64_t crc = json.at("crc64").get<uint64_t>();
    json.erase("crc64");
    require(crc == checksum(json), path, ": is damaged: its checksum differs.");
    state.step = json.at("step").get<int64_t>();
    state.tokens = json.at("tokens").get<int64_t>();
    state.seconds = json.at("seconds").get<double>();
    if (!json.at("best_step").is_null()) state.best_step = json.at("best_step").get<int64_t>();
    const Json best_loss = json.value("best_loss", Json());
    state.best_loss = best_loss.is_number() ? best_loss.get<double>() : std::nan("");
    if (json.contains("model")) json.at("model").get_to(state.model);
    if (json.contains("config")) json.at("config").get_to(state.config);
    for (const auto& [name, file] : json.at("files").items()) {
      state.files[name] = {file.at("bytes").get<int64_t>(), file.at("crc64").get<uint64_t>()};
    }
    if (json.contains("cuts")) {
      for (const auto& [name, cut] : json.at("cuts").items()) {
        state.cuts[name] = {cut.at("dim").get<int64_t>(),
                            cut.at("segments").get<std::vector<int64_t>>()};
        require(state.cuts[name].dim >= 0, path, ": is damaged or not a checkpoint's state.");
      }
    }
    if (json.contains("product_routes")) json.at("product_routes").get_to(state.product_routes);
    if (json.contains("product_routes_of_ranks")) {
      json.at("product_routes_of_ranks").get_to(state.other_routes);
    }
    if (json.contains("data")) {
      const Json& data = json.at("data");
      state.data = {data.at("count").get<int64_t>(), data.at("fingerprint").get<std::string>()};
    }
    if (json.contains("expert_load")) {
      json.at("expert_load").at("sum").get_to(state.load.sum);
      json.at("expert_load").at("steps").get_to(state.load.steps);
    }
  } catch (const Json::exception&) {
    fail(path, ": is damaged or not a checkpoint's state.");
  }
  return state;
}

}  // namespace headloom
