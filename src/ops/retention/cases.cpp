// What retention is timed on: RetNet's values of twice the key size, beside plain attention with as
// many heads of the key size.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/retention/op.h"

namespace headloom::ops {
namespace {

using at::Tensor;

OpCase make(int64_t length, double forward_target, double training_target) {
  const int64_t heads = 8, dim = 64, values = 128;
  OpCase c;
  c.op = "retention";
  c.name = "chunkwise T=" + std::to_string(length);
  c.inputs = [=] {
    return std::vector<Tensor>{
        at::randn({1, length, heads, dim}) * 0.125, at::randn({1, length, heads, dim}),
        at::randn({1, length, heads, values}), 1 - at::exp2(-5 - at::arange(heads, at::kFloat))};
  };
  c.differentiable = 3;
  c.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        backend != "fused", "retention: backend \"fused\" is not there yet; use \"reference\".");
    return std::get<0>(retention(x[0], x[1], x[2], x[3], {}));
  };
  time_against_plain_attention(c, length, heads, dim);
  // Whole chunks of 64 and the state, read and added to.
  c.forward_work.flops =
      2.0 * static_cast<double>(length * heads * (64 * (dim + values) + 2 * dim * values));
  c.forward_target = forward_target;
  c.training_target = training_target;
  c.unsupported = "there is no fused kernel yet";
  return c;
}

}  // namespace

std::vector<OpCase> retention_cases() { return {make(2048, 0.35, 0.25), make(4096, 0.18, 0.13)}; }

}  // namespace headloom::ops
