// The causal convolution against loops over its formula in double, gradients against differences,
// the fused kernels against the reference in float64, and what it refuses.
#include "ops/causal_conv1d/op.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "fused.h"
#include "testing/autocast.h"
#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/instruction_sets.h"

namespace headloom::causal_conv1d_test {
namespace {

using namespace test;
using ops::CausalConv1dOptions;

struct Case {
  std::string name = "";
  int64_t B = 2, L = 63, C = 37, W = 4;
  bool bias = true, silu = true, state = false, documents = false, strided = false;
};

struct Problem {
  std::vector<Tensor> x;  // x, weight, then of bias and state what is there
  Tensor documents;
};

Problem make(const Case& c, at::ScalarType type) {
  at::manual_seed(7);
  Problem p;
  const Tensor wide = at::randn({c.B, c.L, c.strided ? 2 * c.C : c.C}).to(type);
  p.x = {c.strided ? wide.narrow(2, c.C, c.C) : wide, at::randn({c.C, c.W})};
  if (c.bias) p.x.push_back(at::randn({c.C}));
  if (c.state) p.x.push_back(at::randn({c.B, c.W - 1, c.C}).to(type));
  if (c.documents) {
    p.documents = at::arange(c.L, kLong).div(11, "floor").repeat({c.B, 1});
    p.documents[-1] = (at::rand({c.L}) < 0.3).to(at::kLong);  // ids come back
  }
  return p;
}

std::tuple<Tensor, Tensor> run(const std::vector<Tensor>& x, const Tensor& documents, const Case& c,
                               const char* backend) {
  CausalConv1dOptions o;
  if (c.bias) o.bias = x[2];
  if (c.state) o.state = x.back();
  o.silu = c.silu;
  o.documents = documents;
  if (backend) o.backend = backend;
  return ops::causal_conv1d(x[0], x[1], o);
}

// Output, last state and gradients under fixed random cotangents.
std::vector<Tensor> evaluate(const Problem& p, const Case& c, const char* backend,
                             at::ScalarType type) {
  std::vector<Tensor> x;
  for (const Tensor& t : p.x) {
    const bool weight = type == at::kBFloat16 && t.scalar_type() == at::kFloat;
    x.push_back(t.to(weight ? at::kFloat : type).detach().requires_grad_());
  }
  const auto [y, state] = run(x, p.documents, c, backend);
  at::manual_seed(11);
  const Tensor to_y = at::randn(y.sizes()), to_state = at::randn(state.sizes());
  std::vector<Tensor> all = {y.detach(), state.detach()};
  const auto grads = torch::autograd::grad({y, state}, x, {to_y.to(type), to_state.to(type)});
  all.insert(all.end(), grads.begin(), grads.end());
  return all;
}

std::tuple<Tensor, Tensor> naive(const Problem& p, const Case& c) {
  Tensor y = at::zeros({c.B, c.L, c.C}, kDouble), end = at::zeros({c.B, c.W - 1, c.C}, kDouble);
  // The row at position t as position `seen` sees it.
  const auto row = [&](int64_t b, int64_t t, int64_t seen) -> Tensor {
    if (t < 0 && !c.state) return at::zeros({c.C}, kDouble);
    for (int64_t s = std::max<int64_t>(t, 0); c.documents && s < seen; ++s) {
      if (p.documents[b][s].item<int64_t>() != p.documents[b][s + 1].item<int64_t>()) {
        return at::zeros({c.C}, kDouble);
      }
    }
    return (t < 0 ? p.x.back()[b][t + c.W - 1] : p.x[0][b][t]).to(at::kDouble);
  };
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t t = 0; t < c.L; ++t) {
      Tensor sum = c.bias ? p.x[2].to(at::kDouble) : at::zeros({c.C}, kDouble);
      for (int64_t j = 0; j < c.W; ++j) {
        sum = sum + p.x[1].select(1, j).to(at::kDouble) * row(b, t - c.W + 1 + j, t);
      }
      y[b][t] = c.silu ? sum / (1 + at::exp(-sum)) : sum;
    }
    for (int64_t i = 0; i < c.W - 1; ++i) end[b][i] = row(b, c.L - c.W + 1 + i, c.L - 1);
  }
  return {y, end};
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {.name = "mamba"},
      {.name = "one position", .L = 1, .state = true},
      {.name = "shorter than the filter", .L = 2, .W = 8, .state = true, .documents = true},
      {.name = "shorter, no state", .L = 3, .W = 6, .bias = false},
      {.name = "one tap", .W = 1},
      {.name = "eight taps", .L = 40, .C = 100, .W = 8, .state = true},
      {.name = "linear", .B = 3, .L = 50, .bias = false, .silu = false, .state = true},
      {.name = "documents", .B = 3, .L = 70, .C = 20, .documents = true},
      {.name = "documents and state", .L = 30, .W = 5, .state = true, .documents = true},
      {.name = "strided", .L = 33, .C = 64, .strided = true},
      {.name = "long", .B = 1, .L = 1000, .C = 9},
  };
  return all;
}

