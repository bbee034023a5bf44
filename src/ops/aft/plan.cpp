#include "ops/aft/scratch.h"

namespace headloom::ops::aft_kernel {

int64_t scratch_size(int64_t window, bool backward) {
  return Scratch(window, backward, nullptr).size;
}

}  // namespace headloom::ops::aft_kernel
