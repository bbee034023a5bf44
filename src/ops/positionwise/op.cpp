#include "ops/positionwise/op.h"

#include "ops/positionwise/declaration.h"

namespace headloom::ops {

void RmsNorm::check(const Arguments& a) {
  const Tensor& x = a.x;
  check_floating(kName, x, "x");
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) >= 1, "rms_norm: x has shape ", x.sym_sizes(),
                    ", expected [..., E] with E of at least 1.");
  if (a.scale.defined()) {
    check_floating(kName, a.scale, "scale");
    check_shape(kName, a.scale, "scale", {x.sym_size(-1)}, "[E]");
    check_device(kName, a.scale, "scale", x, "x");
  }
  TORCH_CHECK_VALUE(a.eps >= 0, "rms_norm: eps is ", a.eps, ", expected at least 0.");
}

void Rotary::check(const Arguments& a) {
  const Tensor &x = a.x, &cos = a.cos;
  check_floating(kName, x, "x");
  TORCH_CHECK_VALUE(x.dim() == 4, "rotary: x has shape ", x.sym_sizes(),
                    ", expected [B, T, H, D].");
  TORCH_CHECK_VALUE((cos.dim() == 2 || cos.dim() == 3) && cos.sym_size(-1) >= 1 &&
                        2 * cos.sym_size(-1) <= x.sym_size(3),
                    "rotary: cos has shape ", cos.sym_sizes(),
                    ", expected [T, P] or [B, T, P] with P from 1 to D / 2 of x [B, T, H, D] = ",
                    x.sym_sizes(), ".");
  const c10::SymInt pairs = cos.sym_size(-1);
  const auto real = at::toOpMathType(x.scalar_type());
  for (const auto& [t, name] : {std::pair(&cos, "cos"), std::pair(&a.sin, "sin")}) {
    if (cos.dim() == 3) {
      check_shape(kName, *t, name, {x.sym_size(0), x.sym_size(1), pairs}, "[B, T, P]");
    } else {
      check_shape(kName, *t, name, {x.sym_size(1), pairs}, "[T, P]");
    }
    TORCH_CHECK_TYPE(t->scalar_type() == real, "rotary: ", name, " has dtype ", t->scalar_type(),
                     ", expected ", real, ".");
    check_device(kName, *t, name, x, "x");
  }
}

void Swiglu::check(const Arguments& a) {
  check_floating(kName, a.x, "x");
  TORCH_CHECK_VALUE(a.x.dim() >= 1 && a.x.sym_size(-1) >= 2 && a.x.sym_size(-1) % 2 == 0,
                    "swiglu: x has shape ", a.x.sym_sizes(),
                    ", expected [..., 2 I] with I of at least 1.");
}

void GeluTanh::check(const Arguments& a) { check_floating(kName, a.x, "x"); }

std::vector<Tensor> GeluTanh::outputs(const Arguments& a, bool /*training*/) {
  return {contiguous_like(a.x)};
}

std::vector<Tensor> RmsNorm::outputs(const Arguments& a, bool /*training*/) {
  return {contiguous_like(a.x)};
}

std::vector<Tensor> Rotary::outputs(const Arguments& a, bool /*training*/) {
  return {contiguous_like(a.x)};
}

std::vector<Tensor> Swiglu::outputs(const Arguments& a, bool /*training*/) {
  c10::SymDimVector sizes(a.x.sym_sizes());
  sizes.back() = sizes.back() / 2;
  return {at::empty_symint(sizes, a.x.options())};
}

static const Define<RmsNorm> rms_norm_operator;
static const Define<Rotary> rotary_operator;
static const Define<Swiglu> swiglu_operator;
static const Define<GeluTanh> gelu_tanh_operator;

Tensor rms_norm(const Tensor& x, const Tensor& scale, double eps,
                const std::optional<std::string>& backend) {
  return call<RmsNorm>({x, scale, eps}, backend);
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
              const std::optional<std::string>& backend) {
  return call<Rotary>({x, cos, sin, interleaved}, backend);
}

Tensor swiglu(const Tensor& x, const std::optional<std::string>& backend) {
  return call<Swiglu>({x}, backend);
}

Tensor gelu_tanh(const Tensor& x, const std::optional<std::string>& backend) {
  return call<GeluTanh>({x}, backend);
}

}  // namespace headloom::ops
