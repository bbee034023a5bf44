#include "serve/jinja/parser.h"

#include <cstdlib>

#include "core/parse_number.h"

namespace headloom::jinja {

ExpressionPtr ExpressionParser::tuple(bool conditional) {
  const auto one = [&] { return conditional ? expression() : disjunction(); };
  ExpressionPtr first = one();
  if (!now().symbol(",")) return first;
  ExpressionPtr out = make(Expression::Kind::list);
  out->flag = true;
  add(*out, std::move(first));
  while (skip_symbol(",")) {
    if (now().kind == Kind::block_end || now().kind == Kind::output_end || now().symbol(")")) {
      break;
    }
    add(*out, one());
  }
  return out;
}

ExpressionPtr ExpressionParser::expression() {
  const Deeper deeper(*this);
  ExpressionPtr value = disjunction();
  while (skip_name("if")) {
    ExpressionPtr condition = disjunction();
    ExpressionPtr otherwise = skip_name("else") ? expression() : nullptr;
    value = make(Expression::Kind::conditional, "", std::move(value), std::move(condition));
    add(*value, std::move(otherwise));
  }
  return value;
}

ExpressionPtr ExpressionParser::disjunction() {
  ExpressionPtr left = conjunction();
  while (skip_name("or")) {
    left = make(Expression::Kind::binary, "or", std::move(left), conjunction());
  }
  return left;
}

ExpressionPtr ExpressionParser::conjunction() {
  ExpressionPtr left = negation();
  while (skip_name("and")) {
    left = make(Expression::Kind::binary, "and", std::move(left), negation());
  }
  return left;
}

ExpressionPtr ExpressionParser::negation() {
  const Deeper deeper(*this);
  if (!now().name("not") || after().name("in")) return comparison();
  take();
  return make(Expression::Kind::unary, "not", negation());
}

ExpressionPtr ExpressionParser::comparison() {
  ExpressionPtr left = sum();
  ExpressionPtr out;
  while (true) {
    std::string name;
    for (const char* symbol : {"==", "!=", "<", "<=", ">", ">="}) {
      if (now().symbol(symbol)) name = symbol;
    }
    if (now().name("in")) name = "in";
    if (now().name("not") && after().name("in")) {
      take();
      name = "not in";
    }
    if (name.empty()) return out ? std::move(out) : std::move(left);
    take();
    if (!out) out = make(Expression::Kind::compare, "", std::move(left));
    out->names.push_back(name);
    add(*out, sum());
  }
}

ExpressionPtr ExpressionParser::sum() {
  return operators({"+", "-"}, [&] { return joined(); });
}

ExpressionPtr ExpressionParser::joined() {
  return operators({"~"}, [&] { return product(); });
}

ExpressionPtr ExpressionParser::product() {
  return operators({"*", "//", "/", "%"}, [&] { return power(); });
}

ExpressionPtr ExpressionParser::power() {
  return operators({"**"}, [&] { return unary(true); });
}

ExpressionPtr ExpressionParser::unary(bool filtered) {
  const Deeper deeper(*this);
  ExpressionPtr out;
  if (now().symbol("-") || now().symbol("+")) {
    const std::string sign = take().value;
    out = make(Expression::Kind::unary, sign, unary(false));
  } else {
    out = primary();
  }
  out = postfix(std::move(out));
  return filtered ? filters(std::move(out)) : std::move(out);
}

ExpressionPtr ExpressionParser::constant(Value value) const {
  ExpressionPtr out = make(Expression::Kind::constant);
  out->value = std::move(value);
  return out;
}

ExpressionPtr ExpressionParser::primary() {
  const Deeper deeper(*this);
  const Token token = now();
  if (token.kind == Kind::name) {
    take();
    if (token.value == "true" || token.value == "True") return constant(true);
    if (token.value == "false" || token.value == "False") return constant(false);
    if (token.value == "none" || token.value == "None") return constant(None{});
    return make(Expression::Kind::name, token.value);
  }
  if (token.kind == Kind::string) {
    std::string text;
    while (now().kind == Kind::string) text += take().value;
    return constant(std::move(text));
  }
  if (token.kind == Kind::integer) {
    const auto number = parse_number<int64_t>(token.value);
    if (!number) wrong("the integer " + token.value + " is too large");
    take();
    return constant(*number);
  }
  if (token.kind == Kind::real) {
    const std::string text = token.value;
    take();
    // Beyond a double's range it is infinite or 0, as in Python.
    return constant(parse_number<double>(text).value_or(std::strtod(text.c_str(), nullptr)));
  }
  if (skip_symbol("(")) {
    ExpressionPtr out;
    if (now().symbol(")")) {
      out = make(Expression::Kind::list);
      out->flag = true;
    } else {
      out = tuple();
    }
    need_symbol(")");
    return out;
  }
  if (skip_symbol("[")) {
    ExpressionPtr out = make(Expression::Kind::list);
    while (!skip_symbol("]")) {
      if (!out->parts.empty()) need_symbol(",");
      if (skip_symbol("]")) break;
      add(*out, expression());
    }
    return out;
  }
  if (skip_symbol("{")) {
    ExpressionPtr out = make(Expression::Kind::dict);
    while (!skip_symbol("}")) {
      if (!out->parts.empty()) need_symbol(",");
      if (skip_symbol("}")) break;
      add(*out, expression());
      need_symbol(":");
      add(*out, expression());
    }
    return out;
  }
  expected("a value");
}

ExpressionPtr ExpressionParser::postfix(ExpressionPtr out) {
  while (true) {
    if (skip_symbol(".")) {
      if (now().kind == Kind::integer) {
        out = make(Expression::Kind::item, "", std::move(out), primary());
      } else {
        out = make(Expression::Kind::attribute, need_name(), std::move(out));
      }
    } else if (skip_symbol("[")) {
      out = subscript(std::move(out));
    } else if (now().symbol("(")) {
      out = make(Expression::Kind::call, "", std::move(out));
      read_arguments(*out);
    } else {
      return out;
    }
  }
}

ExpressionPtr ExpressionParser::subscript(ExpressionPtr out) {
  ExpressionPtr bounds[3];
  size_t colons = 0;
  while (!now().symbol("]")) {
    if (skip_symbol(":")) {
      if (++colons > 2) expected("']'");
    } else if (bounds[colons]) {
      expected("']'");
    } else {
      bounds[colons] = expression();
    }
  }
  take();
  if (colons == 0) {
    if (!bounds[0]) expected("an index");
    return make(Expression::Kind::item, "", std::move(out), std::move(bounds[0]));
  }
  out = make(Expression::Kind::slice, "", std::move(out));
  for (ExpressionPtr& bound : bounds) add(*out, std::move(bound));
  return out;
}

void ExpressionParser::read_arguments(Expression& call) {
  Arguments& out = call.arguments;
  need_symbol("(");
  while (!skip_symbol(")")) {
    if (!out.positional.empty() || !out.named.empty()) {
      need_symbol(",");
      if (skip_symbol(")")) break;
    }
    if (now().symbol("*") || now().symbol("**")) {
      wrong("arguments unpacked with '" + now().value + "' are not supported");
    }
    if (now().kind == Kind::name && after().symbol("=")) {
      std::string name = take().value;
      take();
      out.named.emplace_back(std::move(name), expression());
      deepen(call, *out.named.back().second);
    } else {
      if (!out.named.empty()) expected("an argument with a name");
      out.positional.push_back(expression());
      deepen(call, *out.positional.back());
    }
  }
}

ExpressionPtr ExpressionParser::filters(ExpressionPtr out, bool begun) {
  while (true) {
    if (begun || skip_symbol("|")) {
      begun = false;
      std::string name = need_name();
      while (skip_symbol(".")) name += "." + need_name();
      out = make(Expression::Kind::filter, std::move(name), std::move(out));
      if (now().symbol("(")) read_arguments(*out);
    } else if (out && now().name("is")) {
      out = test(std::move(out));
    } else if (out && now().symbol("(")) {
      out = postfix(std::move(out));
    } else {
      return out;
    }
  }
}

ExpressionPtr ExpressionParser::test(ExpressionPtr out) {
  take();
  const bool negated = skip_name("not");
  out = make(Expression::Kind::test, need_name(), std::move(out));
  out->flag = negated;
  const bool value = now().kind == Kind::string || now().kind == Kind::integer ||
                     now().kind == Kind::real || now().symbol("[") || now().symbol("{") ||
                     (now().kind == Kind::name && !now().name("else") && !now().name("or") &&
                      !now().name("and") && !now().name("if") && !now().name("is") &&
                      !now().name("in") && !now().name("not") && !now().name("recursive"));
  if (now().symbol("(")) {
    read_arguments(*out);
  } else if (value) {
    out->arguments.positional.push_back(postfix(primary()));
    deepen(*out, *out->arguments.positional.back());
  }
  return out;
}

}  // namespace headloom::jinja
