#include "ops/gated_norm/declaration.h"

namespace headloom::ops {

Tensor GatedNorm::reference(const Arguments& a) {
  const auto& [x, gate, eps] = a;
  const auto wide = at::toOpMathType(x.scalar_type());
  const Tensor value = x.to(wide);
  const Tensor scale = (value.square().mean(-1) + eps).rsqrt().unsqueeze(-1);
  return (at::silu(gate.to(wide)) * (value * scale)).to(x.scalar_type());
}

}  // namespace headloom::ops
