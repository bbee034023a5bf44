#include "ops/dynamic_weights/op.h"

#include "ops/dynamic_weights/declaration.h"

namespace headloom::ops {

void DynamicWeights::check(const Arguments& a) {
  const auto& [hidden, w2, rank] = a;
  check_floating(kName, hidden, "hidden");
  check_floating(kName, w2, "w2");
  TORCH_CHECK_VALUE(rank >= 1, kName, ": rank is ", rank, ", expected at least 1.");
  TORCH_CHECK_VALUE(w2.dim() == 4 && w2.sym_size(3) > 0 && w2.sym_size(3) >= rank &&
                        w2.sym_size(3) % (2 * rank) == 0,
                    kName, ": w2 has shape ", w2.sym_sizes(),
                    ", expected [S, g, I, 2 R n] with R = ", rank, ".");
  TORCH_CHECK_VALUE(
      hidden.dim() == 3 && hidden.sym_size(2) == w2.sym_size(0) * w2.sym_size(1) * w2.sym_size(2),
      kName, ": hidden has shape ", hidden.sym_sizes(),
      ", expected [B, L, S g I] with [S, g, I] of w2 ", w2.sym_sizes(), ".");
  check_device(kName, w2, "w2", hidden, "hidden");
}

// As the product in it would.
void DynamicWeights::autocast(Arguments& a, const AutocastCast& cast) { cast(a.hidden, a.w2); }

void DynamicWeights::prepare(Arguments& a) { a.w2 = a.w2.to(a.hidden.scalar_type()); }

std::vector<Tensor> DynamicWeights::outputs(const Arguments& a, bool training) {
  const auto& [hidden, w2, rank] = a;
  const c10::SymInt rows = hidden.sym_size(0) * hidden.sym_size(1);
  const c10::SymInt parts = w2.sym_size(0) * w2.sym_size(1), weights = w2.sym_size(3);
  std::vector<Tensor> out = {
      at::empty_symint({hidden.sym_size(0), hidden.sym_size(1), w2.sym_size(0), 2 * rank,
                        w2.sym_size(1) * (weights / (2 * rank))},
                       hidden.options())};
  if (training) {
    out.push_back(at::empty_symint({parts, rows, weights}, hidden.options()));
    out.push_back(at::empty_symint({rows, parts, w2.sym_size(2)}, hidden.options()));
  }
  return out;
}

std::vector<Tensor> DynamicWeights::result(const Arguments& a, const std::vector<Tensor>& outputs) {
  const int64_t sides = fixed_size(a.w2, 0);
  // In one operator: its backward puts the gradients together in one pass.
  const auto rows = outputs[0].unflatten(3, {2, a.rank}).flatten(2, 3).unbind(2);
  std::vector<Tensor> out;
  out.reserve(rows.size());
  for (int64_t part = 0; part < 2; ++part) {
    for (int64_t s = 0; s < sides; ++s) out.push_back(rows[2 * s + part]);
  }
  return out;
}

std::vector<Tensor> DynamicWeights::definition(const Arguments& a) {
  const std::vector<Tensor> weights = reference(a);
  const size_t sides = weights.size() / 2;
  std::vector<Tensor> rows;
  for (size_t s = 0; s < sides; ++s) rows.push_back(at::cat({weights[s], weights[sides + s]}, 2));
  return {at::stack(rows, 2)};
}

static const Define<DynamicWeights> dynamic_weights_operator;

std::vector<Tensor> dynamic_weights(const Tensor& hidden, const Tensor& w2, int64_t rank,
                                    const std::optional<std::string>& backend) {
  return call<DynamicWeights>({hidden, w2, rank}, backend);
}

}  // namespace headloom::ops
