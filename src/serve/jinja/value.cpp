#include "serve/jinja/value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "serve/jinja/text.h"

namespace headloom::jinja {
namespace {

constexpr int kDeepestValue = 100;

void check_extent(int depth, int64_t size) {
  if (depth > kDeepestValue) {
    template_error("lists and dictionaries are nested deeper than ", kDeepestValue, " levels");
  }
  if (size > Budget::kMostBytes) {
    template_error("a list or dictionary has more than ", Budget::kMostBytes, " bytes of text");
  }
}

// As Python's repr(): the shortest digits that give the number back.
std::string float_text(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, number, std::chars_format::scientific);
  const std::string scientific(buffer, end.ptr);
  const size_t e = scientific.find('e');
  const int exponent = std::stoi(scientific.substr(e + 1));
  if (exponent < -4 || exponent >= 16) return scientific;
  const auto fixed =
      std::to_chars(buffer, buffer + sizeof buffer, number, std::chars_format::fixed);
  std::string out(buffer, fixed.ptr);
  if (out.find('.') == std::string::npos) out += ".0";
  return out;
}

std::string list_text(const std::vector<std::string>& parts, const char* open, const char* close) {
  std::string out = open;
  for (size_t i = 0; i < parts.size(); ++i) out += (i == 0 ? "" : ", ") + parts[i];
  return out + close;
}

}  // namespace

std::string quoted(const Value& value) {
  if (value.is_text()) return quoted_text(value.text());
  if (value.is_list()) {
    std::vector<std::string> parts;
    for (const Value& item : value.list()) parts.push_back(quoted(item));
    if (!value.whole_list().tuple) return list_text(parts, "[", "]");
    return list_text(parts, "(", parts.size() == 1 ? ",)" : ")");
  }
  if (value.is_dict()) {
    std::vector<std::string> parts;
    for (const auto& [key, item] : value.dict().items) {
      parts.push_back(quoted_text(key) + ": " + quoted(item));
    }
    return list_text(parts, "{", "}");
  }
  return shown(value);
}

namespace {

void write_json(const Value& value, const JsonStyle& style, Budget& budget, int depth,
                std::string& out) {
  budget.make(style.comma.size() + style.colon.size());
  const auto line = [&](int level) {
    if (!style.indent) return;
    budget.make(style.indent->size() * static_cast<size_t>(level));
    out += '\n';
    for (int i = 0; i < level; ++i) out += *style.indent;
  };
  if (value.is_none()) {
    out += "null";
  } else if (value.is_bool()) {
    out += value.truth() ? "true" : "false";
  } else if (value.is_integer()) {
    out += std::to_string(value.integer());
  } else if (value.is_float()) {
    const double number = value.number();
    out += std::isnan(number)   ? "NaN"
           : std::isinf(number) ? (number < 0 ? "-Infinity" : "Infinity")
                                : float_text(number);
  } else if (value.is_text()) {
    out += json_text(value.text(), style.ascii);
  } else if (value.is_list()) {
    const auto& items = value.list();
    out += '[';
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += style.comma;
      line(depth + 1);
      write_json(items[i], style, budget, depth + 1, out);
    }
    if (!items.empty()) line(depth);
    out += ']';
  } else if (value.is_dict()) {
    std::vector<const std::pair<std::string, Value>*> items;
    for (const auto& item : value.dict().items) items.push_back(&item);
    if (style.sorted) {
      std::sort(items.begin(), items.end(), [](auto* a, auto* b) { return a->first < b->first; });
    }
    out += '{';
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += style.comma;
      line(depth + 1);
      out += json_text(items[i]->first, style.ascii) + style.colon;
      write_json(items[i]->second, style, budget, depth + 1, out);
    }
    if (!items.empty()) line(depth);
    out += '}';
  } else {
    template_error("a value of type ", value.type(), " cannot be written as JSON");
  }
}

