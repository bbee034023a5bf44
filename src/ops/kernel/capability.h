// Which build of a kernel runs: chosen once a process by at::get_cpu_capability(), which obeys
// ATEN_CPU_CAPABILITY.
#pragma once

#include <ATen/Version.h>
#include <ATen/cpu/Utils.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "build.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace headloom::ops {

enum class Capability { kDefault, kAvx2, kAvx512, kAvx512Bf16 };

// What a build with HEADLOOM_EMULATION runs in place of the processor's instructions: avx512,
// avx512_bf16, amx, or nothing.
inline std::string_view emulated() {
#if defined(HEADLOOM_EMULATION)
  if (const char* name = std::getenv("HEADLOOM_EMULATE")) return name;
#endif
  return {};
}

inline Capability capability() {
  static const Capability chosen = [] {
    if (emulated() == "avx512") return Capability::kAvx512;
    if (!emulated().empty()) return Capability::kAvx512Bf16;
    const std::string name = at::get_cpu_capability();
#if defined(__x86_64__)
    if (name == "AVX512") {
      // Processors that multiply bfloat16 also have VNNI's products of bytes; the build uses both.
      const bool both =
          __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
      return both ? Capability::kAvx512Bf16 : Capability::kAvx512;
    }
    if (name == "AVX2") return Capability::kAvx2;
#endif
    return Capability::kDefault;
  }();
  return chosen;
}

// Whether kernels may use the tile registers of AMX for bfloat16: the processor has them, the
// system lets the process use them, and no ATEN_CPU_CAPABILITY limits the process to what it names.
inline bool has_amx() {
#if defined(__x86_64__)
  static const bool has = [] {
    if (!emulated().empty()) return emulated() == "amx";
    if (capability() != Capability::kAvx512Bf16 || std::getenv("ATEN_CPU_CAPABILITY")) return false;
    unsigned int a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned int kBFloat16 = 1u << 22, kTiles = 1u << 24;  // of leaf 7
    const bool known = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0;
    return known && (d & kBFloat16) != 0 && (d & kTiles) != 0 && at::cpu::init_amx();
  }();
  return has;
#else
  return false;
#endif
}

// Whether lines that are asked for past the second-level cache come as fast as into it. On Intel's
// processors they do not: two cores of a Sapphire Rapids read 10 GB/s so, and 28 GB/s through that
// cache.
inline bool fetches_past_cache() {
#if defined(__x86_64__)
  return !__builtin_cpu_is("intel");
#else
  return true;
#endif
}

// The build that fits of a kernel NAME, which every instruction set defines as NAME_DEFAULT,
// NAME_AVX2, NAME_AVX512 and NAME_AVX512_BF16 in its kernel_cpu.cpp (HL_KERNEL in inline.h).
template <typename F>
F* choose(F* portable, F* avx2, F* avx512, F* avx512_bf16) {
  F* const builds[] = {portable, avx2, avx512, avx512_bf16};
  return builds[static_cast<int>(capability())];
}
#if defined(__x86_64__)
#define HL_CHOOSE(name) \
  ::headloom::ops::choose(name##_DEFAULT, name##_AVX2, name##_AVX512, name##_AVX512_BF16)
#else  // the portable build is the only one
#define HL_CHOOSE(name) (&name##_DEFAULT)
#endif

}  // namespace headloom::ops
