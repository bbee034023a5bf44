#include "report/format.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/text.h"

namespace headloom::report {

std::string fixed(double value, int decimals) {
  if (!std::isfinite(value)) return kDash;
  char buffer[64];
  if (std::abs(value) >= 1e7) {
    std::snprintf(buffer, sizeof buffer, "%.3g", value);
  } else {
    std::snprintf(buffer, sizeof buffer, "%.*f", decimals, value);
  }
  // What rounds to zero has no sign.
  const bool is_zero = std::strspn(buffer, "-0.") == std::strlen(buffer);
  return buffer[0] == '-' && is_zero ? buffer + 1 : buffer;
}

std::string signed_text(double value, const std::string& size) {
  if (size.find_first_of("123456789") == std::string::npos) return size;
  return (value < 0 ? "−" : "+") + size;
}

std::string percent(double fraction) {
  return std::isfinite(fraction) ? fixed(100 * fraction, 1) + "%" : kDash;
}

std::string times(double ratio) {
  if (!std::isfinite(ratio)) return kDash;
  return fixed(ratio, ratio < 9.995 ? 2 : ratio < 99.5 ? 1 : 0) + "×";
}

std::string count(double value) {
  return std::isfinite(value) && value >= 0 ? human_count(value) : kDash;
}

std::string bytes(double value) {
  return std::isfinite(value) && value >= 0 ? human_bytes(value) : kDash;
}

std::string grouped(double value) {
  if (!std::isfinite(value) || value < 0) return kDash;
  if (value >= 1e12) return human_count(value);
  std::string digits = str(std::llround(value));
  for (auto i = static_cast<int>(digits.size()) - 3; i > 0; i -= 3) {
    digits.insert(static_cast<size_t>(i), ",");
  }
  return digits;
}

std::string duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return kDash;
  return seconds < 10 ? fixed(seconds, 1) + "s" : human_seconds(seconds);
}

std::string exact(double value) { return std::isfinite(value) ? formatted("%.7g", value) : ""; }

double number_in(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  return !text.empty() && *end == 0 && std::isfinite(value) ? value : std::nan("");
}

std::string capitalized(std::string text) {
  if (!text.empty()) text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
  return text;
}

std::string list_of(const std::vector<std::string>& words) {
  std::string out;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) out += i + 1 == words.size() ? " and " : ", ";
    out += words[i];
  }
  return out;
}

void add_once(std::vector<std::string>& words, const std::string& word) {
  if (std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
}

std::string escape(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        if (static_cast<unsigned char>(c) >= 0x20 || c == '\n' || c == '\t') out += c;
    }
  }
  return out;
}

std::string rich(std::string_view text) {
  std::string out;
  bool code = false;
  for (const char c : escape(text)) {
    if (c == '`') {
      out += code ? "</code>" : "<code>";
      code = !code;
    } else {
      out += c;
    }
  }
  if (code) out += "</code>";
  // A spread stays on the line of its mean.
  const std::string loose = " ± ", bound = "\u00a0±\u00a0";
  for (size_t at = 0; (at = out.find(loose, at)) != std::string::npos; at += bound.size()) {
    out.replace(at, loose.size(), bound);
  }
  return out;
}

size_t display_width(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string pad(std::string_view text, size_t width, bool right) {
  const size_t have = display_width(text);
  const std::string space(have < width ? width - have : 0, ' ');
  return right ? space + std::string(text) : std::string(text) + space;
}

}  // namespace headloom::report
