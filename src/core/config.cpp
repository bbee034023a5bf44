#include "core/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <sstream>

#include <toml++/toml.h>

#include "core/error.h"
#include "core/files.h"
#include "core/parse_number.h"
#include "core/utf8.h"

namespace headloom {
namespace {

std::string located(const std::string& name, const toml::source_region& source) {
  return source.begin.line > 0 ? str(name, ":", source.begin.line) : name;
}

Node convert(const toml::node& node, const std::string& name) {
  Node out;
  out.origin = located(name, node.source());
  if (const auto* table = node.as_table()) {
    // toml++ sorts keys; source positions give back the written order.
    Table children;
    std::vector<toml::source_position> positions;
    for (const auto& [key, child] : *table) {
      children.emplace_back(std::string(key.str()), convert(child, name));
      positions.push_back(key.source().begin);
    }
    std::vector<size_t> index(children.size());
    for (size_t i = 0; i < index.size(); ++i) index[i] = i;
    std::stable_sort(index.begin(), index.end(),
                     [&](size_t a, size_t b) { return positions[a] < positions[b]; });
    Table sorted;
    for (size_t i : index) sorted.push_back(std::move(children[i]));
    out.value = std::move(sorted);
  } else if (const auto* array = node.as_array()) {
    Array items;
    for (const auto& item : *array) items.push_back(convert(item, name));
    out.value = std::move(items);
  } else if (const auto* boolean = node.as_boolean()) {
    out.value = boolean->get();
  } else if (const auto* integer = node.as_integer()) {
    out.value = integer->get();
  } else if (const auto* real = node.as_floating_point()) {
    out.value = real->get();
  } else if (const auto* text = node.as_string()) {
    out.value = text->get();
  } else {
    usage_error(out.origin, ": dates and times are not used in a Headloom configuration.");
  }
  return out;
}

// toml++'s "Error while parsing X: Y", as "column 9, in X: Y".
std::string toml_reason(const toml::parse_error& error) {
  std::string text(error.description());
  constexpr std::string_view kBegins = "Error while parsing ";
  const size_t colon = text.find(": ");
  if (text.starts_with(kBegins) && colon != std::string::npos) {
    text = str("in ", text.substr(kBegins.size(), colon - kBegins.size()), ": ",
               text.substr(colon + 2));
  }
  while (text.ends_with('.')) text.pop_back();
  const auto column = error.source().begin.column;
  return column > 0 ? str("column ", column, ", ", text) : text;
}

// Throws UsageError for what a file in TOML, which is UTF-8, cannot hold.
std::string quoted(const std::string& text) {
  if (!is_utf8(text)) {
    usage_error("'", text, "' is no UTF-8, and a configuration cannot hold it: rename it.");
  }
  std::ostringstream out;
  // The library would write several lines, of which the first is read otherwise where it is empty.
  if (std::any_of(text.begin(), text.end(), [](char c) { return c == '\n' || c == '\r'; })) {
    out << '"';
    for (const char c : text) {
      if (c == '"' || c == '\\') out << '\\';
      if (static_cast<unsigned char>(c) >= 0x20 && c != 0x7f) {
        out << c;
      } else {
        std::array<char, 8> code{};
        std::snprintf(code.data(), code.size(), "\\u%04X", static_cast<unsigned char>(c));
        out << code.data();
      }
    }
    out << '"';
    return out.str();
  }
  out << toml::value<std::string>(text);
  return out.str();
}

std::string key_text(const std::string& key) {
  bool bare = !key.empty();
  for (char c : key) {
    bare = bare && (std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-');
  }
  return bare ? key : quoted(key);
}

std::string real_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  std::string text(buffer, end);
  if (text.find_first_of(".eE") == std::string::npos) text += ".0";
  return text;
}

// A table whose children are all plain values and that sits inside an array element is short enough
// to read best on one line ({ type = "dcmha", heads = 8 }).
void write_table(std::ostringstream& out, const Node& node, const std::string& path,
                 bool in_array) {
  for (const auto& [key, child] : node.table()) {
    const bool section = (child.is_table() && !in_array) || child.is_table_array();
    if (!section) out << key_text(key) << " = " << inline_toml(child) << "\n";
  }
  for (const auto& [key, child] : node.table()) {
    const std::string full = path.empty() ? key_text(key) : path + "." + key_text(key);
    if (child.is_table() && !in_array) {
      out << "\n[" << full << "]\n";
      write_table(out, child, full, false);
    } else if (child.is_table_array()) {
      for (const Node& item : child.array()) {
        out << "\n[[" << full << "]]\n";
        write_table(out, item, full, true);
      }
    }
  }
}

// Of the node and all that it holds.
void set_origin(Node& node, const std::string& origin) {
  node.origin = origin;
  if (node.is_table()) {
    for (auto& [key, child] : node.table()) set_origin(child, origin);
  } else if (node.is_array()) {
    for (Node& item : node.array()) set_origin(item, origin);
  }
}

}  // namespace

const Node* Node::find(std::string_view key) const {
  for (const auto& [name, child] : table()) {
    if (name == key) return &child;
  }
  return nullptr;
}

Node* Node::find(std::string_view key) {
  return const_cast<Node*>(static_cast<const Node*>(this)->find(key));
}

Node& Node::set(std::string_view key, Node child) {
  if (Node* existing = find(key)) return *existing = std::move(child);
  table().emplace_back(std::string(key), std::move(child));
  return table().back().second;
}

bool Node::is_table_array() const {
  return is_array() && !array().empty() &&
         std::all_of(array().begin(), array().end(),
                     [](const Node& item) { return item.is_table(); });
}

const char* Node::type_name() const {
  switch (value.index()) {
    case 0:
      return "a table";
    case 1:
      return "an array";
    case 2:
      return "a boolean";
    case 3:
      return "an integer";
    case 4:
      return "a real number";
    default:
      return "a string";
  }
}

namespace {

// Deeper tables than any configuration has. toml++ limits brackets, but not the dots of keys, and
// neither its tables nor ours can go away where they are nested thousands of levels deep.
constexpr size_t kDeepestToml = 64;

// The end of the string that begins at `at` with `quote`, or of the text where it has none.
size_t end_of_string(std::string_view text, size_t at) {
  const char quote = text[at];
  const std::string three(3, quote);
  const bool long_one = text.substr(at, 3) == three;
  const std::string_view close = long_one ? std::string_view(three) : text.substr(at, 1);
  for (size_t i = at + close.size(); i < text.size(); ++i) {
    if (quote == '"' && text[i] == '\\') {
      ++i;
    } else if (text.substr(i, close.size()) == close) {
      size_t end = i + close.size();
      // Up to two quotes may stand right before the three that close.
      for (int more = 0; long_one && more < 2 && end < text.size() && text[end] == quote; ++more) {
        ++end;
      }
      return end;
    }
  }
  return text.size();
}

// Throws UsageError where brackets and the dots of keys nest deeper than kDeepestToml.
void check_toml_depth(std::string_view text, const std::string& name) {
  std::vector<size_t> outside;  // how deep what is around each open bracket is
  size_t depth = 0, line = 1;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"' || c == '\'') {
      const size_t end = end_of_string(text, i);
      line += static_cast<size_t>(std::count(text.begin() + static_cast<int64_t>(i),
                                             text.begin() + static_cast<int64_t>(end), '\n'));
      i = end - 1;
    } else if (c == '#') {
      i = std::min(text.find('\n', i), text.size()) - 1;
    } else if (c == '[' || c == '{') {
      outside.push_back(depth++);
    } else if ((c == ']' || c == '}') && !outside.empty()) {
      depth = outside.back();
      outside.pop_back();
    } else if (c == '.') {
      ++depth;
    } else if (c == ',' || c == '\n') {  // what comes next is as deep as what is around it
      depth = outside.empty() ? 0 : outside.back() + 1;
      line += c == '\n';
    }
    if (depth > kDeepestToml) {
      usage_error(name, ":", line, ": is nested deeper than ", kDeepestToml, " levels.");
    }
  }
}

}  // namespace

