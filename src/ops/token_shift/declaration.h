// What token_shift is to the dispatcher (ops/operator.h).
#pragma once

#include "ops/operator.h"
#include "ops/token_shift/op.h"

namespace headloom::ops {

struct TokenShift {
  struct Arguments {
    Tensor x, mix;
    TokenShiftOptions options;
  };
  using Result = std::vector<Tensor>;
  static constexpr const char* kName = "token_shift";
  static constexpr const char* kDoc = "each position mixed with the one before it";
  static constexpr const char* kSource = "Peng et al. 2023 (RWKV-4)";
  static constexpr const char* kOtherwise = "the reference for the rest";

  static auto arguments(Arguments& a) {
    return std::tuple(differentiable("x", a.x), differentiable("mix", a.mix),
                      optional_differentiable("last", a.options.last),
                      optional_constant("documents", a.options.documents));
  }
  static void check(const Arguments& a);
  static Result reference(const Arguments& a);
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

}  // namespace headloom::ops
