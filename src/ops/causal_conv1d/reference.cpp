#include "ops/causal_conv1d/declaration.h"
#include "ops/documents.h"

namespace headloom::ops {

std::tuple<Tensor, Tensor> CausalConv1d::reference(const Arguments& a) {
  const auto& [x, weight, o] = a;
  const auto wide = at::toOpMathType(x.scalar_type());
  const int64_t taps = fixed_size(weight, 1);
  const c10::SymInt length = x.sym_size(1);
  const Tensor rows = o.state.defined() ? at::cat({o.state, x}, 1).to(wide)
                                        : at::constant_pad_nd(x.to(wide), {0, 0, taps - 1, 0});
  Tensor run;  // documents begun since the first position, for each of `rows`
  if (o.documents.defined()) {
    run = at::constant_pad_nd(id_changes(o.documents).to(at::kLong), {taps, 0}).cumsum(1);
  }
  Tensor y;
  for (int64_t j = 0; j < taps; ++j) {
    Tensor tap = rows.narrow_symint(1, j, length) * weight.select(1, j).to(wide);
    if (run.defined()) {
      // Not times 0: what is not finite in one document stays in it.
      const Tensor other =
          run.narrow_symint(1, j, length).ne(run.narrow_symint(1, taps - 1, length));
      tap = tap.masked_fill(other.unsqueeze(-1), 0);
    }
    y = y.defined() ? y + tap : tap;
  }
  if (o.bias.defined()) y = y + o.bias.to(wide);
  return {(o.silu ? at::silu(y) : y).to(x.scalar_type()), state_after(a)};
}

}  // namespace headloom::ops
