// A Jinja template as tokens.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace headloom::jinja {

struct Token {
  enum class Kind {
    text,          // outside of tags
    output_begin,  // {{
    output_end,
    block_begin,  // {%
    block_end,
    name,
    string,  // value: unescaped
    integer,
    real,
    symbol,  // an operator or a bracket
    end
  };
  Kind kind = Kind::end;
  std::string value;
  int line = 1;

  bool is(Kind k, std::string_view v) const { return kind == k && value == v; }
  bool symbol(std::string_view v) const { return is(Kind::symbol, v); }
  bool name(std::string_view v) const { return is(Kind::name, v); }
};

// White space around tags is treated as transformers sets it: trim_blocks (the line break after a
// block goes), lstrip_blocks (so do the spaces in front of a block that begins its line), and the
// signs - and + in a tag. The last one is Kind::end. Throws TemplateError naming the line.
std::vector<Token> tokens_of_template(std::string_view source);

}  // namespace headloom::jinja
