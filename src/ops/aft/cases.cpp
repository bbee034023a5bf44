// What aft is timed on, beside plain attention of the same width.
#include <ATen/ATen.h>

#include "ops/aft/op.h"
#include "ops/case.h"

namespace headloom::ops {
namespace {

using at::Tensor;

// The window of the paper's language models; heads of 64 channels.
constexpr int64_t kAftWidth = 512, kWindow = 32, kHeads = 8;

OpCase aft_case(const std::string& form, int64_t length, at::ScalarType type = at::kFloat) {
  const bool simple = form == "simple", windowed = form == "local" || form == "conv";
  OpCase c;
  c.op = "aft";
  c.name = form + (windowed ? " W=32" : "") + " C=512" + (type == at::kFloat ? "" : " bfloat16") +
           " T=" + std::to_string(length);
  c.dtype = type;
  c.inputs = [=] {
    std::vector<Tensor> x;
    for (int i = 0; i < 3; ++i) x.push_back(at::randn({1, length, kAftWidth}).to(type));
    const int64_t rows = form == "conv" ? kHeads : length, columns = windowed ? kWindow : length;
    if (!simple) x.push_back(at::randn({rows, columns}) * 0.1);
    return x;
  };
  c.differentiable = simple ? 3 : 4;
  c.run = [=](const std::vector<Tensor>& x, const std::optional<std::string>& backend) {
    AftOptions o;
    o.form = form;
    if (!simple) o.bias = x[3];
    o.backend = backend;
    return std::get<0>(aft(x[0], x[1], x[2], o));
  };
  time_against_plain_attention(c, length, 8, kAftWidth / 8);
  // Both sums of every position over the keys that have a w; in the backward both their gradients,
  // and w's.
  const double values = static_cast<double>(length * kAftWidth);
  const double keys = simple ? 0 : windowed ? kWindow : static_cast<double>(length + 1) / 2;
  const double sums = 4.0 * keys * values;
  c.product_type = at::kFloat;  // the sums of exponentials, in every type
  const double bytes = values * static_cast<double>(c10::elementSize(type));
  // A table of all pairs is read, and in the backward its gradient is written.
  const double table = form == "full" ? 4.0 * keys * static_cast<double>(length) : 0;
  c.forward_work = {.flops = sums, .bytes = 4 * bytes + table, .exponentials = 2 * values};
  c.training_work = {
      .flops = 3 * sums, .bytes = 11 * bytes + 3 * table, .exponentials = 2 * values};
  if (type == at::kFloat) {
    if (simple) c.training_target = 0.15;
    if (windowed) c.training_target = 0.3;
    if (simple) c.at_length = [=](int64_t other) { return aft_case(form, other, type); };
  }
  return c;
}

}  // namespace

static std::vector<OpCase> aft_cases() {
  return {aft_case("simple", 2048), aft_case("local", 2048), aft_case("local", 2048, at::kBFloat16),
          aft_case("conv", 2048), aft_case("full", 2048)};
}

static const CaseFamily aft_registered(aft_cases);

}  // namespace headloom::ops
