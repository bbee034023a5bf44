#include <ATen/ATen.h>

#include "ops/gated_norm/op.h"

namespace headloom::ops {

using at::Tensor;

Tensor gated_norm_reference(const Tensor& x, const Tensor& gate, const Tensor& eps) {
  const auto wide = at::promote_types(x.scalar_type(), at::kFloat);
  const Tensor value = x.to(wide);
  const Tensor scale = (value.square().mean(-1) + eps).rsqrt().unsqueeze(-1);
  return (at::silu(gate.to(wide)) * (value * scale)).to(x.scalar_type());
}

}  // namespace headloom::ops
