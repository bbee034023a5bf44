#include "ops/linear_cross_entropy/declaration.h"

namespace headloom::ops {
namespace {

// The product of 16-bit types on a GPU reads rows of the scores 16 bytes at a time. Where they are
// no multiple of that, as with GPT-2's 50257 classes, cuBLAS takes kernels that are several times
// slower. So classes of zeros are added, and cut off again.
Tensor scores_of(const Tensor& hidden, const Tensor& weight, const Tensor& bias) {
  const bool on_gpu = hidden.is_cuda() && hidden.element_size() == 2;
  const int64_t classes = on_gpu ? weight.sym_size(0).guard_int(__FILE__, __LINE__) : 0;
  if (classes % 8 == 0) {
    return at::linear(hidden, weight, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt);
  }
  const Tensor padded = at::constant_pad_nd(weight, {0, 0, 0, 8 - classes % 8});
  const Tensor scores = at::linear(hidden, padded).narrow(-1, 0, classes);
  return bias.defined() ? scores + bias : scores;
}

}  // namespace

LinearCrossEntropy::Result LinearCrossEntropy::reference(const Arguments& a) {
  const auto& [hidden, weight, targets, bias] = a;
  const Tensor narrow = weight.to(hidden.scalar_type());
  const Tensor scores =
      scores_of(hidden, narrow, bias).to(at::toOpMathType(hidden.scalar_type()));
  const Tensor best = scores.detach().argmax(-1).masked_fill(targets.eq(kIgnoredTarget), -1);
  try {
    return {at::cross_entropy_loss(scores, targets, {}, at::Reduction::Sum, kIgnoredTarget), best};
  } catch (const c10::IndexError& error) {
    TORCH_CHECK_INDEX(false, kName, ": targets: ", error.what_without_backtrace());
  }
}

}  // namespace headloom::ops
