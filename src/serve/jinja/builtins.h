// What Jinja and Python bring along: attributes, methods, filters, tests and operators.
#pragma once

#include <string>

#include "serve/jinja/value.h"

namespace headloom::jinja {

// The arguments of a call by position or name; says what is wrong with them.
class Taken {
 public:
  // `callee` is how messages call it: "the filter 'join'".
  Taken(Call& call, std::string callee) : call_(call), callee_(std::move(callee)) {}

  // The next argument, or the one called `name`; null where there is none.
  const Value* next(const char* name);
  const Value& need(const char* name);
  int64_t integer(const char* name, int64_t otherwise);
  std::string text(const char* name, const std::string& otherwise);
  bool flag(const char* name, bool otherwise);
  // Throws where more were given.
  void end() const;
  const std::string& callee() const { return callee_; }

 private:
  Call& call_;
  std::string callee_;
  size_t at_ = 0, named_ = 0;
};

// value.name and value[key]; undefined where there is none. Throw TemplateError for an undefined
// value.
Value attribute_of(const Value& value, const std::string& name, Budget& budget);
Value item_of(const Value& value, const Value& key, Budget& budget);
Value slice_of(const Value& value, const Value& begin, const Value& end, const Value& step,
               Budget& budget);

// The method of a text, a list or a dictionary; undefined where there is none.
Value method_of(const Value& value, const std::string& name, Budget& budget);

// Throw TemplateError for a name that is not known.
Value filtered(const std::string& name, const Value& value, Call& call, Budget& budget);
bool tested(const std::string& name, const Value& value, Call& call, Budget& budget);

// "+", "-", "*", "/", "//", "%", "**" and "~".
Value operated(const std::string& name, const Value& a, const Value& b, Budget& budget);
Value negated(const Value& value);

// range(), dict() and namespace(). What namespace() makes is kept in `spaces`.
Dict global_functions(std::vector<std::shared_ptr<Namespace>>& spaces, Budget& budget);

}  // namespace headloom::jinja
