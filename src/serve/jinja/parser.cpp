#include "serve/jinja/parser.h"

namespace headloom::jinja {
namespace {

class Parser final : private ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  Block run() {
    Block out = block({});
    if (!now().is(Kind::end, "")) wrong("'" + after().value + "' ends no block");
    return out;
  }

 private:
  // Up to a tag that begins with one of `ends`, or the end.
  Block block(const std::vector<std::string_view>& ends) {
    const Deeper deeper(*this);
    Block out;
    while (now().kind != Kind::end) {
      auto statement = std::make_unique<Statement>();
      statement->line = now().line;
      if (now().kind == Kind::text) {
        statement->text = take().value;
      } else if (now().kind == Kind::output_begin) {
        take();
        statement->kind = Statement::Kind::output;
        statement->expression = tuple();
        if (now().kind != Kind::output_end) expected("the end of the tag");
        take();
      } else {
        const Token& tag = after();
        if (tag.kind != Kind::name) {
          take();
          expected("the name of a block");
        }
        if (std::find(ends.begin(), ends.end(), tag.value) != ends.end()) return out;
        if (tag.value.starts_with("end") || tag.value == "else" || tag.value == "elif") {
          if (ends.empty()) return out;
          take();
          wrong("'" + tag.value + "' stands where '" + std::string(ends.back()) + "' is expected");
        }
        take();
        read(*statement, take().value);
      }
      out.push_back(std::move(statement));
    }
    if (!ends.empty()) wrong("there is no '" + std::string(ends.back()) + "'");
    return out;
  }

  // The body of a block, and its end tag.
  Block body(std::string_view end) {
    Block out = block({end});
    take();
    take();
    end_tag();
    return out;
  }

  void read(Statement& s, const std::string& tag) {
    if (tag == "if") {
      read_condition(s);
    } else if (tag == "for") {
      read_loop(s);
    } else if (tag == "set") {
      read_set(s);
    } else if (tag == "macro") {
      read_macro(s);
    } else if (tag == "filter") {
      s.kind = Statement::Kind::filter;
      s.expression = filters(nullptr, true);
      end_tag();
      s.body = body("endfilter");
    } else if (tag == "generation") {
      s.kind = Statement::Kind::scope;
      end_tag();
      s.body = body("endgeneration");
    } else if (tag == "break" || tag == "continue") {
      if (loops_ == 0) wrong("'" + tag + "' stands in no loop");
      s.kind = tag == "break" ? Statement::Kind::leave : Statement::Kind::next;
      end_tag();
    } else {
      wrong("the block '" + tag +
            "' is not supported; there are if, for, set, macro, filter, raw, break, continue and "
            "generation");
    }
  }

  void read_condition(Statement& s) {
    s.kind = Statement::Kind::condition;
    ExpressionPtr condition = tuple(false);
    end_tag();
    while (true) {
      Block then = block({"elif", "else", "endif"});
      s.branches.emplace_back(std::move(condition), std::move(then));
      take();
      const std::string tag = take().value;
      if (tag == "elif") {
        condition = tuple(false);
        end_tag();
        continue;
      }
      end_tag();
      if (tag == "else") s.branches.emplace_back(nullptr, body("endif"));
      return;
    }
  }

  std::vector<std::string> targets() {
    std::vector<std::string> out;
    const bool bracket = skip_symbol("(");
    do {
      if (!out.empty() && now().name("in")) break;
      out.push_back(need_name());
    } while (skip_symbol(","));
    if (bracket) need_symbol(")");
    return out;
  }

  void read_loop(Statement& s) {
    s.kind = Statement::Kind::loop;
    s.names = targets();
    if (!skip_name("in")) expected("'in'");
    s.expression = tuple(false);
    if (skip_name("if")) s.condition = expression();
    if (now().name("recursive")) wrong("a loop that is 'recursive' is not supported");
    end_tag();
    ++loops_;
    s.body = block({"else", "endfor"});
    --loops_;
    take();
    const bool otherwise = take().value == "else";
    end_tag();
    if (otherwise) s.otherwise = body("endfor");
  }

  void read_set(Statement& s) {
    s.kind = Statement::Kind::set;
    if (after().symbol(".")) {
      s.names = {need_name()};
      take();
      s.attribute = need_name();
    } else {
      s.names = targets();
    }
    if (skip_symbol("=")) {
      s.expression = tuple();
      end_tag();
      return;
    }
    if (s.names.size() != 1) expected("'='");
    s.kind = Statement::Kind::set_block;
    if (now().symbol("|")) s.expression = filters(nullptr);
    end_tag();
    s.body = body("endset");
  }

  void read_macro(Statement& s) {
    s.kind = Statement::Kind::macro;
    s.names = {need_name()};
    need_symbol("(");
    while (!now().symbol(")")) {
      if (!s.parameters.empty()) need_symbol(",");
      std::string name = need_name();
      ExpressionPtr otherwise = skip_symbol("=") ? expression() : nullptr;
      s.parameters.emplace_back(std::move(name), std::move(otherwise));
    }
    take();
    end_tag();
    const int loops = std::exchange(loops_, 0);
    s.body = body("endmacro");
    loops_ = loops;
  }

  int loops_ = 0;
};

}  // namespace

Block parse_template(std::string_view source) { return Parser(tokens_of_template(source)).run(); }

}  // namespace headloom::jinja