TEST(CausalConv1d, FollowsItsFormula) {
  for (const Case& c : cases()) {
    const Problem p = make(c, at::kDouble);
    const auto [y, state] = naive(p, c);
    const auto got = evaluate(p, c, "reference", at::kDouble);
    EXPECT_TRUE(close(got[0], y, 1e-12)) << c.name;
    EXPECT_TRUE(close(got[1], state, 1e-12)) << c.name;
  }
}

TEST(CausalConv1d, GradientsAgreeWithDifferences) {
  const Case c{.name = "", .L = 9, .C = 3, .state = true, .documents = true};
  const Problem p = make(c, at::kDouble);
  std::vector<Tensor> leaves;
  for (const Tensor& t : p.x) leaves.push_back(leaf(t.to(at::kDouble)));
  const Tensor wy = at::randn({2, 9, 3}, kDouble), ws = at::randn({2, 3, 3}, kDouble);
  EXPECT_TRUE(gradients_agree(
      [&] {
        const auto [y, state] = run(leaves, p.documents, c, nullptr);
        return (y * wy).sum() + (state * ws).sum();
      },
      leaves));
}

TEST(CausalConv1d, PiecesWithTheStateBetweenAreTheWhole) {
  for (const char* backend : {"reference", "fused"}) {
    const Case c{.name = "", .L = 40, .state = true};
    const Problem p = make(c, at::kFloat);
    const auto [whole, end] = run(p.x, {}, c, backend);
    for (const std::vector<int64_t>& lengths :
         {std::vector<int64_t>{1, 39}, {2, 1, 1, 36}, {20, 20}}) {
      std::vector<Tensor> outs, x = p.x;
      int64_t from = 0;
      for (const int64_t n : lengths) {
        x[0] = p.x[0].narrow(1, from, n);
        const auto [y, state] = run(x, {}, c, backend);
        outs.push_back(y);
        x.back() = state;
        from += n;
      }
      EXPECT_TRUE(close(at::cat(outs, 1), whole, 1e-6)) << backend;
      EXPECT_TRUE(at::equal(x.back(), end)) << backend;
    }
  }
}

TEST(CausalConv1d, WhatIsNotFiniteStaysInItsDocument) {
  const Case c{.name = "", .B = 1, .L = 3, .C = 2, .state = true};
  const Problem p = make(c, at::kFloat);
  const Tensor documents = at::tensor({0, 0, 1}, at::kLong).unsqueeze(0);
  std::vector<Tensor> x = p.x;
  x[0] = x[0].clone();
  x[0].select(1, 0).fill_(std::nan(""));
  x.back() = at::full_like(x.back(), std::numeric_limits<float>::infinity());
  for (const char* backend : {"reference", "fused"}) {
    const auto [y, state] = run(x, documents, c, backend);
    const auto [expected, end] = run(p.x, documents, c, backend);
    EXPECT_TRUE(at::equal(y.select(1, 2), expected.select(1, 2))) << backend;
    EXPECT_TRUE(at::equal(state, end)) << backend;
  }
}

