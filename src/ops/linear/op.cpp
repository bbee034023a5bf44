#include "ops/linear/op.h"

#include "ops/linear/declaration.h"
#include "ops/linear/int4.h"
#include "ops/product/product.h"

namespace headloom::ops {

void check_int4(const Tensor& weight, const Tensor& scale, const c10::SymInt& in) {
  constexpr const char* kName = Linear::kName;
  TORCH_CHECK_VALUE(in >= 0, kName, ": there are ", in, " inputs, expected at least 0.");
  const c10::SymInt groups = (in + (kInt4Group - 1)) / kInt4Group;
  TORCH_CHECK_TYPE(weight.scalar_type() == at::kByte, kName, ": weight, of four bits, has dtype ",
                   weight.scalar_type(), ", expected uint8.");
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_size(1) == groups * (kInt4Group / 2), kName,
                    ": weight, of four bits, has shape ", weight.sym_sizes(),
                    ", expected [O, 16 G] with G = ", groups, " for the ", in, " values of x.");
  TORCH_CHECK_VALUE(scale.defined(), kName, ": weight is of four bits, but there is no scale.");
  check_shape(kName, scale, "scale", {weight.sym_size(0), groups}, "[O, G]");
  TORCH_CHECK_TYPE(scale.scalar_type() == at::kBFloat16, kName, ": scale has dtype ",
                   scale.scalar_type(), ", expected bfloat16.");
  check_device(kName, scale, "scale", weight, "weight");
}

void Linear::check(const Arguments& a) {
  const auto& [x, weight, scale, bias] = a;
  TORCH_CHECK_VALUE(x.dim() >= 1, kName, ": x has shape ", x.sym_sizes(), ", expected [..., I].");
  check_floating(kName, x, "x");
  if (weight.scalar_type() == at::kByte) {
    check_int4(weight, scale, x.sym_size(-1));
  } else {
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_size(1) == x.sym_size(-1), kName,
                      ": weight has shape ", weight.sym_sizes(),
                      ", expected [O, I] with I = ", x.sym_size(-1), ".");
  }
  check_device(kName, weight, "weight", x, "x");
  if (weight.scalar_type() == at::kChar) {
    TORCH_CHECK_VALUE(scale.defined(), kName, ": weight is int8, but there is no scale.");
    check_shape(kName, scale, "scale", {weight.sym_size(0)}, "[O]");
    check_device(kName, scale, "scale", x, "x");
    TORCH_CHECK_TYPE(scale.scalar_type() == at::kFloat, kName, ": scale has dtype ",
                     scale.scalar_type(), ", expected float32.");
  } else if (weight.scalar_type() != at::kByte) {
    check_weight_dtype(kName, weight, x, "x");
    TORCH_CHECK_VALUE(!scale.defined(), kName, ": weight has dtype ", weight.scalar_type(),
                      ", which takes no scale, but there is one.");
  }
  if (bias.defined()) {
    check_shape(kName, bias, "bias", {weight.sym_size(0)}, "[O]");
    check_dtype(kName, bias, "bias", x, "x");
  }
}

// As at::linear; integer weights and their scales stay what they are.
void Linear::autocast(Arguments& a, const AutocastCast& cast) {
  cast(a.x, a.bias);
  // How many rows there are is asked only where it matters, and not while a graph is traced for any
  // number: it would be bound to the answer.
  const auto many = [&] {
    return a.x.dim() > 0 && !a.x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
           a.x.numel() > a.x.size(-1) * kStreamedRows;
  };
  if (!rounds_weights(a.x) || !many()) cast(a.weight);
}

std::vector<Tensor> Linear::outputs(const Arguments& a, bool /*training*/) {
  c10::SymDimVector sizes(a.x.sym_sizes());
  sizes.back() = a.weight.sym_size(0);
  return {at::empty_symint(sizes, a.x.options())};
}

static const Define<Linear> linear_operator;

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& scale, const Tensor& bias,
              const std::optional<std::string>& backend) {
  return call<Linear>({x, weight, scale, bias}, backend);
}

}  // namespace headloom::ops
