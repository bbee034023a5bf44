#include "ops/token_shift/op.h"

#include "ops/token_shift/declaration.h"

namespace headloom::ops {

void TokenShift::check(const Arguments& a) {
  const Tensor &x = a.x, &mix = a.mix, &last = a.options.last, &documents = a.options.documents;
  TORCH_CHECK_VALUE(x.dim() == 3 && x.sym_size(1) >= 1, "token_shift: x has shape ", x.sym_sizes(),
                    ", expected [B, T, C] with T of at least 1.");
  check_floating(kName, x, "x");
  TORCH_CHECK_VALUE(mix.dim() == 2 && mix.sym_size(0) >= 1 && mix.sym_size(1) == x.sym_size(2),
                    "token_shift: mix has shape ", mix.sym_sizes(),
                    ", expected [N, C] with N of at least 1 and C = ", x.sym_size(2), ".");
  check_floating(kName, mix, "mix");
  check_device(kName, mix, "mix", x, "x");
  if (last.defined()) {
    check_shape(kName, last, "last", {x.sym_size(0), x.sym_size(2)}, "[B, C]");
    check_dtype(kName, last, "last", x, "x");
  }
  if (documents.defined()) check_documents(kName, documents, x, "x");
}

std::vector<Tensor> TokenShift::outputs(const Arguments& a, bool /*training*/) {
  std::vector<Tensor> out;
  for (int64_t i = 0; i < fixed_size(a.mix, 0); ++i) out.push_back(contiguous_like(a.x));
  return out;
}

static const Define<TokenShift> token_shift_operator;

std::vector<Tensor> token_shift(const Tensor& x, const Tensor& mix, const TokenShiftOptions& o) {
  return call<TokenShift>({x, mix, o}, o.backend);
}

}  // namespace headloom::ops
