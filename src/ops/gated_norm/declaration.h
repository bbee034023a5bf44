// What gated_norm is to the dispatcher (ops/operator.h).
#pragma once

#include "ops/gated_norm/op.h"
#include "ops/operator.h"

namespace headloom::ops {

struct GatedNorm {
  struct Arguments {
    Tensor x, gate, eps;
  };
  using Result = Tensor;
  static constexpr const char* kName = "gated_norm";
  static constexpr const char* kDoc = "a norm of each head's values, times a swish gate";
  static constexpr const char* kSource = "Sun et al. 2023";
  static constexpr const char* kOtherwise =
      "the reference for other types and devices and an eps that wants a gradient";

  static auto arguments(Arguments& a) {
    return std::tuple(differentiable("x", a.x), differentiable("gate", a.gate),
                      constant("eps", a.eps));
  }
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static void prepare(Arguments& a);  // eps in full, float32
  static Tensor reference(const Arguments& a);
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

}  // namespace headloom::ops
