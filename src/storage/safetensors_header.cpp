#include "storage/safetensors_header.h"

#include "core/error.h"
#include "core/json_text.h"

namespace headloom {

using Json = nlohmann::ordered_json;

std::string make_safetensors_header(const std::vector<TensorRecord>& records) {
  Json header = Json::object();
  header["__metadata__"] = {{"format", "pt"}};  // some readers insist
  for (const TensorRecord& r : records) {
    header[r.name] = {{"dtype", r.dtype}, {"shape", r.shape}, {"data_offsets", {r.begin, r.end}}};
  }
  std::string text = header.dump();
  // The data starts at a multiple of 64 bytes; the format allows trailing spaces in the header.
  while ((text.size() + 8) % 64 != 0) text += ' ';
  return text;
}

std::vector<TensorRecord> parse_safetensors_header(std::string_view json, const std::string& path) {
  const Json header = parse_json<Json>(json, path + ": the safetensors header");
  require(header.is_object(), path, ": the safetensors header is not a JSON object.");
  std::vector<TensorRecord> records;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto bad = [&] { fail(path, ": tensor '", name, "' has a malformed header entry."); };
    if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
        !entry.contains("shape") || !entry["shape"].is_array() || !entry.contains("data_offsets") ||
        !entry["data_offsets"].is_array() || entry["data_offsets"].size() != 2) {
      bad();
    }
    TensorRecord r;
    r.name = name;
    r.dtype = entry["dtype"].get<std::string>();
    for (const auto& size : entry["shape"]) {
      if (!size.is_number_unsigned()) bad();
      r.shape.push_back(size.get<int64_t>());
      if (r.shape.back() < 0) bad();
    }
    for (const auto& offset : entry["data_offsets"]) {
      if (!offset.is_number_unsigned()) bad();
    }
    r.begin = entry["data_offsets"][0].get<uint64_t>();
    r.end = entry["data_offsets"][1].get<uint64_t>();
    records.push_back(std::move(r));
  }
  return records;
}

}  // namespace headloom