Node parse_toml(std::string_view text, const std::string& name) {
  check_toml_depth(text, name);
  try {
    Node root = convert(toml::parse(text, name), name);
    return root;
  } catch (const toml::parse_error& error) {
    usage_error(located(name, error.source()), ": not valid TOML: ", toml_reason(error), ".");
  }
}

Node read_toml(const std::string& path) { return parse_toml(read_file(path), path); }

std::string to_toml(const Node& root) {
  std::ostringstream out;
  write_table(out, root, "", false);
  std::string text = out.str();
  if (!text.empty() && text.front() == '\n') text.erase(0, 1);
  return text;
}

// Tables inside it become inline tables.
std::string inline_toml(const Node& node) {
  if (node.is_table()) {
    std::string out = "{";
    for (const auto& [key, child] : node.table()) {
      out += (out.size() > 1 ? ", " : " ") + key_text(key) + " = " + inline_toml(child);
    }
    return out + (out.size() > 1 ? " }" : "}");
  }
  if (node.is_array()) {
    std::string out = "[";
    for (const Node& item : node.array()) out += (out.size() > 1 ? ", " : "") + inline_toml(item);
    return out + "]";
  }
  if (const auto* boolean = std::get_if<bool>(&node.value)) return *boolean ? "true" : "false";
  if (const auto* integer = std::get_if<int64_t>(&node.value)) return std::to_string(*integer);
  if (const auto* real = std::get_if<double>(&node.value)) return real_text(*real);
  return quoted(std::get<std::string>(node.value));
}

