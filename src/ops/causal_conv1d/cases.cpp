// What the causal convolution is timed on: Mamba's, beside plain attention of the same width.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/causal_conv1d/op.h"

namespace headloom::ops {
namespace {

using at::Tensor;

OpCase causal_conv1d_case(int64_t length, at::ScalarType type) {
  const int64_t channels = 1024;
  OpCase c;
  c.op = "causal_conv1d";
  c.name = "C=1024 W=4 L=" + std::to_string(length) + (type == at::kFloat ? "" : " bfloat16");
  c.dtype = type;
  c.inputs = [=] {
    return std::vector<Tensor>{at::randn({1, length, channels}).to(type),
                               at::randn({channels, 4}) * 0.5, at::randn({channels})};
  };
  c.differentiable = 3;
  c.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    return std::get<0>(causal_conv1d(
        x[0], x[1],
        {.bias = x[2], .silu = true, .state = {}, .documents = {}, .backend = backend}));
  };
  time_against_plain_attention(c, length, 16, channels / 16);
  // x and y; then x, y's gradient and x's. SiLU takes an exponential, and its slope another.
  const auto values = static_cast<double>(length * channels);
  const double bytes = values * static_cast<double>(c10::elementSize(type));
  c.forward_work = {.flops = 0, .bytes = 2 * bytes, .exponentials = values};
  c.training_work = {.flops = 0, .bytes = 5 * bytes, .exponentials = 2 * values};
  return c;
}

}  // namespace

static std::vector<OpCase> causal_conv1d_cases() {
  return {causal_conv1d_case(2048, at::kFloat), causal_conv1d_case(2048, at::kBFloat16)};
}

static const CaseFamily causal_conv1d_registered(causal_conv1d_cases);

}  // namespace headloom::ops
