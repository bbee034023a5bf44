#include "bench/machine.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/headeronly/version.h>

#include <atomic>

#include "core/platform.h"
#include "core/text.h"
#include "ops/kernel/capability.h"
#include "train/device.h"

namespace headloom::bench {
namespace {

// Whether every thread takes numbers below 1.2e-38 for 0.
bool flushes_subnormals() {
  std::atomic<bool> kept{false};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    const volatile float small = 1e-38f;
    const volatile float smaller = small * 0.01f;
    if (smaller != 0) kept = true;
  });
  return !kept;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> machine_facts() {
  const bool with_cuda = c10::impl::hasDeviceGuardImpl(at::kCUDA);
  return {{"Processor", processor_name()},
          {"Instruction set", str(at::get_cpu_capability(), ops::has_amx() ? " with AMX" : "")},
          {"Threads", std::to_string(at::get_num_threads())},
          {"Below 1.2e-38", flushes_subnormals() ? "counts as 0" : "kept"},
          {"Devices", join(devices_here())},
          {"PyTorch", str(TORCH_VERSION, with_cuda ? ", with CUDA" : "")}};
}

}  // namespace headloom::bench
