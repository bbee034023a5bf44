#include "ops/gated_norm/op.h"

#include "ops/gated_norm/declaration.h"

namespace headloom::ops {

void GatedNorm::check(const Arguments& a) {
  const Tensor &x = a.x, &eps = a.eps;
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) >= 1, "gated_norm: x has shape ", x.sym_sizes(),
                    ", expected [..., E] with E of at least 1.");
  check_floating(kName, x, "x");
  check_shape(kName, a.gate, "gate", x.sym_sizes(), "[..., E]");
  check_dtype(kName, a.gate, "gate", x);
  bool fits = eps.dim() <= x.dim() - 1;
  for (int64_t i = 1; fits && i <= eps.dim(); ++i) {
    fits = eps.sym_size(-i) == 1 || eps.sym_size(-i) == x.sym_size(-i - 1);
  }
  TORCH_CHECK_VALUE(fits, "gated_norm: eps has shape ", eps.sym_sizes(),
                    ", expected one that broadcasts to x's without its last dimension, ",
                    x.sym_sizes(), ".");
  check_device(kName, eps, "eps", x);
  TORCH_CHECK_TYPE(eps.scalar_type() == at::kFloat || eps.scalar_type() == at::kDouble,
                   "gated_norm: eps has dtype ", eps.scalar_type(),
                   ", expected float32 or float64.");
}

// As autocast leaves SiLU and products alone, this takes what it gets, the narrower type of the
// two.
void GatedNorm::autocast(Arguments& a, const AutocastCast& cast) {
  if (a.x.scalar_type() != a.gate.scalar_type()) cast(a.x, a.gate);
}

void GatedNorm::prepare(Arguments& a) {
  const auto rows = a.x.sym_sizes().slice(0, static_cast<size_t>(a.x.dim() - 1));
  a.eps = a.eps.to(at::kFloat).expand_symint(rows);
}

std::vector<Tensor> GatedNorm::outputs(const Arguments& a, bool /*training*/) {
  return {contiguous_like(a.x)};
}

static const Define<GatedNorm> gated_norm_operator;

Tensor gated_norm(const Tensor& x, const Tensor& gate, const Tensor& eps,
                  const std::optional<std::string>& backend) {
  return call<GatedNorm>({x, gate, eps}, backend);
}

}  // namespace headloom::ops
