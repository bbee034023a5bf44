#include "serve/jinja/text.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "data/unicode.h"

namespace headloom::jinja {
namespace {

char32_t code_of(std::string_view character) {
  const data::CodePoint c = data::code_point(character);
  return c.length == 0 ? static_cast<unsigned char>(character[0]) : c.value;
}

std::string changed(std::string_view character, utf8proc_int32_t (*change)(utf8proc_int32_t)) {
  const data::CodePoint c = data::code_point(character);
  if (c.length == 0) return std::string(character);
  if (c.value == 0xdf && change == utf8proc_toupper) return "SS";
  if (c.value == 0xdf && change == utf8proc_totitle) return "Ss";
  if (c.value == 0x130 && change == utf8proc_tolower) return "i\u0307";
  std::string out;
  data::append_utf8(out, static_cast<char32_t>(change(static_cast<utf8proc_int32_t>(c.value))));
  return out;
}

bool is_letter(std::string_view character) {
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(code_of(character)));
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

bool is_printable(char32_t c) {
  if (c == ' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    default:
      return true;
  }
}

}  // namespace

std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> out;
  for (size_t at = 0; at < text.size();) {
    const size_t length = std::max<size_t>(data::code_point(text.substr(at)).length, 1);
    out.push_back(text.substr(at, length));
    at += length;
  }
  return out;
}

bool is_space(std::string_view character) {
  const char32_t c = code_of(character);
  return (c >= 0x1c && c <= 0x1f) || data::is_space(c);
}

bool is_digit_character(std::string_view character) {
  const char32_t c = code_of(character);
  const bool raised = c == 0xb2 || c == 0xb3 || c == 0xb9 || c == 0x2070 ||
                      (c >= 0x2074 && c <= 0x2079) || (c >= 0x2080 && c <= 0x2089);
  return raised || utf8proc_category(static_cast<utf8proc_int32_t>(c)) == UTF8PROC_CATEGORY_ND;
}

bool is_number_character(std::string_view character) {
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(code_of(character)));
  return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}

std::string stripped(std::string_view text, std::string_view chars, bool left, bool right) {
  const auto all = characters(text), wanted = characters(chars);
  const auto goes = [&](std::string_view c) {
    return chars.empty() ? is_space(c) : std::find(wanted.begin(), wanted.end(), c) != wanted.end();
  };
  size_t first = 0, last = all.size();
  while (left && first < last && goes(all[first])) ++first;
  while (right && last > first && goes(all[last - 1])) --last;
  if (first == last) return "";
  const char* begin = all[first].data();
  return {begin, static_cast<size_t>(all[last - 1].data() + all[last - 1].size() - begin)};
}

std::string upper(std::string_view text) {
  std::string out;
  for (const std::string_view c : characters(text)) out += changed(c, utf8proc_toupper);
  return out;
}

std::string lower(std::string_view text) {
  std::string out;
  for (const std::string_view c : characters(text)) out += changed(c, utf8proc_tolower);
  return out;
}

std::string capitalized(std::string_view text) {
  std::string out;
  for (const std::string_view c : characters(text)) {
    out += changed(c, out.empty() ? utf8proc_totitle : utf8proc_tolower);
  }
  return out;
}

std::string titled(std::string_view text) {
  std::string out;
  bool inside = false;
  for (const std::string_view c : characters(text)) {
    out += changed(c, inside ? utf8proc_tolower : utf8proc_totitle);
    inside = is_letter(c);
  }
  return out;
}

std::string headline(std::string_view text) {
  std::string out;
  bool inside = false;
  for (const std::string_view c : characters(text)) {
    const bool between = is_space(c) || (c.size() == 1 && std::string_view("-({[<").find(c) !=
                                                              std::string_view::npos);
    out += changed(c, inside ? utf8proc_tolower : utf8proc_toupper);
    inside = !between;
  }
  return out;
}

int64_t count_words(std::string_view text) {
  int64_t count = 0;
  bool inside = false;
  for (const std::string_view c : characters(text)) {
    const bool part = is_letter(c) || is_number_character(c) || c == "_";
    count += part && !inside;
    inside = part;
  }
  return count;
}

