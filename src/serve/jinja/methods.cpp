// Methods of Python's str, list and dict.
#include <algorithm>

#include "serve/jinja/builtins.h"
#include "serve/jinja/text.h"

namespace headloom::jinja {
namespace {

Value texts(const std::vector<std::string>& list, Budget& budget) {
  List out;
  for (const std::string& text : list) {
    budget.make(text.size() + sizeof(Value));
    out.items.emplace_back(text);
  }
  return out;
}

Value made_text(std::string text, Budget& budget) {
  budget.make(text.size());
  return text;
}

// Whether `text` begins (or ends) with the text or one of the tuple `what`.
bool at_end(const std::string& text, const Value& what, bool begin) {
  if (what.is_list()) {
    return std::any_of(what.list().begin(), what.list().end(),
                       [&](const Value& one) { return at_end(text, one, begin); });
  }
  return begin ? text.starts_with(what.text()) : text.ends_with(what.text());
}

int64_t count_of(std::string_view text, std::string_view part) {
  if (part.empty()) return static_cast<int64_t>(characters(text).size()) + 1;
  int64_t count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string_view::npos; at += part.size()) {
    ++count;
  }
  return count;
}

bool all_of(std::string_view text, bool (*is)(std::string_view character)) {
  const auto all = characters(text);
  return !all.empty() && std::all_of(all.begin(), all.end(), is);
}

using TextMethod = Value (*)(const std::string& text, Taken& taken, Budget& budget);

template <bool left, bool right>
Value strip(const std::string& text, Taken& taken, Budget& budget) {
  const Value* chars = taken.next("chars");
  if (chars != nullptr && chars->is_text() && chars->text().empty()) return text;
  return made_text(
      stripped(text, chars == nullptr || chars->is_none() ? "" : chars->text(), left, right),
      budget);
}

template <bool right>
Value split_at(const std::string& text, Taken& taken, Budget& budget) {
  const Value* separator = taken.next("sep");
  const int64_t most = taken.integer("maxsplit", -1);
  const bool spaces = separator == nullptr || separator->is_none();
  if (!spaces && separator->text().empty())
    template_error(taken.callee(), " has an empty separator");
  return texts(split(text, spaces ? "" : separator->text(), most, right), budget);
}

template <bool right>
Value find_in(const std::string& text, Taken& taken, Budget&) {
  const std::string part = taken.need("sub").text();
  const size_t at = right ? text.rfind(part) : text.find(part);
  if (at == std::string::npos) return -1;
  return static_cast<int64_t>(characters(std::string_view(text).substr(0, at)).size());
}

const std::vector<std::pair<std::string_view, TextMethod>>& text_methods() {
  static const std::vector<std::pair<std::string_view, TextMethod>> table = {
      {"strip", strip<true, true>},
      {"lstrip", strip<true, false>},
      {"rstrip", strip<false, true>},
      {"split", split_at<false>},
      {"rsplit", split_at<true>},
      {"find", find_in<false>},
      {"rfind", find_in<true>},
      {"splitlines", [](const std::string& t, Taken&, Budget& b) { return texts(lines(t), b); }},
      {"upper", [](const std::string& t, Taken&, Budget& b) { return made_text(upper(t), b); }},
      {"lower", [](const std::string& t, Taken&, Budget& b) { return made_text(lower(t), b); }},
      {"title", [](const std::string& t, Taken&, Budget& b) { return made_text(titled(t), b); }},
      {"capitalize",
       [](const std::string& t, Taken&, Budget& b) { return made_text(capitalized(t), b); }},
      {"startswith",
       [](const std::string& t, Taken& a, Budget&) -> Value {
         return at_end(t, a.need("prefix"), true);
       }},
      {"endswith",
       [](const std::string& t, Taken& a, Budget&) -> Value {
         return at_end(t, a.need("suffix"), false);
       }},
      {"removeprefix",
       [](const std::string& t, Taken& a, Budget& b) {
         const std::string part = a.need("prefix").text();
         return made_text(t.starts_with(part) ? t.substr(part.size()) : t, b);
       }},
      {"removesuffix",
       [](const std::string& t, Taken& a, Budget& b) {
         const std::string part = a.need("suffix").text();
         return made_text(t.ends_with(part) ? t.substr(0, t.size() - part.size()) : t, b);
       }},
      {"replace",
       [](const std::string& t, Taken& a, Budget& b) {
         const std::string old = a.need("old").text(), by = a.need("new").text();
         const int64_t most = a.integer("count", -1);
         // What comes out is known before it is made.
         b.make(t.size() + by.size() * static_cast<size_t>(count_of(t, old)));
         return made_text(replaced(t, old, by, most), b);
       }},
      {"join",
       [](const std::string& t, Taken& a, Budget& b) {
         std::string out;
         bool first = true;
         for (const Value& item : items_of(a.need("iterable"))) {
           b.make(item.text().size() + t.size());
           out += (first ? "" : t) + item.text();
           first = false;
         }
         return Value(std::move(out));
       }},
      {"count",
       [](const std::string& t, Taken& a, Budget&) -> Value {
         return count_of(t, a.need("sub").text());
       }},
      {"isdigit",
       [](const std::string& t, Taken&, Budget&) -> Value {
         return all_of(t, is_digit_character);
       }},
      {"isnumeric",
       [](const std::string& t, Taken&, Budget&) -> Value {
         return all_of(t, is_number_character);
       }},
      {"isspace",
       [](const std::string& t, Taken&, Budget&) -> Value { return all_of(t, is_space); }},
  };
  return table;
}

Value pair_of(const std::string& key, const Value& value) {
  return List{.items = {Value(key), value}, .tuple = true};
}

Value dict_method(const Dict& dict, const std::string& name, Taken& taken, Budget& budget) {
  if (name == "get") {
    const Value key = taken.need("key");
    const Value* otherwise = taken.next("default");
    const Value* found = key.is_text() ? dict.find(key.text()) : nullptr;
    if (found != nullptr) return *found;
    return otherwise != nullptr ? *otherwise : Value(None{});
  }
  List out;
  for (const auto& [key, value] : dict.items) {
    budget.make(key.size() + 2 * sizeof(Value));
    out.items.push_back(name == "items"    ? pair_of(key, value)
                        : name == "values" ? value
                                           : Value(key));
  }
  return out;
}

Value list_method(const std::vector<Value>& list, const std::string& name, Taken& taken,
                  Budget& budget) {
  const Value item = taken.need("value");
  const auto same = [&](const Value& other) {
    budget.step();
    return equal(item, other, budget);
  };
  if (name == "count") {
    return static_cast<int64_t>(std::count_if(list.begin(), list.end(), same));
  }
  const auto found = std::find_if(list.begin(), list.end(), same);
  if (found == list.end()) template_error(quoted(item), " is not in the list");
  return static_cast<int64_t>(found - list.begin());
}

bool one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

Value method_of(const Value& value, const std::string& name, Budget& budget) {
  std::function<Value(Taken&)> body;
  if (value.is_text()) {
    for (const auto& [known, method] : text_methods()) {
      if (known != name) continue;
      body = [method = method, value, &budget](Taken& taken) {
        budget.make(value.text().size());  // each reads the whole text
        return method(value.text(), taken, budget);
      };
    }
  } else if (value.is_dict() && one_of(name, {"get", "items", "keys", "values"})) {
    body = [value, name, &budget](Taken& taken) {
      return dict_method(value.dict(), name, taken, budget);
    };
  } else if (value.is_list() && one_of(name, {"index", "count"})) {
    body = [value, name, &budget](Taken& taken) {
      return list_method(value.list(), name, taken, budget);
    };
  } else if ((value.is_list() &&
              one_of(name, {"append", "extend", "insert", "pop", "remove", "sort", "reverse"})) ||
             (value.is_dict() && one_of(name, {"pop", "update", "setdefault", "clear"}))) {
    template_error("'", name, "' would change a ", value.type(), ", which templates may not do");
  }
  if (!body) return {};
  auto whole = [name, body = std::move(body)](Call& call) {
    Taken taken(call, name + "()");
    Value out = body(taken);
    taken.end();
    return out;
  };
  return std::make_shared<const Function>(Function{name, std::move(whole)});
}

}  // namespace headloom::jinja
