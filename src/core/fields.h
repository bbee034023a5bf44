// One declaration of a struct's options serves reading, writing and listing them.
//
//   struct MhaOptions {
//     int64_t heads = 8;
//     std::optional<int64_t> window;
//     void fields(Fields& f) {
//       f.field("heads", heads, "query heads", at_least(1));
//       f.field("window", window, "keys a query sees, its own included; absent: all", at_least(1));
//     }
//   };
//
// `Reader` fills the struct from a Node, strictly: unknown keys, wrong types and values out of
// range are UsageErrors that name the origin and the nearest known key. `Writer` gives the Node of
// the complete struct, defaults included. `Lister` gives key, type, default and description.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/config.h"

namespace headloom {

template <typename T>
struct Range {
  T low = std::numeric_limits<T>::lowest();
  T high = std::numeric_limits<T>::max();
  bool open_low = false;   // low itself is excluded
  bool open_high = false;  // high itself is excluded
};
inline Range<int64_t> at_least(int64_t low) { return {.low = low}; }
inline Range<int64_t> at_least(int low) { return {.low = low}; }
inline Range<double> at_least(double low) { return {.low = low}; }
inline Range<double> positive() { return {.low = 0.0, .open_low = true}; }
template <typename T>
Range<T> between(T low, T high) {
  return {.low = low, .high = high};
}
// [0, 1): dropout rates and the like.
inline Range<double> fraction() { return {.low = 0.0, .high = 1.0, .open_high = true}; }

using Choices = std::vector<std::string>;

class Fields {
 public:
  virtual ~Fields() = default;
  using Text = std::string_view;
  virtual void field(Text key, bool& value, Text doc) = 0;
  virtual void field(Text key, int64_t& value, Text doc, Range<int64_t> range = {}) = 0;
  virtual void field(Text key, double& value, Text doc, Range<double> range = {}) = 0;
  // An empty list of choices accepts any text.
  virtual void field(Text key, std::string& value, Text doc, const Choices& choices = {}) = 0;
  // Absent in the file and left out on writing while it has no value.
  virtual void field(Text key, std::optional<int64_t>& value, Text doc,
                     Range<int64_t> range = {}) = 0;
  virtual void field(Text key, std::optional<double>& value, Text doc,
                     Range<double> range = {}) = 0;
  virtual void field(Text key, std::optional<std::string>& value, Text doc) = 0;
  // A single text is accepted where a list of texts is expected.
  virtual void field(Text key, std::vector<std::string>& value, Text doc,
                     const Choices& choices = {}) = 0;
  virtual void field(Text key, std::vector<int64_t>& value, Text doc,
                     Range<int64_t> range = {}) = 0;

  // Before the field `key`: in the version before this one it was `former`. A Reader still takes
  // that name, with a hint on stderr.
  virtual void renamed(Text former, Text key) {
    (void)former;
    (void)key;
  }

  // A table that is kept as it is, to be read later.
  virtual void raw(Text key, Node& value, Text doc) = 0;

  // A sub-table with fields of its own: `S` has void fields(Fields&).
  template <typename S>
  void table(Text key, S& value, Text doc) {
    nested(key, doc, [&](Fields& inner) { value.fields(inner); });
  }
  // A table whose "type" key chooses what it is. `make(type)` returns a fresh object with
  // void fields(Fields&), or throws UsageError for an unknown type; `value` may hold the default.
  template <typename S>
  void variant(
      Text key, std::shared_ptr<S>& value, Text doc, const Choices& types,
      const std::function<std::shared_ptr<std::type_identity_t<S>>(const std::string&)>& make) {
    std::string type = value ? value->type() : "";
    nested(key, doc, [&](Fields& inner) {
      const std::string before = type;
      inner.field("type", type, "which one", types);
      if (!value || type != before) value = make(type);
      value->fields(inner);
    });
  }
  // A variant that may be absent: `value` then stays null.
  template <typename S>
  void optional_variant(
      Text key, std::shared_ptr<S>& value, Text doc, const Choices& types,
      const std::function<std::shared_ptr<std::type_identity_t<S>>(const std::string&)>& make) {
    if (value || mentions(key, doc)) variant(key, value, doc, types, make);
  }
  // An array of tables, each an `S`. On reading, an absent key keeps the present elements.
  template <typename S>
  void list(Text key, std::vector<S>& values, Text doc) {
    elements(
        key, doc, values.size(), [&](size_t count) { values.resize(count); },
        [&](size_t i, Fields& inner) { values[i].fields(inner); });
  }

