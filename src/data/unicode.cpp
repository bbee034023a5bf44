#include "data/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <optional>
#include <vector>

#include "core/error.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace headloom::data {
namespace {

// Unicode's White_Space. PCRE2's own \s also has U+180E, which has been none since Unicode 6.3.
constexpr const char* kSpaceCharacters =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"
    "\\x{205f}\\x{3000}";

// Oniguruma's \w: letters, marks and digits of all scripts. PCRE2's own has all numbers, no mark.
constexpr const char* kWordCharacters = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}";
// These, too, where it stands outside brackets.
constexpr const char* kMoreWordCharacters = "\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}";

// A line ends with \n alone, and ^ and $ hold at each line, as they do in Oniguruma.
constexpr uint32_t kOptions = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE;
constexpr const char* kNewline = "(*LF)";

bool is_known(const std::string& pattern) {
  int error = 0;
  size_t place = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   kOptions, &error, &place, nullptr);
  pcre2_code_free(code);
  return code != nullptr;
}

// A class by name, [:alpha:], as ranges and properties; empty where PCRE2's has other characters
// and they are not known here.
std::string posix_class(const std::string& name) {
  if (name == "alpha") return "\\p{Alphabetic}";
  if (name == "upper") return "\\p{Uppercase}";
  if (name == "lower") return "\\p{Lowercase}";
  if (name == "alnum") return "\\p{Alphabetic}\\p{Nd}";
  if (name == "punct") return "\\p{P}\\p{S}";
  if (name == "digit") return "\\p{Nd}";
  return name == "space" ? kSpaceCharacters : "";
}

// Writes for PCRE2 what is written for Oniguruma, which the tokenizers package uses, in its syntax
// of Ruby. What the two read in different ways is written out, and Error is thrown for what has no
// other way to be written: sets inside of sets, for one, which PCRE2 would read as signs. \p{Han}
// and the like are the characters of one script, and not also those that several scripts share.
class ForPcre2 {
 public:
  explicit ForPcre2(const std::string& pattern) : pattern_(pattern) {}

  std::string written() {
    while (at_ < pattern_.size()) step();
    return out_;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    fail("the expression '", pattern_, "' is not understood: it has ", what, " at character ", at_);
  }
  bool in_brackets() const { return brackets_ > 0; }

  void step() {
    const char c = pattern_[at_];
    if (c == '\\' && at_ + 1 < pattern_.size()) return escape(pattern_[at_ + 1]);
    if (in_brackets()) {
      if (pattern_.compare(at_, 2, "&&") == 0) refuse("an intersection of sets");
      if (c == '[')
        return pattern_[at_ + 1] == ':' ? named_class() : refuse("a set inside of a set");
    } else if (pattern_.compare(at_, 2, "(?") == 0) {
      return group();
    } else if (const size_t end = end_of_interval(at_)) {
      return interval(end);
    }
    note_atom(c);
    size_t length = 1;
    if (c == '[') {
      ++brackets_;
      // A ] that comes first is one of the set.
      if (pattern_.compare(at_ + length, 1, "^") == 0) ++length;
      if (pattern_.compare(at_ + length, 1, "]") == 0) ++length;
    } else if (c == ']' && in_brackets()) {
      --brackets_;
    }
    put(pattern_.substr(at_, length), length);
  }

  // Remembers where in out_ that begins which an interval after `c` would repeat.
  void note_atom(char c) {
    if (in_brackets() || (static_cast<unsigned char>(c) & 0xc0u) == 0x80u) return;
    if (c == ')' && !groups_.empty()) {
      atom_ = groups_.back();
      groups_.pop_back();
    } else if (std::string_view("?*+").find(c) == std::string_view::npos) {
      atom_ = out_.size();
    }
    if (c == '(') groups_.push_back(out_.size());
  }

  void put(const std::string& text, size_t read) {
    out_ += text;
    at_ += read;
  }
  // A set, which stands in brackets already or gets its own.
  void put_set(const std::string& set, bool inverse, size_t read) {
    put(in_brackets() ? set : str(inverse ? "[^" : "[", set, ']'), read);
  }

