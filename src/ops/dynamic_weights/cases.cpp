// What the weight networks' second half is timed on: a token of a layer of 12 heads, as dcmha has
// it.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/dynamic_weights/declaration.h"

namespace headloom::ops {

using at::Tensor;

static std::vector<OpCase> dynamic_weights_cases() {
  std::vector<OpCase> out;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const int64_t sides = 4, heads = 12, rank = 2, inner = 2 * rank * heads;
    OpCase c;
    c.op = "dynamic_weights";
    c.name = std::string("1 token, 12 heads") + (type == at::kFloat ? "" : " bfloat16");
    c.dtype = type;
    c.inputs = [=, t = type] {
      return std::vector<Tensor>{at::randn({1, 1, sides * inner}).to(t),
                                 at::randn({sides, 1, inner, 2 * rank * heads}).to(t)};
    };
    c.baseline_inputs = c.inputs;
    c.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
      return dynamic_weights(x[0], x[1], 2, backend)[0];
    };
    c.baseline_name = "ATen";
    c.baseline = [](const std::vector<Tensor>& x) {
      return DynamicWeights::reference({x[0], x[1], 2})[0];
    };
    c.differentiable = 2;
    c.forward_target = 0.5;
    out.push_back(std::move(c));
  }
  return out;
}

static const CaseFamily dynamic_weights_registered(dynamic_weights_cases);

}  // namespace headloom::ops