bool same(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    return a.is_float() || b.is_float() ? a.number() == b.number() : a.integer() == b.integer();
  }
  if (a.is_text() && b.is_text()) return a.text() == b.text();
  if (a.is_list() && b.is_list()) {
    const auto &x = a.list(), &y = b.list();
    return a.whole_list().tuple == b.whole_list().tuple && x.size() == y.size() &&
           std::equal(x.begin(), x.end(), y.begin(), same);
  }
  if (a.is_dict() && b.is_dict()) {
    if (a.dict().items.size() != b.dict().items.size()) return false;
    for (const auto& [key, item] : a.dict().items) {
      const Value* other = b.dict().find(key);
      if (other == nullptr || !same(item, *other)) return false;
    }
    return true;
  }
  if (a.is_namespace() && b.is_namespace()) return &a.space() == &b.space();
  if (a.is_function() && b.is_function()) return &a.function() == &b.function();
  return (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined());
}

}  // namespace

const Value* Dict::find(std::string_view key) const {
  for (const auto& item : items) {
    if (item.first == key) return &item.second;
  }
  return nullptr;
}

void Dict::set(const std::string& key, Value value) {
  depth = std::max(depth, 1 + value.depth());
  size += static_cast<int64_t>(key.size()) + value.size();
  for (auto& item : items) {
    if (item.first == key) {
      size -= static_cast<int64_t>(key.size()) + item.second.size();
      item.second = std::move(value);
      return;
    }
  }
  items.emplace_back(key, std::move(value));
}

Value::Value(List list) {
  list.size = 0;  // a copy of a list has been given other items
  for (const Value& item : list.items) {
    list.depth = std::max(list.depth, 1 + item.depth());
    list.size += item.size();
  }
  check_extent(list.depth, list.size);
  held_ = std::make_shared<const List>(std::move(list));
}

Value::Value(Dict dict) {
  check_extent(dict.depth, dict.size);
  held_ = std::make_shared<const Dict>(std::move(dict));
}

Value Value::from_json(const nlohmann::ordered_json& json) {
  if (json.is_null()) return None{};
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_unsigned() &&
      json.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()}) {
    return json.get<double>();
  }
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) {
    List list;
    for (const auto& item : json) list.items.push_back(from_json(item));
    return list;
  }
  Dict dict;
  for (const auto& [key, item] : json.items()) dict.set(key, from_json(item));
  return dict;
}

int64_t Value::integer() const {
  if (const auto* number = std::get_if<int64_t>(&held_)) return *number;
  if (const auto* flag = std::get_if<bool>(&held_)) return *flag ? 1 : 0;
  if (is_undefined()) refuse_undefined();
  template_error("a value of type ", type(), " stands where an integer is expected");
}

double Value::number() const {
  if (const auto* number = std::get_if<double>(&held_)) return *number;
  return static_cast<double>(integer());
}

const std::string& Value::text() const {
  if (const auto* text = std::get_if<Text>(&held_)) return **text;
  if (is_undefined()) refuse_undefined();
  template_error("a value of type ", type(), " stands where a text is expected");
}

const std::vector<Value>& Value::list() const {
  if (is_list()) return whole_list().items;
  if (is_undefined()) refuse_undefined();
  template_error("a value of type ", type(), " stands where a list is expected");
}

const Dict& Value::dict() const {
  if (is_dict()) return *std::get<std::shared_ptr<const Dict>>(held_);
  if (is_undefined()) refuse_undefined();
  template_error("a value of type ", type(), " stands where a dictionary is expected");
}

bool Value::truth() const {
  if (is_bool()) return std::get<bool>(held_);
  if (is_integer()) return integer() != 0;
  if (is_float()) return number() != 0;
  if (is_text()) return !text().empty();
  if (is_list()) return whole_list().generator || !list().empty();
  if (is_dict()) return !dict().items.empty();
  return is_namespace() || is_function();
}

std::string Value::type() const {
  if (is_undefined()) return "undefined";
  if (is_none()) return "NoneType";
  if (is_bool()) return "bool";
  if (is_integer()) return "int";
  if (is_float()) return "float";
  if (is_text()) return "str";
  if (is_list()) {
    return whole_list().generator ? "generator" : whole_list().tuple ? "tuple" : "list";
  }
  if (is_dict()) return "dict";
  return is_namespace() ? "namespace" : "function";
}

