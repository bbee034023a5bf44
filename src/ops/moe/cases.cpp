// What the experts are timed on: DeepSeekMoE's 64 routed experts of which 6 work, beside a dense
// SwiGLU of as many active parameters. The 2 shared experts, one dense SwiGLU, are on both sides.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/moe/op.h"

namespace headloom::ops {
namespace {

using at::Tensor;

constexpr int64_t kMoeWidth = 512, kHidden = 256, kRouted = 64, kShared = 2, kActive = 6;

Tensor dense(const Tensor& x, const Tensor& up, const Tensor& down) {
  const auto h = at::linear(x, up).chunk(2, -1);
  return at::linear(at::silu(h[0]) * h[1], down);
}

OpCase moe_case(int64_t tokens, double target, at::ScalarType type = at::kFloat) {
  OpCase c;
  c.op = "moe";
  c.name = "64 routed, 2 shared, 6 active, " + std::to_string(tokens) +
           (tokens == 1 ? " token" : " tokens") +
           (type == at::kBFloat16 ? " bfloat16" : "");
  c.dtype = type;
  const auto matrix = [type](at::IntArrayRef sizes) { return (at::randn(sizes) * 0.04).to(type); };
  const auto x = [=] { return at::randn({tokens, kMoeWidth}).to(type); };
  c.inputs = [=] {
    const Tensor scores = at::softmax(at::randn({tokens, kRouted}), -1);
    const auto [weight, choice] = at::topk(scores, kActive);
    return std::vector<Tensor>{
        x(),    matrix({kRouted, 2 * kHidden, kMoeWidth}),  matrix({kRouted, kMoeWidth, kHidden}),
        weight, matrix({2 * kShared * kHidden, kMoeWidth}), matrix({kMoeWidth, kShared * kHidden}),
        choice};
  };
  c.differentiable = 6;
  c.run = [](const std::vector<Tensor>& in, const std::optional<std::string>& backend) {
    return moe(in[0], in[1], in[2], in[6], in[3], backend) + dense(in[0], in[4], in[5]);
  };
  c.baseline_name = "dense SwiGLU, equal active parameters";
  const int64_t active = (kShared + kActive) * kHidden;
  c.baseline_inputs = [=] {
    return std::vector<Tensor>{x(), matrix({2 * active, kMoeWidth}), matrix({kMoeWidth, active})};
  };
  c.baseline = [](const std::vector<Tensor>& in) { return dense(in[0], in[1], in[2]); };
  const auto flops = static_cast<double>(tokens * 6 * kMoeWidth * active);
  const auto units = static_cast<double>(tokens * active);
  // One token reads its own experts, and many read all.
  const int64_t read = std::min(kRouted, tokens * kActive) + kShared;
  const double bytes =
      static_cast<double>(read * 3 * kMoeWidth * kHidden + 2 * tokens * kMoeWidth) *
      static_cast<double>(at::elementSize(type));
  c.forward_work = {.flops = flops, .bytes = bytes, .exponentials = units};
  c.training_work = {.flops = 3 * flops, .bytes = 3 * bytes, .exponentials = 2 * units};
  c.forward_target = c.training_target = target;
  return c;
}

}  // namespace

static std::vector<OpCase> moe_cases() {
  return {moe_case(4096, 1.3), moe_case(4096, 0, at::kBFloat16), moe_case(1, 0),
          moe_case(1, 0, at::kBFloat16)};
}

static const CaseFamily moe_registered(moe_cases);

}  // namespace headloom::ops
