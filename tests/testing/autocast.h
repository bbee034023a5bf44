// Autocast of the CPU to bfloat16.
#pragma once

#include <ATen/autocast_mode.h>

namespace headloom::test {

// On while it lives. However its scope is left, the next test begins without autocast and without
// the copies that it has made of weights.
class CpuAutocast {
 public:
  CpuAutocast() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~CpuAutocast() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
  CpuAutocast(const CpuAutocast&) = delete;
  CpuAutocast& operator=(const CpuAutocast&) = delete;
};

// What `run` returns under it.
template <typename F>
auto under_autocast(const F& run) {
  const CpuAutocast autocast;
  return run();
}

}  // namespace headloom::test
