// Small string helpers shared by configuration, command line and reports.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace headloom {

// The candidate with the smallest edit distance to `word`, or "" when none is near enough to be a
// plausible misspelling (distance at most a third of the longer word, and at least one common
// letter).
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

// How a message about `word` ends, which is none of `names`: "; did you mean 'NAME'?" where
// nearest() finds one, else `otherwise`.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& names,
                         const std::string& otherwise);
// The same, with "; there are a, b, c." otherwise.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& names);

// "a, b, c".
std::string join(const std::vector<std::string>& words, std::string_view separator = ", ");

// "1 file", "2 files".
std::string counted(int64_t count, std::string_view thing);

// A number as printf() writes it, in at most 63 characters: formatted("%.3g", 0.12345) is "0.123".
// What rounds to zero has no minus sign.
std::string formatted(const char* format, double value);

// With the letters A to Z small.
std::string lower_case(std::string text);

// 1234567 -> "1.23M"; for counts shown to people.
std::string human_count(double value);

// 3661 seconds -> "1h01m", 75 -> "1m15s", 4.2 -> "4s".
std::string human_seconds(double seconds);

// Bytes with a binary unit: 1536 -> "1.5 KiB".
std::string human_bytes(double bytes);

}  // namespace headloom
