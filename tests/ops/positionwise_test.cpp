// RMS norm, rotary positions and SwiGLU's gate against their formulas number by number, the kernels
// against the definitions with memory that a kernel fails to write poisoned with NaN, and what is
// refused.
#include "ops/positionwise/op.h"

#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <numbers>
#include <string>
#include <vector>

#include "fused.h"
#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/instruction_sets.h"
#include "testing/poison.h"
#include "testing/strided.h"

namespace headloom::positionwise_test {
namespace {

using namespace test;

// One call: its inputs in double, the first `differentiable` of which want gradients.
struct Call {
  std::string name;
  std::vector<Tensor> inputs;
  size_t differentiable = 1;
  std::function<Tensor(const std::vector<Tensor>&, const char* backend)> run;
};

Call norm_call(const Tensor& x, bool with_scale) {
  Call c{.name = "rms_norm", .inputs = {x}, .run = {}};
  if (with_scale) c.inputs.push_back(at::randn({x.size(-1)}, kDouble));
  c.differentiable = c.inputs.size();
  c.run = [](const std::vector<Tensor>& in, const char* backend) {
    return ops::rms_norm(in[0], in.size() > 1 ? in[1] : Tensor(), 1e-5, backend);
  };
  return c;
}

Call rotary_call(const Tensor& x, int64_t pairs, bool interleaved, bool by_row) {
  std::vector<int64_t> sizes = {x.size(1), pairs};
  if (by_row) sizes.insert(sizes.begin(), x.size(0));
  const Tensor angle = at::rand(sizes, kDouble) * 6;
  return {.name = interleaved ? "rotary, interleaved" : "rotary",
          .inputs = {x, angle.cos(), angle.sin()},
          .run = [=](const std::vector<Tensor>& in, const char* backend) {
            // Tables stay wide where x is narrow.
            const auto real = in[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
            return ops::rotary(in[0], in[1].to(real), in[2].to(real), interleaved, backend);
          }};
}

Call swiglu_call(const Tensor& x) {
  return {.name = "swiglu", .inputs = {x}, .run = [](const auto& in, const char* backend) {
            return ops::swiglu(in[0], backend);
          }};
}

Call gelu_call(const Tensor& x) {
  return {.name = "gelu_tanh", .inputs = {x}, .run = [](const auto& in, const char* backend) {
            return ops::gelu_tanh(in[0], backend);
          }};
}

std::vector<Call> calls() {
  at::manual_seed(7);
  const auto random = [](std::vector<int64_t> sizes) { return at::randn(sizes, kDouble); };
  std::vector<Call> out;
  for (const bool scale : {false, true}) {
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{2, 63, 20}, {1, 1, 2}, {3000, 6}, {1, 5, 768}, {97}, {0, 8}}) {
      out.push_back(norm_call(random(sizes), scale));
    }
    out.push_back(norm_call(random({2, 30, 9}).transpose(1, 2), scale));
  }
  for (const bool interleaved : {false, true}) {
    out.push_back(rotary_call(random({2, 63, 6, 20}), 10, interleaved, false));
    out.push_back(rotary_call(random({2, 1, 3, 64}), 32, interleaved, true));
    out.push_back(rotary_call(random({2, 7, 3, 20}), 4, interleaved, true));  // a part of the head
    out.push_back(rotary_call(random({1, 1000, 2, 36}), 17, interleaved, false));
    for (const int64_t size : {2, 4, 8}) {  // a vector has several heads
      out.push_back(rotary_call(random({2, 9, 6, size}), size / 2, interleaved, true));
      out.push_back(rotary_call(random({2, 9, 3, size}), size / 2, interleaved, false));
      // Heads of longer rows.
      out.push_back(
          rotary_call(random({2, 9, 3, 4, size}).select(2, 1), size / 2, interleaved, true));
      out.push_back(rotary_call(random({2, 9, 4, 3 * size}).narrow(3, size, size), size / 2,
                                interleaved, true));
    }
    out.push_back(rotary_call(random({2, 9, 3 * 16}).narrow(-1, 16, 32).unflatten(-1, {2, 16}), 8,
                              interleaved, false));
    out.push_back(rotary_call(random({2, 3, 16, 5}).permute({0, 3, 1, 2}), 8, interleaved, false));
    out.push_back(rotary_call(random({2, 0, 3, 8}), 4, interleaved, false));
  }
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{2, 63, 40}, {1, 1, 2}, {1000, 66}, {30}, {0, 8}}) {
    out.push_back(swiglu_call(random(sizes) * 3));
  }
  out.push_back(swiglu_call(random({4, 32}) * 100));  // saturated either way
  out.push_back(swiglu_call(random({2, 32, 9}).transpose(1, 2)));
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{2, 63, 41}, {1}, {}, {1000, 67}, {0, 8}}) {
    out.push_back(gelu_call(random(sizes) * 3));
  }
  out.push_back(gelu_call(random({4, 32}) * 100));
  out.push_back(gelu_call(random({2, 32, 9}).transpose(1, 2)));
  return out;
}