  void escape(char c) {
    note_atom('\\');
    const std::string word = str(kWordCharacters, in_brackets() ? "" : kMoreWordCharacters);
    const bool inverse = c == 'S' || c == 'W' || c == 'H';
    if (inverse && in_brackets()) refuse(str('\\', c, " inside brackets"));
    // A control character to Oniguruma; to PCRE2 a byte, which may be a part of a character.
    if (c == 'C') refuse("\\C");
    if (c == 's' || c == 'S') return put_set(kSpaceCharacters, inverse, 2);
    if (c == 'w' || c == 'W') return put_set(word, inverse, 2);
    if (c == 'h' || c == 'H') return put_set("0-9a-fA-F", inverse, 2);
    if (c == 'v') return put("\\x{b}", 2);
    if ((c == 'b' || c == 'B') && !in_brackets()) {
      const std::string before = str("(?<=[", word, "])"), after = str("(?=[", word, "])");
      const std::string none_before = str("(?<![", word, "])"),
                        none_after = str("(?![", word, "])");
      return put(c == 'b' ? str("(?:", before, none_after, '|', none_before, after, ')')
                          : str("(?:", before, after, '|', none_before, none_after, ')'),
                 2);
    }
    if ((c == 'p' || c == 'P') && pattern_[at_ + 2] == '{') return property(c == 'P');
    put(pattern_.substr(at_, length_of_escape(c)), length_of_escape(c));
  }

  // Of what stands for one thing: \n, \x41, \x{1f600}, \012, \cA, \k<name>, \k'name'.
  size_t length_of_escape(char c) const {
    const size_t after = at_ + 2;
    const char open = after < pattern_.size() ? pattern_[after] : '\0';
    const bool named = c == 'k' || c == 'g';
    const char close = open == '{' && (c == 'x' || c == 'o') ? '}'
                       : open == '<' && named                ? '>'
                       : open == '\'' && named               ? '\''
                                                             : '\0';
    if (close != '\0') {
      const size_t end = pattern_.find(close, after + 1);
      return end == std::string::npos ? 2 : end + 1 - at_;
    }
    if (c == 'c') return std::min(size_t{3}, pattern_.size() - at_);
    const bool digits = std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (c != 'x' && !digits) return 2;
    const size_t end =
        pattern_.find_first_not_of(digits ? "0123456789" : "0123456789abcdefABCDEF", after);
    return std::min(std::min(end, pattern_.size()) - at_, size_t{4});
  }

  void property(bool inverse) {
    const size_t end = pattern_.find('}', at_);
    const bool negated = pattern_[at_ + 3] == '^';
    const size_t name = at_ + 3 + (negated ? 1 : 0);
    if (end != std::string::npos) {
      const std::string script = "{sc:" + pattern_.substr(name, end + 1 - name);
      if (is_known("\\p" + script)) {
        return put((inverse != negated ? "\\P" : "\\p") + script, end + 1 - at_);
      }
      return put(pattern_.substr(at_, end + 1 - at_), end + 1 - at_);
    }
    put(pattern_.substr(at_, 2), 2);
  }

  void named_class() {
    const size_t end = pattern_.find(":]", at_);
    const std::string name =
        end == std::string::npos ? "" : pattern_.substr(at_ + 2, end - at_ - 2);
    const std::string set = posix_class(name);
    if (set.empty()) refuse(str("[:", name, ":]"));
    put(set, end + 2 - at_);
  }

  // The dot is any character, also the end of a line, with (?m), and with (?s) here.
  void group() {
    note_atom('(');
    const size_t end = pattern_.find_first_not_of("imx-", at_ + 2);
    const bool options =
        end != std::string::npos && end > at_ + 2 && (pattern_[end] == ')' || pattern_[end] == ':');
    if (!options) return put("(?", 2);
    std::string text = pattern_.substr(at_, end - at_);
    std::replace(text.begin(), text.end(), 'm', 's');
    put(text, end - at_);
  }