TEST(CausalConv1d, AutocastCastsTheSequence) {
  const Case c{.name = ""};
  const Problem p = make(c, at::kFloat);
  const Tensor expected = std::get<0>(run(p.x, {}, c, nullptr));
  const Tensor cast = under_autocast([&] { return std::get<0>(run(p.x, {}, c, nullptr)); });
  EXPECT_EQ(cast.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(close(cast, expected, 0.02));
}

TEST(CausalConv1dFused, MatchesTheReference) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    expect_matches_reference(evaluation(c, at::kFloat), 2e-6);
  }
}

// At most twice the error of the plain computation in bfloat16: the reference, whose arithmetic is
// in float32, on rounded inputs with rounded outputs.
TEST(CausalConv1dFused, BFloat16ErrsLikeItsRounding) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    expect_errs_like_rounding(evaluation(c, at::kBFloat16), 2e-5);
  }
}

TEST(CausalConv1dFused, IsDeterministicAtEveryNumberOfThreads) {
  const int threads = at::get_num_threads();
  const Case c{.name = "", .B = 3, .L = 29, .state = true, .documents = true};
  const Problem p = make(c, at::kFloat);
  at::set_num_threads(1);
  const auto alone = evaluate(p, c, "fused", at::kFloat);
  for (const int count : {2, 3, 8}) {
    at::set_num_threads(count);
    const auto once = evaluate(p, c, "fused", at::kFloat);
    const auto twice = evaluate(p, c, "fused", at::kFloat);
    for (size_t i = 0; i < once.size(); ++i) {
      EXPECT_TRUE(at::equal(once[i], twice[i])) << i << " threads " << count;
      const bool sum = i == 3 || i == 4;  // weight, bias: sums over what the threads share
      EXPECT_TRUE(sum ? close(once[i], alone[i], 1e-6).operator bool()
                      : at::equal(once[i], alone[i]))
          << i << " threads " << count;
    }
  }
  at::set_num_threads(threads);
}

TEST(CausalConv1dFused, LesserInstructionSetsToo) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets(
      "CausalConv1dFused.MatchesTheReference:CausalConv1dFused.BFloat16ErrsLikeItsRounding"));
}

TEST(CausalConv1d, RefusesInOneSentence) {
  struct Call {
    Tensor x = at::randn({2, 5, 4}, kDouble), weight = at::randn({4, 3}, kDouble);
    CausalConv1dOptions o;
  };
  const struct {
    void (*apply)(Call&);
    const char* message;
  } bad[] = {
      {[](Call& c) { c.x = c.x[0]; }, "x has shape [5, 4], expected [B, L, C]"},
      {[](Call& c) { c.x = c.x.narrow(1, 0, 0); }, "L and C of at least 1"},
      {[](Call& c) { c.x = c.x.to(at::kLong); }, "x has dtype Long"},
      {[](Call& c) { c.weight = c.weight.narrow(0, 0, 3); }, "weight has shape [3, 3]"},
      {[](Call& c) { c.weight = c.weight.to(at::kFloat); }, "weight has dtype Float"},
      {[](Call& c) { c.o.bias = c.weight; }, "bias has shape"},
      {[](Call& c) { c.o.bias = at::zeros({4}, kLong); }, "bias has dtype Long"},
      {[](Call& c) { c.o.state = at::zeros({2, 3, 4}, kDouble); },
       "state has shape [2, 3, 4], expected [B, W - 1, C] = [2, 2, 4]"},
      {[](Call& c) { c.o.state = at::zeros({2, 2, 4}); }, "state has dtype Float"},
      {[](Call& c) { c.o.documents = at::zeros({2, 5}); }, "documents has dtype Float"},
      {[](Call& c) { c.o.documents = at::zeros({2, 4}, kLong); }, "documents has shape"},
      {[](Call& c) { c.o.backend = "fast"; }, "backend is \"fast\""},
      {[](Call& c) { c.o.backend = "fused"; }, "take float32 and bfloat16 only"},
      {[](Call& c) {
         c.x = c.x.to(at::kFloat);
         c.weight = at::zeros({4, 9});
         c.o.backend = "fused";
       },
       "a filter has more than 8 taps"},
  };
  for (const auto& b : bad) {
    Call c;
    b.apply(c);
    expect_refused("causal_conv1d", b.message, [&] { ops::causal_conv1d(c.x, c.weight, c.o); });
  }
}

}  // namespace
}  // namespace headloom::causal_conv1d_test
