// What wkv is to the dispatcher (ops/operator.h).
#pragma once

#include "ops/operator.h"
#include "ops/wkv/op.h"

namespace headloom::ops {

struct Wkv {
  struct Arguments {
    Tensor k, v, rate, bonus;
    WkvOptions options;
  };
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "wkv";
  static constexpr const char* kDoc = "exponentially decaying averages, a channel at a time";
  static constexpr const char* kSource = "Peng et al. 2023 (RWKV-4)";
  static constexpr const char* kOtherwise = "the reference for other types and devices";

  static auto arguments(Arguments& a) {
    return std::tuple(differentiable("k", a.k), differentiable("v", a.v),
                      differentiable("rate", a.rate), differentiable("bonus", a.bonus),
                      optional_differentiable("receptance", a.options.receptance),
                      optional_differentiable("state", a.options.state),
                      optional_constant("documents", a.options.documents));
  }
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static Result reference(const Arguments& a);
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

}  // namespace headloom::ops
