#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "core/parse_number.h"
#include "serve/jinja/builtins.h"
#include "serve/jinja/text.h"

namespace headloom::jinja {
namespace {

using Filter = Value (*)(const Value& value, Taken& taken, Budget& budget);

Value made(std::string text, Budget& budget) {
  budget.make(text.size());
  return text;
}

std::vector<Value> read(const Value& value, Budget& budget) {
  std::vector<Value> out = items_of(value);
  budget.make(out.size() * sizeof(Value));
  return out;
}

Value generator(std::vector<Value> items) {
  return List{.items = std::move(items), .generator = true};
}

// By a path of names and numbers, "a.b.0"; undefined where there is none.
Value by_path(Value value, const Value& path, Budget& budget) {
  if (path.is_integer()) return item_of(value, path, budget);
  for (const std::string& name : split(path.text(), ".", -1, false)) {
    const auto number = parse_number<int64_t>(name);
    value = number ? item_of(value, *number, budget) : item_of(value, name, budget);
  }
  return value;
}

// What is compared where letters' cases do not matter.
Value caseless(const Value& value) { return value.is_text() ? Value(lower(value.text())) : value; }

struct Order {
  Order(Taken& taken, Budget& budget, bool sensitive) : sensitive(sensitive), budget(budget) {
    if (const Value* given = taken.next("attribute")) path = *given;
  }
  Value key(const Value& item) const {
    const Value out = path.is_undefined() || path.is_none() ? item : by_path(item, path, budget);
    return sensitive ? out : caseless(out);
  }
  Value path = {};
  bool sensitive;
  Budget& budget;
};

Value sorted(const Value& value, Taken& taken, Budget& budget) {
  const bool reverse = taken.flag("reverse", false);
  const bool sensitive = taken.flag("case_sensitive", false);
  const Order order(taken, budget, sensitive);
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : read(value, budget)) keyed.emplace_back(order.key(item), item);
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    budget.step();
    const int way = compare(a.first, b.first, "<", budget);
    return reverse ? way > 0 : way < 0;
  });
  List out;
  for (auto& [key, item] : keyed) out.items.push_back(std::move(item));
  return out;
}

template <int way>
Value extreme(const Value& value, Taken& taken, Budget& budget) {
  const bool sensitive = taken.flag("case_sensitive", false);
  const Order order(taken, budget, sensitive);
  Value best{Undefined{"an extreme of nothing"}};
  for (const Value& item : read(value, budget)) {
    if (best.is_undefined() || way * compare(order.key(item), order.key(best), "<", budget) > 0) {
      best = item;
    }
  }
  return best;
}

Value unique(const Value& value, Taken& taken, Budget& budget) {
  const bool sensitive = taken.flag("case_sensitive", false);
  const Order order(taken, budget, sensitive);
  std::vector<Value> keys, out;
  for (const Value& item : read(value, budget)) {
    const Value key = order.key(item);
    budget.step(static_cast<int64_t>(keys.size()));
    if (std::any_of(keys.begin(), keys.end(),
                    [&](const Value& k) { return equal(k, key, budget); })) {
      continue;
    }
    keys.push_back(key);
    out.push_back(item);
  }
  return generator(std::move(out));
}

// select, reject, selectattr and rejectattr.
template <bool keep, bool attribute>
Value chosen(const Value& value, Taken& taken, Budget& budget) {
  const Value path = attribute ? taken.need("attribute") : Value();
  const Value* test = taken.next("test");
  Call call;
  while (const Value* argument = taken.next("")) call.positional.push_back(*argument);
  std::vector<Value> out;
  for (const Value& item : read(value, budget)) {
    budget.step();
    const Value subject = attribute ? by_path(item, path, budget) : item;
    const bool holds =
        test != nullptr ? tested(test->text(), subject, call, budget) : subject.truth();
    if (holds == keep) out.push_back(item);
  }
  return generator(std::move(out));
}

Value mapped(const Value& value, Taken& taken, Budget& budget) {
  std::vector<Value> out;
  const Value* path = nullptr;
  const Value* name = taken.next("");  // of a filter
  if (name == nullptr) path = &taken.need("attribute");
  const Value* otherwise = path != nullptr ? taken.next("default") : nullptr;
  Call call;
  while (const Value* argument = taken.next("")) call.positional.push_back(*argument);
  for (const Value& item : read(value, budget)) {
    budget.step();
    if (path == nullptr) {
      Call each = call;
      out.push_back(filtered(name->text(), item, each, budget));
      continue;
    }
    Value found = by_path(item, *path, budget);
    out.push_back(found.is_undefined() && otherwise != nullptr ? *otherwise : std::move(found));
  }
  return generator(std::move(out));
}

