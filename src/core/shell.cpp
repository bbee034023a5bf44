#include "core/shell.h"

#include <algorithm>
#include <cctype>

namespace headloom {

std::string shell_word(std::string_view word) {
  const std::string plain = "_-+=./,:@%^";
  const bool bare = !word.empty() && std::all_of(word.begin(), word.end(), [&](unsigned char c) {
    return (c < 128 && std::isalnum(c)) || plain.find(static_cast<char>(c)) != std::string::npos;
  });
  if (bare) return std::string(word);
  std::string out = "'";
  for (const char c : word) {
    if (c == '\'') {
      out += "'\\''";
    } else {
      out += c;
    }
  }
  return out + "'";
}

namespace {

std::string& own_name() {
  static std::string name = "headloom";
  return name;
}

}  // namespace

const std::string& called_as() { return own_name(); }

std::string program_name() { return shell_word(called_as()); }

void set_program_name(std::string_view called) { own_name() = called; }

}  // namespace headloom