void Value::refuse_undefined() const {
  template_error(std::get<Undefined>(held_).name, " is undefined");
}

int Value::depth() const {
  if (is_list()) return whole_list().depth;
  if (is_dict()) return dict().depth;
  return 0;
}

int64_t Value::size() const {
  constexpr int64_t kNumber = 8;  // also of brackets, commas and short words
  if (is_text()) return kNumber + static_cast<int64_t>(text().size());
  if (is_list()) return kNumber + whole_list().size;
  if (is_dict()) return kNumber + dict().size;
  return kNumber;
}

std::string shown(const Value& value) {
  if (value.is_text()) return value.text();
  if (value.is_undefined()) return "";
  if (value.is_none()) return "None";
  if (value.is_bool()) return value.truth() ? "True" : "False";
  if (value.is_integer()) return std::to_string(value.integer());
  if (value.is_float()) return float_text(value.number());
  if (value.is_namespace()) return "<Namespace>";
  if (value.is_function()) return "<function " + value.function().name + ">";
  return quoted(value);
}

std::string json_of(const Value& value, const JsonStyle& style, Budget& budget) {
  if (value.is_undefined()) value.refuse_undefined();
  std::string out;
  write_json(value, style, budget, 0, out);
  return out;
}

bool equal(const Value& a, const Value& b, Budget& budget) {
  budget.read(std::min(a.size(), b.size()));
  return same(a, b);
}

int compare(const Value& a, const Value& b, const std::string& operation, Budget& budget) {
  budget.read(std::min(a.size(), b.size()));
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) {
      return a.number() < b.number() ? -1 : a.number() > b.number() ? 1 : 0;
    }
    return a.integer() < b.integer() ? -1 : a.integer() > b.integer() ? 1 : 0;
  }
  if (a.is_text() && b.is_text()) {
    const int order = a.text().compare(b.text());  // UTF-8 is ordered as its code points
    return order < 0 ? -1 : order > 0 ? 1 : 0;
  }
  if (a.is_list() && b.is_list()) {
    const auto &x = a.list(), &y = b.list();
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!same(x[i], y[i])) return compare(x[i], y[i], operation, budget);
    }
    return x.size() < y.size() ? -1 : x.size() > y.size() ? 1 : 0;
  }
  if (a.is_undefined()) a.refuse_undefined();
  if (b.is_undefined()) b.refuse_undefined();
  template_error("'", operation, "' is not defined between ", a.type(), " and ", b.type());
}

bool contains(const Value& holder, const Value& item, Budget& budget) {
  if (holder.is_text()) budget.read(holder.size());
  if (holder.is_text()) return holder.text().find(item.text()) != std::string::npos;
  if (holder.is_dict()) return item.is_text() && holder.dict().find(item.text()) != nullptr;
  if (holder.is_undefined()) return false;
  const std::vector<Value>& items = holder.list();
  return std::any_of(items.begin(), items.end(), [&](const Value& other) {
    budget.step();
    return equal(item, other, budget);
  });
}

std::vector<Value> items_of(const Value& value) {
  std::vector<Value> out;
  if (value.is_list()) return value.list();
  if (value.is_dict()) {
    for (const auto& [key, item] : value.dict().items) out.emplace_back(key);
  } else if (value.is_text()) {
    for (const std::string_view c : characters(value.text())) out.emplace_back(c);
  } else if (!value.is_undefined()) {
    template_error("a value of type ", value.type(), " cannot be looped over");
  }
  return out;
}

int64_t length_of(const Value& value) {
  if (value.is_text()) return static_cast<int64_t>(characters(value.text()).size());
  if (value.is_list() && !value.whole_list().generator) {
    return static_cast<int64_t>(value.list().size());
  }
  if (value.is_dict()) return static_cast<int64_t>(value.dict().items.size());
  if (value.is_undefined()) return 0;
  template_error("a value of type ", value.type(), " has no length");
}

void Budget::over(const char* what, int64_t most) {
  template_error("it takes more than ", most, " ", what);
}

}  // namespace headloom::jinja
