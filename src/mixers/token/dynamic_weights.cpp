#include "mixers/token/dynamic_weights.h"

#include <cmath>

#include "ops/dynamic_weights/op.h"

namespace headloom {

void DynamicWeightNetworks::initialize(int64_t width, bool with_projection, bool with_gate) {
  if (sides == 0) return;
  const int64_t inside = heads / groups, hidden = 2 * inside * rank;
  const auto c = static_cast<double>(width), n = static_cast<double>(inside),
             r = static_cast<double>(rank);
  if (with_projection) {
    w1 = std::make_shared<Linear>(width, sides * groups * hidden, false,
                                  std::sqrt(2 / (c + static_cast<double>(hidden))));
    w2 =
        normal({sides, groups, hidden, 2 * rank * inside}, 0.02 / (std::sqrt(2 * n * r) * (n + r)));
  }
  if (with_gate) {
    gate = std::make_shared<Linear>(width, sides * heads, false, 0.05 * std::sqrt(2 / (c + n)));
  }
}

std::vector<DynamicWeights> DynamicWeightNetworks::operator()(const Tensor& x, int64_t from,
                                                              int64_t count) const {
  std::vector<DynamicWeights> out(count);
  if (count == 0) return out;
  if (w1) {
    const int64_t rows = w1->weight.size(0) / sides;
    const Tensor hidden = w1->outputs(x, from * rows, count * rows);
    const Tensor second = count == sides ? w2 : w2.narrow(0, from, count);
    const auto weights = ops::dynamic_weights(hidden, second, rank);
    for (int64_t i = 0; i < count; ++i) {
      out[i].down = weights[i];
      out[i].up = weights[count + i];
    }
  }
  if (gate) {
    const auto gates = at::tanh(gate->outputs(x, from * heads, count * heads)).chunk(count, -1);
    for (int64_t i = 0; i < count; ++i) out[i].gate = gates[i];
  }
  return out;
}

int64_t DynamicWeightNetworks::values_per_token() const {
  return heads * ((w1 ? 2 * rank : 0) + (gate ? 1 : 0));
}

}  // namespace headloom
