// What linear is to the dispatcher (ops/operator.h).
#pragma once

#include "ops/linear/op.h"
#include "ops/operator.h"

namespace headloom::ops {

struct Linear {
  struct Arguments {
    Tensor x, weight, scale, bias;
  };
  using Result = Tensor;
  static constexpr const char* kName = "linear";
  static constexpr const char* kDoc =
      "a linear map of few rows, its weights (float, int8 or four bits) read once";
  static constexpr const char* kSource = "Dettmers et al. 2022 for int8 by rows";
  static constexpr const char* kOtherwise = "ATen's products for the rest";

  static auto arguments(Arguments& a) {
    return std::tuple(constant("x", a.x), constant("weight", a.weight),
                      optional_constant("scale", a.scale), optional_constant("bias", a.bias));
  }
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static Tensor reference(const Arguments& a);
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

}  // namespace headloom::ops
