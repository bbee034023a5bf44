#include "train/result.h"

#include <filesystem>

#include "core/files.h"
#include "core/json_text.h"

namespace headloom {

using Json = nlohmann::ordered_json;

void write_result(const std::string& path, const RunResult& r) {
  write_file(path, Json{{"problem", r.problem},
                        {"warning", r.warning},
                        {"tokens_per_second", r.tokens_per_second},
                        {"peak_memory_bytes", r.peak_memory}}
                           .dump(1, ' ', false, Json::error_handler_t::replace) +
                       "\n");
}

std::optional<RunResult> read_result(const std::string& path) {
  if (!std::filesystem::exists(path)) return std::nullopt;
  const auto json = parse_json_if_whole<Json>(read_file(path));
  if (!json.is_object()) return std::nullopt;
  try {
    return RunResult{.problem = json.at("problem").get<std::string>(),
                     .warning = json.value("warning", ""),
                     .tokens_per_second = json.at("tokens_per_second").get<double>(),
                     .peak_memory = json.at("peak_memory_bytes").get<int64_t>()};
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

}  // namespace headloom
