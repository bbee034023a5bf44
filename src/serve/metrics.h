// What Prometheus reads. Free of torch.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "serve/engine.h"

namespace headloom::serve {

// Requests that were answered. Safe to use from several threads.
class Metrics {
 public:
  // `path`: one of a fixed set.
  void count(const std::string& path, int status);
  // Once the answer has been sent.
  void time(const std::string& path, double seconds);
  // In the text format, version 0.0.4.
  std::string text(const Engine::Load& load) const;

 private:
  static constexpr std::array<double, 12> kBounds = {0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
                                                     0.5,   1,    2.5,   5,    10,  60};
  struct Times {
    std::array<int64_t, kBounds.size() + 1> counts = {};
    double sum = 0;
  };
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, int64_t> requests_;
  std::map<std::string, Times> times_;
};

}  // namespace headloom::serve
