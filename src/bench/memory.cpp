#include "bench/memory.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace headloom::bench {
namespace {

std::atomic<int64_t> held{0}, peak{0};

struct Block {
  c10::DataPtr inner;
  int64_t bytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  held -= block->bytes;
  delete block;
}

// Passes everything on to PyTorch's own allocator.
class Counting final : public c10::Allocator {
 public:
  explicit Counting(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{inner_->allocate(bytes), static_cast<int64_t>(bytes)};
    const int64_t now = held += block->bytes;
    int64_t seen = peak;
    while (now > seen && !peak.compare_exchange_weak(seen, now)) {
    }
    return {block->inner.get(), block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* inner_;
};

}  // namespace

double peak_bytes(const std::function<void()>& f) {
  f();  // one-time allocations
  c10::Allocator* const before = c10::GetCPUAllocator();
  static Counting counting(before);
  constexpr uint8_t kAbove = 255;  // priority: replaces the default
  c10::SetCPUAllocator(&counting, kAbove);
  peak = held.load();
  const int64_t start = held;
  f();
  const int64_t most = peak - start;
  c10::SetCPUAllocator(before, kAbove);
  return static_cast<double>(most);
}

}  // namespace headloom::bench
