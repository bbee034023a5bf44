// What retention is to the dispatcher (ops/operator.h).
#pragma once

#include "ops/operator.h"
#include "ops/retention/op.h"

namespace headloom::ops {

struct Retention {
  struct Arguments {
    Tensor q, k, v, gamma;
    RetentionOptions options;
  };
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "retention";
  static constexpr const char* kDoc =
      "linear attention with exponential decay: parallel, recurrent and chunkwise";
  static constexpr const char* kSource = "Sun et al. 2023";
  static constexpr const char* kOtherwise =
      "the reference for the rest: other forms, types and devices, a gamma that wants a gradient";

  static auto arguments(Arguments& a) {
    return std::tuple(differentiable("q", a.q), differentiable("k", a.k), differentiable("v", a.v),
                      constant("gamma", a.gamma), optional_differentiable("state", a.options.state),
                      optional_constant("documents", a.options.documents),
                      setting("form", a.options.form, "\"chunkwise\""),
                      setting("chunk", a.options.chunk, "64"));
  }
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static Result reference(const Arguments& a);
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

}  // namespace headloom::ops
