#include "bench/machine.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/headeronly/version.h>

#include "core/platform.h"
#include "core/text.h"
#include "ops/kernel/capability.h"
#include "train/device.h"

namespace headloom::bench {

std::vector<std::pair<std::string, std::string>> machine_facts() {
  const bool with_cuda = c10::impl::hasDeviceGuardImpl(at::kCUDA);
  return {{"Processor", processor_name()},
          {"Instruction set", str(at::get_cpu_capability(), ops::has_amx() ? " with AMX" : "")},
          {"Threads", std::to_string(at::get_num_threads())},
          {"Devices", join(devices_here())},
          {"PyTorch", str(TORCH_VERSION, with_cuda ? ", with CUDA" : "")}};
}

}  // namespace headloom::bench
