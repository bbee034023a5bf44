// Dropout that does not depend on how many processes share a batch.
#pragma once

#include <ATen/ATen.h>

#include "mixers/context_parallel.h"

namespace headloom {

// While it lives, a batch of this process is part `part` of `parts` equal ones of a larger batch,
// in their order: batch_dropout() drops what it would drop of the larger one. With `among` the
// batch has those rows of the part's sequences that are this process's. One lives at a time.
class PartOfBatch {
 public:
  // `among` may be null; it must outlive this.
  PartOfBatch(int64_t part, int64_t parts, const ContextParallel* among);
  ~PartOfBatch();
  PartOfBatch(const PartOfBatch&) = delete;
  PartOfBatch& operator=(const PartOfBatch&) = delete;
};

// at::dropout of x [B, ...], with ContextParallel [2 B, L, ...]. For a part of a batch the numbers
// of the whole batch are drawn, so that the generators of all processes stay alike; the time for
// that grows with the whole batch.
at::Tensor batch_dropout(const at::Tensor& x, double rate, bool training);

}  // namespace headloom
