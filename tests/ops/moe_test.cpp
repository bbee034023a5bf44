// The experts against loops over tokens, choices and units in double; the fused form, with the
// kernels of lesser instruction sets too, against the reference, with memory that a kernel fails to
// write poisoned with NaN; and what is refused.
#include "ops/moe/op.h"

#include <torch/csrc/autograd/autograd.h>

#include "fused.h"
#include "testing/autocast.h"
#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/instruction_sets.h"
#include "testing/strided.h"

namespace headloom::moe_test {
namespace {

using namespace test;

struct Case {
  std::string name = "";
  int64_t tokens = 63, width = 20, hidden = 12, experts = 8, active = 3;
  std::string choice = "random";  // "one": all choose the last; "half": half the experts stay empty
  bool strided = false;
};

struct Problem {
  Tensor x, up, down, weight;  // differentiable
  Tensor choice;

  Tensor run(const std::optional<std::string>& backend = {}) const {
    return ops::moe(x, up, down, choice, weight, backend);
  }
};

Problem make(const Case& c) {
  at::manual_seed(7);
  Problem p;
  p.x = at::randn({c.tokens, c.width}, kDouble);
  if (c.strided) p.x = rows_apart(p.x, at::kDouble);
  p.up = at::randn({c.experts, 2 * c.hidden, c.width}, kDouble) * 0.5;
  p.down = at::randn({c.experts, c.width, c.hidden}, kDouble) * 0.5;
  p.weight = at::rand({c.tokens, c.active}, kDouble);
  const Tensor scores = at::rand({c.tokens, c.experts});
  if (c.choice == "half") scores.narrow(1, 0, c.experts / 2).zero_();
  p.choice = std::get<1>(at::topk(scores, c.active));
  if (c.choice == "one") p.choice.fill_(c.experts - 1);
  return p;
}

Tensor naive(const Problem& p) {
  const int64_t tokens = p.x.size(0), width = p.x.size(1), hidden = p.down.size(2);
  const Tensor out = at::zeros({tokens, width}, kDouble);
  const auto x = p.x.accessor<double, 2>(), weight = p.weight.accessor<double, 2>();
  const auto up = p.up.accessor<double, 3>(), down = p.down.accessor<double, 3>();
  const auto choice = p.choice.accessor<int64_t, 2>();
  auto y = out.accessor<double, 2>();
  for (int64_t n = 0; n < tokens; ++n) {
    for (int64_t j = 0; j < choice.size(1); ++j) {
      const int64_t e = choice[n][j];
      for (int64_t i = 0; i < hidden; ++i) {
        double g = 0, u = 0;
        for (int64_t c = 0; c < width; ++c) {
          g += up[e][i][c] * x[n][c];
          u += up[e][hidden + i][c] * x[n][c];
        }
        const double a = g / (1 + std::exp(-g)) * u;
        for (int64_t c = 0; c < width; ++c) y[n][c] += weight[n][j] * down[e][c][i] * a;
      }
    }
  }
  return out;
}

// The result and the gradients of x, up, down and weight.
std::vector<Tensor> evaluate(Problem p, const char* backend, at::ScalarType type) {
  std::vector<Tensor> leaves;
  for (Tensor* t : {&p.x, &p.up, &p.down, &p.weight}) {
    const bool weight = t == &p.weight && type != at::kDouble;
    leaves.push_back(in_its_strides(*t, weight ? at::kFloat : type).requires_grad_());
    *t = leaves.back();
  }
  const Tensor y = p.run(backend);
  at::manual_seed(11);
  std::vector<Tensor> all = {y.detach()};
  for (Tensor& g : torch::autograd::grad({y}, leaves, {at::randn(y.sizes(), kDouble).to(type)})) {
    all.push_back(g);
  }
  return all;
}

Evaluate evaluation(const Case& c) {
  return [p = make(c)](const char* backend, at::ScalarType type) {
    return evaluate(p, backend, type);
  };
}

std::vector<Case> cases() {
  return {{.name = "odd"},
          {.name = "one token", .tokens = 1},
          {.name = "no token", .tokens = 0},
          {.name = "many tokens", .tokens = 1000, .width = 33, .hidden = 7, .experts = 20},
          {.name = "one expert", .experts = 1, .active = 1},
          {.name = "one gets all", .choice = "one"},
          {.name = "half are empty", .choice = "half"},
          {.name = "every expert", .active = 8},
          {.name = "one unit", .width = 1, .hidden = 1},
          {.name = "wide", .tokens = 100, .width = 64, .hidden = 48},
          {.name = "strided", .strided = true}};
}

TEST(Moe, ReferenceIsTheLoop) {
  for (const Case& c : cases()) {
    const Problem p = make(c);
    EXPECT_TRUE(close(p.run("reference"), naive(p), 1e-12)) << c.name;
  }
}

TEST(Moe, GradientsAgreeWithDifferences) {
  Problem p = make({.tokens = 9, .width = 5, .hidden = 4, .experts = 4, .active = 2});
  const std::vector<Tensor> leaves = {p.x, p.up, p.down, p.weight};
  for (Tensor t : leaves) t.requires_grad_();
  const Tensor cotangent = at::randn({9, 5}, kDouble);
  EXPECT_TRUE(gradients_agree([&] { return (p.run() * cotangent).sum(); }, leaves));
}

TEST(Moe, FusedMatchesTheReference) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    expect_matches_reference(evaluation(c), 3e-6);
  }
}

