// What the selective scan is timed on: Mamba's shape with everything fused, beside plain attention
// of the same width.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/selective_scan/op.h"

namespace headloom::ops {
namespace {

using at::Tensor;

OpCase selective_scan_case(int64_t length, at::ScalarType type) {
  const int64_t channels = 1024, states = 16;
  OpCase c;
  c.op = "selective_scan";
  c.name = "L=" + std::to_string(length) + (type == at::kBFloat16 ? " bfloat16" : "");
  c.dtype = type;
  // u, delta, A, B, C, D, z, delta_bias as Mamba starts.
  c.inputs = [=] {
    const auto random = [&](at::IntArrayRef shape) { return at::randn(shape).to(type); };
    const Tensor A = -at::arange(1, states + 1).to(at::kFloat).repeat({channels, 1});
    return std::vector<Tensor>{
        random({1, length, channels}), random({1, length, channels}) * 0.1, A,
        random({1, length, states}),   random({1, length, states}),         at::ones({channels}),
        random({1, length, channels}), at::rand({channels}) * 4 - 6};
  };
  c.differentiable = 8;
  c.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    return std::get<0>(selective_scan(x[0], x[1], x[2], x[3], x[4],
                                      {.D = x[5],
                                       .z = x[6],
                                       .delta_bias = x[7],
                                       .delta_softplus = true,
                                       .state = {},
                                       .documents = {},
                                       .backend = backend}));
  };
  time_against_plain_attention(c, length, 16, channels / 16);
  // The forward reads u, delta, z and writes y; the backward reads four and writes three.
  const auto rows = static_cast<double>(length * channels) * static_cast<double>(elementSize(type));
  const auto decays = static_cast<double>(length * channels * states);
  c.forward_work = {.flops = 0, .bytes = 4 * rows, .exponentials = decays};
  c.training_work = {.flops = 0, .bytes = 11 * rows, .exponentials = 2 * decays};
  return c;
}

// The scan as it is usually written in PyTorch: each step selects from tensors of all steps, which
// in the backward writes as many whole tensors. selective_scan_reference is the same without that.
Tensor usual_loop(const std::vector<Tensor>& x) {
  const Tensor &u = x[0], &B = x[3], &C = x[4];
  const Tensor dt = at::softplus(x[1] + x[7]);
  const Tensor decay = at::exp(dt.unsqueeze(-1) * x[2]);
  const Tensor added = (dt * u).unsqueeze(-1) * B.unsqueeze(2);
  Tensor h = at::zeros_like(added.select(1, 0));
  std::vector<Tensor> rows;
  for (int64_t t = 0; t < u.size(1); ++t) {
    h = decay.select(1, t) * h + added.select(1, t);
    rows.push_back(at::matmul(h, C.select(1, t).unsqueeze(-1)).squeeze(-1));
  }
  return (at::stack(rows, 1) + x[5] * u) * at::silu(x[6]);
}

// Its time grows with the square of the length: a quarter of it is enough to see.
OpCase against_the_usual_loop() {
  OpCase c = selective_scan_case(512, at::kFloat);
  c.name += ", usual loop";
  c.run = [run = c.run](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    return backend == "reference" ? usual_loop(x) : run(x, backend);
  };
  c.forward_work = c.training_work = {};
  c.reference_target = 300;
  return c;
}

}  // namespace

static std::vector<OpCase> selective_scan_cases() {
  OpCase c = selective_scan_case(2048, at::kFloat);
  c.training_target = 0.5;
  c.at_length = [](int64_t length) { return selective_scan_case(length, at::kFloat); };
  return {c, selective_scan_case(2048, at::kBFloat16), against_the_usual_loop()};
}

static const CaseFamily selective_scan_registered(selective_scan_cases);

}  // namespace headloom::ops
