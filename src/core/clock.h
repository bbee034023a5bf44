// The time that something took.
#pragma once

#include <chrono>

namespace headloom {

// Seconds of a clock that is never set back; only differences mean something.
inline double seconds_now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

}  // namespace headloom
