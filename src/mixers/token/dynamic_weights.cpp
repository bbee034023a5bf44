#include "mixers/token/dynamic_weights.h"

#include <cmath>

#include "ops/positionwise/op.h"

namespace headloom {

void DynamicWeightNetworks::initialize(int64_t width, bool with_projection, bool with_gate) {
  if (sides == 0) return;
  const int64_t inside = heads / groups, hidden = 2 * inside * rank;
  const auto c = static_cast<double>(width), n = static_cast<double>(inside),
             r = static_cast<double>(rank);
  if (with_projection) {
    w1 = at::empty({width, sides * groups * hidden})
             .normal_(0, std::sqrt(2 / (c + static_cast<double>(hidden))));
    w2 = at::empty({sides, groups, hidden, 2 * rank * inside})
             .normal_(0, 0.02 / (std::sqrt(2 * n * r) * (n + r)));
  }
  if (with_gate) {
    gate = at::empty({width, sides * heads}).normal_(0, 0.05 * std::sqrt(2 / (c + n)));
  }
}

std::vector<DynamicWeights> DynamicWeightNetworks::operator()(const Tensor& x, int64_t from,
                                                              int64_t count) const {
  std::vector<DynamicWeights> out(count);
  if (count == 0) return out;
  const int64_t batch = x.size(0), length = x.size(1);
  if (w1.defined()) {
    const int64_t hidden = w2.size(2);
    const Tensor down = w1.narrow(1, from * groups * hidden, count * groups * hidden);
    const Tensor h = at::gelu(at::matmul(x, down)).view({batch * length, count * groups, hidden});
    const Tensor w = at::bmm(h.transpose(0, 1), w2.narrow(0, from, count).flatten(0, 1))
                         .view({count, groups, batch, length, 2, rank, heads / groups});
    const auto halves = w.unbind(4);
    const auto downs = ops::rms_norm(halves[0], {}, 1e-6).unbind(0);
    const auto ups = halves[1].unbind(0);
    // [g, B, L, R, n] -> [B, L, R, H], a view with one group.
    const auto layout = [](const Tensor& t) { return t.permute({1, 2, 3, 0, 4}).flatten(3); };
    for (int64_t i = 0; i < count; ++i) {
      out[i].down = layout(downs[i]);
      out[i].up = layout(ups[i]);
    }
  }
  if (gate.defined()) {
    const Tensor weight = gate.narrow(1, from * heads, count * heads);
    const auto gates = at::tanh(at::matmul(x, weight)).chunk(count, -1);
    for (int64_t i = 0; i < count; ++i) out[i].gate = gates[i];
  }
  return out;
}

int64_t DynamicWeightNetworks::values_per_token() const {
  return heads * ((w1.defined() ? 2 * rank : 0) + (gate.defined() ? 1 : 0));
}

}  // namespace headloom
