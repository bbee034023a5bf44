// The time that something took, and the date.
#pragma once

#include <chrono>
#include <ctime>
#include <string>

namespace headloom {

// Seconds of a clock that is never set back; only differences mean something.
inline double seconds_now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// The date here, "2026-03-01".
inline std::string today() {
  const std::time_t now = std::time(nullptr);
  char buffer[32];
  std::strftime(buffer, sizeof buffer, "%Y-%m-%d", std::localtime(&now));
  return buffer;
}

}  // namespace headloom
