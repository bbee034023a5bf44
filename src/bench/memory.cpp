#include "bench/memory.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace headloom::bench {
namespace {

// What is counted. Some of PyTorch's libraries ask for memory by its address alone, so that sizes
// are kept beside it.
struct Counted {
  std::mutex mutex;
  std::unordered_map<void*, int64_t> sizes;
  int64_t held = 0, peak = 0;
  c10::Allocator* inner = nullptr;  // PyTorch's own
};
Counted& counted() {
  static auto* counted = new Counted;  // tensors may outlive static storage
  return *counted;
}

void release(void* data) {
  Counted& all = counted();
  {
    const std::lock_guard lock(all.mutex);
    if (const auto found = all.sizes.find(data); found != all.sizes.end()) {
      all.held -= found->second;
      all.sizes.erase(found);
    }
  }
  all.inner->raw_deallocate(data);
}

// Passes everything on.
class Counting final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Counted& all = counted();
    void* const data = all.inner->raw_allocate(bytes);
    const std::lock_guard lock(all.mutex);
    if (data != nullptr) {
      all.sizes[data] = static_cast<int64_t>(bytes);
      all.held += static_cast<int64_t>(bytes);
      all.peak = std::max(all.peak, all.held);
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    counted().inner->copy_data(to, from, bytes);
  }
};

}  // namespace

double peak_bytes(const std::function<void()>& f) {
  f();  // one-time allocations
  Counted& all = counted();
  all.inner = c10::GetCPUAllocator();
  static Counting counting;
  constexpr uint8_t kAbove = 255;  // priority: replaces the default
  c10::SetCPUAllocator(&counting, kAbove);
  const int64_t start = all.held;
  all.peak = start;
  f();
  const int64_t most = all.peak - start;
  c10::SetCPUAllocator(all.inner, kAbove);
  return static_cast<double>(most);
}

}  // namespace headloom::bench
