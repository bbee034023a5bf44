#include <ATen/TensorSubclassLikeUtils.h>

#include "ops/moe/declaration.h"

namespace headloom::ops {

// Every expert on every token: sizes do not depend on what was chosen, which transforms and
// compilers need.
Tensor Moe::reference(const Arguments& a) {
  const auto& [x, up, down, choice, weight] = a;
  // Where the numbers are there to be read: not while this is traced, and without waiting for a
  // device. An expert that does not exist would count as one that gives 0.
  if (choice.is_cpu() && !at::isTensorSubclassLike(choice) && choice.numel() > 0) {
    const auto [low, high] = at::aminmax(choice);
    const int64_t least = low.item<int64_t>(), most = high.item<int64_t>();
    TORCH_CHECK_INDEX(least >= 0 && most < up.size(0), "moe: choice has the expert ",
                      least < 0 ? least : most, ", expected one of 0 to ", up.size(0) - 1, ".");
  }
  const auto wide = at::promote_types(x.scalar_type(), weight.scalar_type());
  const std::vector<Tensor> ups = up.unbind(0), downs = down.unbind(0);
  Tensor sum;
  for (size_t i = 0; i < ups.size(); ++i) {
    const Tensor mine = choice.eq(static_cast<int64_t>(i)).to(weight.scalar_type());
    const Tensor gate = (weight * mine).sum(1, true);  // [N, 1]
    const std::vector<Tensor> h = at::linear(x, ups[i]).chunk(2, -1);
    const Tensor y = at::linear(at::silu(h[0]) * h[1], downs[i]).to(wide) * gate;
    sum = sum.defined() ? sum + y : y;
  }
  return sum.to(x.scalar_type());
}

}  // namespace headloom::ops
