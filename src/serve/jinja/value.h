// Values of a Jinja template: Python's, as far as chat templates use them. Free of torch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.h"

namespace headloom::jinja {

// What is wrong with a template, or with what it was given.
class TemplateError : public Error {
 public:
  using Error::Error;
};

// What a template called raise_exception() with.
class Raised : public TemplateError {
 public:
  using TemplateError::TemplateError;
};

template <typename... Args>
[[noreturn]] void template_error(const Args&... args) {
  throw TemplateError(str(args...));
}

// The value of a name or an attribute that is not there; `name` says which for messages.
struct Undefined {
  std::string name;
};
struct None {};

struct List;
struct Dict;
struct Namespace;
struct Function;
class Budget;

class Value {
 public:
  using Text = std::shared_ptr<const std::string>;

  Value() : held_(Undefined{}) {}
  Value(None none) : held_(none) {}
  Value(Undefined undefined) : held_(std::move(undefined)) {}
  Value(bool flag) : held_(flag) {}
  Value(int64_t number) : held_(number) {}
  Value(int number) : held_(int64_t{number}) {}
  Value(double number) : held_(number) {}
  Value(std::string text) : held_(std::make_shared<const std::string>(std::move(text))) {}
  Value(std::string_view text) : Value(std::string(text)) {}
  Value(const char* text) : Value(std::string(text)) {}
  // Throws TemplateError where lists and dictionaries are nested too deep or are too large, also by
  // holding the same list many times.
  Value(List list);
  Value(Dict dict);
  Value(std::shared_ptr<Namespace> space) : held_(std::move(space)) {}
  Value(std::shared_ptr<const Function> function) : held_(std::move(function)) {}
  static Value from_json(const nlohmann::ordered_json& json);

  bool is_undefined() const { return std::holds_alternative<Undefined>(held_); }
  bool is_none() const { return std::holds_alternative<None>(held_); }
  bool is_bool() const { return std::holds_alternative<bool>(held_); }
  bool is_integer() const { return std::holds_alternative<int64_t>(held_); }
  bool is_float() const { return std::holds_alternative<double>(held_); }
  bool is_number() const { return is_bool() || is_integer() || is_float(); }
  bool is_text() const { return std::holds_alternative<Text>(held_); }
  bool is_list() const { return std::holds_alternative<std::shared_ptr<const List>>(held_); }
  bool is_dict() const { return std::holds_alternative<std::shared_ptr<const Dict>>(held_); }
  bool is_namespace() const { return std::holds_alternative<std::shared_ptr<Namespace>>(held_); }
  bool is_function() const {
    return std::holds_alternative<std::shared_ptr<const Function>>(held_);
  }

  // Of that type; integer() and number() also take a boolean. Throw TemplateError for others.
  int64_t integer() const;
  double number() const;
  const std::string& text() const;
  const std::vector<Value>& list() const;
  const List& whole_list() const { return *std::get<std::shared_ptr<const List>>(held_); }
  const Dict& dict() const;
  Namespace& space() const { return *std::get<std::shared_ptr<Namespace>>(held_); }
  const Function& function() const { return *std::get<std::shared_ptr<const Function>>(held_); }

  bool truth() const;
  // As Python calls the type: "str", "int", ...
  std::string type() const;
  // "'x' is undefined": why an undefined value cannot be used.
  [[noreturn]] void refuse_undefined() const;
  int depth() const;
  // About how many bytes it has when it is written, also as a part of another.
  int64_t size() const;

 private:
  std::variant<Undefined, None, bool, int64_t, double, Text, std::shared_ptr<const List>,
               std::shared_ptr<const Dict>, std::shared_ptr<Namespace>,
               std::shared_ptr<const Function>>
      held_;
};

struct List {
  std::vector<Value> items;
  bool tuple = false;
  bool generator = false;  // what map() and its like give: true even when empty, without a length
  int depth = 1;           // of lists and dictionaries in each other
  int64_t size = 0;        // Value::size()
};

// In the order of insertion. Keys are texts.
struct Dict {
  std::vector<std::pair<std::string, Value>> items;
  int depth = 1;
  int64_t size = 0;

  const Value* find(std::string_view key) const;
  void set(const std::string& key, Value value);
};

// namespace(): the one kind of value that a template can change.
struct Namespace {
  Dict attributes;
};

struct Call {
  std::vector<Value> positional = {};
  std::vector<std::pair<std::string, Value>> named = {};
};

struct Function {
  std::string name;
  std::function<Value(Call&)> body;
};

// Python's str() and repr().
std::string shown(const Value& value);
std::string quoted(const Value& value);

// The arguments of Python's json.dumps(). Without an indent everything is on one line.
struct JsonStyle {
  std::optional<std::string> indent = {};  // what stands before each line, once for each level
  std::string comma = ", ", colon = ": ";
  bool sorted = false, ascii = false;
};
std::string json_of(const Value& value, const JsonStyle& style, Budget& budget);

bool equal(const Value& a, const Value& b, Budget& budget);
// Below, equal or above 0. Throws TemplateError for what has no order.
int compare(const Value& a, const Value& b, const std::string& operation, Budget& budget);
// Python's `item in holder`.
bool contains(const Value& holder, const Value& item, Budget& budget);
// What a loop sees: items, keys, characters, nothing. Throws TemplateError for what has none.
std::vector<Value> items_of(const Value& value);
// len(); throws TemplateError for what has none.
int64_t length_of(const Value& value);

// What a template may use: each rendering has its own. Throws TemplateError beyond it.
class Budget {
 public:
  static constexpr int64_t kMostSteps = 4'000'000;
  static constexpr int64_t kMostBytes = int64_t{64} << 20;

  void step(int64_t count = 1) {
    steps_ += count;
    if (steps_ > kMostSteps) over("steps", kMostSteps);
  }
  // Bytes that are made; they also count as work.
  void make(size_t bytes) {
    bytes_ += static_cast<int64_t>(bytes);
    if (bytes_ > kMostBytes) over("bytes of text", kMostBytes);
    read(static_cast<int64_t>(bytes));
  }
  void read(int64_t bytes) { step(bytes / 64); }

 private:
  [[noreturn]] static void over(const char* what, int64_t most);
  int64_t steps_ = 0, bytes_ = 0;
};

}  // namespace headloom::jinja