bool has_below(const Node& root, const std::string& key) {
  const size_t dot = key.find('.');
  const Node* const child = root.find(key.substr(0, dot));
  if (child == nullptr || dot == std::string::npos) return child != nullptr;
  return child->is_table() && has_below(*child, key.substr(dot + 1));
}

void set_below(Node& root, const std::string& key, const Node& value) {
  const size_t dot = key.find('.');
  if (dot == std::string::npos) {
    root.set(key, value);
    return;
  }
  const std::string first = key.substr(0, dot);
  Node* inner = root.find(first);
  if (inner == nullptr || !inner->is_table()) inner = &root.set(first, Node{});
  set_below(*inner, key.substr(dot + 1), value);
}

void apply_override(Node& root, const std::string& assignment) {
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0) {
    usage_error("--set ", assignment, ": expected key=value, such as --set train.steps=100.");
  }
  const std::string path = assignment.substr(0, equals);
  const std::string text = assignment.substr(equals + 1);
  Node value;
  bool several = false;
  try {
    const Node parsed = parse_toml("value = " + text, "--set");
    several = parsed.table().size() > 1;
    value = *parsed.find("value");
  } catch (const UsageError&) {
    // A word needs no quotes here. What begins as a list, a table or a quoted text and is none was
    // meant as one; often the shell has taken the quotes away.
    if (text.find_first_of("[{\"'") == 0) {
      usage_error(
          "--set ", path, ": ", text,
          " is not a TOML value; texts in it need quotes that the shell leaves, as in --set "
          "'task.paths=[\"book.txt\"]'.");
    }
    value.value = text;
  }
  if (several) {
    usage_error("--set ", path,
                ": other keys follow the value, in lines of their own; expected "
                "one value, and a --set for each key.");
  }
  set_origin(value, "--set " + path);

  Node* node = &root;
  std::istringstream parts(path);
  std::string part;
  std::vector<std::string> keys;
  while (std::getline(parts, part, '.')) keys.push_back(part);
  if (path.ends_with('.') || std::find(keys.begin(), keys.end(), "") != keys.end()) {
    usage_error("--set ", path,
                ": has an empty part, expected names with dots between, such as "
                "train.steps.");
  }
  if (keys.size() > kDeepestToml) {
    usage_error("--set ", path, ": names ", keys.size(), " levels of tables, expected at most ",
                kDeepestToml, ".");
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    const bool last = i + 1 == keys.size();
    if (node->is_array()) {
      const auto index = parse_number<size_t>(keys[i]);
      if (!index || *index >= node->array().size()) {
        const size_t count = node->array().size();
        const std::string list = i == 0 ? "" : keys[i - 1];
        usage_error("--set ", path, ": '", list, "' has no entry '", keys[i], "'",
                    count == 0   ? str("; it is empty.")
                    : count == 1 ? str(", expected 0, its only entry.")
                                 : str(", expected 0 to ", count - 1, ", counted from 0."));
      }
      node = &node->array()[*index];
    } else if (node->is_table()) {
      Node* child = node->find(keys[i]);
      if (child == nullptr) {
        if (!last && keys[i + 1].find_first_not_of("0123456789") == std::string::npos) {
          usage_error("--set ", path, ": the configuration has no list '", keys[i], "', of which '",
                      keys[i + 1],
                      "' would be an entry (the layers of a preset do not stand in it); expected "
                      "the whole list as its value.");
        }
        Node fresh;
        fresh.origin = value.origin;
        child = &node->set(keys[i], fresh);
      }
      node = child;
    } else {
      usage_error("--set ", path, ": '", keys[i - 1], "' is ", node->type_name(), ", not a table.");
    }
    if (last) *node = value;
  }
}

Node merged(const Node& base, const Node& over) {
  if (!base.is_table() || !over.is_table()) return over;
  Node out = base;
  for (const auto& [key, child] : over.table()) {
    const Node* present = base.find(key);
    out.set(key, present != nullptr ? merged(*present, child) : child);
  }
  return out;
}

}  // namespace headloom
