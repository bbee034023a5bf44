#include "ops/documents.h"
#include "ops/wkv/declaration.h"

namespace headloom::ops {

// A step at a time.
std::tuple<Tensor, Tensor> Wkv::reference(const Arguments& given) {
  const auto& [k, v, rate, bonus, o] = given;
  const auto wide = at::toOpMathType(k.scalar_type());
  const int64_t length = k.sym_size(1).guard_int(__FILE__, __LINE__);
  const std::vector<Tensor> keys = k.to(wide).unbind(1), values = v.to(wide).unbind(1);
  const Tensor w = rate.to(wide), u = bonus.to(wide);
  Tensor a = at::zeros_like(keys[0]), b = a, m = at::full_like(keys[0], kNoExponent);
  if (o.state.defined()) {
    a = o.state.select(1, 0);
    b = o.state.select(1, 1);
    m = o.state.select(1, 2);
  }
  std::vector<Tensor> begins;  // [B, 1] each: t + 1 begins a document
  if (o.documents.defined()) begins = id_changes(o.documents).unsqueeze(-1).unbind(1);
  std::vector<Tensor> outputs;
  for (int64_t t = 0; t < length; ++t) {
    if (t > 0 && !begins.empty()) {
      // Not times 0: what is not finite in one document stays in it.
      a = a.masked_fill(begins[t - 1], 0);
      b = b.masked_fill(begins[t - 1], 0);
      m = m.masked_fill(begins[t - 1], kNoExponent);
    }
    const Tensor &key = keys[t], &value = values[t];
    // The scale cancels, so that it is a constant to gradients.
    const Tensor own = u + key;
    const Tensor scale = at::maximum(m, own).detach();
    const Tensor past = at::exp(m - scale), now = at::exp(own - scale);
    // Nothing has any weight where every key so far is -inf.
    const Tensor below = past * b + now;
    outputs.push_back((past * a + now * value) /
                      at::where(below.eq(0), at::ones_like(below), below));
    const Tensor next = at::maximum(m - w, key).detach();
    const Tensor kept = at::exp(m - w - next), added = at::exp(key - next);
    a = kept * a + added * value;
    b = kept * b + added;
    m = next;
  }
  Tensor output = at::stack(outputs, 1);
  if (o.receptance.defined()) output = output * at::sigmoid(o.receptance.to(wide));
  return {output.to(k.scalar_type()), at::stack({a, b, m}, 1)};
}

}  // namespace headloom::ops
