#include "ops/moe/op.h"

#include "ops/moe/declaration.h"

namespace headloom::ops {

void Moe::check(const Arguments& a) {
  const auto& [x, up, down, choice, weight] = a;
  TORCH_CHECK_VALUE(x.dim() == 2 && x.sym_size(1) >= 1, "moe: x has shape ", x.sym_sizes(),
                    ", expected [N, C] with C of at least 1.");
  check_floating(kName, x, "x");
  const c10::SymInt tokens = x.sym_size(0), width = x.sym_size(1);
  TORCH_CHECK_VALUE(up.dim() == 3 && up.sym_size(0) >= 1 && up.sym_size(1) >= 2 &&
                        up.sym_size(1) % 2 == 0 && up.sym_size(2) == width,
                    "moe: up has shape ", up.sym_sizes(),
                    ", expected [experts, 2I, C] with C = ", width, ".");
  check_dtype(kName, up, "up", x);
  check_shape(kName, down, "down", {up.sym_size(0), width, up.sym_size(1) / 2}, "[experts, C, I]");
  check_dtype(kName, down, "down", x);
  check_ids(kName, choice, "choice", x);
  TORCH_CHECK_VALUE(choice.dim() == 2 && choice.sym_size(0) == tokens, "moe: choice has shape ",
                    choice.sym_sizes(), ", expected [N, K] with N = ", tokens, ".");
  check_shape(kName, weight, "weight", choice.sym_sizes(), "[N, K]");
  check_device(kName, weight, "weight", x);
  TORCH_CHECK_TYPE(weight.scalar_type() == at::kFloat || weight.scalar_type() == x.scalar_type(),
                   "moe: weight has dtype ", weight.scalar_type(), ", expected float32 or ",
                   x.scalar_type(), " as x has.");
}

// What is multiplied is cast to the autocast type; the weights stay float32.
void Moe::autocast(Arguments& a, const AutocastCast& cast) { cast(a.x, a.up, a.down); }

std::vector<Tensor> Moe::outputs(const Arguments& a, bool training) {
  const c10::SymInt rows = training ? a.choice.sym_numel() : c10::SymInt(0);
  return {contiguous_like(a.x), at::empty_symint({rows, a.up.sym_size(1)}, a.x.options())};
}

static const Define<Moe> moe_operator;

Tensor moe(const Tensor& x, const Tensor& up, const Tensor& down, const Tensor& choice,
           const Tensor& weight, const std::optional<std::string>& backend) {
  return call<Moe>({x, up, down, choice, weight}, backend);
}

}  // namespace headloom::ops
