// A configuration as a tree of values that remember where they were written.
//
// TOML is parsed into `Node`s (toml++ does the parsing); `Reader` and `Writer` in core/fields.h
// turn nodes into plain structs and back. Operators, mixers and models see plain structs. The
// trainer and imports also keep nodes, to change and to merge what a configuration says.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace headloom {

struct Node;
using Array = std::vector<Node>;
// Tables keep the order in which their keys were written.
using Table = std::vector<std::pair<std::string, Node>>;

struct Node {
  std::variant<Table, Array, bool, int64_t, double, std::string> value = Table{};
  std::string origin = {};  // "file.toml:12", "--set", or "" for values made in code

  bool is_table() const { return std::holds_alternative<Table>(value); }
  bool is_array() const { return std::holds_alternative<Array>(value); }
  Table& table() { return std::get<Table>(value); }
  const Table& table() const { return std::get<Table>(value); }
  Array& array() { return std::get<Array>(value); }
  const Array& array() const { return std::get<Array>(value); }

  // The child of a table, or nullptr. The node must be a table.
  const Node* find(std::string_view key) const;
  Node* find(std::string_view key);
  // Sets or replaces a child of a table.
  Node& set(std::string_view key, Node child);
  // A list of tables, at least one: TOML writes each as a section of its own.
  bool is_table_array() const;
  // "a table", "an integer", ... for messages.
  const char* type_name() const;
  // How a message about the node begins: "file.toml:12: ", or "" for values made in code.
  std::string place() const { return origin.empty() ? "" : origin + ": "; }
};

// Parses TOML text; `name` stands for the file in messages. Throws UsageError with name and line.
Node parse_toml(std::string_view text, const std::string& name);
// Reads and parses a file. Throws Error where it cannot be read.
Node read_toml(const std::string& path);
// TOML text of a table: plain values first, then sub-tables, then arrays of tables.
std::string to_toml(const Node& root);
// TOML text of any value on one line: what stands after "key = ".
std::string inline_toml(const Node& value);

// By a path of keys, "model.width", below a table: whether it is there; and sets it, where tables
// that are missing are made.
bool has_below(const Node& root, const std::string& key);
void set_below(Node& root, const std::string& key, const Node& value);

// Applies one `--set` argument, "a.b=value" or "a.0.b=value" (array elements by index). The value
// is read as TOML and, where that fails, taken as a string.
void apply_override(Node& root, const std::string& assignment);

// `over`'s keys replace those of `base`; tables are merged key by key, everything else is replaced
// whole.
Node merged(const Node& base, const Node& over);

}  // namespace headloom
