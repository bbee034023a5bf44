// Resident memory of this process, and how much it can have.
#pragma once

#include <cstdint>
#include <string>

namespace headloom {

// Peak resident memory since it was made, above what the process held then.
class PeakMemory {
 public:
  PeakMemory();
  // -1 where the system does not tell.
  int64_t bytes() const;

 private:
  int64_t start_ = -1;
};

struct MemoryLimit {
  double bytes = 0;  // infinite where nothing says
  std::string name;  // "physical memory"
};

// The smallest of the machine's physical memory, the limits of the process's control group and of
// those around it (version 1 and 2), and the process's limits of address space and data
// (RLIMIT_AS, RLIMIT_DATA). Swap is not counted. Files are read below `root`.
MemoryLimit memory_limit(const std::string& root = "");

// From now on so many processes of one training, this one among them, share the machine, and so
// many its control groups. Each may use an equal part.
void share_memory(int64_t on_machine, int64_t in_control_group);

// Throws UsageError where `bytes` are more than the limit: "WHAT at least BYTES of memory by
// estimate (PARTS), but this process can have ...; ADVICE.".
void check_fits(const std::string& what, double bytes, const std::string& parts,
                const std::string& advice);

}  // namespace headloom
