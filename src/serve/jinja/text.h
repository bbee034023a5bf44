// Python's operations on texts, over UTF-8. What is no UTF-8 counts a character a byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace headloom::jinja {

std::vector<std::string_view> characters(std::string_view text);
// Whether a character (as characters() gives it) is white space to Python's str.strip().
bool is_space(std::string_view character);
// Whether Python's str.isdigit() and str.isnumeric() count it, Chinese numerals left out.
bool is_digit_character(std::string_view character);
bool is_number_character(std::string_view character);

// Both sides, or one. `chars` empty: white space.
std::string stripped(std::string_view text, std::string_view chars, bool left, bool right);
std::string upper(std::string_view text);
std::string lower(std::string_view text);
// The first letter of the text, or of each word, in upper case, the others in lower case.
std::string capitalized(std::string_view text);
std::string titled(std::string_view text);
// As Jinja's filter 'title' has it: words begin after spaces and opening brackets only.
std::string headline(std::string_view text);
// `most` below 0: all.
std::string replaced(std::string_view text, std::string_view old, std::string_view by,
                     int64_t most);
// At white space where `separator` is empty; at most `most` cuts where that is not negative,
// from the right where `right`.
std::vector<std::string> split(std::string_view text, std::string_view separator, int64_t most,
                               bool right);
// Runs of letters, digits and underscores, as Jinja's filter 'wordcount' has it.
int64_t count_words(std::string_view text);
std::vector<std::string> lines(std::string_view text);

// Python's repr() of a str, and json.dumps(text, ensure_ascii=ascii).
std::string quoted_text(std::string_view text);
std::string json_text(std::string_view text, bool ascii);

}  // namespace headloom::jinja
