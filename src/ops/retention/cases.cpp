// What retention is timed on: RetNet's values of twice the key size, beside plain attention with as
// many heads of the key size.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/retention/op.h"

namespace headloom::ops {
namespace {

using at::Tensor;

constexpr int64_t kHeads = 8, kDim = 64, kValues = 128;

OpCase retention_case(int64_t length, double forward_target, double training_target,
                      at::ScalarType type = at::kFloat) {
  OpCase c;
  c.op = "retention";
  c.name = "chunkwise T=" + std::to_string(length) + (type == at::kBFloat16 ? " bfloat16" : "");
  c.dtype = type;
  c.inputs = [=] {
    return std::vector<Tensor>{(at::randn({1, length, kHeads, kDim}) * 0.125).to(type),
                               at::randn({1, length, kHeads, kDim}).to(type),
                               at::randn({1, length, kHeads, kValues}).to(type),
                               1 - at::exp2(-5 - at::arange(kHeads, at::kFloat))};
  };
  c.differentiable = 3;
  c.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    return std::get<0>(retention(x[0], x[1], x[2], x[3], {.backend = backend}));
  };
  time_against_plain_attention(c, length, kHeads, kDim);
  // A position and head, whatever the chunk: the state read and added to; in the backward it or its
  // gradient read for q, k and v, and the gradient added to.
  const auto positions = static_cast<double>(length * kHeads);
  const auto state = static_cast<double>(2 * kDim * kValues);
  const auto element = static_cast<double>(at::elementSize(type));
  const auto rows = static_cast<double>(2 * kDim + 2 * kValues);  // q, k, v and the output
  const auto grads = static_cast<double>(2 * kDim + kValues);     // of q, k and v
  c.forward_work = {.flops = positions * 2 * state, .bytes = positions * rows * element};
  c.training_work = {.flops = positions * 6 * state,
                     .bytes = positions * (2 * rows + grads) * element};
  c.forward_target = forward_target;
  c.training_target = training_target;
  c.at_length = [=](int64_t other) { return retention_case(other, 0, 0, type); };
  return c;
}

}  // namespace

static std::vector<OpCase> retention_cases() {
  return {retention_case(2048, 0.35, 0.25), retention_case(4096, 0.18, 0.13),
          retention_case(2048, 0, 0, at::kBFloat16)};
}

static const CaseFamily retention_registered(retention_cases);

}  // namespace headloom::ops
