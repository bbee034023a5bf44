// What causal_conv1d is to the dispatcher (ops/operator.h).
#pragma once

#include "ops/causal_conv1d/op.h"
#include "ops/operator.h"

namespace headloom::ops {

struct CausalConv1d {
  struct Arguments {
    Tensor x, weight;
    CausalConv1dOptions options;
  };
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "causal_conv1d";
  static constexpr const char* kDoc = "a filter over the last positions for each channel";
  static constexpr const char* kSource = "Gu & Dao 2023";
  static constexpr const char* kOtherwise = "the reference for the rest";

  static auto arguments(Arguments& a) {
    return std::tuple(differentiable("x", a.x), differentiable("weight", a.weight),
                      optional_differentiable("bias", a.options.bias),
                      setting("silu", a.options.silu, "False"),
                      optional_differentiable("state", a.options.state),
                      optional_constant("documents", a.options.documents));
  }
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static Result reference(const Arguments& a);
  // The kernels give y alone: the state is rows that are there already.
  static constexpr size_t kOutputs = 1;
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
  static Result result(const Arguments& a, std::vector<Tensor> outputs);
  // The last rows of what was before and of x, zero where they belong to another document than the
  // last position.
  static Tensor state_after(const Arguments& a);
};

}  // namespace headloom::ops
