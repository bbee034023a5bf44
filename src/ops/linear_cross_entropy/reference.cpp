#include "ops/linear_cross_entropy/declaration.h"

namespace headloom::ops {

LinearCrossEntropy::Result LinearCrossEntropy::reference(const Arguments& a) {
  const auto& [hidden, weight, targets, bias] = a;
  const Tensor narrow = weight.to(hidden.scalar_type());
  const Tensor scores =
      at::linear(hidden, narrow, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt)
          .to(at::toOpMathType(hidden.scalar_type()));
  const Tensor best = scores.detach().argmax(-1).masked_fill(targets.eq(kIgnoredTarget), -1);
  try {
    return {at::cross_entropy_loss(scores, targets, {}, at::Reduction::Sum, kIgnoredTarget), best};
  } catch (const c10::IndexError& error) {
    TORCH_CHECK_INDEX(false, kName, ": targets: ", error.what_without_backtrace());
  }
}

}  // namespace headloom::ops
