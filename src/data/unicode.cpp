#include "data/unicode.h"

#include <utf8proc.h>

#include <cstdlib>

#include "core/error.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace headloom::data {
namespace {

// Unicode's White_Space. PCRE2's own \s also has U+180E, which has been none since Unicode 6.3.
constexpr const char* kSpaceCharacters =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"
    "\\x{205f}\\x{3000}";

// `pattern` with \s (anywhere) and \S (outside brackets) written out.
std::string with_spaces_written_out(const std::string& pattern) {
  std::string out;
  int brackets = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char next = pattern[++i];
      if (next == 's') {
        out += brackets > 0 ? kSpaceCharacters : str('[', kSpaceCharacters, ']');
      } else if (next == 'S' && brackets == 0) {
        out += str("[^", kSpaceCharacters, ']');
      } else {
        out += c;
        out += next;
      }
      continue;
    }
    if (c == '[') ++brackets;
    if (c == ']' && brackets > 0) --brackets;
    out += c;
  }
  return out;
}

}  // namespace

CodePoint code_point(std::string_view text) {
  const auto byte = [&](size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const auto follows = [&](size_t i) { return (byte(i) & 0xc0u) == 0x80u; };
  const unsigned first = byte(0);
  if (first < 0x80) return {static_cast<char32_t>(first), 1};
  if (first >= 0xc2 && first < 0xe0 && follows(1)) {
    return {((first & 0x1fu) << 6) | (byte(1) & 0x3fu), 2};
  }
  if ((first & 0xf0u) == 0xe0 && follows(1) && follows(2)) {
    const char32_t value = ((first & 0xfu) << 12) | ((byte(1) & 0x3fu) << 6) | (byte(2) & 0x3fu);
    if (value >= 0x800 && (value < 0xd800 || value > 0xdfff)) return {value, 3};
  }
  if (first >= 0xf0 && first < 0xf5 && follows(1) && follows(2) && follows(3)) {
    const char32_t value = ((first & 7u) << 18) | ((byte(1) & 0x3fu) << 12) |
                           ((byte(2) & 0x3fu) << 6) | (byte(3) & 0x3fu);
    if (value >= 0x10000 && value <= 0x10ffff) return {value, 4};
  }
  return {};
}

void append_utf8(std::string& text, char32_t c) {
  const auto put = [&](unsigned value) { text += static_cast<char>(value); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xc0u | (c >> 6));
    put(0x80u | (c & 0x3fu));
  } else if (c < 0x10000) {
    put(0xe0u | (c >> 12));
    put(0x80u | ((c >> 6) & 0x3fu));
    put(0x80u | (c & 0x3fu));
  } else {
    put(0xf0u | (c >> 18));
    put(0x80u | ((c >> 12) & 0x3fu));
    put(0x80u | ((c >> 6) & 0x3fu));
    put(0x80u | (c & 0x3fu));
  }
}

bool is_space(char32_t c) {
  return (c >= 0x9 && c <= 0xd) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

std::string normalize(std::string_view text, NormalForm form) {
  const bool composed = form == NormalForm::nfc || form == NormalForm::nfkc;
  const bool compatible = form == NormalForm::nfkc || form == NormalForm::nfkd;
  const int options = UTF8PROC_STABLE | (composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
                      (compatible ? UTF8PROC_COMPAT : 0);
  utf8proc_uint8_t* out = nullptr;
  const utf8proc_ssize_t size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                             static_cast<utf8proc_ssize_t>(text.size()), &out,
                                             static_cast<utf8proc_option_t>(options));
  require(size >= 0, "the text cannot be normalised: ", utf8proc_errmsg(size), ".");
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(out, std::free);
  return {reinterpret_cast<const char*>(out), static_cast<size_t>(size)};
}

struct Regex::Compiled {
  explicit Compiled(const std::string& pattern) {
    int error = 0;
    size_t place = 0;
    code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                             PCRE2_UTF | PCRE2_UCP, &error, &place, nullptr));
    if (!code) {
      unsigned char reason[256];
      pcre2_get_error_message(error, reason, sizeof reason);
      fail("the expression '", pattern,
           "' is not understood: ", reinterpret_cast<const char*>(reason), " at character ", place);
    }
    pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // without it matching is slower only
  }
  struct Free {
    void operator()(pcre2_code* c) const { pcre2_code_free(c); }
    void operator()(pcre2_match_data* d) const { pcre2_match_data_free(d); }
  };
  std::unique_ptr<pcre2_code, Free> code;
};

Regex::Regex(const std::string& pattern)
    : compiled_(std::make_shared<const Compiled>(with_spaces_written_out(pattern))) {}

Regex Regex::literal(const std::string& text) {
  std::string pattern;
  for (const char c : text) {
    // Any ASCII sign but letters and digits stands for itself behind a backslash.
    if (c > 0 && !std::isalnum(static_cast<unsigned char>(c))) pattern += '\\';
    pattern += c;
  }
  return Regex(pattern);
}

std::vector<Regex::Range> Regex::matches(std::string_view text) const {
  const std::unique_ptr<pcre2_match_data, Compiled::Free> data(
      pcre2_match_data_create_from_pattern(compiled_->code.get(), nullptr));
  std::vector<Range> found;
  size_t at = 0;
  while (at < text.size()) {
    const int result = pcre2_match(compiled_->code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                   text.size(), at, PCRE2_NO_UTF_CHECK, data.get(), nullptr);
    if (result == PCRE2_ERROR_NOMATCH) break;
    require(result >= 0, "a tokenizer's expression fails on this text (PCRE2 error ", result, ").");
    const size_t* range = pcre2_get_ovector_pointer(data.get());
    if (range[1] > range[0]) {
      found.push_back({range[0], range[1]});
      at = range[1];
    } else {  // an empty match splits nothing: look on behind the next character
      at = range[0] < text.size() ? range[0] + code_point(text.substr(range[0])).length
                                  : text.size();
    }
  }
  return found;
}

}  // namespace headloom::data
