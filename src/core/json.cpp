#include "core/json.h"

#include "core/error.h"
#include "core/files.h"
#include "core/json_text.h"

namespace headloom {
namespace {

using Json = nlohmann::ordered_json;

Node node_of(const Json& json, const std::string& path) {
  Node node;
  node.origin = path;
  if (json.is_object()) {
    for (const auto& [key, value] : json.items()) {
      node.set(key, node_of(value, path));
    }
  } else if (json.is_array() || json.is_null()) {
    Array array;
    for (const Json& value : json) array.push_back(node_of(value, path));
    node.value = std::move(array);
  } else if (json.is_boolean()) {
    node.value = json.get<bool>();
  } else if (json.is_number_integer() &&
             !(json.is_number_unsigned() && json.get<uint64_t>() > INT64_MAX)) {
    node.value = json.get<int64_t>();
  } else if (json.is_number()) {
    node.value = json.get<double>();
  } else {
    node.value = json.get<std::string>();
  }
  return node;
}

Json json_of(const Node& node) {
  if (node.is_table()) {
    Json out = Json::object();
    for (const auto& [key, value] : node.table()) out[key] = json_of(value);
    return out;
  }
  if (node.is_array()) {
    Json out = Json::array();
    for (const Node& value : node.array()) out.push_back(json_of(value));
    return out;
  }
  if (const auto* flag = std::get_if<bool>(&node.value)) return *flag;
  if (const auto* number = std::get_if<int64_t>(&node.value)) return *number;
  if (const auto* number = std::get_if<double>(&node.value)) return *number;
  return std::get<std::string>(node.value);
}

}  // namespace

Node read_json(const std::string& path) {
  const Json json = parse_json<Json>(read_file(path), path);
  require(json.is_object(), path, ": is JSON, but not an object ({...}).");
  return node_of(json, path);
}

std::string to_json(const Node& node) { return json_of(node).dump(2) + "\n"; }

}  // namespace headloom
