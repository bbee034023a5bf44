#include "mixers/dropout.h"

namespace headloom {

// Of the process: autograd may run a layer again in a thread of its own.
static int64_t g_part = 0, g_parts = 1;
static const ContextParallel* g_among = nullptr;

PartOfBatch::PartOfBatch(int64_t part, int64_t parts, const ContextParallel* among) {
  g_part = part;
  g_parts = parts;
  g_among = among;
}
PartOfBatch::~PartOfBatch() {
  g_part = 0;
  g_parts = 1;
  g_among = nullptr;
}

at::Tensor batch_dropout(const at::Tensor& x, double rate, bool training) {
  const bool whole = g_parts == 1 && g_among == nullptr;
  if (whole || !training || rate <= 0) return at::dropout(x, rate, training);
  std::vector<int64_t> sizes = x.sizes().vec();
  if (g_among != nullptr) {
    sizes[0] /= 2;
    sizes[1] *= 2 * g_among->size;
  }
  const int64_t sequences = sizes[0];
  sizes[0] *= g_parts;
  at::Tensor kept =
      at::empty(sizes, x.options()).bernoulli_(1 - rate).narrow(0, g_part * sequences, sequences);
  if (g_among != nullptr) kept = g_among->rows_of(kept);
  return x * kept.div(1 - rate);
}

}  // namespace headloom
