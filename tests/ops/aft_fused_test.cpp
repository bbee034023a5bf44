// The kernels of causal aft against the reference in float64: outputs, states and every gradient,
// on memory poisoned with NaN.
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "fused.h"
#include "ops/aft/op.h"
#include "testing/compare.h"
#include "testing/instruction_sets.h"
#include "testing/poison.h"

namespace headloom::aft_fused_test {
namespace {

using namespace test;
using ops::AftOptions;

struct Case {
  std::string name;
  std::string form = "local";
  int64_t B = 1, T = 63, C = 60, W = 5;
  bool state = false, documents = false, strided = false;
  double keys = 1, weights = 0.5;  // scales of k and w
  double slope = 0;                // what keys rise by from position to position
  int64_t heads = 4, offset = 0;   // of conv, of full
  bool output_only = false;        // no gradient reaches the state

  bool stateful() const { return form == "simple" || form == "local"; }
};

struct Problem {
  Tensor q, k, v;
  AftOptions o;

  std::vector<Tensor*> leaves() {
    std::vector<Tensor*> all = {&q, &k, &v};
    if (o.bias.defined()) all.push_back(&o.bias);
    if (o.state.defined()) all.push_back(&o.state);
    return all;
  }
};

Problem make(const Case& c, at::ScalarType type) {
  at::manual_seed(5);
  const auto sequence = [&](double scale, int64_t length) {
    const Tensor t = (at::randn({c.B, length, c.C}) * scale).to(type);
    if (!c.strided) return t;
    return at::cat({t.transpose(0, 1), at::zeros({length, c.B, 7}, t.options())}, -1)
        .narrow(-1, 0, c.C)
        .transpose(0, 1);
  };
  Problem p;
  p.q = sequence(2, c.T);
  p.k = sequence(c.keys, c.T);
  if (c.slope != 0) p.k = p.k + (at::arange(c.T, kLong).unsqueeze(-1) * c.slope).to(type);
  p.v = sequence(1, c.T);
  p.o.form = c.form;
  const int64_t before = c.state ? 9 : 0;
  if (c.form == "local") p.o.bias = at::randn({c.T + before, c.W}) * c.weights;
  if (c.form == "conv") p.o.bias = at::randn({c.heads, c.W}) * c.weights;
  if (c.form == "full") {
    const int64_t longest = c.T + c.offset + 2;
    p.o.bias = at::randn({longest, longest}) * c.weights;
    if (c.strided) p.o.bias = p.o.bias.t();
    p.o.offset = c.offset;
  }
  if (c.state) {
    // After a few positions, fewer or more than the window.
    AftOptions first = p.o;
    p.o.state = std::get<1>(
        ops::aft(sequence(1, before), sequence(c.keys, before), sequence(1, before), first));
    p.o.offset = before;
  }
  if (c.documents) {
    p.o.documents = (at::rand({c.B, c.T}) < 0.1).to(at::kLong);
    p.o.documents[0] = at::arange(c.T, kLong).div(50, "floor");
  }
  return p;
}

// Output, state and gradients under fixed cotangents, those of the state's exponent apart.
std::vector<Tensor> evaluate(Problem p, const Case& c, const std::string& backend,
                             at::ScalarType type) {
  std::vector<Tensor> leaves;
  for (Tensor* t : p.leaves()) {
    const bool wide = t == &p.o.bias || t == &p.o.state;
    *t = t->to(type != at::kDouble && wide ? at::kFloat : type).detach().requires_grad_();
    leaves.push_back(*t);
  }
  p.o.backend = backend;
  const auto [out, state] = ops::aft(p.q, p.k, p.v, p.o);
  at::manual_seed(11);
  const Tensor to_out = at::randn(out.sizes());
  Tensor to_state = at::randn(state.sizes());
  if (c.stateful()) to_state.select(1, 2).zero_();
  std::vector<Tensor> all = {out.detach(), state.detach()};
  const auto grads =
      c.output_only || !c.stateful()
          ? torch::autograd::grad({out}, leaves, {to_out.to(type)})
          : torch::autograd::grad({out, state}, leaves,
                                  {to_out.to(type), to_state.to(state.scalar_type())});
  all.insert(all.end(), grads.begin(), grads.end());
  return all;
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {.name = "simple", .form = "simple", .B = 2, .C = 83, .state = true},
      {.name = "simple, documents", .form = "simple", .B = 2, .T = 130, .documents = true},
      {.name = "one position", .T = 1, .state = true},
      {.name = "odd", .B = 3, .T = 63, .C = 83, .W = 7, .state = true},
      {.name = "long", .T = 1000, .C = 130, .W = 32},
      {.name = "window of one", .T = 70, .C = 20, .W = 1, .state = true},
      {.name = "window longer than chunk and sequence", .T = 50, .C = 20, .W = 70, .state = true},
      {.name = "window longer than chunk", .T = 150, .C = 20, .W = 45},
      {.name = "output only", .T = 100, .C = 17, .state = true, .output_only = true},
      {.name = "documents", .B = 2, .T = 200, .C = 70, .W = 9, .documents = true},
      {.name = "documents and state", .B = 2, .T = 90, .C = 20, .state = true, .documents = true},
      {.name = "strided", .B = 2, .T = 70, .C = 40, .strided = true},
      {.name = "far apart", .T = 130, .C = 90, .state = true, .keys = 50},
      {.name = "far apart, documents",
       .B = 2,
       .T = 130,
       .state = true,
       .documents = true,
       .keys = 50},
      {.name = "large weights", .T = 70, .C = 20, .state = true, .weights = 20},
      {.name = "thousands apart", .T = 130, .C = 20, .state = true, .keys = 3000},
      {.name = "rising", .T = 130, .C = 20, .state = true, .slope = 100},
      {.name = "falling", .T = 130, .C = 20, .state = true, .slope = -100},

      {.name = "conv, one position", .form = "conv", .T = 1},
      {.name = "conv, odd", .form = "conv", .B = 3, .C = 87, .W = 7, .heads = 3},
      {.name = "conv, long", .form = "conv", .T = 1000, .C = 260, .W = 32, .heads = 2},
      {.name = "conv, window of one", .form = "conv", .T = 70, .C = 20, .W = 1},
      {.name = "conv, window over all", .form = "conv", .T = 50, .C = 20, .W = 70, .heads = 20},
      {.name = "conv, documents", .form = "conv", .B = 2, .T = 200, .W = 9, .documents = true},
      {.name = "conv, strided", .form = "conv", .B = 2, .T = 70, .C = 40, .strided = true},
      {.name = "conv, far apart", .form = "conv", .T = 130, .keys = 50},
      {.name = "conv, thousands apart", .form = "conv", .T = 130, .keys = 3000},
      {.name = "conv, rising", .form = "conv", .T = 130, .slope = 100},
      {.name = "conv, falling", .form = "conv", .T = 130, .slope = -100},
      {.name = "conv, large weights", .form = "conv", .T = 70, .weights = 20},

      {.name = "full, one position", .form = "full", .T = 1},
      {.name = "full, odd", .form = "full", .B = 3, .C = 83},
      {.name = "full, long", .form = "full", .T = 1000, .C = 130},
      {.name = "full, offset", .form = "full", .B = 2, .T = 70, .C = 20, .offset = 5},
      {.name = "full, documents", .form = "full", .B = 2, .T = 200, .C = 70, .documents = true},
      {.name = "full, documents and offset",
       .form = "full",
       .B = 2,
       .T = 90,
       .C = 20,
       .documents = true,
       .offset = 40},
      {.name = "full, strided", .form = "full", .B = 2, .T = 70, .C = 40, .strided = true},
      {.name = "full, far apart", .form = "full", .T = 130, .C = 90, .keys = 50},
      {.name = "full, thousands apart", .form = "full", .T = 130, .C = 90, .keys = 3000},
      {.name = "full, thousands apart, documents",
       .form = "full",
       .B = 2,
       .T = 130,
       .documents = true,
       .keys = 3000},
      {.name = "full, rising", .form = "full", .T = 130, .C = 20, .slope = 100},
      {.name = "full, rising slowly", .form = "full", .T = 130, .C = 20, .slope = 1},
      {.name = "full, falling", .form = "full", .T = 130, .C = 20, .slope = -100},
      {.name = "full, large weights", .form = "full", .T = 70, .C = 20, .weights = 20},
      {.name = "full, huge weights", .form = "full", .T = 70, .C = 20, .weights = 100},
  };
  return all;
}

// The exponent of empty sums is -1e38, and so are the keys of places not seen yet.
void drop_markers(std::vector<Tensor>& results) {
  results[1] = at::where(results[1] < -1e37, at::zeros_like(results[1]), results[1]);
}

// Where a query sees one key alone, or keys far apart, there is no gradient but what rounding makes
// of a difference: then errors are relative to 1.
bool is_nothing(const Tensor& expected) {
  return expected.numel() > 0 && expected.abs().max().item<double>() < 1e-6;
}

TEST(AftFused, MatchesTheReference) {
  for (const Case& c : cases()) {
    auto expected = evaluate(make(c, at::kFloat), c, "reference", at::kDouble);
    Poison poison;
    auto got = evaluate(make(c, at::kFloat), c, "fused", at::kFloat);
    drop_markers(expected);
    drop_markers(got);
    for (size_t i = 0; i < got.size(); ++i) {
      const bool far = c.keys > 1 || c.weights > 1 || c.slope != 0;
      const double one = is_nothing(expected[i]) ? 1 : 0;
      EXPECT_TRUE(close(got[i] + one, expected[i] + one, far ? 5e-5 : 1e-5)) << c.name << " " << i;
    }
  }
}

TEST(AftFused, TakesSmallAndLargeValuesBesideKeysApart) {
  for (const char* form : {"simple", "local", "conv", "full"}) {
    expect_takes_small_and_large_values(
        Case{.name = form, .form = form, .T = 64, .keys = 0.1, .output_only = true});
  }
}

// At most twice the error of the plain computation in bfloat16: the reference on rounded inputs
// with rounded outputs.
TEST(AftFused, BFloat16ErrsLikeItsRounding) {
  for (const Case& c : cases()) {
    if (c.T > 200) continue;
    auto exact = evaluate(make(c, at::kBFloat16), c, "reference", at::kDouble);
    auto plain = evaluate(make(c, at::kBFloat16), c, "reference", at::kBFloat16);
    Poison poison;
    auto got = evaluate(make(c, at::kBFloat16), c, "fused", at::kBFloat16);
    for (auto* results : {&exact, &plain, &got}) drop_markers(*results);
    for (size_t i = 0; i < got.size(); ++i) {
      const double one = is_nothing(exact[i]) ? 1 : 0;
      EXPECT_TRUE(errs_like_rounding(got[i] + one, plain[i] + one, exact[i] + one, 2e-5))
          << c.name << " " << i;
    }
  }
}

TEST(AftFused, IsTheSameAtEveryNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (const Case& c : {Case{.name = "", .B = 2, .T = 100, .C = 200, .W = 11, .state = true},
                        Case{.name = "", .form = "conv", .B = 2, .T = 100, .C = 200},
                        Case{.name = "", .form = "full", .B = 2, .T = 100, .C = 200}}) {
    at::set_num_threads(1);
    const auto once = evaluate(make(c, at::kFloat), c, "fused", at::kFloat);
    for (const int count : {2, 3, 8}) {
      at::set_num_threads(count);
      const auto again = evaluate(make(c, at::kFloat), c, "fused", at::kFloat);
      const auto twice = evaluate(make(c, at::kFloat), c, "fused", at::kFloat);
      for (size_t i = 0; i < once.size(); ++i) {
        // The sum over channels of w's gradient is shared out, but not in full.
        const bool shared = i == 5 && c.form != "full";
        EXPECT_TRUE(close(again[i], once[i], shared ? 1e-5 : 0)) << c.form << i << " " << count;
        EXPECT_TRUE(at::equal(again[i], twice[i])) << c.form << i << " threads " << count;
      }
    }
  }
  at::set_num_threads(threads);
}

TEST(AftFused, PiecesAreTheWhole) {
  for (const char* form : {"simple", "local"}) {
    const Case c{.name = "", .form = form, .B = 2, .T = 150, .C = 50, .W = 12};
    const Problem p = make(c, at::kFloat);
    const auto [whole, end] = ops::aft(p.q, p.k, p.v, p.o);
    for (const std::vector<int64_t>& lengths :
         {std::vector<int64_t>{1, 149}, {32, 64, 54}, {7, 3, 47, 1, 92}}) {
      AftOptions o = p.o;
      std::vector<Tensor> outs;
      for (const int64_t n : lengths) {
        const auto part = [&](const Tensor& t) { return t.narrow(1, o.offset, n); };
        const auto [out, state] = ops::aft(part(p.q), part(p.k), part(p.v), o);
        outs.push_back(out);
        o.state = state;
        o.offset += n;
      }
      EXPECT_TRUE(close(at::cat(outs, 1), whole, 2e-6)) << form;
      EXPECT_TRUE(close(o.state, end, 2e-6)) << form;
    }
  }
}

TEST(AftFused, LesserInstructionSetsToo) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets(
      "AftFused.MatchesTheReference:AftFused.BFloat16ErrsLikeItsRounding"));
}

}  // namespace
}  // namespace headloom::aft_fused_test
