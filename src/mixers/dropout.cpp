#include "mixers/dropout.h"

namespace headloom {

// Of the process: autograd may run a layer again in a thread of its own.
static int64_t g_part = 0, g_parts = 1;

PartOfBatch::PartOfBatch(int64_t part, int64_t parts) {
  g_part = part;
  g_parts = parts;
}
PartOfBatch::~PartOfBatch() {
  g_part = 0;
  g_parts = 1;
}

at::Tensor batch_dropout(const at::Tensor& x, double rate, bool training) {
  if (g_parts == 1 || !training || rate <= 0) return at::dropout(x, rate, training);
  std::vector<int64_t> sizes = x.sizes().vec();
  const int64_t rows = sizes[0];
  sizes[0] *= g_parts;
  const at::Tensor kept =
      at::empty(sizes, x.options()).bernoulli_(1 - rate).narrow(0, g_part * rows, rows);
  return x * kept.div(1 - rate);
}

}  // namespace headloom
