#include "core/platform.h"

#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <sstream>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace headloom {

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

bool reset_peak_memory() {
  std::ofstream reset("/proc/self/clear_refs");
  reset << "5";
  reset.flush();
  return static_cast<bool>(reset);
}

void release_free_memory() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

bool keep_freed_memory() {
#ifdef __GLIBC__
  // -1: never. One arena, because those of other threads give memory back whatever the threshold.
  return ::mallopt(M_MMAP_MAX, 0) != 0 && ::mallopt(M_TRIM_THRESHOLD, -1) != 0 &&
         ::mallopt(M_ARENA_MAX, 1) != 0;
#else
  return false;
#endif
}

void return_large_blocks() {
#ifdef __GLIBC__
  ::mallopt(M_MMAP_MAX, 65536);
  ::mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the largest that glibc takes
#endif
}

void return_freed_memory() {
#ifdef __GLIBC__
  // The thresholds that glibc chooses by itself after it has freed blocks of 16 MiB.
  ::mallopt(M_MMAP_MAX, 65536);
  ::mallopt(M_MMAP_THRESHOLD, 16 << 20);
  ::mallopt(M_TRIM_THRESHOLD, 32 << 20);
#endif
}

int64_t page_faults() {
  rusage usage{};
  return ::getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_minflt : 0;
}

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string line;
  std::getline(file, line);
  return line;
}

std::string control_groups() {
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream text;
  text << file.rdbuf();
  // In a container the names are those of its own.
  std::array<char, 64> names{};
  if (::readlink("/proc/self/ns/cgroup", names.data(), names.size() - 1) > 0) text << names.data();
  return text.str();
}

std::string program_path() { return "/proc/" + std::to_string(::getpid()) + "/exe"; }

}  // namespace headloom
