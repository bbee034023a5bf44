#include "serve/metrics.h"

#include <algorithm>

namespace headloom::serve {

void Metrics::count(const std::string& path, int status) {
  const std::lock_guard lock(mutex_);
  ++requests_[{path, status}];
}

void Metrics::time(const std::string& path, double seconds) {
  const std::lock_guard lock(mutex_);
  Times& times = times_[path];
  const auto bucket = std::lower_bound(kBounds.begin(), kBounds.end(), seconds) - kBounds.begin();
  ++times.counts[static_cast<size_t>(bucket)];
  times.sum += seconds;
}

std::string Metrics::text(const Engine::Load& load) const {
  std::string out;
  const auto head = [&](const char* name, const char* type, const char* help) {
    out += str("# HELP ", name, " ", help, "\n# TYPE ", name, " ", type, "\n");
  };
  const auto one = [&](const char* name, const char* type, const char* help, auto value) {
    head(name, type, help);
    out += str(name, " ", value, "\n");
  };
  const std::chrono::duration<double> up = std::chrono::steady_clock::now() - begun_;
  one("headloom_uptime_seconds", "gauge", "Seconds since the server began.", up.count());
  one("headloom_running_texts", "gauge", "Texts of requests that are being read or written.",
      load.running);
  one("headloom_waiting_texts", "gauge", "Texts of requests that wait for their turn.",
      load.waiting);
  one("headloom_state_bytes", "gauge",
      "Bytes of the decoding states (KV cache) of the running texts.", load.state_bytes);
  one("headloom_prompt_tokens_total", "counter", "Tokens of prompts that were read.",
      load.prompt_tokens);
  one("headloom_generated_tokens_total", "counter", "Tokens that were written.", load.written);
  const std::lock_guard lock(mutex_);
  head("headloom_requests_total", "counter",
       "Requests by path and HTTP status; status 499: the client left before its answer.");
  for (const auto& [key, count] : requests_) {
    out += str("headloom_requests_total{path=\"", key.first, "\",status=\"", key.second, "\"} ",
               count, "\n");
  }
  const char* name = "headloom_request_seconds";
  head(name, "histogram", "Seconds from a connection to the end of its answer.");
  for (const auto& [path, times] : times_) {
    int64_t sum = 0;
    for (size_t i = 0; i < times.counts.size(); ++i) {
      sum += times.counts[i];
      const std::string bound = i < kBounds.size() ? str(kBounds[i]) : "+Inf";
      out += str(name, "_bucket{path=\"", path, "\",le=\"", bound, "\"} ", sum, "\n");
    }
    out += str(name, "_sum{path=\"", path, "\"} ", times.sum, "\n");
    out += str(name, "_count{path=\"", path, "\"} ", sum, "\n");
  }
  return out;
}

}  // namespace headloom::serve