Value joined(const Value& value, Taken& taken, Budget& budget) {
  const std::string between = taken.text("d", "");
  const Value* path = taken.next("attribute");
  std::string out;
  bool first = true;
  for (const Value& item : read(value, budget)) {
    const std::string text = shown(path != nullptr ? by_path(item, *path, budget) : item);
    budget.make(text.size() + between.size());
    out += (first ? "" : between) + text;
    first = false;
  }
  return out;
}

Value end_of(const Value& value, bool first, Budget& budget) {
  const std::vector<Value> items = read(value, budget);
  if (items.empty()) return Undefined{"an item of nothing"};
  return first ? items.front() : items.back();
}

Value reversed(const Value& value, Taken&, Budget& budget) {
  std::vector<Value> items = read(value, budget);
  std::reverse(items.begin(), items.end());
  if (!value.is_text()) return generator(std::move(items));
  std::string out;
  for (const Value& c : items) out += c.text();
  return out;
}

Value summed(const Value& value, Taken& taken, Budget& budget) {
  const Value* path = taken.next("attribute");
  const Value* start = taken.next("start");
  Value out = start != nullptr ? *start : Value(0);
  for (const Value& item : read(value, budget)) {
    const bool whole = path == nullptr || path->is_none();
    out = operated("+", out, whole ? item : by_path(item, *path, budget), budget);
  }
  return out;
}

// As Python's int() and float() read texts; undefined where they would not.
Value number_in(std::string_view text, bool integer) {
  const std::string bare = stripped(text, "", true, true);
  const bool plus = bare.starts_with('+') && !bare.starts_with("+-");
  const std::string_view number = std::string_view(bare).substr(plus ? 1 : 0);
  if (integer) {
    const auto whole = parse_number<int64_t>(number);
    return whole ? Value(*whole) : Value();
  }
  const auto real = parse_number<double>(number);
  return real ? Value(*real) : Value();
}

Value to_integer(const Value& value, Taken& taken, Budget&) {
  const Value* otherwise = taken.next("default");
  Value out;
  if (value.is_text()) {
    out = number_in(value.text(), true);
    if (out.is_undefined()) out = number_in(value.text(), false);
  } else if (value.is_number()) {
    out = value;
  }
  if (out.is_float()) {
    const double whole = std::trunc(out.number());
    out = std::abs(whole) < 9e18 ? Value(static_cast<int64_t>(whole)) : Value();
  }
  if (out.is_undefined()) return otherwise != nullptr ? *otherwise : Value(0);
  return out.integer();
}

Value to_float(const Value& value, Taken& taken, Budget&) {
  const Value* otherwise = taken.next("default");
  const Value out = value.is_text() ? number_in(value.text(), false) : value;
  if (out.is_number()) return out.number();
  return otherwise != nullptr ? *otherwise : Value(0.0);
}

Value rounded(const Value& value, Taken& taken, Budget&) {
  const int64_t digits = std::clamp<int64_t>(taken.integer("precision", 0), -300, 300);
  const std::string method = taken.text("method", "common");
  const bool common = method != "ceil" && method != "floor";
  if (common && digits >= 0) {
    if (!value.is_float()) return value.integer();
    char text[700];  // of the decimal number itself: 2.675 is below it, and its 1000-fold is not
    std::snprintf(text, sizeof text, "%.*f", static_cast<int>(digits), value.number());
    return std::strtod(text, nullptr);
  }
  const double factor = std::pow(10.0, static_cast<double>(digits));
  const double scaled = value.number() * factor;
  if (method == "ceil") return std::ceil(scaled) / factor;
  if (method == "floor") return std::floor(scaled) / factor;
  return std::nearbyint(scaled) / factor;
}

Value indented(const Value& value, Taken& taken, Budget& budget) {
  const Value* width = taken.next("width");
  const bool first = taken.flag("first", false), blank = taken.flag("blank", false);
  const int64_t spaces = width == nullptr || width->is_text() ? 4 : width->integer();
  if (spaces > 1000) template_error("the filter 'indent' has the width ", spaces);
  const std::string margin =
      width != nullptr && width->is_text()
          ? width->text()
          : std::string(static_cast<size_t>(std::max<int64_t>(spaces, 0)), ' ');
  std::string out;
  bool begin = true;
  for (const std::string& line : lines(shown(value) + "\n")) {
    budget.make(line.size() + margin.size());
    if (!begin) out += '\n';
    if (begin ? first : blank || !line.empty()) out += margin;
    out += line;
    begin = false;
  }
  return out;
}

