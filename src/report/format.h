// Numbers and text for people. Unknown numbers (not finite) become an en dash everywhere.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace headloom::report {

inline constexpr const char* kDash = "–";

// "1.912"; values too large for plain digits go to scientific notation.
std::string fixed(double value, int decimals);
// "+0.03" or "−0.03": what `size` says of the value without its sign, after a sign where it has a
// digit that is not 0.
std::string signed_text(double value, const std::string& size);
// 0.125 -> "12.5%".
std::string percent(double fraction);
// 0.61 -> "0.61×", 12.3 -> "12.3×", 123.4 -> "123×".
std::string times(double ratio);
// 1234567 -> "1.23M", unknown or negative -> dash.
std::string count(double value);
// 1536 -> "1.5 KiB", unknown or negative -> dash.
std::string bytes(double value);
// 12345 -> "12,345"; what people compare digit by digit.
std::string grouped(double value);
// Seconds with at most two units.
std::string duration(double seconds);

// For a file: up to seven digits, and nothing for an unknown number.
std::string exact(double value);
// The number that is all of the text; NaN where it is none.
double number_in(const std::string& text);

std::string capitalized(std::string text);
// "a", "a and b", "a, b and c".
std::string list_of(const std::vector<std::string>& words);
// Adds `word` unless it is there.
void add_once(std::vector<std::string>& words, const std::string& word);

// For element content and double-quoted attributes alike; control characters that XML forbids are
// dropped.
std::string escape(std::string_view text);
// Escaped, with `x` as <code>x</code> and no line break around ±.
std::string rich(std::string_view text);

// Columns a terminal needs for UTF-8 text (one a code point; no wide characters are used here).
size_t display_width(std::string_view text);
std::string pad(std::string_view text, size_t width, bool right);

}  // namespace headloom::report
