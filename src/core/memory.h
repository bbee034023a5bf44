// Resident memory of this process.
#pragma once

#include <cstdint>

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

}  // namespace headloom
