// What aft is to the dispatcher (ops/operator.h).
#pragma once

#include "ops/aft/op.h"
#include "ops/operator.h"

namespace headloom::ops {

struct Aft {
  struct Arguments {
    Tensor q, k, v;
    AftOptions options;
  };
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "aft";
  static constexpr const char* kDoc =
      "attention without queries times keys: simple, local, full and conv";
  static constexpr const char* kSource = "Zhai et al. 2021";
  static constexpr const char* kOtherwise = "matrix products for the rest";

  static auto arguments(Arguments& a) {
    AftOptions& o = a.options;
    return std::tuple(differentiable("q", a.q), differentiable("k", a.k), differentiable("v", a.v),
                      setting("form", o.form, "\"simple\""),
                      optional_differentiable("bias", o.bias), setting("causal", o.causal, "True"),
                      optional_constant("lengths", o.lengths),
                      optional_constant("documents", o.documents),
                      optional_differentiable("state", o.state), setting("offset", o.offset, "0"));
  }
  static bool stateful(const AftOptions& o);  // these forms have a state
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static Result reference(const Arguments& a);
  static Result otherwise(const Arguments& a);  // conv as a convolution
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
  static Result result(const Arguments& a, const std::vector<Tensor>& outputs);
};

}  // namespace headloom::ops
