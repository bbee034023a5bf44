// The kernels of wkv against the reference in float64: outputs, states and every gradient, on
// memory poisoned with NaN.
#include <torch/csrc/autograd/autograd.h>

#include "fused.h"
#include "ops/wkv/op.h"
#include "testing/compare.h"
#include "testing/instruction_sets.h"

namespace headloom::wkv_fused_test {
namespace {

using namespace test;
using ops::WkvOptions;

struct Case {
  std::string name;
  int64_t B = 1, T = 63, C = 60;
  bool gate = false, state = false, documents = false, strided = false;
  double keys = 1;           // their scale
  bool output_only = false;  // no gradient reaches the state
};

struct Problem {
  Tensor k, v, decay, bonus;
  WkvOptions o;

  std::vector<Tensor*> leaves() {
    std::vector<Tensor*> all = {&k, &v, &decay, &bonus};
    if (o.receptance.defined()) all.push_back(&o.receptance);
    if (o.state.defined()) all.push_back(&o.state);
    return all;
  }
};

Problem make(const Case& c, at::ScalarType type) {
  at::manual_seed(5);
  const auto sequence = [&](double scale) {
    const Tensor t = (at::randn({c.B, c.T, c.C}) * scale).to(type);
    if (!c.strided) return t;
    // Rows far apart in memory, as a part of a wider projection is.
    return at::cat({t.transpose(0, 1), at::zeros({c.T, c.B, 7}, t.options())}, -1)
        .narrow(-1, 0, c.C)
        .transpose(0, 1);
  };
  Problem p;
  p.k = sequence(c.keys);
  p.v = sequence(1);
  p.decay = at::exp(at::linspace(-5, 3, c.C));
  p.bonus = at::randn({c.C});
  if (c.gate) p.o.receptance = sequence(2);
  if (c.state) {
    p.o.state = at::stack({at::randn({c.B, c.C}), at::rand({c.B, c.C}) + 0.5,
                           at::randn({c.B, c.C}) * (c.keys > 1 ? c.keys : 1)},
                          1);
  }
  if (c.documents) {
    p.o.documents = (at::rand({c.B, c.T}) < 0.1).to(at::kLong);
    p.o.documents[0] = at::arange(c.T, kLong).div(50, "floor");
  }
  return p;
}

// Output, state (its sums relative to the largest exponent) and gradients under fixed cotangents.
std::vector<Tensor> evaluate(Problem p, const Case& c, const std::string& backend,
                             at::ScalarType type) {
  std::vector<Tensor> leaves;
  for (Tensor* t : p.leaves()) {
    const bool wide = t->dim() == 1 || t == &p.o.state;
    const auto to = type != at::kDouble && wide ? at::kFloat : type;
    *t = t->to(to).detach().requires_grad_();
    leaves.push_back(*t);
  }
  p.o.backend = backend;
  const auto [out, state] = ops::wkv(p.k, p.v, p.decay, p.bonus, p.o);
  at::manual_seed(11);
  const Tensor to_out = at::randn(out.sizes()), to_sums = at::randn({c.B, 2, c.C});
  std::vector<Tensor> all = {out.detach(), state.detach()};
  const auto grads =
      c.output_only ? torch::autograd::grad({out}, leaves, {to_out.to(type)})
                    : torch::autograd::grad({out, state.narrow(1, 0, 2)}, leaves,
                                            {to_out.to(type), to_sums.to(state.scalar_type())});
  all.insert(all.end(), grads.begin(), grads.end());
  return all;
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {.name = "one position", .T = 1, .state = true},
      {.name = "odd", .B = 3, .T = 63, .C = 83, .gate = true, .state = true},
      {.name = "long", .T = 1000, .C = 130, .gate = true},
      {.name = "output only", .T = 100, .C = 17, .state = true, .output_only = true},
      {.name = "one channel", .T = 33, .C = 1},
      {.name = "documents", .B = 2, .T = 200, .C = 70, .gate = true, .documents = true},
      {.name = "documents and state", .B = 2, .T = 90, .C = 20, .state = true, .documents = true},
      {.name = "strided", .B = 2, .T = 70, .C = 40, .gate = true, .strided = true},
      {.name = "far apart", .T = 130, .C = 90, .gate = true, .state = true, .keys = 50},
      {.name = "far apart, documents",
       .B = 2,
       .T = 130,
       .state = true,
       .documents = true,
       .keys = 50},
  };
  return all;
}

TEST(WkvFused, MatchesTheReference) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    expect_matches_reference(evaluation(c, at::kFloat), c.keys > 1 ? 5e-5 : 1e-5);
  }
}

TEST(WkvFused, TakesSmallAndLargeValuesBesideKeysApart) {
  expect_takes_small_and_large_values(
      Case{.name = "apart", .T = 64, .keys = 0.1, .output_only = true});
}

// At most twice the error of the plain computation in bfloat16: the reference, whose arithmetic is
// in float32, on rounded inputs with rounded outputs.
TEST(WkvFused, BFloat16ErrsLikeItsRounding) {
  for (const Case& c : cases()) {
    if (c.T > 200) continue;  // the reference takes its time
    SCOPED_TRACE(c.name);
    expect_errs_like_rounding(evaluation(c, at::kBFloat16), 2e-5);
  }
}

TEST(WkvFused, IsTheSameAtEveryNumberOfThreads) {
  for (const Case& c : {Case{.name = "wide", .T = 100, .C = 300, .gate = true, .state = true},
                        Case{.name = "batch", .B = 3, .T = 70, .C = 90}}) {
    SCOPED_TRACE(c.name);
    expect_same_on_any_number_of_threads(evaluation(c, at::kFloat));
  }
}

TEST(WkvFused, PiecesAreTheWhole) {
  const Case c{.name = "pieces", .B = 2, .T = 150, .C = 50, .gate = true, .state = true};
  const Problem p = make(c, at::kFloat);
  const auto [whole, end] = ops::wkv(p.k, p.v, p.decay, p.bonus, p.o);
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>{1, 149}, {32, 64, 54}, {7, 50, 1, 92}}) {
    WkvOptions o = p.o;
    std::vector<Tensor> outs;
    int64_t from = 0;
    for (const int64_t n : lengths) {
      o.receptance = p.o.receptance.narrow(1, from, n);
      const auto [out, state] =
          ops::wkv(p.k.narrow(1, from, n), p.v.narrow(1, from, n), p.decay, p.bonus, o);
      outs.push_back(out);
      o.state = state;
      from += n;
    }
    EXPECT_TRUE(close(at::cat(outs, 1), whole, 2e-6));
    EXPECT_TRUE(close(o.state, end, 2e-6));
  }
}

TEST(WkvFused, WithoutGradientsKeepsNothing) {
  const Problem p = make({.name = "", .T = 64, .C = 32}, at::kFloat);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("headloom::wkv_fused", "");
  torch::jit::Stack stack = {p.k,           p.v,           p.decay,       p.bonus,
                             c10::IValue(), c10::IValue(), c10::IValue(), false};
  op.callBoxed(stack);
  EXPECT_EQ(stack.at(0).toTensorVector().at(2).numel(), 0);
}

TEST(WkvFused, LesserInstructionSetsToo) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets(
      "WkvFused.MatchesTheReference:WkvFused.BFloat16ErrsLikeItsRounding"));
}

}  // namespace
}  // namespace headloom::wkv_fused_test
