// JSON text and its parts, with errors in our own sentences: what a file has wrong is said with its
// name, line and column, or with the part's place in it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/error.h"

namespace headloom {

// Far deeper than any file that means something: what reads and frees trees recurses.
constexpr int kDeepestJson = 64;

// Throws Error where brackets outside of texts are nested deeper than kDeepestJson.
void check_json_depth(std::string_view text, const std::string& name);
// Why text cannot be read on from `byte` (from 1), where the parser stopped: "line 3 has '}' in
// column 5, where it does not belong".
std::string json_fault(std::string_view text, size_t byte);

// `name` stands for the text in messages. `seen` is called for each part as it is read
// (nlohmann::json::parse). Throws Error.
template <typename Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& name,
                const typename Json::parser_callback_t& seen = nullptr) {
  check_json_depth(text, name);
  try {
    return Json::parse(text, seen);
  } catch (const typename Json::parse_error& error) {
    fail(name, ": is not JSON: ", json_fault(text, error.byte), ".");
  } catch (const typename Json::exception&) {
    fail(name, ": has a number that is too large for any type.");
  }
}

// The value, discarded (is_discarded()) where parse_json() throws.
template <typename Json = nlohmann::json>
Json parse_json_if_whole(std::string_view text) {
  try {
    return parse_json<Json>(text, "");
  } catch (const Error&) {
    return Json(Json::value_t::discarded);
  }
}

// A part of a JSON document that knows its place in it. What is asked of it and is not so throws an
// Error of one sentence without the file's name: "'model.vocab' is missing, expected a table".
class JsonPart {
 public:
  using Json = nlohmann::json;
  JsonPart(const Json& value, std::string place) : value_(&value), place_(std::move(place)) {}

  const Json& raw() const { return *value_; }
  bool absent() const { return value_->is_null(); }
  bool is_list() const { return value_->is_array(); }
  size_t size() const { return value_->size(); }

  // The member of that name, absent where there is none.
  JsonPart get(const std::string& key) const {
    static const Json null;
    if (!absent() && !value_->is_object()) wrong("a table");
    const auto found = value_->find(key);
    return {absent() || found == value_->end() ? null : *found,
            place_.empty() ? key : place_ + "." + key};
  }
  // Element i of a list.
  JsonPart get(size_t i) const {
    static const Json null;
    return {list().size() > i ? list()[i] : null, str(place_, "[", i, "]")};
  }
  std::string text() const { return as<std::string>(value_->is_string(), "a text"); }
  int64_t whole() const { return as<int64_t>(value_->is_number_integer(), "a whole number"); }
  bool flag() const { return as<bool>(value_->is_boolean(), "true or false"); }
  bool flag(bool otherwise) const { return absent() ? otherwise : flag(); }
  const Json& table() const {
    if (!value_->is_object()) wrong("a table");
    return *value_;
  }
  const Json& list() const {
    if (!value_->is_array()) wrong("a list");
    return *value_;
  }

 private:
  template <typename T>
  T as(bool fits, const char* expected) const {
    if (!fits) wrong(expected);
    return value_->get<T>();
  }
  [[noreturn]] void wrong(const char* expected) const {
    const std::string name = place_.empty() ? "it" : "'" + place_ + "'";
    if (absent()) fail(name, " is missing, expected ", expected);
    const std::string shown = value_->dump(-1, ' ', false, Json::error_handler_t::replace);
    fail(name, " is ", shown.size() > 40 ? std::string(value_->type_name()) : shown, ", expected ",
         expected);
  }

  const Json* value_;
  std::string place_;
};

}  // namespace headloom