// The result and the gradients.
std::vector<Tensor> evaluate(const Call& c, const char* backend, at::ScalarType type) {
  std::vector<Tensor> inputs;
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    const bool wide = i >= c.differentiable && type != at::kDouble;
    inputs.push_back(in_its_strides(c.inputs[i], wide ? at::kFloat : type));
    if (i < c.differentiable) inputs.back().requires_grad_();
  }
  const Tensor y = c.run(inputs, backend);
  EXPECT_EQ(y.scalar_type(), type) << c.name;
  at::manual_seed(11);
  const Tensor drawn = at::randn(y.sizes(), kDouble);
  // As the gradients of parts of something larger come.
  const bool apart = !c.inputs[0].is_contiguous();
  const Tensor cotangent = apart ? rows_apart(drawn, type) : drawn.to(type);
  std::vector<Tensor> all = {y.detach()};
  inputs.resize(c.differentiable);
  for (Tensor& g : torch::autograd::grad({y}, inputs, {cotangent})) all.push_back(g);
  return all;
}

TEST(Positionwise, DefinitionsAreTheirFormulas) {
  at::manual_seed(3);
  const Tensor x = at::randn({2, 3, 2, 6}, kDouble), scale = at::randn({6}, kDouble);
  const auto at_place = [](const Tensor& t, int64_t i) { return t[1][2][1][i].item<double>(); };
  double squares = 0;
  for (int64_t i = 0; i < 6; ++i) squares += std::pow(at_place(x, i), 2);
  const Tensor normed = ops::rms_norm(x, scale, 1e-5);
  for (int64_t i = 0; i < 6; ++i) {
    EXPECT_NEAR(at_place(normed, i),
                at_place(x, i) / std::sqrt(squares / 6 + 1e-5) * scale[i].item<double>(), 1e-12);
  }
  const Tensor angle = at::randn({3, 2}, kDouble);  // the last two dimensions stay
  for (const bool interleaved : {false, true}) {
    const Tensor turned = ops::rotary(x, angle.cos(), angle.sin(), interleaved);
    for (int64_t p = 0; p < 2; ++p) {
      const int64_t first = interleaved ? 2 * p : p, second = interleaved ? 2 * p + 1 : p + 2;
      const double by = angle[2][p].item<double>();
      const double a = at_place(x, first), b = at_place(x, second);
      EXPECT_NEAR(at_place(turned, first), a * std::cos(by) - b * std::sin(by), 1e-12);
      EXPECT_NEAR(at_place(turned, second), b * std::cos(by) + a * std::sin(by), 1e-12);
      EXPECT_EQ(at_place(turned, 4 + p), at_place(x, 4 + p));
    }
  }
  const Tensor bent = ops::gelu_tanh(x);
  for (int64_t i = 0; i < 6; ++i) {
    const double v = at_place(x, i);
    const double u = std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v);
    EXPECT_NEAR(at_place(bent, i), v * (1 + std::tanh(u)) / 2, 1e-12);
  }
  const Tensor gated = ops::swiglu(x);
  for (int64_t i = 0; i < 3; ++i) {
    const double g = at_place(x, i);
    EXPECT_NEAR(at_place(gated, i), g / (1 + std::exp(-g)) * at_place(x, 3 + i), 1e-12);
  }
}

