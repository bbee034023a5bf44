// What text needs to know of Unicode: well-formed UTF-8, normal forms, regular expressions.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace headloom::data {

// The code point that starts `text`, which must not be empty, and its length in bytes; length 0
// where the bytes there are no well-formed UTF-8.
struct CodePoint {
  char32_t value = 0;
  size_t length = 0;
};
CodePoint code_point(std::string_view text);
void append_utf8(std::string& text, char32_t code_point);
// Unicode's White_Space.
bool is_space(char32_t code_point);

// "PCRE2 VERSION, utf8proc VERSION": by these the characters are known.
std::string unicode_versions();

enum class NormalForm { nfc, nfd, nfkc, nfkd };
// `text` must be well-formed UTF-8.
std::string normalize(std::string_view text, NormalForm form);

// A regular expression over UTF-8 text, in the common syntax of Perl, Ruby and Oniguruma.
class Regex {
 public:
  // Throws Error with the reason where `pattern` is not understood.
  explicit Regex(const std::string& pattern);
  // Matches exactly these characters.
  static Regex literal(const std::string& text);

  struct Range {
    size_t begin = 0, end = 0;  // bytes
  };
  // Calls `take` for the matches, one after the other; an empty one does not stand at the end of
  // another. `text` must be well-formed UTF-8. Throws Error where the expression takes too much
  // work on it. Safe to call from several threads, and from `take`.
  void each_match(std::string_view text, const std::function<void(Range)>& take) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
};

}  // namespace headloom::data
