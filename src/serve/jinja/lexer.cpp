#include "serve/jinja/lexer.h"

#include <algorithm>
#include <cstdio>

#include "data/unicode.h"
#include "serve/jinja/value.h"

namespace headloom::jinja {
namespace {

using Kind = Token::Kind;

bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool starts_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

// Line breaks as \n, without the last one.
std::string normal(std::string_view source) {
  std::string out;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
      continue;
    }
    out += '\n';
    if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      read_text();
      if (at_ >= source_.size()) break;
      const char mark = source_[at_ + 1];
      if (mark == '#') {
        read_comment();
      } else if (mark == '%') {
        if (!read_raw()) read_tag(Kind::block_begin, Kind::block_end, "%}");
      } else {
        read_tag(Kind::output_begin, Kind::output_end, "}}");
      }
    }
    add(Kind::end, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void wrong(const std::string& message) const {
    template_error("line ", line_, ": ", message);
  }

  std::string_view rest() const { return std::string_view(source_).substr(at_); }
  void add(Kind kind, std::string value) { tokens_.push_back({kind, std::move(value), line_}); }
  // Passes over `count` characters.
  void pass(size_t count) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(at_ + count),
                                         '\n'));
    at_ += count;
  }

  // Of text in front of a tag whose first character after the opening mark is `sign`.
  std::string before_tag(std::string text, char sign, bool output) const {
    if (sign == '-') {
      while (!text.empty() && is_blank(text.back())) text.pop_back();
    } else if (sign != '+' && !output) {
      const size_t line = text.rfind('\n') + 1;  // 0 where there is none
      if (line > 0 || starts_line_) {
        const bool blank =
            std::all_of(text.begin() + static_cast<std::ptrdiff_t>(line), text.end(), is_blank);
        if (blank) text.resize(line);
      }
    }
    return text;
  }

  // Up to the next tag.
  void read_text() {
    size_t found = at_;
    for (;; ++found) {
      found = source_.find('{', found);
      if (found == std::string::npos || found + 1 >= source_.size()) {
        found = source_.size();
        break;
      }
      const char mark = source_[found + 1];
      if (mark == '{' || mark == '%' || mark == '#') break;
    }
    std::string text = source_.substr(at_, found - at_);
    const bool last = found == source_.size();
    if (!last) {
      const char sign = found + 2 < source_.size() ? source_[found + 2] : '\0';
      text = before_tag(std::move(text), sign, source_[found + 1] == '{');
    }
    if (!text.empty()) add(Kind::text, std::move(text));
    pass(found - at_);
  }

  // After a tag that ends at `at_`; `sign` stood in front of its closing mark.
  void after_tag(char sign, bool output) {
    const size_t begin = at_;
    if (sign == '-') {
      size_t end = at_;
      while (end < source_.size() && is_blank(source_[end])) ++end;
      pass(end - at_);
    } else if (sign != '+' && !output && at_ < source_.size() && source_[at_] == '\n') {
      pass(1);
    }
    starts_line_ = at_ > begin && source_[at_ - 1] == '\n';
  }

  void read_comment() {
    const size_t end = source_.find("#}", at_ + 2);
    if (end == std::string::npos) wrong("a comment that begins with '{#' has no end");
    const char sign = end > at_ + 2 ? source_[end - 1] : '\0';
    pass(end + 2 - at_);
    after_tag(sign, false);
  }

  // {% raw %}...{% endraw %}. False where another tag begins here.
  bool read_raw() {
    // Where the tag `name` that begins at `from` ends, and its signs; npos: it is another tag.
    const auto tag = [&](size_t from, std::string_view name, char& left, char& right) {
      size_t at = from + 2;
      left = at < source_.size() && (source_[at] == '-' || source_[at] == '+') ? source_[at++] : 0;
      while (at < source_.size() && is_blank(source_[at])) ++at;
      if (!std::string_view(source_).substr(at).starts_with(name)) return std::string::npos;
      at += name.size();
      while (at < source_.size() && is_blank(source_[at])) ++at;
      right = at < source_.size() && (source_[at] == '-' || source_[at] == '+') ? source_[at++] : 0;
      return std::string_view(source_).substr(at).starts_with("%}") ? at + 2 : std::string::npos;
    };
    char left = 0, right = 0;
    const size_t begin = tag(at_, "raw", left, right);
    if (begin == std::string::npos) return false;
    pass(begin - at_);
    after_tag(right == '-' ? '-' : '+', false);  // the line break after it stays
    for (size_t end = source_.find("{%", at_); end != std::string::npos;
         end = source_.find("{%", end + 2)) {
      const size_t after = tag(end, "endraw", left, right);
      if (after == std::string::npos) continue;
      std::string text = before_tag(source_.substr(at_, end - at_), left, false);
      if (!text.empty()) add(Kind::text, std::move(text));
      pass(after - at_);
      after_tag(right, false);
      return true;
    }
    wrong("a block 'raw' has no 'endraw'");
  }

  void read_tag(Kind begin, Kind end, std::string_view close) {
    add(begin, "");
    pass(2);
    if (at_ < source_.size() && (source_[at_] == '-' || source_[at_] == '+')) pass(1);
    std::string open;  // brackets
    while (true) {
      size_t blank = 0;
      while (at_ + blank < source_.size() && is_blank(source_[at_ + blank])) ++blank;
      pass(blank);
      if (at_ >= source_.size()) {
        wrong("a tag has no end, expected '" + std::string(close) + "'");
      }
      if (open.empty()) {
        const bool sign = rest()[0] == '-' || (rest()[0] == '+' && end == Kind::block_end);
        if (rest().substr(sign ? 1 : 0).starts_with(close)) {
          const char mark = sign ? rest()[0] : '\0';
          add(end, "");
          pass(close.size() + (sign ? 1 : 0));
          after_tag(mark, end == Kind::output_end);
          return;
        }
      }
      read_token(open);
    }
  }

  void read_token(std::string& open) {
    const char c = source_[at_];
    size_t size = 1;
    if (starts_name(c)) {
      while (size < rest().size() && (starts_name(rest()[size]) || is_digit(rest()[size]))) ++size;
      add(Kind::name, std::string(rest().substr(0, size)));
    } else if (is_digit(c)) {
      size = read_number();
    } else if (c == '"' || c == '\'') {
      size = read_string(c);
    } else {
      for (const char* two : {"**", "//", "==", "!=", "<=", ">="}) {
        if (rest().starts_with(two)) size = 2;
      }
      const std::string symbol(rest().substr(0, size));
      if (size == 1 && std::string_view("+-*/%~<>=()[]{}.,:|").find(c) == std::string_view::npos) {
        char byte[16];
        std::snprintf(byte, sizeof byte, "the byte 0x%02x", static_cast<unsigned char>(c));
        const bool visible = c > ' ' && c < 0x7f;
        wrong((visible ? "the character '" + symbol + "'" : byte) + " is not expected in a tag");
      }
      if (c == '(' || c == '[' || c == '{') open += c;
      if (c == ')' || c == ']' || c == '}') {
        const char begin = c == ')' ? '(' : c == ']' ? '[' : '{';
        if (open.empty() || open.back() != begin) wrong("the bracket '" + symbol + "' closes none");
        open.pop_back();
      }
      add(Kind::symbol, symbol);
    }
    pass(size);
  }

  size_t read_number() {
    size_t size = 0;
    const auto digits = [&] {
      const size_t first = size;
      while (size < rest().size() && (is_digit(rest()[size]) || rest()[size] == '_')) ++size;
      return size > first;
    };
    digits();
    bool real = false;
    const auto digit_at = [&](size_t i) { return i < rest().size() && is_digit(rest()[i]); };
    if (size < rest().size() && rest()[size] == '.' && digit_at(size + 1)) {
      real = true;
      ++size;
      digits();
    }
    if (size < rest().size() && (rest()[size] == 'e' || rest()[size] == 'E')) {
      const size_t sign =
          size + 1 < rest().size() && (rest()[size + 1] == '-' || rest()[size + 1] == '+') ? 1 : 0;
      if (digit_at(size + 1 + sign)) {
        real = true;
        size += 1 + sign;
        digits();
      }
    }
    std::string value(rest().substr(0, size));
    std::erase(value, '_');
    add(real ? Kind::real : Kind::integer, value);
    return size;
  }

  // With Python's escapes.
  size_t read_string(char quote) {
    std::string value;
    for (size_t i = 1; i < rest().size(); ++i) {
      const char c = rest()[i];
      if (c == quote) {
        add(Kind::string, std::move(value));
        return i + 1;
      }
      if (c != '\\' || i + 1 >= rest().size()) {
        value += c;
        continue;
      }
      const char escape = rest()[++i];
      static constexpr std::string_view kNames = "nrtabfv\\'\"", kValues = "\n\r\t\a\b\f\v\\'\"";
      const size_t known = kNames.find(escape);
      const size_t hex = escape == 'x' ? 2 : escape == 'u' ? 4 : escape == 'U' ? 8 : 0;
      if (known != std::string_view::npos) {
        value += kValues[known];
      } else if (hex > 0) {
        const std::string code(rest().substr(i + 1, hex));
        if (code.size() != hex ||
            code.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos ||
            std::stoul(code, nullptr, 16) > 0x10ffff) {
          wrong("the escape '\\" + std::string(1, escape) + code + "' is no character");
        }
        data::append_utf8(value, static_cast<char32_t>(std::stoul(code, nullptr, 16)));
        i += hex;
      } else if (escape >= '0' && escape <= '7') {
        unsigned code = 0;
        size_t n = 0;
        for (; n < 3 && i + n < rest().size() && rest()[i + n] >= '0' && rest()[i + n] <= '7';
             ++n) {
          code = 8 * code + static_cast<unsigned>(rest()[i + n] - '0');
        }
        data::append_utf8(value, code);
        i += n - 1;
      } else if (escape != '\n') {
        value += '\\';
        value += escape;
      }
    }
    wrong("a text in quotes has no end");
  }

  const std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool starts_line_ = true;  // what comes next begins a line
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokens_of_template(std::string_view source) {
  return Lexer(normal(source)).run();
}

}  // namespace headloom::jinja
