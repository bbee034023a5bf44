#include "ops/streamed_linear/op.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops/check.h"
#include "ops/dispatch.h"
#include "ops/streamed_linear/fused.h"

namespace headloom::ops {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

constexpr const char* kOp = "streamed_linear";

void check(const Tensor& x, const Tensor& weight, const Tensor& scale, const Tensor& bias,
           std::optional<std::string_view> backend) {
  TORCH_CHECK_VALUE(x.dim() >= 1, kOp, ": x has shape ", x.sym_sizes(), ", expected [..., I].");
  TORCH_CHECK_TYPE(x.is_floating_point(), kOp, ": x has dtype ", x.scalar_type(),
                   ", expected a floating type.");
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_size(1) == x.sym_size(-1), kOp,
                    ": weight has shape ", weight.sym_sizes(),
                    ", expected [O, I] with I = ", x.sym_size(-1), ".");
  check_device(kOp, weight, "weight", x, "x");
  if (weight.scalar_type() == at::kChar) {
    TORCH_CHECK_VALUE(scale.defined(), kOp, ": weight is int8, but there is no scale.");
    check_shape(kOp, scale, "scale", {weight.sym_size(0)}, "[O]");
    check_device(kOp, scale, "scale", x, "x");
    TORCH_CHECK_TYPE(scale.scalar_type() == at::kFloat, kOp, ": scale has dtype ",
                     scale.scalar_type(), ", expected float32.");
  } else {
    check_dtype(kOp, weight, "weight", x, "x");
    TORCH_CHECK_VALUE(!scale.defined(), kOp, ": weight has dtype ", weight.scalar_type(),
                      ", which takes no scale, but there is one.");
  }
  if (bias.defined()) {
    check_shape(kOp, bias, "bias", {weight.sym_size(0)}, "[O]");
    check_dtype(kOp, bias, "bias", x, "x");
    check_device(kOp, bias, "bias", x, "x");
  }
  check_backend(kOp, backend);
}

Tensor streamed_linear_op(const Tensor& x, const Tensor& weight, const Optional& scale,
                          const Optional& bias, std::optional<std::string_view> backend) {
  const Tensor s = scale.value_or(Tensor()), b = bias.value_or(Tensor());
  check(x, weight, s, b, backend);
  return runs_fused(kOp, backend, streamed_linear_unsupported(x, weight, b))
             ? streamed_linear_fused(x, weight, s, b)
             : streamed_linear_reference(x, weight, s, b);
}

Tensor call(const Tensor& x, const Tensor& weight, const Optional& scale, const Optional& bias,
            std::optional<std::string_view> backend) {
  static const auto op = dispatched<decltype(streamed_linear_op)>("headloom::streamed_linear");
  return op.call(x, weight, scale, bias, backend);
}

// As at::linear; int8 weights and their scales stay what they are.
Tensor streamed_linear_autocast(const Tensor& x, const Tensor& weight, const Optional& scale,
                                const Optional& bias, std::optional<std::string_view> backend) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  const auto type = at::autocast::get_autocast_dtype(at::kCPU);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, at::kCPU); };
  return call(cast(x), cast(weight), scale, bias ? Optional(cast(*bias)) : bias, backend);
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def(
      "streamed_linear(Tensor x, Tensor weight, Tensor? scale=None, Tensor? bias=None, "
      "str? backend=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CompositeImplicitAutograd, m) {
  m.impl("streamed_linear", streamed_linear_op);
}
TORCH_LIBRARY_IMPL(headloom, AutocastCPU, m) {
  m.impl("streamed_linear", streamed_linear_autocast);
}

}  // namespace

Tensor streamed_linear(const Tensor& x, const Tensor& weight, const Tensor& scale,
                       const Tensor& bias, const std::optional<std::string>& backend) {
  const auto optional = [](const Tensor& t) { return t.defined() ? Optional(t) : std::nullopt; };
  return call(x, weight, optional(scale), optional(bias),
              backend ? std::optional<std::string_view>(*backend) : std::nullopt);
}

}  // namespace headloom::ops