TEST(Positionwise, FusedMatchesTheDefinition) {
  for (const Call& c : calls()) {
    const auto expected = evaluate(c, "reference", at::kDouble);
    Poison poison;
    const auto got = evaluate(c, "fused", at::kFloat);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(close(got[i], expected[i], 2e-6)) << c.name << c.inputs[0].sizes() << " " << i;
    }
  }
}

TEST(Positionwise, RowsOfRotaryMayLieApart) {
  at::manual_seed(13);
  for (const bool interleaved : {false, true}) {
    for (const int64_t size : {2, 4, 8, 16, 20}) {
      SCOPED_TRACE(::testing::Message() << "heads of " << size << ", " << interleaved);
      const Call adjacent =
          rotary_call(at::randn({2, 9, 3, size}, kDouble), size / 2, interleaved, false);
      Call apart = adjacent;
      apart.inputs[0] = rows_apart(adjacent.inputs[0], at::kDouble);
      const auto evaluation_of = [](const Call& c) -> Evaluate {
        return [c](const char* backend, at::ScalarType type) { return evaluate(c, backend, type); };
      };
      expect_same_with_rows_apart(evaluation_of(adjacent), evaluation_of(apart));
    }
  }
}

// Of numbers at odd places of memory, and of a scale that is wider than its values.
TEST(Positionwise, DefinitionsTakeWhatLiesAnyhow) {
  at::manual_seed(5);
  const Tensor x = at::randn({5 * 12 + 1}, kDouble).narrow(0, 1, 60).view({1, 5, 2, 6});
  const Tensor angle = at::randn({5, 3}, kDouble), scale = at::randn({6});
  for (const bool interleaved : {false, true}) {
    const Tensor got = ops::rotary(x, angle.cos(), angle.sin(), interleaved);
    EXPECT_TRUE(close(got, ops::rotary(x.clone(), angle.cos(), angle.sin(), interleaved), 0));
  }
  const Tensor narrow = x.to(at::kBFloat16);
  const Tensor exact = ops::rms_norm(narrow.to(kDouble), scale.to(kDouble), 1e-5);
  EXPECT_TRUE(close(ops::rms_norm(narrow, scale, 1e-5, "reference"), exact, 4e-3));
}

// A low-precision kernel may err at most twice as much as the plain low-precision computation.
TEST(Positionwise, BFloat16ErrsLikeItsRounding) {
  for (const Call& c : calls()) {
    const auto exact = evaluate(c, "reference", at::kDouble);
    const auto plain = evaluate(c, "reference", at::kBFloat16);
    Poison poison;
    const auto got = evaluate(c, "fused", at::kBFloat16);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(errs_like_rounding(got[i], plain[i], exact[i], 1e-6))
          << c.name << c.inputs[0].sizes() << " " << i;
    }
  }
}

TEST(Positionwise, ThreadsShareTheRows) {
  for (const Call& c : calls()) {
    SCOPED_TRACE(::testing::Message() << c.name << c.inputs[0].sizes());
    // Of the gradient of a norm's scale each share has sums of its own.
    expect_same_on_any_number_of_threads(
        [&](const char* backend, at::ScalarType type) { return evaluate(c, backend, type); },
        c.differentiable > 1 ? 2e-6 : 0);
  }
}