Value dict_sorted(const Value& value, Taken& taken, Budget& budget) {
  const bool sensitive = taken.flag("case_sensitive", false);
  const bool by_value = taken.text("by", "key") == "value";
  const bool reverse = taken.flag("reverse", false);
  auto items = value.dict().items;
  budget.make(items.size() * 2 * sizeof(Value));
  const auto key = [&](const auto& item) {
    const Value out = by_value ? item.second : Value(item.first);
    return sensitive ? out : caseless(out);
  };
  std::stable_sort(items.begin(), items.end(), [&](const auto& a, const auto& b) {
    budget.step();
    const int way = compare(key(a), key(b), "<", budget);
    return reverse ? way > 0 : way < 0;
  });
  List out;
  for (auto& [name, item] : items) {
    out.items.emplace_back(List{.items = {Value(name), item}, .tuple = true});
  }
  return out;
}

Value escaped(const Value& value, Taken&, Budget& budget) {
  std::string out;
  for (const char c : shown(value)) {
    out += c == '&'    ? "&amp;"
           : c == '<'  ? "&lt;"
           : c == '>'  ? "&gt;"
           : c == '"'  ? "&#34;"
           : c == '\'' ? "&#39;"
                       : std::string(1, c);
  }
  return made(std::move(out), budget);
}

constexpr int64_t kWidestIndent = 100;

// json.dumps() with the arguments that transformers gives to the filter.
Value as_json(const Value& value, Taken& taken, Budget& budget) {
  JsonStyle style{.ascii = taken.flag("ensure_ascii", false)};
  const Value* indent = taken.next("indent");
  const Value* separators = taken.next("separators");
  style.sorted = taken.flag("sort_keys", false);
  if (indent != nullptr && !indent->is_none()) {
    style.indent =
        indent->is_text()
            ? indent->text()
            : std::string(std::clamp<int64_t>(indent->integer(), 0, kWidestIndent + 1), ' ');
    if (style.indent->size() > kWidestIndent) {
      template_error("the filter 'tojson' has an indent of more than ", kWidestIndent,
                     " characters");
    }
    style.comma = ",";
  }
  if (separators != nullptr && !separators->is_none()) {
    const std::vector<Value> parts = items_of(*separators);
    if (parts.size() != 2) {
      template_error("the filter 'tojson' has ", parts.size(), " 'separators', expected 2");
    }
    style.comma = parts[0].text();
    style.colon = parts[1].text();
  }
  return made(json_of(value, style, budget), budget);
}

Value defaulted(const Value& value, Taken& taken, Budget&) {
  const Value* otherwise = taken.next("default_value");
  const bool boolean = taken.flag("boolean", false);
  if (!value.is_undefined() && (!boolean || value.truth())) return value;
  return otherwise != nullptr ? *otherwise : Value("");
}

Value replaced_in(const Value& value, Taken& taken, Budget& budget) {
  Call call{.positional = {taken.need("old"), taken.need("new")}};
  if (const Value* count = taken.next("count"); count != nullptr && !count->is_none()) {
    call.positional.push_back(*count);
  }
  return method_of(Value(shown(value)), "replace", budget).function().body(call);
}

Value to_list(const Value& value, Taken&, Budget& budget) {
  return List{.items = read(value, budget)};
}