// A low-precision kernel may err at most twice as much as the plain low-precision computation.
TEST(Moe, BFloat16ErrsLikeItsRounding) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    expect_errs_like_rounding(evaluation(c), 0.004);  // one rounding
  }
}

TEST(Moe, SaturatedUnitsStayFinite) {
  Problem p = make({});
  p.x = p.x * 1000;
  const auto expected = evaluate(p, "reference", at::kDouble);
  const auto got = evaluate(p, "fused", at::kFloat);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(close(got[i], expected[i], 1e-5)) << i;
}

// Whatever its numbers are: results, and gradients of all but its own weights.
TEST(Moe, AnExpertThatNoTokenChoseGivesNothing) {
  for (const char* backend : {"reference", "fused"}) {
    const at::ScalarType type = std::string(backend) == "fused" ? at::kFloat : at::kDouble;
    Problem p = make({.choice = "half"});  // expert 0 is empty
    const auto expected = evaluate(p, backend, type);
    ASSERT_FALSE(p.choice.eq(0).any().item<bool>());
    p.up = p.up.clone();
    p.down = p.down.clone();
    p.up[0].fill_(1e200);
    p.down[0].fill_(std::nan(""));
    const auto got = evaluate(p, backend, type);
    for (size_t i = 0; i < got.size(); ++i) {
      const bool weights = i == 2 || i == 3;  // [experts, ...]
      const auto others = [&](const Tensor& t) { return weights ? t.slice(0, 1) : t; };
      EXPECT_TRUE(others(got[i]).equal(others(expected[i]))) << backend << i;
    }
  }
}

TEST(Moe, IsTheSameOnAnyNumberOfThreads) {
  for (const Case& c : {Case{.name = "balanced", .tokens = 200},
                        Case{.name = "one gets all", .tokens = 200, .choice = "one"}}) {
    SCOPED_TRACE(c.name);
    expect_same_on_any_number_of_threads(evaluation(c), 1e-6);
  }
}

TEST(Moe, AutocastKeepsTheWeights) {
  Problem p = make({});
  const Tensor exact = p.run();
  for (Tensor* t : {&p.x, &p.up, &p.down, &p.weight}) *t = t->to(at::kFloat);
  const Tensor y = under_autocast([&] { return p.run(); });
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(close(y, exact, 0.02));
}

TEST(Moe, LesserInstructionSetsToo) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets(
      "Moe.FusedMatchesTheReference:Moe.BFloat16ErrsLikeItsRounding"));
}

TEST(Moe, RefusesInOneSentence) {
  const struct {
    void (*apply)(Problem&);
    const char* message;
  } bad[] = {
      {[](Problem& p) { p.x = p.x.unsqueeze(0); }, "x has shape [1, 63, 20], expected [N, C]"},
      {[](Problem& p) { p.x = p.x.to(at::kLong); }, "x has dtype Long"},
      {[](Problem& p) { p.up = p.up.narrow(1, 0, 5); }, "up has shape [8, 5, 20]"},
      {[](Problem& p) { p.up = p.up.to(at::kFloat); }, "up has dtype Float, expected Double"},
      {[](Problem& p) { p.down = p.down.narrow(0, 0, 4); }, "down has shape [4, 20, 12]"},
      {[](Problem& p) { p.choice = p.choice.to(at::kFloat); }, "choice has dtype Float"},
      {[](Problem& p) { p.choice = p.choice.narrow(0, 0, 3); }, "choice has shape [3, 3]"},
      {[](Problem& p) { p.weight = p.weight.narrow(1, 0, 2); }, "weight has shape [63, 2]"},
      {[](Problem& p) { p.weight = p.weight.to(at::kBFloat16); }, "weight has dtype BFloat16"},
      {[](Problem& p) {
         for (Tensor* t : {&p.x, &p.up, &p.down, &p.weight}) *t = t->to(at::kFloat);
         p.choice[3][1] = 8;
       },
       "choice has the expert 8, expected one of 0 to 7"},
  };
  for (const auto& b : bad) {
    Problem p = make({});
    b.apply(p);
    expect_refused("moe", b.message, [&] { p.run(); });
  }
  EXPECT_THROW(make({}).run("fused"), c10::NotImplementedError);  // double
  EXPECT_THROW(make({}).run("quick"), c10::ValueError);
}

}  // namespace
}  // namespace headloom::moe_test
