// What linear_cross_entropy is to the dispatcher (ops/operator.h).
#pragma once

#include "ops/linear_cross_entropy/op.h"
#include "ops/operator.h"

namespace headloom::ops {

struct LinearCrossEntropy {
  struct Arguments {
    Tensor hidden, weight, targets, bias;
  };
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "linear_cross_entropy";
  static constexpr const char* kReturns = "(Tensor loss, Tensor best)";
  static constexpr const char* kDoc = "a linear map to many classes and its summed cross-entropy";
  static constexpr const char* kSource = "Hsu et al. 2024 (Liger)";
  static constexpr const char* kOtherwise = "the reference for other types and devices";
  static constexpr bool kScalesKept = true;

  static auto arguments(Arguments& a) {
    return std::tuple(differentiable("hidden", a.hidden), differentiable("weight", a.weight),
                      constant("targets", a.targets), optional_differentiable("bias", a.bias));
  }
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static Result reference(const Arguments& a);
  // loss, best; with `training` the gradients of hidden, weight and (float32) bias where the loss's
  // is 1.
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

}  // namespace headloom::ops
