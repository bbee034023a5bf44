// What the positionwise operators are to the dispatcher (ops/operator.h). Autocast leaves them
// alone: each takes and gives what type comes, as ATen's norm and SiLU do.
#pragma once

#include "ops/operator.h"
#include "ops/positionwise/op.h"

namespace headloom::ops {

struct RmsNorm {
  struct Arguments {
    Tensor x, scale;
    double eps = 1e-6;
  };
  using Result = Tensor;
  static constexpr const char* kName = "rms_norm";
  static constexpr const char* kDoc = "values over the root of their mean square, scaled";
  static constexpr const char* kSource = "Zhang & Sennrich 2019";
  static constexpr const char* kOtherwise = "the reference for other types and devices";

  static auto arguments(Arguments& a) {
    return std::tuple(differentiable("x", a.x), optional_differentiable("scale", a.scale),
                      setting("eps", a.eps, "1e-06"));
  }
  static void check(const Arguments& a);
  // On a GPU the reference is one kernel too, of PyTorch's, unless the scale has another type.
  static bool prefers_kernels(const Arguments& a) {
    return !a.x.is_cuda() || (a.scale.defined() && a.scale.scalar_type() != a.x.scalar_type());
  }
  static Tensor reference(const Arguments& a);
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

struct Rotary {
  struct Arguments {
    Tensor x, cos, sin;
    bool interleaved = false;
  };
  using Result = Tensor;
  static constexpr const char* kName = "rotary";
  static constexpr const char* kDoc = "queries and keys turned by their positions";
  static constexpr const char* kSource = "Su et al. 2021";
  static constexpr const char* kOtherwise =
      "the reference for other types and devices and angles that want a gradient";

  static auto arguments(Arguments& a) {
    return std::tuple(differentiable("x", a.x), constant("cos", a.cos), constant("sin", a.sin),
                      setting("interleaved", a.interleaved, "False"));
  }
  static void check(const Arguments& a);
  static Tensor reference(const Arguments& a);
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

struct Swiglu {
  struct Arguments {
    Tensor x;
  };
  using Result = Tensor;
  static constexpr const char* kName = "swiglu";
  static constexpr const char* kDoc = "the gate of a feed-forward network";
  static constexpr const char* kSource = "Shazeer 2020";
  static constexpr const char* kOtherwise = "the reference for other types and devices";

  static auto arguments(Arguments& a) { return std::tuple(differentiable("x", a.x)); }
  static void check(const Arguments& a);
  static Tensor reference(const Arguments& a);
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

struct GeluTanh {
  struct Arguments {
    Tensor x;
  };
  using Result = Tensor;
  static constexpr const char* kName = "gelu_tanh";
  static constexpr const char* kDoc = "GELU by its approximation with tanh";
  static constexpr const char* kSource = "Hendrycks & Gimpel 2016";
  static constexpr const char* kOtherwise = "the reference for other types and devices";

  static auto arguments(Arguments& a) { return std::tuple(differentiable("x", a.x)); }
  static void check(const Arguments& a);
  static Tensor reference(const Arguments& a);
  static std::vector<Tensor> outputs(const Arguments& a, bool training);
};

}  // namespace headloom::ops
