// What selective_scan is to the dispatcher (ops/operator.h).
#pragma once

#include "ops/operator.h"
#include "ops/selective_scan/op.h"

namespace headloom::ops {

struct SelectiveScan {
  struct Arguments {
    Tensor u, delta, A, B, C;
    SelectiveScanOptions options;
  };
  using Result = std::tuple<Tensor, Tensor>;
  static constexpr const char* kName = "selective_scan";
  static constexpr const char* kDoc =
      "a diagonal recurrence whose step and maps come from the sequence";
  static constexpr const char* kSource = "Gu & Dao 2023";
  static constexpr const char* kOtherwise = "the reference for other types and devices";

  static auto arguments(Arguments& a) {
    SelectiveScanOptions& o = a.options;
    return std::tuple(
        differentiable("u", a.u), differentiable("delta", a.delta), differentiable("A", a.A),
        differentiable("B", a.B), differentiable("C", a.C), optional_differentiable("D", o.D),
        optional_differentiable("z", o.z), optional_differentiable("delta_bias", o.delta_bias),
        setting("delta_softplus", o.delta_softplus, "False"),
        optional_differentiable("state", o.state), optional_constant("documents", o.documents));
  }
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static Result reference(const Arguments& a);
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

}  // namespace headloom::ops
