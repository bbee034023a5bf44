#include <algorithm>
#include <cmath>

#include "serve/jinja/builtins.h"
#include "serve/jinja/text.h"

namespace headloom::jinja {
namespace {

// range() in the sandbox that transformers renders in.
constexpr int64_t kLongestRange = 100'000;

[[noreturn]] void no_operator(const std::string& name, const Value& a, const Value& b) {
  if (a.is_undefined()) a.refuse_undefined();
  if (b.is_undefined()) b.refuse_undefined();
  template_error("'", name, "' is not defined between ", a.type(), " and ", b.type());
}

void check(bool overflow) {
  if (overflow) template_error("an integer is too large");
}

Value integers(const std::string& name, int64_t a, int64_t b) {
  int64_t out = 0;
  if (name == "+") {
    check(__builtin_add_overflow(a, b, &out));
    return out;
  }
  if (name == "-") {
    check(__builtin_sub_overflow(a, b, &out));
    return out;
  }
  if (name == "*") {
    check(__builtin_mul_overflow(a, b, &out));
    return out;
  }
  if (name == "**") {
    if (b < 0) return std::pow(static_cast<double>(a), static_cast<double>(b));
    out = 1;
    for (int64_t i = 0; i < b && out != 0 && (a != 1 || i == 0); ++i) {
      if (a == -1) return b % 2 == 0 ? 1 : -1;
      check(__builtin_mul_overflow(out, a, &out));
    }
    return out;
  }
  if (b == 0) template_error("a number is divided by 0");
  if (name == "/") return static_cast<double>(a) / static_cast<double>(b);
  if (b == -1) return name == "%" ? Value(0) : integers("-", 0, a);
  const bool down = a % b != 0 && (a < 0) != (b < 0);  // Python rounds down
  if (name == "//") return a / b - (down ? 1 : 0);
  return a % b + (down ? b : 0);
}

Value numbers(const std::string& name, double a, double b) {
  if (name == "+") return a + b;
  if (name == "-") return a - b;
  if (name == "*") return a * b;
  if (name == "**") return std::pow(a, b);
  if (b == 0) template_error("a number is divided by 0");
  if (name == "/") return a / b;
  if (name == "//") return std::floor(a / b);
  const double rest = std::fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

Value repeated(const Value& value, int64_t count, Budget& budget) {
  count = std::max<int64_t>(count, 0);
  const auto size = static_cast<int64_t>(value.is_text() ? value.text().size()
                                                         : sizeof(Value) * value.list().size());
  if (size > 0 && count > Budget::kMostBytes / size) budget.make(size_t{Budget::kMostBytes} + 1);
  budget.make(static_cast<size_t>(size * count));
  if (value.is_text()) {
    std::string out;
    for (int64_t i = 0; i < count; ++i) out += value.text();
    return out;
  }
  List out;
  for (int64_t i = 0; i < count && size > 0; ++i) {
    out.items.insert(out.items.end(), value.list().begin(), value.list().end());
  }
  return out;
}

}  // namespace

const Value* Taken::next(const char* name) {
  if (at_ < call_.positional.size()) return &call_.positional[at_++];
  for (const auto& [given, value] : call_.named) {
    if (given == name) {
      ++named_;
      return &value;
    }
  }
  return nullptr;
}

const Value& Taken::need(const char* name) {
  const Value* value = next(name);
  if (value == nullptr) template_error(callee_, " lacks its argument '", name, "'");
  return *value;
}

int64_t Taken::integer(const char* name, int64_t otherwise) {
  const Value* value = next(name);
  return value == nullptr ? otherwise : value->integer();
}

std::string Taken::text(const char* name, const std::string& otherwise) {
  const Value* value = next(name);
  return value == nullptr || value->is_none() ? otherwise : value->text();
}

bool Taken::flag(const char* name, bool otherwise) {
  const Value* value = next(name);
  return value == nullptr ? otherwise : value->truth();
}

void Taken::end() const {
  if (at_ < call_.positional.size()) {
    template_error(callee_, " takes at most ", at_, " arguments, found ", call_.positional.size());
  }
  if (named_ < call_.named.size()) {
    template_error(callee_, " has an argument that is not supported, among ", call_.named.size(),
                   " with names, the last of them '", call_.named.back().first, "'");
  }
}

Value attribute_of(const Value& value, const std::string& name, Budget& budget) {
  if (value.is_undefined()) value.refuse_undefined();
  Value method = method_of(value, name, budget);
  if (!method.is_undefined()) return method;
  const Value* found = nullptr;
  if (value.is_dict()) found = value.dict().find(name);
  if (value.is_namespace()) found = value.space().attributes.find(name);
  if (found != nullptr) return *found;
  return Undefined{"the attribute '" + name + "' of a " + value.type()};
}

Value item_of(const Value& value, const Value& key, Budget& budget) {
  if (value.is_undefined()) value.refuse_undefined();
  if (value.is_dict() && key.is_text()) {
    const Value* found = value.dict().find(key.text());
    return found != nullptr ? *found : attribute_of(value, key.text(), budget);
  }
  if ((value.is_list() || value.is_text()) && key.is_integer()) {
    const std::vector<Value> letters = value.is_text() ? items_of(value) : std::vector<Value>();
    budget.step(1 + static_cast<int64_t>(letters.size()));
    const std::vector<Value>& items = value.is_text() ? letters : value.list();
    const auto size = static_cast<int64_t>(items.size());
    const int64_t at = key.integer() < 0 ? key.integer() + size : key.integer();
    if (at >= 0 && at < size) return items[static_cast<size_t>(at)];
    return Undefined{str("item ", key.integer(), " of a ", value.type(), " of length ", size)};
  }
  if (key.is_text() && !value.is_list()) return attribute_of(value, key.text(), budget);
  return Undefined{"the item " + quoted(key) + " of a " + value.type()};
}

Value slice_of(const Value& value, const Value& begin, const Value& end, const Value& step,
               Budget& budget) {
  if (!value.is_text()) value.list();  // throws for what has no slices
  const std::vector<Value> items = items_of(value);
  budget.step(static_cast<int64_t>(items.size()));
  const auto size = static_cast<int64_t>(items.size());
  const int64_t by = step.is_none() ? 1 : step.integer();
  if (by == 0) template_error("the step of a slice is 0");
  const auto bound = [&](const Value& given, int64_t otherwise) {
    if (given.is_none()) return otherwise;
    const int64_t at = given.integer() < 0 ? given.integer() + size : given.integer();
    return by > 0 ? std::clamp<int64_t>(at, 0, size) : std::clamp<int64_t>(at, -1, size - 1);
  };
  const int64_t first = bound(begin, by > 0 ? 0 : size - 1);
  const int64_t last = bound(end, by > 0 ? size : -1);
  std::vector<Value> out;
  for (int64_t i = first; by > 0 ? i < last : i > last;) {
    out.push_back(items[static_cast<size_t>(i)]);
    if (__builtin_add_overflow(i, by, &i)) break;
  }
  if (!value.is_text()) return List{.items = std::move(out), .tuple = value.whole_list().tuple};
  std::string text;
  for (const Value& c : out) text += c.text();
  budget.make(text.size());
  return text;
}

Value operated(const std::string& name, const Value& a, const Value& b, Budget& budget) {
  if (name == "~" || (name == "+" && a.is_text() && b.is_text())) {
    std::string out = shown(a) + shown(b);
    budget.make(out.size());
    return out;
  }
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return numbers(name, a.number(), b.number());
    return integers(name, a.integer(), b.integer());
  }
  if (name == "+" && a.is_list() && b.is_list() && a.type() == b.type()) {
    List out = a.whole_list();
    out.items.insert(out.items.end(), b.list().begin(), b.list().end());
    budget.make(out.items.size() * sizeof(Value));
    return out;
  }
  if (name == "*" && (a.is_text() || a.is_list()) && b.is_integer()) {
    return repeated(a, b.integer(), budget);
  }
  if (name == "*" && (b.is_text() || b.is_list()) && a.is_integer()) {
    return repeated(b, a.integer(), budget);
  }
  if (name == "%" && a.is_text()) template_error("'%' on a text is not supported; use '~'");
  no_operator(name, a, b);
}

Value negated(const Value& value) {
  if (value.is_float()) return -value.number();
  return integers("-", 0, value.integer());
}

Dict global_functions(std::vector<std::shared_ptr<Namespace>>& spaces, Budget& budget) {
  Dict out;
  const auto add = [&](const char* name, std::function<Value(Call&)> body) {
    out.set(name, std::make_shared<const Function>(Function{name, std::move(body)}));
  };
  add("range", [&budget](Call& call) -> Value {
    Taken taken(call, "range()");
    const Value first = taken.need("start");
    const Value* second = taken.next("stop");
    const int64_t begin = second != nullptr ? first.integer() : 0;
    const int64_t end = second != nullptr ? second->integer() : first.integer();
    const int64_t step = taken.integer("step", 1);
    taken.end();
    if (step == 0) template_error("the step of range() is 0");
    const double count =
        (static_cast<double>(end) - static_cast<double>(begin)) / static_cast<double>(step);
    if (count > static_cast<double>(kLongestRange)) {
      template_error("range() has more than ", kLongestRange, " items");
    }
    List list;
    for (int64_t i = 0; i < static_cast<int64_t>(std::ceil(count)); ++i) {
      list.items.emplace_back(begin + i * step);
    }
    budget.make(list.items.size() * sizeof(Value));
    return list;
  });
  add("dict", [](Call& call) -> Value {
    Dict dict;
    if (!call.positional.empty()) dict = call.positional[0].dict();
    if (call.positional.size() > 1)
      template_error("dict() takes at most 1 argument without a name");
    for (const auto& [name, value] : call.named) dict.set(name, value);
    return dict;
  });
  add("namespace", [&spaces, &budget](Call& call) -> Value {
    auto space = std::make_shared<Namespace>();
    if (!call.positional.empty()) space->attributes = call.positional[0].dict();
    for (const auto& [name, value] : call.named) space->attributes.set(name, value);
    budget.make(sizeof(Namespace));
    spaces.push_back(space);
    return space;
  });
  return out;
}

}  // namespace headloom::jinja