// Of many rows each share has sums of its own for the gradient of the scale.
TEST(Positionwise, NormsGradientsAreTheDefinitionsOnAnyNumberOfThreads) {
  at::manual_seed(9);
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{3000, 6}, {300, 96}}) {
    SCOPED_TRACE(::testing::Message() << sizes[0] << " rows");
    const Call c = norm_call(at::randn(sizes, kDouble), /*with_scale=*/true);
    const Evaluate run = [&](const char* backend, at::ScalarType type) {
      return evaluate(c, backend, type);
    };
    expect_matches_reference(run, 2e-6);
    expect_same_on_any_number_of_threads(run, 2e-6);
  }
}

// The gradient of the gradient's square, which only a gradient that records itself has.
TEST(Positionwise, GradientsHaveGradients) {
  for (const Call& c : calls()) {
    if (c.inputs[0].numel() == 0) continue;
    const auto second = [&](const char* backend, at::ScalarType type) {
      std::vector<Tensor> inputs;
      for (const Tensor& t : c.inputs) inputs.push_back(t.to(type).detach());
      std::vector<Tensor> wanted(inputs.begin(),
                                 inputs.begin() + static_cast<int64_t>(c.differentiable));
      for (Tensor& t : wanted) t.requires_grad_();
      const Tensor y = c.run(inputs, backend);
      Tensor sum = at::zeros({}, y.options());
      for (const Tensor& g :
           torch::autograd::grad({y.pow(3).sum()}, wanted, {}, std::nullopt, true)) {
        sum = sum + g.square().sum();
      }
      return torch::autograd::grad({sum}, wanted);
    };
    const auto expected = second("reference", at::kDouble), got = second("fused", at::kFloat);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(close(got[i], expected[i], 2e-5)) << c.name << c.inputs[0].sizes() << " " << i;
    }
  }
}

TEST(Positionwise, EveryInstructionSet) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets(
      "Positionwise.FusedMatchesTheDefinition:Positionwise.BFloat16ErrsLikeItsRounding"));
}

TEST(Positionwise, RefusesInOneSentence) {
  const Tensor x = at::randn({2, 5, 3, 8}), table = at::randn({5, 4});
  const auto rms = [](const Tensor& t, const Tensor& scale) { ops::rms_norm(t, scale, 1e-6); };
  expect_refused("rms_norm", "x has dtype Long", [&] { rms(x.to(at::kLong), {}); });
  expect_refused("rms_norm", "x has shape []", [&] { rms(at::ones({}), {}); });
  expect_refused("rms_norm", "scale has shape [7], expected [E] = [8]",
                 [&] { rms(x, at::ones({7})); });
  expect_refused("rms_norm", "eps is -1", [&] { ops::rms_norm(x, {}, -1); });
  expect_refused("rotary", "x has shape [2, 5, 24]",
                 [&] { ops::rotary(x.flatten(2), table, table, false); });
  expect_refused("rotary", "cos has shape [5, 5]",
                 [&] { ops::rotary(x, at::ones({5, 5}), table, false); });
  expect_refused("rotary", "cos has shape [4, 4], expected [T, P] = [5, 4]",
                 [&] { ops::rotary(x, at::ones({4, 4}), table, false); });
  expect_refused("rotary", "sin has shape [2, 5, 4]",
                 [&] { ops::rotary(x, table, at::ones({2, 5, 4}), false); });
  expect_refused("rotary", "cos has dtype BFloat16, expected Float",
                 [&] { ops::rotary(x, table.to(at::kBFloat16), table, false); });
  expect_refused("swiglu", "x has shape [2, 3]", [&] { ops::swiglu(at::ones({2, 3})); });
  expect_refused("swiglu", "backend is \"quick\"", [&] { ops::swiglu(x, "quick"); });
  EXPECT_THROW(ops::swiglu(x.to(at::kDouble), "fused"), c10::NotImplementedError);
}

}  // namespace
}  // namespace headloom::positionwise_test
