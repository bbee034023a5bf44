// What moe is to the dispatcher (ops/operator.h).
#pragma once

#include "ops/moe/op.h"
#include "ops/operator.h"

namespace headloom::ops {

struct Moe {
  struct Arguments {
    Tensor x, up, down, choice, weight;
  };
  using Result = Tensor;
  static constexpr const char* kName = "moe";
  static constexpr const char* kDoc = "SwiGLU experts, each on the tokens that chose it";
  static constexpr const char* kSource = "Dai et al. 2024 (DeepSeekMoE)";
  static constexpr const char* kOtherwise =
      "the reference, every expert on every token, for other types and devices";

  static auto arguments(Arguments& a) {
    return std::tuple(differentiable("x", a.x), differentiable("up", a.up),
                      differentiable("down", a.down), constant("choice", a.choice),
                      differentiable("weight", a.weight));
  }
  static void check(const Arguments& a);
  static void autocast(Arguments& a, const AutocastCast& cast);
  static Tensor reference(const Arguments& a);
  // y; the experts' hidden units before SiLU [N K, 2I], sorted by expert, no rows unless
  // `training`.
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

}  // namespace headloom::ops
