// What aft is timed on, beside plain attention of the same width.
#include <ATen/ATen.h>

#include "ops/aft/op.h"
#include "ops/case.h"

namespace headloom::ops {
namespace {

using at::Tensor;

constexpr int64_t kAftWidth = 512, kWindow = 32;  // the window of the paper's language models

OpCase aft_case(const std::string& form, int64_t length, at::ScalarType type = at::kFloat) {
  const bool local = form == "local";
  OpCase c;
  c.op = "aft";
  c.name = form + (local ? " W=32" : "") + " C=512" + (type == at::kFloat ? "" : " bfloat16") +
           " T=" + std::to_string(length);
  c.dtype = type;
  c.inputs = [=] {
    std::vector<Tensor> x;
    for (int i = 0; i < 3; ++i) x.push_back(at::randn({1, length, kAftWidth}).to(type));
    if (local) x.push_back(at::randn({length, kWindow}) * 0.1);
    return x;
  };
  c.differentiable = local ? 4 : 3;
  c.run = [=](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    AftOptions o;
    o.form = form;
    if (local) o.bias = x[3];
    o.backend = backend;
    return std::get<0>(aft(x[0], x[1], x[2], o));
  };
  time_against_plain_attention(c, length, 8, kAftWidth / 8);
  // Both sums of every position over the window; in the backward both their gradients, and w's.
  const double values = static_cast<double>(length * kAftWidth);
  const double band = local ? 4.0 * kWindow * values : 0;
  c.product_type = at::kFloat;  // the sums of exponentials, in every type
  const double bytes = values * static_cast<double>(c10::elementSize(type));
  c.forward_work = {.flops = band, .bytes = 4 * bytes, .exponentials = 2 * values};
  c.training_work = {.flops = 3 * band, .bytes = 11 * bytes, .exponentials = 2 * values};
  if (type == at::kFloat) {
    c.training_target = local ? 0.3 : 0.15;
    if (!local) c.at_length = [=](int64_t other) { return aft_case(form, other, type); };
  }
  return c;
}

}  // namespace

static std::vector<OpCase> aft_cases() {
  return {aft_case("simple", 2048), aft_case("local", 2048),
          aft_case("local", 2048, at::kBFloat16)};
}

static const CaseFamily aft_registered(aft_cases);

}  // namespace headloom::ops
