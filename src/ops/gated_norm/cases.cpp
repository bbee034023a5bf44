// What the gated norm is timed on: RetNet's heads, beside ATen's norm, SiLU and product.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/gated_norm/op.h"

namespace headloom::ops {

static std::vector<OpCase> gated_norm_cases() {
  const int64_t length = 2048, heads = 8, values = 128;
  OpCase c;
  c.op = "gated_norm";
  c.name = "T=2048";
  const auto rows = [=] { return at::randn({1, length, heads, values}); };
  c.inputs = [=] { return std::vector<at::Tensor>{rows(), rows(), at::full({1}, 1e-6)}; };
  c.differentiable = 2;
  c.run = [](const std::vector<at::Tensor>& x, const std::optional<std::string>& backend) {
    return gated_norm(x[0], x[1], x[2], backend);
  };
  c.baseline_name = "rms_norm, silu and a product";
  c.baseline_inputs = [=] { return std::vector<at::Tensor>{rows(), rows(), rows()}; };
  c.baseline = [=](const std::vector<at::Tensor>& x) {
    return at::silu(x[1]) * at::rms_norm(x[0], {values}, {}, 1e-6);
  };
  const auto elements = static_cast<double>(length * heads * values);
  c.forward_work = {.flops = 0, .bytes = 3 * 4 * elements, .exponentials = elements};
  c.training_work = {.flops = 0, .bytes = 8 * 4 * elements, .exponentials = 3 * elements};
  return {c};
}

static const CaseFamily gated_norm_registered(gated_norm_cases);

}  // namespace headloom::ops
