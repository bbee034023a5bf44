// The gated norm against its formula number by number, the fused kernels, those of lesser
// instruction sets too, against the reference with memory that a kernel fails to write poisoned
// with NaN, and what is refused.
#include "ops/gated_norm/op.h"

#include <torch/csrc/autograd/autograd.h>

#include "fused.h"
#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/instruction_sets.h"
#include "testing/poison.h"

namespace headloom::gated_norm_test {
namespace {

using namespace test;

struct Call {
  Tensor x, gate, eps;

  explicit Call(at::IntArrayRef sizes)
      : x(at::randn(sizes, kDouble)),
        gate(at::randn(sizes, kDouble) * 3),
        eps(at::rand(sizes.slice(sizes.size() - 2, 1), kDouble)) {}
};

// y and the gradients of x and the gate.
std::vector<Tensor> evaluate(const Call& c, const char* backend, at::ScalarType type) {
  const auto real = type == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor x = c.x.to(type).detach().requires_grad_();
  const Tensor gate = c.gate.to(type).detach().requires_grad_();
  const Tensor y = ops::gated_norm(x, gate, c.eps.to(real), backend);
  at::manual_seed(11);
  std::vector<Tensor> all = {y.detach()};
  for (Tensor& g :
       torch::autograd::grad({y}, {x, gate}, {at::randn(y.sizes(), kDouble).to(type)})) {
    all.push_back(g);
  }
  return all;
}

std::vector<Call> calls() {
  at::manual_seed(7);
  std::vector<Call> out;
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{2, 63, 6, 20},
                                            {1, 1, 1, 1},
                                            {1, 1000, 2, 33},
                                            {3, 5, 4, 128},
                                            {7, 15},
                                            {2, 0, 3, 8}}) {
    out.emplace_back(sizes);
  }
  out.emplace_back(at::IntArrayRef({2, 9, 3, 16}));
  out.back().x = out.back().x.transpose(1, 2).contiguous().transpose(1, 2);
  out.emplace_back(at::IntArrayRef({2, 9, 3, 16}));
  out.back().gate = out.back().gate * 100;  // saturated either way
  return out;
}

TEST(GatedNorm, ReferenceIsItsFormula) {
  const Call c = calls()[0];
  const Tensor y = ops::gated_norm(c.x, c.gate, c.eps);
  for (const auto& [b, t, h] : {std::tuple(0, 0, 0), {1, 62, 5}, {0, 17, 3}}) {
    const Tensor x = c.x[b][t][h], gate = c.gate[b][t][h];
    double squares = 0;
    for (int64_t e = 0; e < 20; ++e) squares += std::pow(x[e].item<double>(), 2);
    const double norm = std::sqrt(squares / 20 + c.eps[h].item<double>());
    for (int64_t e = 0; e < 20; ++e) {
      const double g = gate[e].item<double>();
      EXPECT_NEAR(y[b][t][h][e].item<double>(), g / (1 + std::exp(-g)) * x[e].item<double>() / norm,
                  1e-12);
    }
  }
}

TEST(GatedNorm, GradientsAgreeWithDifferences) {
  at::manual_seed(5);
  Call c({2, 3, 2, 5});
  for (Tensor* t : {&c.x, &c.gate, &c.eps}) t->requires_grad_();
  const Tensor cotangent = at::randn(c.x.sizes(), kDouble);
  EXPECT_TRUE(
      gradients_agree([&] { return (ops::gated_norm(c.x, c.gate, c.eps) * cotangent).sum(); },
                      {c.x, c.gate, c.eps}));
}

TEST(GatedNorm, FusedMatchesTheReference) {
  for (const Call& c : calls()) {
    const auto expected = evaluate(c, "reference", at::kDouble);
    Poison poison;
    const auto got = evaluate(c, "fused", at::kFloat);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(close(got[i], expected[i], 2e-6)) << c.x.sizes() << " " << i;
    }
  }
}

// A low-precision kernel may err at most twice as much as the plain low-precision computation.
TEST(GatedNorm, BFloat16ErrsLikeItsRounding) {
  for (const Call& c : calls()) {
    const auto exact = evaluate(c, "reference", at::kDouble);
    const auto plain = evaluate(c, "reference", at::kBFloat16);
    Poison poison;
    const auto got = evaluate(c, "fused", at::kBFloat16);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(errs_like_rounding(got[i], plain[i], exact[i], 1e-6)) << c.x.sizes() << " " << i;
    }
  }
}

TEST(GatedNorm, IsTheSameOnAnyNumberOfThreads) {
  for (const Call& c : calls()) {
    SCOPED_TRACE(::testing::Message() << c.x.sizes());
    expect_same_on_any_number_of_threads(
        [&](const char* backend, at::ScalarType type) { return evaluate(c, backend, type); });
  }
}

TEST(GatedNorm, LesserInstructionSetsToo) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets(
      "GatedNorm.FusedMatchesTheReference:GatedNorm.BFloat16ErrsLikeItsRounding"));
}

TEST(GatedNorm, RefusesInOneSentence) {
  const struct {
    void (*apply)(Call&);
    const char* message;
  } bad[] = {
      {[](Call& c) { c.x = c.x.to(at::kLong); }, "x has dtype Long"},
      {[](Call& c) { c.gate = c.gate.narrow(-1, 0, 3); }, "gate has shape [2, 5, 3, 3]"},
      {[](Call& c) { c.gate = c.gate.to(at::kFloat); }, "gate has dtype Float, expected Double"},
      {[](Call& c) { c.eps = at::ones({5}, kDouble); }, "eps has shape [5]"},
      {[](Call& c) { c.eps = c.eps.to(at::kBFloat16); }, "eps has dtype BFloat16"},
  };
  for (const auto& b : bad) {
    Call c({2, 5, 3, 4});
    b.apply(c);
    expect_refused("gated_norm", b.message, [&] { ops::gated_norm(c.x, c.gate, c.eps); });
  }
  const Call c({2, 5, 3, 4});
  EXPECT_THROW(ops::gated_norm(c.x, c.gate, c.eps, "fused"), c10::NotImplementedError);
  EXPECT_THROW(ops::gated_norm(c.x, c.gate, c.eps, "quick"), c10::ValueError);
}

}  // namespace
}  // namespace headloom::gated_norm_test
