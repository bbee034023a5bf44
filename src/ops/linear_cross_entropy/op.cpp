#include "ops/linear_cross_entropy/op.h"

#include "ops/linear_cross_entropy/declaration.h"
#include "ops/product/product.h"

namespace headloom::ops {

void LinearCrossEntropy::check(const Arguments& a) {
  const auto& [hidden, weight, targets, bias] = a;
  TORCH_CHECK_VALUE(hidden.dim() == 2 && hidden.sym_size(1) >= 1, kName, ": hidden has shape ",
                    hidden.sym_sizes(), ", expected [N, C] with C of at least 1.");
  check_floating(kName, hidden, "hidden");
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && weight.sym_size(0) >= 1 && weight.sym_size(1) == hidden.sym_size(1),
      kName, ": weight has shape ", weight.sym_sizes(),
      ", expected [V, C] with V of at least 1 and C = ", hidden.sym_size(1), ".");
  check_weight_dtype(kName, weight, hidden, "hidden");
  check_ids(kName, targets, "targets", hidden, "hidden");
  check_shape(kName, targets, "targets", {hidden.sym_size(0)}, "[N]");
  if (bias.defined()) {
    check_shape(kName, bias, "bias", {weight.sym_size(0)}, "[V]");
    check_dtype(kName, bias, "bias", hidden, "hidden");
  }
}

// The products in the narrow type, the softmax in float32, as at::linear and at::cross_entropy_loss
// under autocast.
void LinearCrossEntropy::autocast(Arguments& a, const AutocastCast& cast) {
  cast(a.hidden, a.bias);
  if (!rounds_weights(a.hidden)) cast(a.weight);
}

std::vector<Tensor> LinearCrossEntropy::outputs(const Arguments& a, bool training) {
  const auto real = a.hidden.options().dtype(at::toOpMathType(a.hidden.scalar_type()));
  std::vector<Tensor> out = {at::empty_symint(c10::SymIntArrayRef(), real),
                             at::empty_symint(a.targets.sym_sizes(), a.targets.options())};
  if (!training) return out;
  out.push_back(contiguous_like(a.hidden));
  out.push_back(contiguous_like(a.weight));
  if (a.bias.defined()) out.push_back(contiguous_float(a.bias.sym_sizes(), a.bias));
  return out;
}

static const Define<LinearCrossEntropy> linear_cross_entropy_operator;

std::tuple<Tensor, Tensor> linear_cross_entropy(const Tensor& hidden, const Tensor& weight,
                                                const Tensor& targets, const Tensor& bias,
                                                const std::optional<std::string>& backend) {
  return call<LinearCrossEntropy>({hidden, weight, targets, bias}, backend);
}

}  // namespace headloom::ops
