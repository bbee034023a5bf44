#include "core/fields.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <set>

#include "core/error.h"
#include "core/range_text.h"
#include "core/sizes.h"
#include "core/text.h"

namespace headloom {
namespace {

std::string shown(const Node& node) {
  return node.is_table() || node.is_table_array() ? node.type_name() : inline_toml(node);
}

template <typename T>
std::string words_of(const Range<T>& range) {
  const bool low = range.low != std::numeric_limits<T>::lowest();
  const bool high = range.high != std::numeric_limits<T>::max();
  const std::string from = str(range.open_low ? "above " : "at least ", range.low);
  const std::string to = str(range.open_high ? "below " : "at most ", range.high);
  if (!low && !high) return std::is_integral_v<T> ? "an integer" : "a finite number";
  if (low && high) return from + " and " + to;
  return low ? from : to;
}

template <typename T>
bool inside(const Range<T>& range, T value) {
  return (range.open_low ? value > range.low : value >= range.low) &&
         (range.open_high ? value < range.high : value <= range.high);
}

template <typename T>
std::string typed(const char* type, Range<T> range) {
  if (range.high == static_cast<T>(kLargestSize)) {  // true of every size: not worth a line's end
    range.high = std::numeric_limits<T>::max();
  }
  const bool bounded =
      range.low != std::numeric_limits<T>::lowest() || range.high != std::numeric_limits<T>::max();
  return bounded ? str(type, ", ", range_text(range)) : type;
}

bool read_bool(const Node& node, const std::string& key) {
  if (const auto* value = std::get_if<bool>(&node.value)) return *value;
  usage_error(node.place(), "'", key, "' is ", shown(node), ", expected true or false.");
}

// What is a number too large for an integer, "" otherwise. --set takes such digits for text.
std::string too_large(const Node& node) {
  if (const auto* real = std::get_if<double>(&node.value)) {
    return std::abs(*real) >= 0x1p63 && std::isfinite(*real) ? shown(node) : "";
  }
  const auto* text = std::get_if<std::string>(&node.value);
  if (text == nullptr) return "";
  const size_t digits = text->find_first_of("123456789");
  const bool number = digits <= 1 && text->find_first_not_of("0123456789", 1) == text->npos &&
                      (digits == 0 || text->front() == '-' || text->front() == '+');
  return number && text->size() - digits >= 19 ? *text : "";
}

int64_t read_int(const Node& node, const std::string& key, const Range<int64_t>& range) {
  const auto* value = std::get_if<int64_t>(&node.value);
  if (value == nullptr) {
    const std::string large = too_large(node);
    if (!large.empty()) {
      usage_error(node.place(), "'", key, "' is ", large,
                  ", which an integer of 64 bits cannot hold, expected ", range_text(range), ".");
    }
    usage_error(node.place(), "'", key, "' is ", shown(node), ", expected an integer.");
  }
  if (!inside(range, *value)) {
    usage_error(node.place(), "'", key, "' is ", *value, ", expected ", range_text(range), ".");
  }
  return *value;
}

double read_real(const Node& node, const std::string& key, const Range<double>& range) {
  double value = 0;
  if (const auto* real = std::get_if<double>(&node.value)) {
    value = *real;
  } else if (const auto* integer = std::get_if<int64_t>(&node.value)) {
    value = static_cast<double>(*integer);
  } else {
    usage_error(node.place(), "'", key, "' is ", shown(node), ", expected a number.");
  }
  if (!std::isfinite(value)) {
    const bool bounded = range_text(range) != range_text(Range<double>{});
    usage_error(node.place(), "'", key, "' is ", shown(node), ", expected a finite number",
                bounded ? " " + range_text(range) : "", ".");
  }
  if (!inside(range, value)) {
    usage_error(node.place(), "'", key, "' is ", shown(node), ", expected ", range_text(range),
                ".");
  }
  return value;
}

std::string read_text(const Node& node, const std::string& key, const Choices& choices) {
  const auto* value = std::get_if<std::string>(&node.value);
  if (value == nullptr) {
    usage_error(node.place(), "'", key, "' is ", shown(node), ", expected text in quotes.");
  }
  if (!choices.empty() && std::find(choices.begin(), choices.end(), *value) == choices.end()) {
    const std::string near = nearest(*value, choices);
    usage_error(node.place(), "'", key, "' is \"", *value, "\", expected one of ", join(choices),
                near.empty() ? "." : str("; did you mean \"", near, "\"?"));
  }
  return *value;
}

template <typename T, typename ReadOne>
std::vector<T> read_list(const Node& node, const ReadOne& read_one) {
  std::vector<T> values;
  if (!node.is_array()) return {read_one(node)};
  for (const Node& item : node.array()) values.push_back(read_one(item));
  return values;
}

template <typename T>
Node plain(const T& value) {
  Node node;
  node.value = value;
  return node;
}

template <typename T>
Node plain_list(const std::vector<T>& values) {
  Array items;
  for (const T& value : values) items.push_back(plain(value));
  return plain(items);
}

// Throws where `text`, which stands in place of a table, would be the type of one that can be read.
void expect_no_type(const Node& text, const std::string& path,
                    const std::function<void(const Node&)>& read) {
  Node table;
  table.set("type", text);
  try {
    read(table);
  } catch (const UsageError&) {
    return;
  }
  usage_error(text.place(), "'", path, "' is a string, expected a table such as { type = \"",
              std::get<std::string>(text.value), "\" }.");
}

}  // namespace

std::string range_text(const Range<int64_t>& range) { return words_of(range); }
std::string range_text(const Range<double>& range) { return words_of(range); }

Reader::Reader(const Node& node, std::string path) : node_(node), path_(std::move(path)) {
  if (!node.is_table()) {
    usage_error(node.place(), "'", path_, "' is ", node.type_name(), ", expected a table.");
  }
}

std::string Reader::full(Text key) const {
  return path_.empty() ? std::string(key) : path_ + "." + std::string(key);
}

const Node* Reader::take(Text key) {
  known_.emplace_back(key);
  const Node* node = node_.find(key);
  for (const auto& [former, now] : renamed_) {
    const Node* old = now == key ? node_.find(former) : nullptr;
    if (old == nullptr) continue;
    if (node != nullptr) {
      usage_error(old->place(), "'", full(former), "' is the former name of '", full(key),
                  "', which is there as well; expected one of them.");
    }
    // Once for each name: a configuration is read several times, and has many layers.
    static std::mutex mutex;
    static std::set<std::string> told;
    const std::lock_guard lock(mutex);
    if (told.insert(str(former, ' ', key)).second) {
      std::fprintf(stderr,
                   "headloom: %s'%s' is called '%s' now; the next version will not know it.\n",
                   old->place().c_str(), full(former).c_str(), std::string(key).c_str());
    }
    return old;
  }
  return node;
}

void Reader::renamed(Text former, Text key) { renamed_.emplace_back(former, key); }

void Reader::field(Text key, bool& value, Text) {
  if (const Node* node = take(key)) value = read_bool(*node, full(key));
}
void Reader::field(Text key, int64_t& value, Text, Range<int64_t> range) {
  if (const Node* node = take(key)) value = read_int(*node, full(key), range);
}
void Reader::field(Text key, double& value, Text, Range<double> range) {
  if (const Node* node = take(key)) value = read_real(*node, full(key), range);
}
void Reader::field(Text key, std::string& value, Text, const Choices& choices) {
  if (const Node* node = take(key)) {
    value = read_text(*node, full(key), choices);
  } else if (key == "type" && value.empty()) {
    usage_error(node_.place(), "'", path_, "' has no 'type'; expected one of ", join(choices), ".");
  }
}
void Reader::field(Text key, std::optional<int64_t>& value, Text, Range<int64_t> range) {
  if (const Node* node = take(key)) value = read_int(*node, full(key), range);
}
void Reader::field(Text key, std::optional<double>& value, Text, Range<double> range) {
  if (const Node* node = take(key)) value = read_real(*node, full(key), range);
}
void Reader::field(Text key, std::optional<std::string>& value, Text) {
  if (const Node* node = take(key)) value = read_text(*node, full(key), {});
}
void Reader::field(Text key, std::vector<std::string>& value, Text, const Choices& choices) {
  if (const Node* node = take(key)) {
    value = read_list<std::string>(
        *node, [&](const Node& item) { return read_text(item, full(key), choices); });
  }
}
void Reader::field(Text key, std::vector<int64_t>& value, Text, Range<int64_t> range) {
  const Node* node = take(key);
  if (node == nullptr) return;
  if (!node->is_array()) {
    // Not taken for a list of one: `seeds = 5` may as well mean five seeds.
    const std::string one = shown(*node);
    usage_error(
        node->place(), "'", full(key), "' is ", one, ", expected a list, such as [1, 2, 3]",
        node->type_name() == std::string("an integer") ? str(", or [", one, "] for one") : "", ".");
  }
  value =
      read_list<int64_t>(*node, [&](const Node& item) { return read_int(item, full(key), range); });
}

void Reader::raw(Text key, Node& value, Text) {
  const Node* node = take(key);
  if (node == nullptr) return;
  if (!node->is_table()) {
    usage_error(node->place(), "'", full(key), "' is ", node->type_name(), ", expected a table.");
  }
  value = *node;
}

bool Reader::mentions(Text key, Text) {
  if (node_.find(key) != nullptr) return true;
  known_.emplace_back(key);
  return false;
}

void Reader::nested(Text key, Text, const std::function<void(Fields&)>& body) {
  static const Node empty;
  const Node* node = take(key);
  const auto read = [&](const Node& table) {
    Reader inner(table, full(key));
    body(inner);
    inner.finish();
  };
  if (node != nullptr && std::holds_alternative<std::string>(node->value)) {
    expect_no_type(*node, full(key), read);
  }
  read(node != nullptr ? *node : empty);
}

void Reader::elements(Text key, Text, size_t, const std::function<void(size_t)>& resize,
                      const std::function<void(size_t, Fields&)>& body) {
  const Node* node = take(key);
  if (node == nullptr) return;
  if (!node->is_array()) {
    usage_error(node->place(), "'", full(key), "' is ", node->type_name(),
                ", expected an array of tables ([[", full(key), "]]).");
  }
  resize(0);  // elements of the file replace the defaults, they do not merge with them
  resize(node->array().size());
  for (size_t i = 0; i < node->array().size(); ++i) {
    Reader inner(node->array()[i], str(full(key), "[", i, "]"));
    body(i, inner);
    inner.finish();
  }
}

void Reader::finish() const {
  for (const auto& [key, child] : node_.table()) {
    if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
    const bool former = std::any_of(renamed_.begin(), renamed_.end(),
                                    [&](const auto& names) { return names.first == key; });
    if (former) continue;
    const std::string near = nearest(key, known_);
    usage_error(child.place(), "unknown key '", full(key), "'",
                near.empty() ? str("; known keys are ", join(known_), ".")
                             : str("; did you mean '", full(near), "'?"));
  }
}

void Writer::field(Text key, bool& value, Text) { node_.set(key, plain(value)); }
void Writer::field(Text key, int64_t& value, Text, Range<int64_t>) { node_.set(key, plain(value)); }
void Writer::field(Text key, double& value, Text, Range<double>) { node_.set(key, plain(value)); }
void Writer::field(Text key, std::string& value, Text, const Choices&) {
  node_.set(key, plain(value));
}
void Writer::field(Text key, std::optional<int64_t>& value, Text, Range<int64_t>) {
  if (value) node_.set(key, plain(*value));
}
void Writer::field(Text key, std::optional<double>& value, Text, Range<double>) {
  if (value) node_.set(key, plain(*value));
}
void Writer::field(Text key, std::optional<std::string>& value, Text) {
  if (value) node_.set(key, plain(*value));
}
void Writer::field(Text key, std::vector<std::string>& value, Text, const Choices&) {
  node_.set(key, plain_list(value));
}
void Writer::field(Text key, std::vector<int64_t>& value, Text, Range<int64_t>) {
  node_.set(key, plain_list(value));
}
void Writer::raw(Text key, Node& value, Text) {
  if (!value.table().empty()) node_.set(key, value);
}
bool Writer::mentions(Text, Text) { return false; }
void Writer::nested(Text key, Text, const std::function<void(Fields&)>& body) {
  Writer inner;
  body(inner);
  node_.set(key, inner.take());
}
void Writer::elements(Text key, Text, size_t present, const std::function<void(size_t)>&,
                      const std::function<void(size_t, Fields&)>& body) {
  if (present == 0) return;
  Array items;
  for (size_t i = 0; i < present; ++i) {
    Writer inner;
    body(i, inner);
    items.push_back(inner.take());
  }
  node_.set(key, plain(items));
}

void Lister::add(Text key, std::string type, std::string default_value, Text doc) {
  options_.push_back(
      {prefix_ + std::string(key), std::move(type), std::move(default_value), std::string(doc)});
}
void Lister::field(Text key, bool& value, Text doc) {
  add(key, "boolean", value ? "true" : "false", doc);
}
void Lister::field(Text key, int64_t& value, Text doc, Range<int64_t> range) {
  add(key, typed("integer", range), str(value), doc);
}
void Lister::field(Text key, double& value, Text doc, Range<double> range) {
  add(key, typed("real", range), shown(plain(value)), doc);
}
void Lister::field(Text key, std::string& value, Text doc, const Choices& choices) {
  add(key, choices.empty() ? "text" : "one of " + join(choices, " | "), value, doc);
}
void Lister::field(Text key, std::optional<int64_t>& value, Text doc, Range<int64_t> range) {
  add(key, typed("integer", range), value ? str(*value) : "", doc);
}
void Lister::field(Text key, std::optional<double>& value, Text doc, Range<double> range) {
  add(key, typed("real", range), value ? shown(plain(*value)) : "", doc);
}
void Lister::field(Text key, std::optional<std::string>& value, Text doc) {
  add(key, "text", value.value_or(""), doc);
}
void Lister::field(Text key, std::vector<std::string>& value, Text doc, const Choices& choices) {
  add(key, choices.empty() ? "list of text" : "list of " + join(choices, " | "), join(value), doc);
}
void Lister::field(Text key, std::vector<int64_t>& value, Text doc, Range<int64_t> range) {
  add(key, typed("list of integers", range), shown(plain_list(value)), doc);
}
void Lister::raw(Text key, Node&, Text doc) { add(key, "table", "", doc); }
bool Lister::mentions(Text key, Text doc) {
  add(key, "table", "", doc);
  return false;
}
void Lister::nested(Text key, Text, const std::function<void(Fields&)>& body) {
  const std::string before = prefix_;
  prefix_ += std::string(key) + ".";
  body(*this);
  prefix_ = before;
}
void Lister::elements(Text key, Text doc, size_t, const std::function<void(size_t)>&,
                      const std::function<void(size_t, Fields&)>&) {
  add(key, "array of tables", "", doc);
}

}  // namespace headloom
