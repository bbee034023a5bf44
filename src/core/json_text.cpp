#include "core/json_text.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

namespace headloom {

void check_json_depth(std::string_view text, const std::string& name) {
  int depth = 0;
  bool inside = false;  // a text
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (inside) {
      if (c == '\\') ++i;
      inside = c != '"';
    } else if (c == '"') {
      inside = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kDeepestJson) {
        fail(name, ": is nested deeper than ", kDeepestJson, " levels.");
      }
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
}

namespace {

// Whether \uXXXX at this place is half of a pair of UTF-16 (RFC 8259, section 7) that has no other.
bool is_half_character(std::string_view text, size_t place) {
  const auto unit = [&](size_t from) {
    int64_t value = 0;
    const std::string_view digits = from < text.size() ? text.substr(from, 6) : "";
    const bool whole =
        digits.size() == 6 && digits.starts_with("\\u") &&
        std::from_chars(digits.data() + 2, digits.data() + 6, value, 16).ptr == digits.data() + 6;
    return whole ? value : -1;
  };
  const auto is_first = [](int64_t u) { return u >= 0xd800 && u <= 0xdbff; };
  const auto is_second = [](int64_t u) { return u >= 0xdc00 && u <= 0xdfff; };
  if (is_first(unit(place))) return !is_second(unit(place + 6));
  return is_second(unit(place)) && !(place >= 6 && is_first(unit(place - 6)));
}

}  // namespace

std::string json_fault(std::string_view text, size_t byte) {
  if (text.find_first_not_of(" \t\r\n") == text.npos) return "it is empty";
  if (byte == 0 || byte > text.size()) return "it ends in the middle (was it cut off?)";
  const size_t at = byte - 1;
  const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(at), '\n');
  const size_t start = at == 0 ? text.npos : text.rfind('\n', at - 1);
  const size_t column = start == text.npos ? at + 1 : at - start;
  const auto c = static_cast<unsigned char>(text[at]);
  char shown[16];
  if (c >= 0x20 && c < 0x7f) {
    std::snprintf(shown, sizeof shown, "'%c'", c);
  } else {
    std::snprintf(shown, sizeof shown, "the byte 0x%02x", c);
  }
  // The line of a file of JSON lines has a number already.
  const bool lines = text.find('\n') != text.npos;
  // A half is noticed where the other one is missing.
  const size_t escape = text.substr(0, at).rfind("\\u");
  if (escape != text.npos && at - escape <= 7 && is_half_character(text, escape)) {
    return str(lines ? str("line ", line) : "it", " has ", text.substr(escape, 6), " in column ",
               column - (at - escape), ", which is half a character");
  }
  return str(lines ? str("line ", line) : "it", " has ", shown, " in column ", column,
             ", where it does not belong");
}

}  // namespace headloom
