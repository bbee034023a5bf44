#include "bench/machine.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/headeronly/version.h>

#include "core/platform.h"

namespace headloom::bench {

std::vector<std::pair<std::string, std::string>> machine_facts() {
  return {{"Processor", processor_name()},
          {"Instruction set", at::get_cpu_capability()},
          {"Threads", std::to_string(at::get_num_threads())},
          {"PyTorch", TORCH_VERSION}};
}

}  // namespace headloom::bench
