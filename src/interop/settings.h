// A configuration read key by key, with the defaults its architecture has.
#pragma once

#include <optional>

#include "core/config.h"

namespace headloom {

class Settings {
 public:
  // `path` is for messages.
  Settings(Node node, std::string path) : node_(std::move(node)), path_(std::move(path)) {}

  // Keys may be paths, "rope_parameters.rope_theta", "layer.0.mixer.heads". Without a default an
  // absent key is a UsageError, as is a value of another type, also on the way to the last step.
  // A null, which a file's reader makes an empty list, counts as absent but for is_null().
  bool has(const std::string& key) const { return find(key) != nullptr; }
  bool is_null(const std::string& key) const;
  bool is_integer(const std::string& key) const {
    return has(key) && std::holds_alternative<int64_t>(find(key)->value);
  }
  int64_t integer(const std::string& key, std::optional<int64_t> otherwise = {}) const;
  // An integer that is a size: from 1 to 2^40.
  int64_t count(const std::string& key, std::optional<int64_t> otherwise = {}) const;
  double real(const std::string& key, std::optional<double> otherwise = {}) const;
  bool flag(const std::string& key, std::optional<bool> otherwise = {}) const;
  std::string text(const std::string& key, std::optional<std::string> otherwise = {}) const;

  // UsageErrors naming the key where it is there and not what it has to be.
  void only(const std::string& key, bool value) const;
  void only(const std::string& key, const std::vector<std::string>& values) const;
  void only_equal(const std::string& key, int64_t value) const;
  // There are no others than these.
  void only_keys(const std::vector<std::string>& keys) const;
  // A list of which every element is `value`.
  void only_each(const std::string& key, const std::string& value) const;
  // A list of `size` elements.
  void only_of_size(const std::string& key, int64_t size) const;

  const Node& node() const { return node_; }
  const std::string& path() const { return path_; }

  // nullptr where there is none.
  const Node* find(const std::string& key) const;
  // The settings below a key that is a table, or these where it is absent.
  Settings below(const std::string& key) const;
  // The same with the value of each alias (first) also under the key that it stands for (second).
  // Throws UsageError where both are there with different values.
  Settings resolved(const std::vector<std::pair<std::string, std::string>>& aliases) const;
  // The same with the value of each key that is absent. A null is a value.
  Settings with_defaults(const std::vector<std::pair<std::string, Node>>& defaults) const;

 private:
  const Node* step_to(const std::string& key) const;
  [[noreturn]] void missing(const std::string& key) const;
  [[noreturn]] void wrong(const std::string& key, const Node& value, const char* expected) const;

  Node node_;
  std::string path_;
};

// Tables made in code: table({{"width", 64}, {"norm", "rms_norm"}}).
// Not inline, as GCC 12 then takes the variant for uninitialised.
struct Value : Node {
  Value(bool v);                // NOLINT: all are meant to convert
  Value(int v);                 // NOLINT
  Value(int64_t v);             // NOLINT
  Value(double v);              // NOLINT
  Value(const char* v);         // NOLINT
  Value(const std::string& v);  // NOLINT
  Value(const Node& v);         // NOLINT
};
Node table(std::vector<std::pair<std::string, Value>> entries);

}  // namespace headloom
