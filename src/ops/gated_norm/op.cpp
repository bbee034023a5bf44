#include "ops/gated_norm/op.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops/check.h"
#include "ops/dispatch.h"
#include "ops/gated_norm/fused.h"

namespace headloom::ops {
namespace {

using at::Tensor;

constexpr const char* kOp = "gated_norm";

void check(const Tensor& x, const Tensor& gate, const Tensor& eps,
           const std::optional<std::string_view>& backend) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) >= 1, "gated_norm: x has shape ", x.sym_sizes(),
                    ", expected [..., E] with E of at least 1.");
  TORCH_CHECK_TYPE(x.is_floating_point(), "gated_norm: x has dtype ", x.scalar_type(),
                   ", expected a floating type.");
  check_shape(kOp, gate, "gate", x.sym_sizes(), "[..., E]");
  check_dtype(kOp, gate, "gate", x);
  bool fits = eps.dim() <= x.dim() - 1;
  for (int64_t i = 1; fits && i <= eps.dim(); ++i) {
    fits = eps.sym_size(-i) == 1 || eps.sym_size(-i) == x.sym_size(-i - 1);
  }
  TORCH_CHECK_VALUE(fits, "gated_norm: eps has shape ", eps.sym_sizes(),
                    ", expected one that broadcasts to x's without its last dimension, ",
                    x.sym_sizes(), ".");
  check_device(kOp, eps, "eps", x);
  TORCH_CHECK_TYPE(eps.scalar_type() == at::kFloat || eps.scalar_type() == at::kDouble,
                   "gated_norm: eps has dtype ", eps.scalar_type(),
                   ", expected float32 or float64.");
  check_backend(kOp, backend);
}

Tensor gated_norm_op(const Tensor& x, const Tensor& gate, const Tensor& eps,
                     std::optional<std::string_view> backend) {
  check(x, gate, eps, backend);
  if (!runs_fused(kOp, backend, gated_norm_unsupported_reason(x, eps))) {
    return gated_norm_reference(x, gate, eps);
  }
  const auto rows = x.sym_sizes().slice(0, static_cast<size_t>(x.dim() - 1));
  return gated_norm_fused(x, gate, eps.to(at::kFloat).expand_symint(rows));
}

Tensor call(const Tensor& x, const Tensor& gate, const Tensor& eps,
            std::optional<std::string_view> backend) {
  static const auto op = dispatched<decltype(gated_norm_op)>("headloom::gated_norm");
  return op.call(x, gate, eps, backend);
}

// As autocast leaves SiLU and products alone, this takes what it gets, the narrower type of the
// two.
Tensor gated_norm_autocast(const Tensor& x, const Tensor& gate, const Tensor& eps,
                           std::optional<std::string_view> backend) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  const auto type = at::autocast::get_autocast_dtype(at::kCPU);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, at::kCPU); };
  return x.scalar_type() == gate.scalar_type() ? call(x, gate, eps, backend)
                                               : call(cast(x), cast(gate), eps, backend);
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def("gated_norm(Tensor x, Tensor gate, Tensor eps, str? backend=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CompositeImplicitAutograd, m) { m.impl("gated_norm", gated_norm_op); }
TORCH_LIBRARY_IMPL(headloom, AutocastCPU, m) { m.impl("gated_norm", gated_norm_autocast); }

}  // namespace

Tensor gated_norm(const Tensor& x, const Tensor& gate, const Tensor& eps,
                  const std::optional<std::string>& backend) {
  return call(x, gate, eps, backend ? std::optional<std::string_view>(*backend) : std::nullopt);
}

}  // namespace headloom::ops
