// The head and its loss: the definition against loops in double, the fused kernels against the
// definition with memory that a kernel fails to write poisoned with NaN, pieces that add up, and
// what is refused.
#include "ops/linear_cross_entropy/op.h"

#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "fused.h"
#include "testing/autocast.h"
#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/instruction_sets.h"
#include "testing/poison.h"

namespace headloom::linear_cross_entropy_test {
namespace {

using namespace test;

struct Call {
  Tensor hidden, weight, targets, bias;

  Call(int64_t positions, int64_t width, int64_t classes, bool with_bias)
      : hidden(at::randn({positions, width}, kDouble)),
        weight(at::randn({classes, width}, kDouble)),
        targets(at::randint(0, classes, {positions}, at::kLong)),
        bias(with_bias ? at::randn({classes}, kDouble) : Tensor()) {}
};

struct Found {
  Tensor best;
  std::vector<Tensor> real;  // the loss and the gradients of hidden, weight and bias
};

// The loss counts three times.
Found evaluate(const Call& c, const char* backend, at::ScalarType type) {
  std::vector<Tensor> leaves;
  for (const Tensor& t : {c.hidden, c.weight, c.bias}) {
    leaves.push_back(t.defined() ? t.to(type).detach().requires_grad_() : t);
  }
  const auto [loss, best] =
      ops::linear_cross_entropy(leaves[0], leaves[1], c.targets, leaves[2], backend);
  if (!leaves[2].defined()) leaves.pop_back();
  Found out{best, {loss.detach()}};
  for (Tensor& g : torch::autograd::grad({loss * 3}, leaves)) out.real.push_back(std::move(g));
  return out;
}

std::vector<Call> calls() {
  at::manual_seed(7);
  std::vector<Call> out = {{63, 20, 1000, true}, {1, 1, 1, false}, {1, 7, 7, true},
                           {0, 5, 7, true},      {2, 33, 1, true}, {130, 6, 50257, false},
                           {5, 64, 129, false}};
  // Some positions count for nothing, or all.
  out.emplace_back(63, 9, 83, true);
  out.back().targets.masked_fill_(at::arange(63).remainder(3).ne(0), ops::kIgnoredTarget);
  out.emplace_back(4, 9, 83, true);
  out.back().targets.fill_(ops::kIgnoredTarget);
  // Far apart: one class has all the weight.
  out.emplace_back(17, 16, 257, false);
  out.back().hidden *= 100;
  // Strided.
  out.emplace_back(17, 16, 257, true);
  out.back().hidden = out.back().hidden.t().contiguous().t();
  out.back().weight = out.back().weight.t().contiguous().t();
  // Classes that cannot be.
  out.emplace_back(17, 16, 257, true);
  out.back().bias.narrow(0, 100, 100).fill_(-std::numeric_limits<double>::infinity());
  out.back().targets.remainder_(100);
  return out;
}

TEST(LinearCrossEntropy, ReferenceIsItsFormula) {
  Call c = calls()[0];
  c.targets[5] = ops::kIgnoredTarget;
  const auto [loss, best] =
      ops::linear_cross_entropy(c.hidden, c.weight, c.targets, c.bias, "reference");
  double expected = 0;
  for (int64_t n = 0; n < c.hidden.size(0); ++n) {
    if (n == 5) continue;
    double sum = 0, most = -1e300;
    int64_t likeliest = -1;
    std::vector<double> scores;
    for (int64_t v = 0; v < c.weight.size(0); ++v) {
      const double score =
          (c.hidden[n] * c.weight[v]).sum().item<double>() + c.bias[v].item<double>();
      scores.push_back(score);
      sum += std::exp(score);
      if (score > most) {
        most = score;
        likeliest = v;
      }
    }
    expected += std::log(sum) - scores[c.targets[n].item<int64_t>()];
    EXPECT_EQ(best[n].item<int64_t>(), likeliest);
    if (n == 10) break;
  }
  c.targets.narrow(0, 11, 52).fill_(ops::kIgnoredTarget);
  EXPECT_NEAR(
      std::get<0>(ops::linear_cross_entropy(c.hidden, c.weight, c.targets, c.bias)).item<double>(),
      expected, 1e-9);
  EXPECT_EQ(best[5].item<int64_t>(), -1);
}

TEST(LinearCrossEntropy, GradientsAgreeWithDifferences) {
  at::manual_seed(5);
  Call c(4, 3, 5, true);
  c.targets[1] = ops::kIgnoredTarget;
  for (Tensor* t : {&c.hidden, &c.weight, &c.bias}) t->requires_grad_();
  EXPECT_TRUE(gradients_agree(
      [&] { return std::get<0>(ops::linear_cross_entropy(c.hidden, c.weight, c.targets, c.bias)); },
      {c.hidden, c.weight, c.bias}));
}

TEST(LinearCrossEntropy, FusedMatchesTheReference) {
  for (const Call& c : calls()) {
    const Found expected = evaluate(c, "reference", at::kDouble);
    const Found plain = evaluate(c, "reference", at::kFloat);
    Poison poison;
    const Found got = evaluate(c, "fused", at::kFloat);
    EXPECT_TRUE(got.best.equal(expected.best)) << c.weight.sizes();
    ASSERT_EQ(got.real.size(), expected.real.size());
    for (size_t i = 0; i < got.real.size(); ++i) {
      EXPECT_TRUE(errs_like_rounding(got.real[i], plain.real[i], expected.real[i], 1e-5))
          << c.hidden.sizes() << c.weight.sizes() << " " << i;
    }
    // Without a gradient, the same loss.
    at::NoGradGuard no_grad;
    const auto option = [](const Tensor& t) { return t.defined() ? t.to(at::kFloat) : t; };
    const auto [loss, best] = ops::linear_cross_entropy(option(c.hidden), option(c.weight),
                                                        c.targets, option(c.bias), "fused");
    EXPECT_TRUE(loss.equal(got.real[0]));
    EXPECT_TRUE(best.equal(got.best));
  }
}

// A low-precision kernel may err at most twice as much as the plain low-precision computation.
void expect_bfloat16_errs_like_its_rounding(const Call& c) {
  Call rounded = c;
  for (Tensor* t : {&rounded.hidden, &rounded.weight, &rounded.bias}) {
    if (t->defined()) *t = t->to(at::kBFloat16).to(at::kDouble);
  }
  const Found exact = evaluate(rounded, "reference", at::kDouble);
  const Found plain = evaluate(rounded, "reference", at::kBFloat16);
  Poison poison;
  const Found got = evaluate(rounded, "fused", at::kBFloat16);
  EXPECT_EQ(got.real[0].scalar_type(), at::kFloat);
  for (size_t i = 0; i < got.real.size(); ++i) {
    // The gradient is rounded once more where the backward scales it.
    EXPECT_TRUE(errs_like_rounding(got.real[i], plain.real[i], exact.real[i], 4e-3))
        << c.hidden.sizes() << c.weight.sizes() << " " << i;
  }
}

TEST(LinearCrossEntropy, BFloat16ErrsLikeItsRounding) {
  for (const Call& c : calls()) expect_bfloat16_errs_like_its_rounding(c);
}

// So many scores that they are computed in pieces of the positions, also where only some of these
// count. The gradient of the weight is too narrow to sum over pieces in.
TEST(LinearCrossEntropy, PiecesOfBFloat16ErrLikeTheirRounding) {
  at::manual_seed(10);
  Call c(400, 6, 50257, true);
  expect_bfloat16_errs_like_its_rounding(c);
  c.targets.masked_fill_(at::arange(400).remainder(3).eq(0), ops::kIgnoredTarget);
  expect_bfloat16_errs_like_its_rounding(c);
}

// More scores than are there at once: the same as the sum over parts of the positions.
TEST(LinearCrossEntropy, PiecesAddUp) {
  at::manual_seed(9);
  const int64_t parts = 4, classes = 50257, positions = 1401;
  ASSERT_GT(positions * classes * static_cast<int64_t>(sizeof(float)), ops::kScoreBytes);
  Call c(positions, 3, classes, true);
  const Found whole = evaluate(c, "fused", at::kFloat);
  std::vector<Tensor> sums(whole.real.size());
  std::vector<Tensor> hidden, best;
  for (int64_t i = 0; i < parts; ++i) {
    Call part = c;
    const int64_t begin = positions * i / parts, end = positions * (i + 1) / parts;
    part.hidden = c.hidden.narrow(0, begin, end - begin);
    part.targets = c.targets.narrow(0, begin, end - begin);
    const Found found = evaluate(part, "fused", at::kFloat);
    best.push_back(found.best);
    hidden.push_back(found.real[1]);
    for (size_t j = 0; j < sums.size(); ++j) {
      if (j != 1) sums[j] = sums[j].defined() ? sums[j] + found.real[j] : found.real[j];
    }
  }
  sums[1] = at::cat(hidden);
  EXPECT_TRUE(whole.best.equal(at::cat(best)));
  for (size_t j = 0; j < sums.size(); ++j) EXPECT_TRUE(close(whole.real[j], sums[j], 1e-5)) << j;
}

// Threads share the positions, and products may add up in another order.
TEST(LinearCrossEntropy, IsTheSameOnAnyNumberOfThreads) {
  for (const Call& c : calls()) {
    SCOPED_TRACE(::testing::Message() << c.hidden.sizes() << c.weight.sizes());
    expect_same_on_any_number_of_threads(
        [&](const char* backend, at::ScalarType type) {
          Found found = evaluate(c, backend, type);
          found.real.push_back(found.best.to(type));
          return found.real;
        },
        1e-5);
  }
}

TEST(LinearCrossEntropy, AutocastMultipliesInBFloat16) {
  at::manual_seed(4);
  const Call c(9, 16, 100, true);
  const Found plain = evaluate(c, "fused", at::kBFloat16);
  const Found got = under_autocast([&] { return evaluate(c, "fused", at::kFloat); });
  EXPECT_TRUE(got.real[0].equal(plain.real[0]));
  EXPECT_EQ(got.real[2].scalar_type(), at::kFloat);
  EXPECT_TRUE(close(got.real[2], plain.real[2], 1e-2));
}

TEST(LinearCrossEntropy, TheFirstOfEquallyLikelyClassesIsBest) {
  const auto best = [](const Tensor& bias) {
    return std::get<1>(ops::linear_cross_entropy(at::zeros({1, 4}), at::zeros({3000, 4}),
                                                 at::zeros({1}, kLong), bias, "fused"))
        .item<int64_t>();
  };
  EXPECT_EQ(best({}), 0);
  for (const int64_t first : {15, 1023, 1024, 1025, 2047, 2999}) {
    Tensor bias = at::zeros({3000});
    bias.narrow(0, first, 3000 - first).fill_(2);
    EXPECT_EQ(best(bias), first);
  }
}

TEST(LinearCrossEntropy, GradientOfTheGradientIsTheDefinitions) {
  at::manual_seed(6);
  const Call c(7, 5, 11, true);
  const auto second = [&](const char* backend, at::ScalarType type) {
    const Tensor hidden = c.hidden.to(type).requires_grad_();
    const Tensor weight = c.weight.to(type).requires_grad_();
    const auto [loss, best] =
        ops::linear_cross_entropy(hidden, weight, c.targets, c.bias.to(type), backend);
    const auto first = torch::autograd::grad({loss}, {hidden}, {}, std::nullopt, true);
    return torch::autograd::grad({first[0].square().sum()}, {weight})[0];
  };
  EXPECT_TRUE(close(second("fused", at::kFloat), second("reference", at::kDouble), 1e-5));
}

TEST(LinearCrossEntropy, OnlyTheGradientsThatAreWantedAreThere) {
  const Tensor hidden = at::randn({3, 4}), weight = at::randn({5, 4}).requires_grad_();
  const Tensor targets = at::zeros({3}, kLong);
  std::get<0>(ops::linear_cross_entropy(hidden, weight, targets, {}, "fused")).backward();
  EXPECT_FALSE(hidden.grad().defined());
  EXPECT_TRUE(weight.grad().defined());
}

TEST(LinearCrossEntropy, RefusesInOneSentence) {
  const struct {
    void (*apply)(Call&);
    const char* message;
  } bad[] = {
      {[](Call& c) { c.hidden = c.hidden.to(at::kLong); }, "hidden has dtype Long"},
      {[](Call& c) { c.hidden = c.hidden.unsqueeze(0); }, "hidden has shape [1, 5, 3]"},
      {[](Call& c) { c.weight = c.weight.narrow(1, 0, 2); },
       "weight has shape [7, 2], expected [V, C] with V of at least 1 and C = 3"},
      {[](Call& c) { c.weight = c.weight.narrow(0, 0, 0); }, "weight has shape [0, 3]"},
      {[](Call& c) { c.weight = c.weight.to(at::kFloat); }, "weight has dtype Float"},
      {[](Call& c) { c.targets = c.targets.to(at::kInt); }, "targets has dtype Int"},
      {[](Call& c) { c.targets = c.targets.narrow(0, 0, 4); }, "targets has shape [4]"},
      {[](Call& c) { c.bias = c.bias.narrow(0, 0, 6); }, "bias has shape [6]"},
      {[](Call& c) { c.targets[2] = 7; }, "Target 7 is out of bounds"},
  };
  for (const auto& b : bad) {
    Call c(5, 3, 7, true);
    b.apply(c);
    expect_refused("linear_cross_entropy", b.message,
                   [&] { ops::linear_cross_entropy(c.hidden, c.weight, c.targets, c.bias); });
  }
  const Call c(5, 3, 7, true);
  for (const int64_t target : {-1, 7}) {
    Call other = c;
    other.targets[3] = target;
    expect_refused("linear_cross_entropy",
                   str("targets has the class ", target, ", expected one of 0 to 6 or -100"), [&] {
                     ops::linear_cross_entropy(other.hidden.to(at::kFloat),
                                               other.weight.to(at::kFloat), other.targets);
                   });
  }
  EXPECT_THROW(ops::linear_cross_entropy(c.hidden, c.weight, c.targets, c.bias, "fused"),
               c10::NotImplementedError);
}

TEST(LinearCrossEntropy, LesserInstructionSetsToo) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets(
      "LinearCrossEntropy.Fused*:LinearCrossEntropy.BFloat16*:LinearCrossEntropy.TheFirst*"));
}

}  // namespace
}  // namespace headloom::linear_cross_entropy_test
