// token_shift against its formula, its kernels against the reference, and what it refuses.
#include "ops/token_shift/op.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/instruction_sets.h"
#include "testing/poison.h"

namespace headloom::token_shift_test {
namespace {

using namespace test;
using ops::TokenShiftOptions;

TEST(TokenShift, FollowsItsFormula) {
  at::manual_seed(3);
  const Tensor x = at::randn({2, 7, 3}, kDouble), mix = at::rand({2, 3}, kDouble);
  TokenShiftOptions o;
  o.last = at::randn({2, 3}, kDouble);
  o.documents = at::tensor({4, 4, 4, 0, 0, 4, 4}, kLong).expand({2, 7});
  const auto y = ops::token_shift(x, mix, o);
  ASSERT_EQ(y.size(), 2u);
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t t = 0; t < 7; ++t) {
      const Tensor before = t == 0             ? o.last
                            : t == 3 || t == 5 ? at::zeros({2, 3}, kDouble)
                                               : x.select(1, t - 1);
      EXPECT_TRUE(close(y[static_cast<size_t>(i)].select(1, t),
                        mix[i] * x.select(1, t) + (1 - mix[i]) * before, 1e-14))
          << i << t;
    }
  }
}

TEST(TokenShift, GradientsAgreeWithDifferences) {
  at::manual_seed(4);
  const Tensor x = leaf(at::randn({2, 9, 3}, kDouble)), mix = leaf(at::rand({3, 3}, kDouble)),
               last = leaf(at::randn({2, 3}, kDouble)), w = at::randn({3, 2, 9, 3}, kDouble);
  TokenShiftOptions o;
  o.last = last;
  o.documents = at::arange(9, kLong).div(4, "floor").expand({2, 9});
  EXPECT_TRUE(gradients_agree([&] { return (at::stack(ops::token_shift(x, mix, o)) * w).sum(); },
                              {x, mix, last}));
}

struct Case {
  const char* name;
  int64_t B, T, C, N;
  bool last, documents, strided;
};

std::vector<Tensor> evaluate(const Case& c, const std::string& backend, at::ScalarType given,
                             at::ScalarType type) {
  at::manual_seed(5);
  Tensor x = at::randn({c.B, c.T, c.strided ? 2 * c.C : c.C}).to(given).narrow(-1, 0, c.C);
  if (c.strided) x = x.to(type);  // keeps its strides
  std::vector<Tensor> leaves = {x.to(type).detach().requires_grad_(),
                                at::rand({c.N, c.C}).to(type == at::kDouble ? type : at::kFloat)};
  leaves[1].requires_grad_();
  TokenShiftOptions o;
  o.backend = backend;
  if (c.last) {
    leaves.push_back(at::randn({c.B, c.C}).to(given).to(type).requires_grad_());
    o.last = leaves[2];
  }
  if (c.documents) o.documents = (at::rand({c.B, c.T}) < 0.2).to(at::kLong);
  std::vector<Tensor> all = ops::token_shift(leaves[0], leaves[1], o), cotangents;
  for (const Tensor& t : all) cotangents.push_back(at::randn(t.sizes()).to(given).to(type));
  const auto grads = torch::autograd::grad(all, leaves, cotangents);
  all.insert(all.end(), grads.begin(), grads.end());
  return all;
}

const Case kCases[] = {{"one", 1, 1, 1, 1, true, false, false},
                       {"odd", 3, 63, 83, 3, true, true, false},
                       {"long", 1, 1000, 130, 2, false, false, false},
                       {"strided", 2, 70, 40, 4, false, true, true}};

TEST(TokenShift, KernelsMatchTheReference) {
  for (const Case& c : kCases) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      const auto exact = evaluate(c, "reference", type, at::kDouble);
      const auto plain = evaluate(c, "reference", type, type);
      Poison poison;
      const auto got = evaluate(c, "fused", type, type);
      ASSERT_EQ(got.size(), exact.size());
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(errs_like_rounding(got[i], plain[i], exact[i], 1e-6)) << c.name << " " << i;
      }
    }
  }
}

TEST(TokenShift, IsTheSameAtEveryNumberOfThreads) {
  const int threads = at::get_num_threads();
  const Case c = {"", 3, 130, 70, 3, true, true, false};
  at::set_num_threads(1);
  const auto once = evaluate(c, "fused", at::kFloat, at::kFloat);
  for (const int count : {2, 3, 8}) {
    at::set_num_threads(count);
    const auto again = evaluate(c, "fused", at::kFloat, at::kFloat);
    for (size_t i = 0; i < once.size(); ++i) {
      // The sum over positions of the gradient of mix is shared out.
      EXPECT_TRUE(i == 4 ? close(again[i], once[i], 1e-6) : close(again[i], once[i], 0))
          << i << " threads " << count;
    }
  }
  at::set_num_threads(threads);
}

TEST(TokenShift, LesserInstructionSetsToo) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets("TokenShift.KernelsMatchTheReference"));
}

TEST(TokenShift, RefusesInOneSentence) {
  const Tensor x = at::randn({2, 5, 3}), mix = at::rand({2, 3});
  const struct {
    std::function<void()> run;
    const char* message;
  } cases[] = {
      {[&] { ops::token_shift(x[0], mix, {}); }, "x has shape [5, 3]"},
      {[&] { ops::token_shift(x.to(at::kLong), mix, {}); }, "x has dtype Long"},
      {[&] { ops::token_shift(x, mix[0], {}); }, "mix has shape [3]"},
      {[&] { ops::token_shift(x, mix.to(at::kLong), {}); }, "mix has dtype Long"},
      {[&] { ops::token_shift(x, mix, {x[0], {}, {}}); }, "last has shape [5, 3]"},
      {[&] { ops::token_shift(x, mix, {{}, x[0], {}}); }, "documents has dtype Float"},
      {[&] { ops::token_shift(x, mix, {{}, {}, "fast"}); }, "backend is \"fast\""},
      {[&] { ops::token_shift(x, at::rand({5, 3}), {{}, {}, "fused"}); }, "more than 4 mixes"},
  };
  for (const auto& bad : cases) {
    expect_refused("token_shift", bad.message, bad.run);
  }
}

}  // namespace
}  // namespace headloom::token_shift_test
