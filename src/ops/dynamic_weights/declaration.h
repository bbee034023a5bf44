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
    return std::tuple(differentiable("hidden", a.hidden), differentiable("w2", a.w2),
                      setting("rank", a.rank));
  }
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static void prepare(Arguments& a);  // w2 of hidden's type
  static Result reference(const Arguments& a);
  // The kernels give one tensor [B, L, S, 2 R, H], of which the results are views. For the
  // backward they keep the products [S g, B L, 2 R n], and GELU of hidden [B L, S g, I].
  static constexpr size_t kOutputs = 1;
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
  static Result definition(const Arguments& a);  // the results in one tensor, as the kernels' are
  static Result result(const Arguments& a, const std::vector<Tensor>& outputs);
};

}  // namespace headloom::ops