const std::vector<std::pair<std::string_view, Filter>>& filters() {
  using V = const Value&;
  static const std::vector<std::pair<std::string_view, Filter>> table = {
      {"trim",
       [](V v, Taken& t, Budget& b) {
         return made(stripped(shown(v), t.text("chars", ""), true, true), b);
       }},
      {"upper", [](V v, Taken&, Budget& b) { return made(upper(shown(v)), b); }},
      {"lower", [](V v, Taken&, Budget& b) { return made(lower(shown(v)), b); }},
      {"title", [](V v, Taken&, Budget& b) { return made(headline(shown(v)), b); }},
      {"capitalize", [](V v, Taken&, Budget& b) { return made(capitalized(shown(v)), b); }},
      {"string", [](V v, Taken&, Budget& b) { return made(shown(v), b); }},
      {"safe", [](V v, Taken&, Budget&) { return v; }},
      {"escape", escaped},
      {"e", escaped},
      {"length", [](V v, Taken&, Budget&) -> Value { return length_of(v); }},
      {"count", [](V v, Taken&, Budget&) -> Value { return length_of(v); }},
      {"first", [](V v, Taken&, Budget& b) { return end_of(v, true, b); }},
      {"last", [](V v, Taken&, Budget& b) { return end_of(v, false, b); }},
      {"list", to_list},
      {"join", joined},
      {"default", defaulted},
      {"d", defaulted},
      {"replace", replaced_in},
      {"tojson", as_json},
      {"select", chosen<true, false>},
      {"reject", chosen<false, false>},
      {"selectattr", chosen<true, true>},
      {"rejectattr", chosen<false, true>},
      {"map", mapped},
      {"items",
       [](V v, Taken&, Budget& b) {
         if (v.is_undefined()) return generator({});
         Call none;
         v.dict();
         return method_of(v, "items", b).function().body(none);
       }},
      {"dictsort", dict_sorted},
      {"sort", sorted},
      {"unique", unique},
      {"reverse", reversed},
      {"min", extreme<-1>},
      {"max", extreme<1>},
      {"sum", summed},
      {"int", to_integer},
      {"float", to_float},
      {"round", rounded},
      {"abs",
       [](V v, Taken&, Budget&) -> Value {
         if (v.is_float()) return std::abs(v.number());
         return v.integer() < 0 ? negated(v) : v;
       }},
      {"indent", indented},
      {"attr",
       [](V v, Taken& t, Budget& b) -> Value {
         const std::string name = t.need("name").text();
         // Not an item of a dictionary.
         return v.is_dict() ? method_of(v, name, b) : attribute_of(v, name, b);
       }},
      {"wordcount", [](V v, Taken&, Budget&) -> Value { return count_words(shown(v)); }},
  };
  return table;
}

}  // namespace

Value filtered(const std::string& name, const Value& value, Call& call, Budget& budget) {
  for (const auto& [known, filter] : filters()) {
    if (known != name) continue;
    budget.step();
    if (value.is_text()) budget.make(value.text().size());
    Taken taken(call, "the filter '" + name + "'");
    Value out = filter(value, taken, budget);
    taken.end();
    return out;
  }
  template_error("the filter '", name, "' is not supported");
}

bool tested(const std::string& name, const Value& value, Call& call, Budget& budget) {
  Taken taken(call, "the test '" + name + "'");
  const auto result = [&]() -> bool {
    const auto is = [&](std::initializer_list<std::string_view> names) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    if (name == "defined") return !value.is_undefined();
    if (name == "undefined") return value.is_undefined();
    if (name == "none") return value.is_none();
    if (name == "string") return value.is_text();
    if (name == "mapping") return value.is_dict();
    if (name == "number") return value.is_number();
    if (name == "integer") return value.is_integer();
    if (name == "float") return value.is_float();
    if (name == "boolean") return value.is_bool();
    if (name == "true") return value.is_bool() && value.truth();
    if (name == "false") return value.is_bool() && !value.truth();
    if (name == "callable") return value.is_function();
    if (name == "iterable") {
      return value.is_text() || value.is_list() || value.is_dict() || value.is_undefined();
    }
    if (name == "sequence") {
      return value.is_text() || value.is_dict() || value.is_undefined() ||
             (value.is_list() && !value.whole_list().generator);
    }
    if (name == "lower" || name == "upper") {  // a text without letters is neither
      budget.read(value.size());
      const std::string text = shown(value), low = lower(text), high = upper(text);
      return low != high && text == (name == "lower" ? low : high);
    }
    if (name == "odd") return value.integer() % 2 != 0;
    if (name == "even") return value.integer() % 2 == 0;
    if (name == "divisibleby") {
      const int64_t by = taken.need("num").integer();
      if (by == 0) template_error("a number is divided by 0");
      return by == -1 || value.integer() % by == 0;
    }
    if (is({"eq", "equalto", "=="})) return equal(value, taken.need("other"), budget);
    if (is({"ne", "!="})) return !equal(value, taken.need("other"), budget);
    if (is({"lt", "lessthan", "<"})) return compare(value, taken.need("other"), "<", budget) < 0;
    if (is({"le", "<="})) return compare(value, taken.need("other"), "<=", budget) <= 0;
    if (is({"gt", "greaterthan", ">"})) return compare(value, taken.need("other"), ">", budget) > 0;
    if (is({"ge", ">="})) return compare(value, taken.need("other"), ">=", budget) >= 0;
    if (name == "in") return contains(taken.need("seq"), value, budget);
    if (name == "sameas") {
      const Value& other = taken.need("other");
      return value.type() == other.type() && equal(value, other, budget);
    }
    template_error("the test '", name, "' is not supported");
  }();
  taken.end();
  return result;
}

}  // namespace headloom::jinja
