#include "ops/documents.h"
#include "ops/token_shift/declaration.h"

namespace headloom::ops {

std::vector<Tensor> TokenShift::reference(const Arguments& a) {
  const Tensor& x = a.x;
  const TokenShiftOptions& o = a.options;
  const auto wide = at::toOpMathType(x.scalar_type());
  const Tensor now = x.to(wide);
  const c10::SymInt rest = x.sym_size(1) - 1;
  const Tensor first =
      o.last.defined() ? o.last.to(wide).unsqueeze(1) : at::zeros_like(now.narrow(1, 0, 1));
  Tensor before = now.narrow_symint(1, 0, rest);
  if (o.documents.defined()) {
    before = before.masked_fill(id_changes(o.documents).unsqueeze(-1), 0);  // though it were NaN
  }
  before = at::cat({first, before}, 1);
  std::vector<Tensor> out;
  for (const Tensor& mu : a.mix.to(wide).unbind(0)) {
    out.push_back((before + mu * (now - before)).to(x.scalar_type()));
  }
  return out;
}

}  // namespace headloom::ops