 protected:
  // Whether a table that has no value here is given one.
  virtual bool mentions(Text key, Text doc) = 0;
  virtual void nested(Text key, Text doc, const std::function<void(Fields&)>& body) = 0;
  virtual void elements(Text key, Text doc, size_t present,
                        const std::function<void(size_t)>& resize,
                        const std::function<void(size_t, Fields&)>& body) = 0;
};

// Reads `node` (a table) into a struct. `path` is the place in the file for messages ("model").
template <typename S>
void read_fields(const Node& node, S& value, const std::string& path = "");
template <typename S>
Node write_fields(S& value);

class Reader final : public Fields {
 public:
  Reader(const Node& node, std::string path);
  void field(Text, bool&, Text) override;
  void field(Text, int64_t&, Text, Range<int64_t>) override;
  void field(Text, double&, Text, Range<double>) override;
  void field(Text, std::string&, Text, const Choices&) override;
  void field(Text, std::optional<int64_t>&, Text, Range<int64_t>) override;
  void field(Text, std::optional<double>&, Text, Range<double>) override;
  void field(Text, std::optional<std::string>&, Text) override;
  void field(Text, std::vector<std::string>&, Text, const Choices&) override;
  void field(Text, std::vector<int64_t>&, Text, Range<int64_t>) override;
  void renamed(Text former, Text key) override;
  void raw(Text, Node&, Text) override;
  // Throws UsageError when the table has a key that no field asked for.
  void finish() const;

 protected:
  bool mentions(Text, Text) override;
  void nested(Text, Text, const std::function<void(Fields&)>&) override;
  void elements(Text, Text, size_t, const std::function<void(size_t)>&,
                const std::function<void(size_t, Fields&)>&) override;

 private:
  const Node* take(Text key);
  std::string full(Text key) const;

  const Node& node_;
  std::string path_;
  std::vector<std::string> known_;
  std::vector<std::pair<std::string, std::string>> renamed_;  // former and present names
};

class Writer final : public Fields {
 public:
  void field(Text, bool&, Text) override;
  void field(Text, int64_t&, Text, Range<int64_t>) override;
  void field(Text, double&, Text, Range<double>) override;
  void field(Text, std::string&, Text, const Choices&) override;
  void field(Text, std::optional<int64_t>&, Text, Range<int64_t>) override;
  void field(Text, std::optional<double>&, Text, Range<double>) override;
  void field(Text, std::optional<std::string>&, Text) override;
  void field(Text, std::vector<std::string>&, Text, const Choices&) override;
  void field(Text, std::vector<int64_t>&, Text, Range<int64_t>) override;
  void raw(Text, Node&, Text) override;
  Node take() { return std::move(node_); }

 protected:
  bool mentions(Text, Text) override;
  void nested(Text, Text, const std::function<void(Fields&)>&) override;
  void elements(Text, Text, size_t, const std::function<void(size_t)>&,
                const std::function<void(size_t, Fields&)>&) override;

 private:
  Node node_;
};

// One documented option.
struct OptionInfo {
  std::string key;
  std::string type;           // "integer", "real", "text", "one of a|b", ...
  std::string default_value;  // "" when absent by default
  std::string doc;
};

class Lister final : public Fields {
 public:
  void field(Text, bool&, Text) override;
  void field(Text, int64_t&, Text, Range<int64_t>) override;
  void field(Text, double&, Text, Range<double>) override;
  void field(Text, std::string&, Text, const Choices&) override;
  void field(Text, std::optional<int64_t>&, Text, Range<int64_t>) override;
  void field(Text, std::optional<double>&, Text, Range<double>) override;
  void field(Text, std::optional<std::string>&, Text) override;
  void field(Text, std::vector<std::string>&, Text, const Choices&) override;
  void field(Text, std::vector<int64_t>&, Text, Range<int64_t>) override;
  void raw(Text, Node&, Text) override;
  const std::vector<OptionInfo>& options() const { return options_; }

 protected:
  bool mentions(Text, Text) override;
  void nested(Text, Text, const std::function<void(Fields&)>&) override;
  void elements(Text, Text, size_t, const std::function<void(size_t)>&,
                const std::function<void(size_t, Fields&)>&) override;

 private:
  void add(Text key, std::string type, std::string default_value, Text doc);
  std::string prefix_;
  std::vector<OptionInfo> options_;
};

template <typename S>
void read_fields(const Node& node, S& value, const std::string& path) {
  Reader reader(node, path);
  value.fields(reader);
  reader.finish();
}

template <typename S>
Node write_fields(S& value) {
  Writer writer;
  value.fields(writer);
  return writer.take();
}

// Throws read_fields' UsageErrors for a struct that was filled in code.
template <typename S>
void check_fields(const S& value, const std::string& path) {
  S written = value, read;
  read_fields(write_fields(written), read, path);
}

}  // namespace headloom
