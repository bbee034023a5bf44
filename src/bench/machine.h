// Facts about this machine that a measurement should carry.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace headloom::bench {

// ("Processor", ...), ("Instruction set", ...), ("Threads", ...), ("PyTorch", ...).
std::vector<std::pair<std::string, std::string>> machine_facts();

}  // namespace headloom::bench