  // Where the interval that begins at `at` ends, {3} or {1,3} or {1,} or {,3}; 0: none begins here.
  size_t end_of_interval(size_t at) const {
    if (pattern_.compare(std::min(at, pattern_.size()), 1, "{") != 0) return 0;
    constexpr const char* kDigits = "0123456789";
    const size_t first = pattern_.find_first_not_of(kDigits, at + 1);
    if (first == std::string::npos) return 0;
    const bool two = pattern_[first] == ',';
    const size_t end = two ? pattern_.find_first_not_of(kDigits, first + 1) : first;
    const bool empty = end == at + 1 || (two && end == at + 2);
    return end == std::string::npos || pattern_[end] != '}' || empty ? 0 : end + 1;
  }

  // In Ruby's syntax a + after an interval repeats it, and so does a ? after one of a single
  // number. PCRE2 would take the one for possessive and the other for lazy.
  void interval(size_t end) {
    std::string bounds = pattern_.substr(at_, end - at_);
    const bool exact = bounds.find(',') == std::string::npos;
    if (bounds[1] == ',') bounds.insert(1, "0");
    const char next = end < pattern_.size() ? pattern_[end] : '\0';
    if (next != '+' && !(next == '?' && exact)) return put(bounds, end - at_);
    const size_t after = end + 1;
    const char last = after < pattern_.size() ? pattern_[after] : '\0';
    if (last == '?' || last == '*' || last == '+' || end_of_interval(after) > 0) {
      refuse("an interval that is repeated twice");
    }
    out_.insert(atom_, "(?:");
    put(str(bounds, ')', next), after - at_);
  }

  const std::string& pattern_;
  size_t at_ = 0;
  int brackets_ = 0;
  std::string out_;
  size_t atom_ = 0;             // where the last one begins in out_
  std::vector<size_t> groups_;  // where the open ones begin in out_
};

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

std::string unicode_versions() {
  std::string pcre2(static_cast<size_t>(pcre2_config(PCRE2_CONFIG_VERSION, nullptr)), '\0');
  pcre2_config(PCRE2_CONFIG_VERSION, pcre2.data());
  return str("PCRE2 ", pcre2.c_str(), ", utf8proc ", utf8proc_version());
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
    const std::string whole = kNewline + pattern;
    code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(whole.data()), whole.size(), kOptions,
                             &error, &place, nullptr));
    if (!code) {
      unsigned char reason[256];
      pcre2_get_error_message(error, reason, sizeof reason);
      fail("the expression '", pattern,
           "' is not understood: ", reinterpret_cast<const char*>(reason), " at character ",
           place - std::string_view(kNewline).size());
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
    : compiled_(std::make_shared<const Compiled>(ForPcre2(pattern).written())) {}

Regex Regex::literal(const std::string& text) {
  std::string pattern;
  for (const char c : text) {
    // Any ASCII sign but letters and digits stands for itself after a backslash.
    if (c > 0 && !std::isalnum(static_cast<unsigned char>(c))) pattern += '\\';
    pattern += c;
  }
  return Regex(pattern);
}

void Regex::each_match(std::string_view text, const std::function<void(Range)>& take) const {
  // Room for the whole match alone, so that it serves every expression.
  thread_local const std::unique_ptr<pcre2_match_data, Compiled::Free> data(
      pcre2_match_data_create(1, nullptr));
  std::optional<size_t> last_end;
  for (size_t at = 0; at < text.size();) {
    const int result = pcre2_match(compiled_->code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                   text.size(), at, PCRE2_NO_UTF_CHECK, data.get(), nullptr);
    if (result == PCRE2_ERROR_NOMATCH) break;
    require(result >= 0, "a tokenizer's expression fails on this text (PCRE2 error ", result, ").");
    const size_t* const range = pcre2_get_ovector_pointer(data.get());
    const Range found{range[0], range[1]};
    if (found.end > found.begin || !last_end || found.end > *last_end) {
      last_end = at = found.end;
      take(found);
    } else {  // an empty one at the end of another is none: look on after the next character
      at += std::max<size_t>(1, code_point(text.substr(at)).length);
    }
  }
}

}  // namespace headloom::data
