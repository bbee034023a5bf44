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
  static constexpr const char* kDoc = "a linear map, its weights in float, eight or four bits";
  static constexpr const char* kSource = "Dettmers et al. 2022 for int8 by rows";
  static constexpr const char* kOtherwise = "the reference for the rest";

  static auto arguments(Arguments& a) {
    return std::tuple(differentiable("x", a.x), differentiable("weight", a.weight),
                      optional_constant("scale", a.scale), optional_differentiable("bias", a.bias));
  }
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static Tensor reference(const Arguments& a);
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

// Throws for weights of four bits and their scales that are not of `in` inputs.
void check_int4(const Tensor& weight, const Tensor& scale, const c10::SymInt& in);

}  // namespace headloom::ops
