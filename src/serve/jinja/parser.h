// Reads a template's tokens: what tags have inside.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serve/jinja/lexer.h"
#include "serve/jinja/syntax.h"

namespace headloom::jinja {

class ExpressionParser {
 public:
  explicit ExpressionParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

 protected:
  using Kind = Token::Kind;
  static constexpr int kDeepest = 200;  // of tags, brackets and operations in each other

  struct Deeper {
    explicit Deeper(ExpressionParser& parser) : depth(parser.depth_) {
      if (++depth > kDeepest) {
        parser.wrong(str("tags and brackets are nested deeper than ", kDeepest, " levels"));
      }
    }
    ~Deeper() { --depth; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;
    int& depth;
  };

  [[noreturn]] void wrong(const std::string& message) const {
    template_error("line ", now().line, ": ", message);
  }
  [[noreturn]] void expected(const std::string& what) const {
    wrong("expected " + what + ", found " + found());
  }
  std::string found() const {
    switch (now().kind) {
      case Kind::end:
        return "the end of the template";
      case Kind::block_end:
      case Kind::output_end:
        return "the end of the tag";
      case Kind::text:
      case Kind::block_begin:
      case Kind::output_begin:
        return "another tag";
      default:
        return "'" + now().value + "'";
    }
  }

  const Token& now() const { return tokens_[at_]; }
  const Token& after() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool skip_symbol(std::string_view symbol) {
    const bool there = now().symbol(symbol);
    if (there) take();
    return there;
  }
  bool skip_name(std::string_view name) {
    const bool there = now().name(name);
    if (there) take();
    return there;
  }
  void need_symbol(std::string_view symbol) {
    if (!skip_symbol(symbol)) expected("'" + std::string(symbol) + "'");
  }
  std::string need_name() {
    if (now().kind != Kind::name) expected("a name");
    return take().value;
  }
  void end_tag() {
    if (now().kind != Kind::block_end) expected("the end of the tag");
    take();
  }

  ExpressionPtr make(Expression::Kind kind, std::string name = {}) const {
    auto out = std::make_unique<Expression>();
    out->kind = kind;
    out->line = now().line;
    out->name = std::move(name);
    return out;
  }
  ExpressionPtr make(Expression::Kind kind, std::string name, ExpressionPtr a,
                     ExpressionPtr b = nullptr) const {
    ExpressionPtr out = make(kind, std::move(name));
    out->line = a ? a->line : out->line;
    add(*out, std::move(a));
    if (b) add(*out, std::move(b));
    return out;
  }
  void add(Expression& out, ExpressionPtr part) const {
    if (part) deepen(out, *part);
    out.parts.push_back(std::move(part));
  }
  // Evaluating and freeing recurse.
  void deepen(Expression& out, const Expression& part) const {
    out.depth = std::max(out.depth, 1 + part.depth);
    if (out.depth > kDeepest) {
      wrong(str("an expression has more than ", kDeepest, " operations in each other"));
    }
  }

  // One expression, or several with commas as a tuple.
  ExpressionPtr tuple(bool conditional = true);
  ExpressionPtr expression();
  ExpressionPtr disjunction();
  // Filters, tests and calls after a value; `begun`: the first has no '|' in front of it.
  ExpressionPtr filters(ExpressionPtr out, bool begun = false);

 private:
  ExpressionPtr conjunction();
  ExpressionPtr negation();
  ExpressionPtr comparison();
  template <typename Next>
  ExpressionPtr operators(std::initializer_list<const char*> symbols, const Next& next) {
    ExpressionPtr left = next();
    while (true) {
      const auto found = std::find_if(symbols.begin(), symbols.end(),
                                      [&](const char* symbol) { return now().symbol(symbol); });
      if (found == symbols.end()) return left;
      take();
      left = make(Expression::Kind::binary, *found, std::move(left), next());
    }
  }
  ExpressionPtr sum();
  ExpressionPtr joined();
  ExpressionPtr product();
  ExpressionPtr power();
  ExpressionPtr unary(bool filtered);
  ExpressionPtr constant(Value value) const;
  ExpressionPtr primary();
  ExpressionPtr postfix(ExpressionPtr out);
  ExpressionPtr subscript(ExpressionPtr out);
  void read_arguments(Expression& call);
  ExpressionPtr test(ExpressionPtr out);

  const std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace headloom::jinja
