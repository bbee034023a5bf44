// Numbers that a text spells out.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>

namespace headloom {

// The number that the whole of `text` is, as std::from_chars() reads it: digits, for a signed type
// with "-" before them, and for a floating-point one as strtod() takes them. Nothing where anything
// else stands in the text, or where the number is beyond the type.
template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number number{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end) return std::nullopt;
  return number;
}

}  // namespace headloom