std::string replaced(std::string_view text, std::string_view old, std::string_view by,
                     int64_t most) {
  std::string out;
  if (old.empty()) {  // before each character and at the end
    for (const std::string_view c : characters(text)) {
      if (most != 0) out += by;
      if (most > 0) --most;
      out += c;
    }
    return most != 0 ? out + std::string(by) : out;
  }
  size_t from = 0;
  for (size_t found; most != 0 && (found = text.find(old, from)) != std::string_view::npos;) {
    out += text.substr(from, found - from);
    out += by;
    from = found + old.size();
    if (most > 0) --most;
  }
  return out += text.substr(from);
}

std::vector<std::string> split(std::string_view text, std::string_view separator, int64_t most,
                               bool right) {
  std::vector<std::string> out;
  if (separator.empty()) {
    std::vector<std::string_view> all = characters(text);
    if (right) std::reverse(all.begin(), all.end());
    size_t at = 0;
    const auto skip = [&](bool spaces) {
      while (at < all.size() && is_space(all[at]) == spaces) ++at;
    };
    for (skip(true); at < all.size(); skip(true)) {
      const size_t first = at;
      if (most >= 0 && static_cast<int64_t>(out.size()) == most) {
        at = all.size();  // the rest, with the spaces at its far end
        const char* const near = all[first].data();
        const std::string_view rest =
            right ? text.substr(0, static_cast<size_t>(near + all[first].size() - text.data()))
                  : text.substr(static_cast<size_t>(near - text.data()));
        out.emplace_back(rest);
        break;
      }
      skip(false);
      const std::string_view one = all[right ? at - 1 : first];
      const std::string_view other = all[right ? first : at - 1];
      out.emplace_back(one.data(), static_cast<size_t>(other.data() + other.size() - one.data()));
    }
  } else if (right) {
    size_t end = text.size();
    while (most < 0 || static_cast<int64_t>(out.size()) < most) {
      const size_t found = end < separator.size() ? std::string_view::npos
                                                  : text.rfind(separator, end - separator.size());
      if (found == std::string_view::npos) break;
      out.emplace_back(text.substr(found + separator.size(), end - found - separator.size()));
      end = found;
    }
    out.emplace_back(text.substr(0, end));
  } else {
    size_t from = 0;
    while (most < 0 || static_cast<int64_t>(out.size()) < most) {
      const size_t found = text.find(separator, from);
      if (found == std::string_view::npos) break;
      out.emplace_back(text.substr(from, found - from));
      from = found + separator.size();
    }
    out.emplace_back(text.substr(from));
  }
  if (right) std::reverse(out.begin(), out.end());
  return out;
}

std::vector<std::string> lines(std::string_view text) {
  std::vector<std::string> out;
  size_t from = 0, at = 0;
  for (const std::string_view c : characters(text)) {
    const size_t end = at + c.size();
    const char32_t code = code_of(c);
    const bool breaks = (code >= 0xa && code <= 0xd) || (code >= 0x1c && code <= 0x1e) ||
                        code == 0x85 || code == 0x2028 || code == 0x2029;
    if (breaks && !(code == '\r' && end < text.size() && text[end] == '\n')) {
      const bool both = code == '\n' && at > from && text[at - 1] == '\r';
      out.emplace_back(text.substr(from, at - from - (both ? 1 : 0)));
      from = end;
    }
    at = end;
  }
  if (from < text.size()) out.emplace_back(text.substr(from));
  return out;
}

std::string quoted_text(std::string_view text) {
  const bool doubled =
      text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  const char quote = doubled ? '"' : '\'';
  std::string out(1, quote);
  for (const std::string_view c : characters(text)) {
    const char32_t code = code_of(c);
    if (c[0] == quote || c == "\\") {
      out += '\\';
      out += c;
    } else if (c == "\n") {
      out += "\\n";
    } else if (c == "\r") {
      out += "\\r";
    } else if (c == "\t") {
      out += "\\t";
    } else if (is_printable(code)) {
      out += c;
    } else {
      char escape[16];
      std::snprintf(escape, sizeof escape,
                    code < 0x100     ? "\\x%02x"
                    : code < 0x10000 ? "\\u%04x"
                                     : "\\U%08x",
                    static_cast<unsigned>(code));
      out += escape;
    }
  }
  return out += quote;
}

std::string json_text(std::string_view text, bool ascii) {
  using Json = nlohmann::json;
  return Json(text).dump(-1, ' ', ascii, Json::error_handler_t::replace);
}

}  // namespace headloom::jinja
