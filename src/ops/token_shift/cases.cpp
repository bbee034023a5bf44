// What token_shift is timed on, beside the same in ATen's operations.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/token_shift/op.h"

namespace headloom::ops {

static std::vector<OpCase> token_shift_cases() {
  using at::Tensor;
  const int64_t length = 2048, channels = 512, mixes = 3;
  OpCase c;
  c.op = "token_shift";
  c.name = "3 mixes, C=512 T=2048";
  c.inputs = [=] {
    return std::vector<Tensor>{at::randn({1, length, channels}), at::rand({mixes, channels})};
  };
  c.differentiable = 2;
  c.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    TokenShiftOptions o;
    o.backend = backend;
    return at::cat(token_shift(x[0], x[1], o));
  };
  c.baseline_name = "in ATen";
  c.baseline_inputs = c.inputs;
  c.baseline = [run = c.run](const std::vector<Tensor>& x) { return run(x, "reference"); };
  return {c};
}

static const CaseFamily token_shift_registered(token_shift_cases);

}  // namespace headloom::ops
