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

std::vector<Tensor> DynamicWeights::outputs(const Arguments& a, bool /*training*/) {
  const auto& [hidden, w2, rank] = a;
  return {at::empty_symint({hidden.sym_size(0), hidden.sym_size(1), w2.sym_size(0), 2 * rank,
                            w2.sym_size(1) * (w2.sym_size(3) / (2 * rank))},
                           hidden.options())};
}

std::vector<Tensor> DynamicWeights::result(const Arguments& a, const std::vector<Tensor>& outputs) {
  const Tensor& all = outputs[0];
  const int64_t sides = fixed_size(a.w2, 0);
  const c10::SymInt batch = all.sym_size(0), length = all.sym_size(1), heads = all.sym_size(4);
  const c10::SymInt half = a.rank * heads, line = 2 * sides * half;
  std::vector<Tensor> out;
  out.reserve(2 * sides);
  for (int64_t part = 0; part < 2; ++part) {
    for (int64_t s = 0; s < sides; ++s) {
      out.push_back(all.as_strided_symint({batch, length, a.rank, heads},
                                          {length * line, line, heads, 1}, (2 * s + part) * half));
    }
  }
  return out;
}

static const Define<DynamicWeights> dynamic_weights_operator;

std::vector<Tensor> dynamic_weights(const Tensor& hidden, const Tensor& w2, int64_t rank,
                                    const std::optional<std::string>& backend) {
  return call<DynamicWeights>({hidden, w2, rank}, backend);
}

}  // namespace headloom::ops
