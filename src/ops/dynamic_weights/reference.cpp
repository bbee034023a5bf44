#include "ops/dynamic_weights/declaration.h"
#include "ops/positionwise/op.h"

namespace headloom::ops {

std::vector<Tensor> DynamicWeights::reference(const Arguments& a) {
  const auto& [hidden, w2, rank] = a;
  const c10::SymInt batch = hidden.sym_size(0), length = hidden.sym_size(1);
  const int64_t sides = fixed_size(w2, 0), groups = fixed_size(w2, 1), inner = fixed_size(w2, 2);
  const Tensor h = at::gelu(hidden).reshape_symint({batch * length, sides * groups, inner});
  const Tensor w =
      at::bmm(h.transpose(0, 1), w2.to(hidden.scalar_type()).flatten(0, 1))
          .view_symint({sides, groups, batch, length, 2, rank, fixed_size(w2, 3) / (2 * rank)});
  const auto halves = w.unbind(4);
  std::vector<Tensor> out;
  for (const Tensor& half : {rms_norm(halves[0], {}, 1e-6), halves[1]}) {
    // [S, g, B, L, R, n] -> [B, L, R, H] of each side, a view with one group.
    for (const Tensor& side : half.permute({0, 2, 3, 4, 1, 5}).flatten(4).unbind(0)) {
      out.push_back(side);
    }
  }
  return out;
}

}  // namespace headloom::ops
