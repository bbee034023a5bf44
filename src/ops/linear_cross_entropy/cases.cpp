// What the head and its loss are timed on: GPT-2's vocabulary, beside ATen's operators.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/linear_cross_entropy/op.h"

namespace headloom::ops {

static std::vector<OpCase> linear_cross_entropy_cases() {
  const int64_t positions = 1024, width = 768, classes = 50257;
  std::vector<OpCase> out;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    OpCase c;
    c.op = "linear_cross_entropy";
    c.name = type == at::kFloat ? "N=1024 V=50257" : "N=1024 V=50257 bfloat16";
    c.dtype = type;
    c.inputs = [=] {
      return std::vector<at::Tensor>{at::randn({positions, width}).to(type),
                                     (at::randn({classes, width}) * 0.02).to(type)};
    };
    c.differentiable = 2;
    const at::Tensor targets = at::arange(positions, at::kLong) * 49;
    c.run = [=](const std::vector<at::Tensor>& x, const std::optional<std::string>& backend) {
      return std::get<0>(linear_cross_entropy(x[0], x[1], targets, {}, backend));
    };
    c.baseline_name = "linear and cross_entropy";
    c.baseline_inputs = c.inputs;
    c.baseline = [=](const std::vector<at::Tensor>& x) {
      return at::cross_entropy_loss(at::linear(x[0], x[1]).to(at::kFloat), targets, {},
                                    at::Reduction::Sum);
    };
    const double scores = static_cast<double>(positions) * static_cast<double>(classes);
    const double bytes = static_cast<double>(c10::elementSize(type)) *
                         static_cast<double>((positions + classes) * width);
    c.forward_work = {
        .flops = 2.0 * scores * static_cast<double>(width), .bytes = bytes, .exponentials = scores};
    c.training_work = {.flops = 6.0 * scores * static_cast<double>(width),
                       .bytes = 2 * bytes,
                       .exponentials = 2 * scores};
    c.forward_target = c.training_target = 1.0;
    out.push_back(c);
  }
  return out;
}

static const CaseFamily linear_cross_entropy_registered(linear_cross_entropy_cases);

}  // namespace headloom::ops
