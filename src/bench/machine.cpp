#include "bench/machine.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/headeronly/version.h>

#include <fstream>

namespace headloom::bench {

std::vector<std::pair<std::string, std::string>> machine_facts() {
  std::string processor = "unknown";
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      processor = line.substr(colon + 2);
      break;
    }
  }
  return {{"Processor", processor},
          {"Instruction set", at::get_cpu_capability()},
          {"Threads", std::to_string(at::get_num_threads())},
          {"PyTorch", TORCH_VERSION}};
}

}  // namespace headloom::bench
