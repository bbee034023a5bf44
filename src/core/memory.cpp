#include "core/memory.h"

#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace headloom {
namespace {

// A field of /proc/self/status in bytes, or -1.
int64_t process_memory(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string key;
  int64_t kib = 0;
  while (status >> key) {
    if (key == field + ":" && status >> kib) return kib * 1024;
    status.ignore(1 << 12, '\n');
  }
  return -1;
}

}  // namespace

PeakMemory::PeakMemory() {
  ::malloc_trim(0);  // what the allocator keeps for later is not in use
  std::ofstream reset("/proc/self/clear_refs");
  reset << "5";  // sets the peak (VmHWM) to what is resident now
  reset.flush();
  start_ = reset ? process_memory("VmRSS") : -1;
}

int64_t PeakMemory::bytes() const {
  const int64_t peak = process_memory("VmHWM");
  return start_ < 0 || peak < 0 ? -1 : std::max<int64_t>(peak - start_, 0);
}

}  // namespace headloom
