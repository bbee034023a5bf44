#include "core/text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/error.h"

namespace headloom {
namespace {

// Insertions, deletions, substitutions and swaps of neighbours.
int64_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<int64_t> before, above, row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    before = std::exchange(above, row);
    row[0] = static_cast<int64_t>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int64_t substitute = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({substitute, above[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  int64_t best_distance = 0;
  for (const std::string& candidate : candidates) {
    const int64_t distance = edit_distance(word, candidate);
    const auto longer = static_cast<int64_t>(std::max(word.size(), candidate.size()));
    if (distance >= longer || distance > std::max<int64_t>(1, longer / 3)) continue;
    if (best.empty() || distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& names,
                         const std::string& otherwise) {
  const std::string near = nearest(word, names);
  return near.empty() ? otherwise : "; did you mean '" + near + "'?";
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& names) {
  return did_you_mean(word, names, "; there are " + join(names) + ".");
}

std::string join(const std::vector<std::string>& words, std::string_view separator) {
  std::string out;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) out += separator;
    out += words[i];
  }
  return out;
}

std::string counted(int64_t count, std::string_view thing) {
  return str(count, ' ', thing, count == 1 ? "" : "s");
}

std::string formatted(const char* format, double value) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, value);
  if (std::isfinite(value) && std::strpbrk(buffer, "123456789") == nullptr) {
    std::snprintf(buffer, sizeof buffer, format, 0.0);
  }
  return buffer;
}

std::string human_count(double value) {
  // Three digits: 999.5k is already 1M.
  if (value >= 999.5e9) return formatted("%.3gT", value / 1e12);
  if (value >= 999.5e6) return formatted("%.3gG", value / 1e9);
  if (value >= 999.5e3) return formatted("%.3gM", value / 1e6);
  if (value >= 1e3) return formatted("%.3gk", value / 1e3);
  return formatted("%.4g", value);
}

std::string human_seconds(double seconds) {
  if (seconds > 0 && seconds < 0.95) return formatted("%.2gs", seconds);
  const long long whole = std::llround(seconds);
  char buffer[64];
  if (whole >= 3600) {
    std::snprintf(buffer, sizeof buffer, "%lldh%02lldm", whole / 3600, whole % 3600 / 60);
  } else if (whole >= 60) {
    std::snprintf(buffer, sizeof buffer, "%lldm%02llds", whole / 60, whole % 60);
  } else {
    std::snprintf(buffer, sizeof buffer, "%llds", whole);
  }
  return buffer;
}

std::string human_bytes(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 6) {
    bytes /= 1024;
    ++unit;
  }
  return formatted(unit == 0 ? "%.0f " : "%.1f ", bytes) + units[unit];
}

std::string lower_case(std::string text) {
  for (char& c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return text;
}

}  // namespace headloom
