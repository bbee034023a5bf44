#include "ops/documents.h"
#include "ops/selective_scan/declaration.h"

namespace headloom::ops {
namespace {

// B or C, broadcasting to [B, L, channels, N].
Tensor by_channel(const Tensor& x, int64_t channels) {
  if (x.dim() == 2) return x;
  if (x.dim() == 3) return x.unsqueeze(2);
  return x.repeat_interleave(channels / x.size(2), 2);
}

}  // namespace

// Step after step.
std::tuple<Tensor, Tensor> SelectiveScan::reference(const Arguments& a) {
  const auto& [given, delta, A, B, C, o] = a;
  const auto wide = at::toOpMathType(given.scalar_type());
  const Tensor u = given.to(wide);
  const int64_t channels = u.size(2);
  const int64_t length = u.sym_size(1).guard_int(__FILE__, __LINE__);
  Tensor dt = delta.to(wide);
  if (o.delta_bias.defined()) dt = dt + o.delta_bias.to(wide);
  if (o.delta_softplus) dt = at::softplus(dt);
  const Tensor decay = at::exp(dt.unsqueeze(-1) * A.to(wide));  // [B, L, channels, N]
  std::vector<Tensor> begins;  // [B, 1, 1] each: a document begins at t + 1
  if (o.documents.defined()) {
    begins = id_changes(o.documents).unsqueeze(-1).unsqueeze(-1).unbind(1);
  }
  const Tensor added = (dt * u).unsqueeze(-1) * by_channel(B.to(wide), channels);

  // unbind and stack: the backward of L selections would add up L tensors of the whole size.
  const std::vector<Tensor> decays = decay.unbind(1), inputs = added.unbind(1);
  const Tensor outward = by_channel(C.to(wide), channels);
  const std::vector<Tensor> rows = outward.dim() == 2 ? std::vector<Tensor>{} : outward.unbind(1);
  std::vector<Tensor> outputs;
  // From zeros, not from nothing: what is not finite in A shows from the first step on.
  Tensor h = o.state.defined() ? o.state : at::zeros_like(inputs[0]);
  for (int64_t t = 0; t < length; ++t) {
    // Not times 0: what is not finite in one document stays in it.
    if (t > 0 && !begins.empty()) h = at::where(begins[t - 1], at::zeros({}, h.options()), h);
    h = at::addcmul(inputs[t], decays[t], h);
    outputs.push_back((h * (rows.empty() ? outward : rows[t])).sum(-1));
  }
  Tensor y = at::stack(outputs, 1);
  if (o.D.defined()) y = y + o.D.to(wide) * u;
  if (o.z.defined()) y = y * at::silu(o.z.to(wide));
  return {y.to(given.scalar_type()), h};
}

}  // namespace headloom::ops
