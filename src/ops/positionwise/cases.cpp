// What the positionwise operators are timed on: a layer of width 768, beside ATen's operators.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/positionwise/op.h"

namespace headloom::ops {

using at::Tensor;

static std::vector<OpCase> positionwise_cases() {
  const int64_t length = 2048, width = 768, heads = 12, dim = 64, hidden = 2048;
  // Values read and written once by forward, and by both.
  const auto work = [](OpCase& c, double forward, double training) {
    c.forward_work.bytes = 4 * forward;
    c.training_work.bytes = 4 * training;
  };
  OpCase norm;
  norm.op = "rms_norm";
  norm.name = "T=2048";
  norm.inputs = [=] {
    return std::vector<Tensor>{at::randn({1, length, width}), at::randn({width})};
  };
  norm.differentiable = 2;
  norm.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    return rms_norm(x[0], x[1], 1e-6, backend);
  };
  norm.baseline_name = "ATen's rms_norm";
  norm.baseline_inputs = norm.inputs;
  norm.baseline = [=](const std::vector<Tensor>& x) {
    return at::rms_norm(x[0], {width}, x[1], 1e-6);
  };
  const auto values = static_cast<double>(length * width);
  work(norm, 2 * values, 5 * values);

  OpCase turn;
  turn.op = "rotary";
  turn.name = "T=2048";
  turn.inputs = [=] {
    const Tensor angle = at::rand({length, dim / 2});
    return std::vector<Tensor>{at::randn({1, length, heads, dim}), angle.cos(), angle.sin()};
  };
  turn.differentiable = 1;
  turn.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    return rotary(x[0], x[1], x[2], false, backend);
  };
  turn.baseline_name = "products and a concatenation";
  turn.baseline_inputs = turn.inputs;
  turn.baseline = [](const std::vector<Tensor>& x) {
    const auto halves = x[0].chunk(2, -1);
    const Tensor c = x[1].unsqueeze(1), s = x[2].unsqueeze(1);
    return at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1);
  };
  work(turn, 2 * values, 4 * values);

  OpCase gate;
  gate.op = "swiglu";
  gate.name = "T=2048";
  gate.inputs = [=] { return std::vector<Tensor>{at::randn({1, length, 2 * hidden})}; };
  gate.differentiable = 1;
  gate.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    return swiglu(x[0], backend);
  };
  gate.baseline_name = "silu and a product";
  gate.baseline_inputs = gate.inputs;
  gate.baseline = [](const std::vector<Tensor>& x) {
    const auto halves = x[0].chunk(2, -1);
    return at::silu(halves[0]) * halves[1];
  };
  const auto units = static_cast<double>(length * hidden);
  work(gate, 3 * units, 8 * units);
  gate.forward_work.exponentials = units;
  gate.training_work.exponentials = 2 * units;
  OpCase bend;
  bend.op = "gelu_tanh";
  bend.name = "T=2048";
  bend.inputs = [=] { return std::vector<Tensor>{at::randn({1, length, 4 * width})}; };
  bend.differentiable = 1;
  bend.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    return gelu_tanh(x[0], backend);
  };
  bend.baseline_name = "ATen's gelu";
  bend.baseline_inputs = bend.inputs;
  bend.baseline = [](const std::vector<Tensor>& x) { return at::gelu(x[0], "tanh"); };
  work(bend, 2 * 4 * values, 5 * 4 * values);
  bend.forward_work.exponentials = 4 * values;
  bend.training_work.exponentials = 2 * 4 * values;
  return {norm, turn, gate, bend};
}

static const CaseFamily positionwise_registered(positionwise_cases);

}  // namespace headloom::ops
