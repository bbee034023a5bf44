#include "core/json_text.h"

#include <algorithm>
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
  return str(lines ? str("line ", line) : "it", " has ", shown, " in column ", column,
             ", where it does not belong");
}

}  // namespace headloom
