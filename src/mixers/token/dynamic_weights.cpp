#include "mixers/token/dynamic_weights.h"

#include <cmath>

#include "ops/dynamic_weights/op.h"
#include "ops/streamed_linear/op.h"

namespace headloom {

void DynamicWeightNetworks::initialize(int64_t width, bool with_projection, bool with_gate) {
  if (sides == 0) return;
  const int64_t inside = heads / groups, hidden = 2 * inside * rank;
  const auto c = static_cast<double>(width), n = static_cast<double>(inside),
             r = static_cast<double>(rank);
  if (with_projection) {
    w1 = at::empty({sides * groups * hidden, width})
             .normal_(0, std::sqrt(2 / (c + static_cast<double>(hidden))));
    w2 = at::empty({sides, groups, hidden, 2 * rank * inside})
             .normal_(0, 0.02 / (std::sqrt(2 * n * r) * (n + r)));
  }
  if (with_gate) {
    gate = at::empty({sides * heads, width}).normal_(0, 0.05 * std::sqrt(2 / (c + n)));
  }
}

std::vector<DynamicWeights> DynamicWeightNetworks::operator()(const Tensor& x, int64_t from,
                                                              int64_t count) const {
  std::vector<DynamicWeights> out(count);
  if (count == 0) return out;
  // Of one side, or of all.
  const auto part = [&](const Tensor& all, int64_t rows) {
    return count == sides ? all : all.narrow(0, from * rows, count * rows);
  };
  if (w1.defined()) {
    const Tensor hidden = ops::streamed_linear(x, part(w1, w1.size(0) / sides));
    const auto weights = ops::dynamic_weights(hidden, part(w2, 1), rank);
    for (int64_t i = 0; i < count; ++i) {
      out[i].down = weights[i];
      out[i].up = weights[count + i];
    }
  }
  if (gate.defined()) {
    const auto gates = at::tanh(ops::streamed_linear(x, part(gate, heads))).chunk(count, -1);
    for (int64_t i = 0; i < count; ++i) out[i].gate = gates[i];
  }
  return out;
}

int64_t DynamicWeightNetworks::values_per_token() const {
  return heads * ((w1.defined() ? 2 * rank : 0) + (gate.defined() ? 1 : 0));
}

}  // namespace headloom
