#include "interop/settings.h"

#include <algorithm>

#include "core/error.h"
#include "core/parse_number.h"
#include "core/text.h"

namespace headloom {
namespace {

std::string shown_value(const Node& node) {
  if (const auto* flag = std::get_if<bool>(&node.value)) return *flag ? "true" : "false";
  if (const auto* number = std::get_if<int64_t>(&node.value)) return std::to_string(*number);
  if (const auto* number = std::get_if<double>(&node.value)) {
    const std::string text = str(*number);
    // 32.0 is no integer, so it must not look like one.
    return text.find_first_not_of("-0123456789") == std::string::npos ? text + ".0" : text;
  }
  if (const auto* text = std::get_if<std::string>(&node.value)) return str('"', *text, '"');
  return node.type_name();
}

}  // namespace

const Node* Settings::find(const std::string& key) const {
  const Node* found = step_to(key);
  return found != nullptr && found->is_array() && found->array().empty() ? nullptr : found;
}

bool Settings::is_null(const std::string& key) const {
  return step_to(key) != nullptr && find(key) == nullptr;
}

Settings Settings::below(const std::string& key) const {
  const Node* found = find(key);
  if (found == nullptr) return *this;
  if (!found->is_table()) wrong(key, *found, "a table");
  return {*found, path_};
}

Settings Settings::resolved(const std::vector<std::pair<std::string, std::string>>& aliases) const {
  Settings out = *this;
  for (const auto& [alias, key] : aliases) {
    if (!has(alias)) continue;
    if (has(key) && shown_value(*find(alias)) != shown_value(*find(key))) {
      usage_error(path_, ": '", alias, "' is ", shown_value(*find(alias)), " and '", key, "' is ",
                  shown_value(*find(key)), ", which are one key, expected both alike.");
    }
    out.node_.set(key, *find(alias));
  }
  return out;
}

Settings Settings::with_defaults(const std::vector<std::pair<std::string, Node>>& defaults) const {
  Settings out = *this;
  for (const auto& [key, value] : defaults) {
    if (!has(key) && !is_null(key)) out.node_.set(key, value);
  }
  return out;
}

const Node* Settings::step_to(const std::string& key) const {
  const Node* node = &node_;
  for (size_t at = 0; at <= key.size();) {
    const size_t end = std::min(key.find('.', at), key.size());
    const std::string step = key.substr(at, end - at);
    const std::optional<size_t> index = parse_number<size_t>(step);
    if (node->is_table()) {
      node = node->find(step);
    } else if (node->is_array() && (index || node->array().empty())) {
      node = index && *index < node->array().size() ? &node->array()[*index] : nullptr;
    } else if (at > 0) {
      wrong(key.substr(0, at - 1), *node, index ? "a table or a list" : "a table");
    } else {
      node = nullptr;
    }
    if (node == nullptr) return nullptr;
    at = end + 1;
  }
  return node;
}

void Settings::missing(const std::string& key) const {
  usage_error(path_, ": has no key '", key, "'.");
}

void Settings::wrong(const std::string& key, const Node& value, const char* expected) const {
  usage_error(path_, ": '", key, "' is ", shown_value(value), ", expected ", expected, ".");
}

int64_t Settings::integer(const std::string& key, std::optional<int64_t> otherwise) const {
  const Node* found = find(key);
  if (found == nullptr && otherwise) return *otherwise;
  if (found == nullptr) missing(key);
  const auto* number = std::get_if<int64_t>(&found->value);
  if (number == nullptr) wrong(key, *found, "an integer");
  return *number;
}

int64_t Settings::count(const std::string& key, std::optional<int64_t> otherwise) const {
  const int64_t out = integer(key, otherwise);
  if (out < 1 || out > int64_t{1} << 40) {
    usage_error(path_, ": '", key, "' is ", out, ", expected at least 1 and no huge number.");
  }
  return out;
}

double Settings::real(const std::string& key, std::optional<double> otherwise) const {
  const Node* found = find(key);
  if (found == nullptr && otherwise) return *otherwise;
  if (found == nullptr) missing(key);
  if (const auto* number = std::get_if<int64_t>(&found->value)) {
    return static_cast<double>(*number);
  }
  const auto* number = std::get_if<double>(&found->value);
  if (number == nullptr) wrong(key, *found, "a number");
  return *number;
}

bool Settings::flag(const std::string& key, std::optional<bool> otherwise) const {
  const Node* found = find(key);
  if (found == nullptr && otherwise) return *otherwise;
  if (found == nullptr) missing(key);
  const auto* value = std::get_if<bool>(&found->value);
  if (value == nullptr) wrong(key, *found, "true or false");
  return *value;
}

std::string Settings::text(const std::string& key, std::optional<std::string> otherwise) const {
  const Node* found = find(key);
  if (found == nullptr && otherwise) return *otherwise;
  if (found == nullptr) missing(key);
  const auto* value = std::get_if<std::string>(&found->value);
  if (value == nullptr) wrong(key, *found, "text");
  return *value;
}

void Settings::only(const std::string& key, bool value) const {
  if (flag(key, value) != value) wrong(key, *find(key), value ? "true" : "false");
}

void Settings::only(const std::string& key, const std::vector<std::string>& values) const {
  if (!has(key)) return;
  for (const std::string& value : values) {
    if (text(key) == value) return;
  }
  wrong(key, *find(key), join(values, " or ").c_str());
}

void Settings::only_equal(const std::string& key, int64_t value) const {
  if (integer(key, value) != value) wrong(key, *find(key), std::to_string(value).c_str());
}

void Settings::only_keys(const std::vector<std::string>& keys) const {
  for (const auto& [key, value] : node_.table()) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    usage_error(path_, ": there is no key '", key, "'", did_you_mean(key, keys));
  }
}

void Settings::only_each(const std::string& key, const std::string& value) const {
  if (!has(key)) return;
  const Node& found = *find(key);
  const std::string expected = "a list of '" + value + "' alone";
  if (!found.is_array()) wrong(key, found, expected.c_str());
  for (const Node& one : found.array()) {
    const auto* const is = std::get_if<std::string>(&one.value);
    if (is == nullptr || *is != value) wrong(key, one, expected.c_str());
  }
}

void Settings::only_of_size(const std::string& key, int64_t size) const {
  if (!has(key)) return;
  const Node& found = *find(key);
  const std::string expected = str("a list of ", size);
  if (!found.is_array()) wrong(key, found, expected.c_str());
  const auto there = static_cast<int64_t>(found.array().size());
  if (there != size)
    usage_error(path_, ": '", key, "' is a list of ", there, ", expected ", expected, ".");
}

Value::Value(bool v) { value = v; }
Value::Value(int v) { value = int64_t{v}; }
Value::Value(int64_t v) { value = v; }
Value::Value(double v) { value = v; }
Value::Value(const char* v) { value = std::string(v); }
Value::Value(const std::string& v) { value = v; }
Value::Value(const Node& v) : Node(v) {}

Node table(std::vector<std::pair<std::string, Value>> entries) {
  Node out;
  for (auto& [key, value] : entries) out.set(key, std::move(value));
  return out;
}

}  // namespace headloom
