// What dynamic_weights is to the dispatcher (ops/operator.h).
#pragma once

#include "ops/dynamic_weights/op.h"
#include "ops/operator.h"

namespace headloom::ops {

struct DynamicWeights {
  struct Arguments {
    Tensor hidden, w2;
    int64_t rank = 1;
  };
  using Result = std::vector<Tensor>;
  static constexpr const char* kName = "dynamic_weights";
  static constexpr const char* kDoc =
      "composition weights of heads from their networks' hidden layer";
  static constexpr const char* kSource = "Xiao et al. 2024";
  static constexpr const char* kOtherwise = "ATen's operators for the rest";

  static auto arguments(Arguments& a) {
    return std::tuple(constant("hidden", a.hidden), constant("w2", a.w2), setting("rank", a.rank));
  }
  static void check(const Arguments& a);
  static Result reference(const Arguments& a);
  // Of the kernels: one tensor [B, L, S, 2 R, H], of which the results are views.
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
  static Result result(const Arguments& a, const std::vector<Tensor>& outputs);
};

}  // namespace headloom::ops
