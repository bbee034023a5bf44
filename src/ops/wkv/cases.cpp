// What wkv is timed on, beside plain attention of the same width.
#include <ATen/ATen.h>

#include "ops/case.h"
#include "ops/wkv/op.h"

namespace headloom::ops {
namespace {

using at::Tensor;

OpCase wkv_case(int64_t length, at::ScalarType type, bool gate) {
  const int64_t channels = 512;
  OpCase c;
  c.op = "wkv";
  c.name = std::string(gate ? "gated C=512" : "C=512") + (type == at::kFloat ? "" : " bfloat16") +
           " T=" + std::to_string(length);
  c.dtype = type;
  c.inputs = [=] {
    const auto sequence = [&] { return at::randn({1, length, channels}).to(type); };
    // RWKV-4's rates at the start, slowest to fastest.
    const Tensor decay = at::exp(-5 + 8 * at::linspace(0, 1, channels));
    std::vector<Tensor> x = {sequence(), sequence(), decay, at::full({channels}, -1.2)};
    if (gate) x.push_back(sequence());
    return x;
  };
  c.differentiable = gate ? 5 : 4;
  c.run = [](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    WkvOptions o;
    if (x.size() > 4) o.receptance = x[4];
    o.backend = backend;
    return std::get<0>(wkv(x[0], x[1], x[2], x[3], o));
  };
  time_against_plain_attention(c, length, 8, channels / 8);
  // k, v and the output, then k, v, three gradients; the gate adds itself, twice, and its gradient.
  const double values = static_cast<double>(length * channels);
  const double bytes = values * static_cast<double>(c10::elementSize(type));
  c.forward_work = {.bytes = (gate ? 4 : 3) * bytes, .exponentials = (gate ? 2 : 1) * values};
  c.training_work = {.bytes = (gate ? 11 : 8) * bytes, .exponentials = (gate ? 2 : 1) * values};
  if (!gate && type == at::kFloat) {
    c.training_target = 0.15;
    c.at_length = [=](int64_t other) { return wkv_case(other, type, gate); };
  }
  return c;
}

}  // namespace

static std::vector<OpCase> wkv_cases() {
  return {wkv_case(2048, at::kFloat, false), wkv_case(2048, at::kFloat, true),
          wkv_case(2048, at::kBFloat16, false)};
}

static const CaseFamily wkv_registered(wkv_cases);

}  // namespace headloom::ops
