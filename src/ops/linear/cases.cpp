// What the linear map is timed on: the largest of 124M-parameter models for few rows, and all of
// their products in training, beside ATen's; and the narrow ones of small models in training.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/linear/op.h"

namespace headloom::ops {
namespace {

using at::Tensor;

// `weights`: the type that holds them.
OpCase linear_case(int64_t rows, at::ScalarType type, at::ScalarType weights) {
  const int64_t in = 768, out = 50304;
  OpCase c;
  c.op = "linear";
  c.name = std::to_string(rows) + " x 768 x 50304" +
           (weights == at::kChar              ? " int8"
            : weights == at::ScalarType::Int4 ? " int4"
                                              : "") +
           (type == at::kFloat ? "" : " bfloat16");
  c.dtype = type;
  c.inputs = [=]() -> std::vector<Tensor> {
    const Tensor x = at::randn({rows, in}).to(type), weight = at::randn({out, in});
    if (weights == type) return {x, weight.to(type)};
    const auto [values, scale] =
        weights == at::kChar ? quantized_int8(weight) : quantized_int4(weight);
    return {x, values, scale};
  };
  c.differentiable = 1;
  c.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    return linear(x[0], x[1], x.size() > 2 ? x[2] : Tensor(), {}, backend);
  };
  c.baseline_name = "linear";
  c.baseline_inputs = [=] {
    return std::vector<Tensor>{at::randn({rows, in}).to(type), at::randn({out, in}).to(type)};
  };
  c.baseline = [](const std::vector<Tensor>& x) { return at::linear(x[0], x[1]); };
  c.forward_work.flops = 2.0 * static_cast<double>(rows * in * out);
  c.forward_work.bytes =
      static_cast<double>(in * out) *
      (weights == at::ScalarType::Int4 ? 0.5625 : static_cast<double>(c10::elementSize(weights)));
  c.forward_target = weights == type ? 1.0 : weights == at::kChar ? 0.35 : 0.2;
  return c;
}

// Forward and both gradients, [rows, in] x [in, out].
OpCase dense_case(int64_t rows, int64_t in, int64_t out, at::ScalarType type) {
  OpCase c;
  c.op = "linear";
  c.name = c10::str(rows, " x ", in, " x ", out, type == at::kFloat ? "" : " bfloat16");
  c.dtype = type;
  c.inputs = [=]() -> std::vector<Tensor> {
    return {at::randn({rows, in}).to(type), at::randn({out, in}).to(type)};
  };
  c.differentiable = 2;
  c.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    return linear(x[0], x[1], {}, {}, backend);
  };
  c.baseline_name = "linear";
  c.baseline_inputs = c.inputs;
  c.baseline = [](const std::vector<Tensor>& x) { return at::linear(x[0], x[1]); };
  const double size = static_cast<double>(c10::elementSize(type));
  c.forward_work = {.flops = 2.0 * static_cast<double>(rows * in * out),
                    .bytes = size * static_cast<double>(rows * in + in * out + rows * out)};
  c.training_work = {.flops = 3 * c.forward_work.flops, .bytes = 3 * c.forward_work.bytes};
  c.bound_target = 1 / 0.85;
  return c;
}

}  // namespace

static std::vector<OpCase> linear_cases() {
  constexpr auto kInt4 = at::ScalarType::Int4;
  return {dense_case(1024, 768, 2304, at::kFloat),
          dense_case(1024, 768, 768, at::kFloat),
          dense_case(1024, 768, 3072, at::kFloat),
          dense_case(1024, 3072, 768, at::kFloat),
          dense_case(1024, 768, 50257, at::kFloat),
          dense_case(1024, 768, 2304, at::kBFloat16),
          dense_case(1024, 3072, 768, at::kBFloat16),
          dense_case(32768, 64, 192, at::kFloat),
          dense_case(32768, 64, 340, at::kFloat),
          dense_case(32768, 170, 64, at::kFloat),
          linear_case(1, at::kFloat, at::kFloat),
          linear_case(8, at::kFloat, at::kFloat),
          linear_case(1, at::kBFloat16, at::kBFloat16),
          linear_case(8, at::kBFloat16, at::kBFloat16),
          linear_case(1, at::kFloat, at::kChar),
          linear_case(8, at::kFloat, at::kChar),
          linear_case(1, at::kFloat, kInt4),
          linear_case(1, at::kBFloat16, kInt4),
          linear_case(8, at::kFloat, kInt4)};
}

static const CaseFamily linear_registered(linear_cases);

}  // namespace headloom::ops
