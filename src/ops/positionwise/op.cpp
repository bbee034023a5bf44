#include "ops/positionwise/op.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include "ops/check.h"
#include "ops/dispatch.h"
#include "ops/positionwise/fused.h"

namespace headloom::ops {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;
using Backend = std::optional<std::string_view>;

void check_floating(const char* op, const Tensor& t, const char* name) {
  TORCH_CHECK_TYPE(t.is_floating_point(), op, ": ", name, " has dtype ", t.scalar_type(),
                   ", expected a floating type.");
}

Tensor rms_norm_op(const Tensor& x, const Optional& scale, double eps, Backend backend) {
  constexpr const char* kOp = "rms_norm";
  check_floating(kOp, x, "x");
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) >= 1, "rms_norm: x has shape ", x.sym_sizes(),
                    ", expected [..., E] with E of at least 1.");
  if (scale) {
    check_floating(kOp, *scale, "scale");
    check_shape(kOp, *scale, "scale", {x.sym_size(-1)}, "[E]");
    check_device(kOp, *scale, "scale", x, "x");
  }
  TORCH_CHECK_VALUE(eps >= 0, "rms_norm: eps is ", eps, ", expected at least 0.");
  check_backend(kOp, backend);
  const bool fused = runs_fused(kOp, backend, kernels_unsupported(x));
  return fused ? rms_norm_fused(x, scale.value_or(Tensor()), eps)
               : rms_norm_reference(x, scale.value_or(Tensor()), eps);
}

Tensor rotary_op(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
                 Backend backend) {
  constexpr const char* kOp = "rotary";
  check_floating(kOp, x, "x");
  TORCH_CHECK_VALUE(x.dim() == 4, "rotary: x has shape ", x.sym_sizes(),
                    ", expected [B, T, H, D].");
  TORCH_CHECK_VALUE((cos.dim() == 2 || cos.dim() == 3) && cos.sym_size(-1) >= 1 &&
                        2 * cos.sym_size(-1) <= x.sym_size(3),
                    "rotary: cos has shape ", cos.sym_sizes(),
                    ", expected [T, P] or [B, T, P] with P from 1 to D / 2 of x [B, T, H, D] = ",
                    x.sym_sizes(), ".");
  const c10::SymInt pairs = cos.sym_size(-1);
  const auto real = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (const auto& [t, name] : {std::pair(&cos, "cos"), std::pair(&sin, "sin")}) {
    if (cos.dim() == 3) {
      check_shape(kOp, *t, name, {x.sym_size(0), x.sym_size(1), pairs}, "[B, T, P]");
    } else {
      check_shape(kOp, *t, name, {x.sym_size(1), pairs}, "[T, P]");
    }
    TORCH_CHECK_TYPE(t->scalar_type() == real, "rotary: ", name, " has dtype ", t->scalar_type(),
                     ", expected ", real, ".");
    check_device(kOp, *t, name, x, "x");
  }
  const char* reason = kernels_unsupported(x);
  if (cos.requires_grad() || sin.requires_grad()) reason = "cos or sin wants a gradient";
  check_backend(kOp, backend);
  return runs_fused(kOp, backend, reason) ? rotary_fused(x, cos, sin, interleaved)
                                          : rotary_reference(x, cos, sin, interleaved);
}

Tensor swiglu_op(const Tensor& x, Backend backend) {
  constexpr const char* kOp = "swiglu";
  check_floating(kOp, x, "x");
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) >= 2 && x.sym_size(-1) % 2 == 0,
                    "swiglu: x has shape ", x.sym_sizes(),
                    ", expected [..., 2 I] with I of at least 1.");
  check_backend(kOp, backend);
  return runs_fused(kOp, backend, kernels_unsupported(x)) ? swiglu_fused(x) : swiglu_reference(x);
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  const auto tags = std::vector<at::Tag>{at::Tag::pt2_compliant_tag};
  m.def("rms_norm(Tensor x, Tensor? scale=None, float eps=1e-06, str? backend=None) -> Tensor",
        tags);
  m.def(
      "rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved=False, str? backend=None) -> "
      "Tensor",
      tags);
  m.def("swiglu(Tensor x, str? backend=None) -> Tensor", tags);
}
// Autocast leaves them alone: each takes and gives what type comes, as ATen's norm and SiLU do.
TORCH_LIBRARY_IMPL(headloom, CompositeImplicitAutograd, m) {
  m.impl("rms_norm", rms_norm_op);
  m.impl("rotary", rotary_op);
  m.impl("swiglu", swiglu_op);
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& scale, double eps,
                const std::optional<std::string>& backend) {
  static const auto op = dispatched<decltype(rms_norm_op)>("headloom::rms_norm");
  return op.call(x, optional_tensor(scale), eps, backend);
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
              const std::optional<std::string>& backend) {
  static const auto op = dispatched<decltype(rotary_op)>("headloom::rotary");
  return op.call(x, cos, sin, interleaved, backend);
}

Tensor swiglu(const Tensor& x, const std::optional<std::string>& backend) {
  static const auto op = dispatched<decltype(swiglu_op)>("headloom::swiglu");
  return op.call(x, backend);
}

}  // namespace headloom::ops
