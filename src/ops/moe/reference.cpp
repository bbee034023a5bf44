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
    const Tensor chosen = choice.eq(static_cast<int64_t>(i));  // [N, k]
    const Tensor mine = chosen.any(1, true);
    const Tensor gate = at::where(chosen, weight, 0).sum(1, true);  // [N, 1]
    // What does not belong to the expert is left out before and after it, rather than multiplied by
    // 0: an expert whose numbers overflow gives no NaN to tokens that have not chosen it.
    const std::vector<Tensor> h = at::linear(at::where(mine, x, 0), ups[i]).chunk(2, -1);
    const Tensor all = at::linear(at::silu(h[0]) * h[1], downs[i]).to(wide) * gate;
    const Tensor y = at::where(mine, all, 0);
    sum = sum.defined() ? sum + y : y;
  }
  return sum.to(x.scalar_type());
}

}  // namespace headloom::ops
