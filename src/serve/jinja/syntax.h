// A Jinja template as a tree.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serve/jinja/value.h"

namespace headloom::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

struct Arguments {
  std::vector<ExpressionPtr> positional;
  std::vector<std::pair<std::string, ExpressionPtr>> named;
};

struct Expression {
  enum class Kind {
    constant,     // value
    name,         // name
    list,         // parts; a tuple where `flag`
    dict,         // parts: key, value, key, value, ...
    attribute,    // parts[0].name
    item,         // parts[0][parts[1]]
    slice,        // parts[0][parts[1]:parts[2]:parts[3]], absent ones null
    call,         // parts[0](arguments)
    filter,       // parts[0] | name(arguments); parts[0] null: the body of a block
    test,         // parts[0] is name(arguments); "is not" where `flag`
    unary,        // name: "-", "+" or "not"
    binary,       // name, parts[0] and parts[1]; also "and", "or" and "~"
    compare,      // parts[0], then names[i] parts[i + 1] chained
    conditional,  // parts[0] if parts[1] else parts[2], which may be null
  };
  Kind kind = Kind::constant;
  int line = 1;
  Value value = {};
  std::string name = {};
  bool flag = false;
  std::vector<ExpressionPtr> parts = {};
  std::vector<std::string> names = {};
  Arguments arguments = {};
  int depth = 1;  // of expressions in each other
};

struct Statement;
using Block = std::vector<std::unique_ptr<Statement>>;

struct Statement {
  enum class Kind {
    text,       // text
    output,     // {{ expression }}
    condition,  // branches in order, a null condition for else
    loop,       // for names in expression if condition; body, otherwise
    set,        // names = expression, or names[0].attribute = expression
    set_block,  // names[0] = body, filtered by expression
    macro,      // name(parameters with defaults), body
    filter,     // body, filtered by expression
    scope,      // body, in a scope of its own: {% generation %}
    leave,      // {% break %}
    next,       // {% continue %}
  };
  Kind kind = Kind::text;
  int line = 1;
  std::string text = {};
  ExpressionPtr expression = {};
  ExpressionPtr condition = {};
  std::vector<std::string> names = {};
  std::string attribute = {};
  std::vector<std::pair<ExpressionPtr, Block>> branches = {};
  std::vector<std::pair<std::string, ExpressionPtr>> parameters = {};
  Block body = {}, otherwise = {};
};

// Throws TemplateError naming the line and what stands there.
Block parse_template(std::string_view source);

}  // namespace headloom::jinja
