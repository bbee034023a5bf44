// The table of blocks. One line a block.
#include "blocks/block.h"

namespace headloom {

#define HEADLOOM_BLOCKS(X) \
  X(sequential)            \
  X(parallel)              \
  X(simplified)

#define DECLARE(name) BlockEntry name##_block();
HEADLOOM_BLOCKS(DECLARE)
#undef DECLARE

const std::vector<BlockEntry>& blocks() {
#define ENTRY(name) name##_block(),
  static const std::vector<BlockEntry> entries = {HEADLOOM_BLOCKS(ENTRY)};
#undef ENTRY
  return entries;
}

}  // namespace headloom
