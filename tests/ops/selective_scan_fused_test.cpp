// The fused selective scan against the reference in float64: outputs, last states and every
// gradient, with memory that a kernel fails to write poisoned with NaN.
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "fused.h"
#include "ops/selective_scan/op.h"
#include "testing/compare.h"
#include "testing/instruction_sets.h"
#include "testing/strided.h"

namespace headloom::selective_scan_fused_test {
namespace {

using namespace test;
using ops::SelectiveScanOptions;

struct Case {
  std::string name = "";
  int64_t B = 1, L = 63, D = 72, N = 16;
  int64_t groups = 0;  // 0: [B, L, N]
  bool constant_b = false, constant_c = false;
  bool state = false, documents = false;
  bool strided = false;  // rows of inputs and cotangents lie apart
  bool bare = false;  // no D, z, bias, softplus
  bool output_only = false;
  double rate = 1;  // of the decay
};

struct Problem {
  std::vector<Tensor> x;  // u, delta, A, B, C, then of D, z, delta_bias and state what is there
  Tensor documents;
};

Problem make(const Case& c, at::ScalarType type) {
  at::manual_seed(7);
  const auto along = [&](int64_t width) { return at::randn({c.B, c.L, width}).to(type); };
  const auto map = [&](bool constant) {
    if (constant) return at::randn({c.D, c.N}).to(type);
    if (c.groups == 0) return along(c.N);
    return at::randn({c.B, c.L, c.groups, c.N}).to(type);
  };
  Problem p;
  p.x = {along(c.D), along(c.D) * 0.5, -at::rand({c.D, c.N}) * (16 * c.rate), map(c.constant_b),
         map(c.constant_c)};
  if (c.bare) {
    p.x[1] = p.x[1].abs() * 0.2;
  } else {
    p.x.push_back(at::randn({c.D}));
    p.x.push_back(along(c.D));
    p.x.push_back(at::randn({c.D}) * 2 - 2);
  }
  if (c.state) p.x.push_back(at::randn({c.B, c.D, c.N}));
  if (c.documents) {
    p.documents = at::arange(c.L, kLong).div(17, "floor").repeat({c.B, 1});
    // Changes at chunk boundaries, at every step and in between, with ids that come back.
    p.documents[-1] = (at::rand({c.L}) < 0.2).to(at::kLong);
    if (c.L > 40) p.documents[-1].narrow(0, 32, 8).copy_(at::arange(8, kLong));
  }
  return p;
}

// Output, last state and gradients under fixed random cotangents.
std::vector<Tensor> evaluate(const Problem& p, const Case& c, const char* backend,
                             at::ScalarType type) {
  const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
  const auto laid_out = [&](const Tensor& t, at::ScalarType to) {
    return c.strided ? rows_apart(t, to) : t.to(to);
  };
  std::vector<Tensor> x;
  for (size_t i = 0; i < p.x.size(); ++i) {
    const bool parameter = p.x[i].scalar_type() == at::kFloat && type == at::kBFloat16;
    const Tensor t = laid_out(p.x[i], parameter ? wide : type);
    x.push_back(t.detach().requires_grad_());
  }
  size_t next = 5;
  SelectiveScanOptions o;
  if (!c.bare) {
    o.D = x[next++];
    o.z = x[next++];
    o.delta_bias = x[next++];
    o.delta_softplus = true;
  }
  if (c.state) o.state = x[next++];
  o.documents = p.documents;
  o.backend = backend;
  const auto [y, last] = ops::selective_scan(x[0], x[1], x[2], x[3], x[4], o);
  at::manual_seed(11);
  const Tensor to_y = laid_out(at::randn(y.sizes()), type),
               to_last = laid_out(at::randn(last.sizes()), wide);
  std::vector<Tensor> all = {y.detach(), last.detach()};
  const auto grads = c.output_only ? torch::autograd::grad({y}, x, {to_y})
                                   : torch::autograd::grad({y, last}, x, {to_y, to_last});
  all.insert(all.end(), grads.begin(), grads.end());
  return all;
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {.name = "one position", .L = 1, .D = 5, .N = 1, .state = true},
      {.name = "odd", .B = 2, .state = true},
      {.name = "long", .L = 1000, .D = 20, .N = 5},
      {.name = "bare", .L = 70, .D = 33, .N = 7, .bare = true},
      {.name = "output only", .B = 2, .L = 33, .D = 31, .N = 5, .state = true, .output_only = true},
      {.name = "documents", .B = 2, .L = 150, .D = 20, .N = 4, .state = true, .documents = true},
      {.name = "strided", .B = 2, .L = 65, .D = 40, .N = 6, .strided = true},
      {.name = "groups", .B = 2, .L = 40, .D = 99, .N = 3, .groups = 3, .documents = true},
      {.name = "groups of one", .L = 40, .D = 6, .N = 2, .groups = 6},
      {.name = "constant b", .B = 2, .L = 70, .D = 65, .N = 5, .constant_b = true},
      {.name = "constant c", .B = 2, .L = 70, .D = 65, .N = 5, .groups = 5, .constant_c = true},
      {.name = "constant",
       .B = 2,
       .L = 70,
       .D = 65,
       .N = 5,
       .constant_b = true,
       .constant_c = true,
       .documents = true},
      {.name = "many states", .L = 40, .D = 9, .N = 600},
      {.name = "many channels", .L = 40, .D = 1100, .N = 2},
      {.name = "slow decay", .L = 600, .D = 8, .N = 4, .rate = 1e-4},
      {.name = "growth", .L = 30, .D = 8, .N = 4, .rate = -0.02},
      {.name = "fast decay", .L = 50, .D = 8, .N = 4, .rate = 1e5},
  };
  return all;
}

TEST(SelectiveScanFused, MatchesTheReference) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    expect_matches_reference(evaluation(c, at::kFloat), 1e-5);
  }
}

// At most twice the error of the plain computation in bfloat16: the reference, whose arithmetic is
// in float32, on rounded inputs with rounded outputs.
TEST(SelectiveScanFused, BFloat16ErrsLikeItsRounding) {
  for (const Case& c : cases()) {
    if (c.L > 200 || c.N > 100 || c.D > 1000) continue;  // the reference takes its time
    SCOPED_TRACE(c.name);
    expect_errs_like_rounding(evaluation(c, at::kBFloat16), 2e-5);
  }
}

// A problem in bfloat16 has wide parameters beside narrow sequences.
TEST(SelectiveScanFused, RowsMayLieApart) {
  for (const Case& c :
       {Case{.name = "odd", .B = 2, .L = 65, .D = 41, .N = 6, .state = true},
        Case{.name = "groups", .B = 2, .L = 40, .D = 9, .N = 3, .groups = 3},
        Case{.name = "one position", .B = 2, .L = 1, .D = 5, .N = 2, .state = true}}) {
    SCOPED_TRACE(c.name);
    Case apart = c;
    apart.strided = true;
    expect_same_with_rows_apart(evaluation(c, at::kBFloat16), evaluation(apart, at::kBFloat16));
  }
}

TEST(SelectiveScanFused, IsDeterministicAtEveryNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (const Case& c : {Case{.name = "wide", .L = 70, .D = 300, .N = 3, .state = true},
                        Case{.name = "batch", .B = 3, .L = 40, .D = 70, .N = 4}}) {
    const Problem p = make(c, at::kFloat);
    at::set_num_threads(1);
    const auto alone = evaluate(p, c, "fused", at::kFloat);
    for (const int count : {1, 2, 3, 8}) {
      at::set_num_threads(count);
      const auto once = evaluate(p, c, "fused", at::kFloat);
      const auto twice = evaluate(p, c, "fused", at::kFloat);
      for (size_t i = 0; i < once.size(); ++i) {
        EXPECT_TRUE(at::equal(once[i], twice[i])) << c.name << " " << i << " threads " << count;
        // The gradients of B and C are sums over what the threads share.
        const bool shared = i == 5 || i == 6;
        EXPECT_TRUE(shared                         ? close(once[i], alone[i], 1e-6)
                    : at::equal(once[i], alone[i]) ? ::testing::AssertionSuccess()
                                                   : ::testing::AssertionFailure())
            << c.name << " " << i << " threads " << count;
      }
    }
  }
  at::set_num_threads(threads);
}

TEST(SelectiveScanFused, PiecesAreTheWhole) {
  const Case c{.name = "pieces", .B = 2, .L = 150, .D = 50, .N = 4, .state = true};
  const Problem p = make(c, at::kFloat);
  const auto run = [&](int64_t from, int64_t length, const Tensor& state) {
    const auto part = [&](size_t i) { return p.x[i].narrow(1, from, length); };
    return ops::selective_scan(part(0), part(1), p.x[2], part(3), part(4),
                               {.D = p.x[5],
                                .z = part(6),
                                .delta_bias = p.x[7],
                                .delta_softplus = true,
                                .state = state,
                                .documents = {},
                                .backend = "fused"});
  };
  const auto [whole, end] = run(0, 150, p.x[8]);
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>{1, 149}, {32, 64, 54}, {7, 50, 1, 92}}) {
    std::vector<Tensor> outs;
    Tensor state = p.x[8];
    int64_t from = 0;
    for (const int64_t n : lengths) {
      const auto [out, last] = run(from, n, state);
      outs.push_back(out);
      state = last;
      from += n;
    }
    EXPECT_TRUE(close(at::cat(outs, 1), whole, 2e-6));
    EXPECT_TRUE(close(state, end, 2e-6));
  }
}

TEST(SelectiveScanFused, WithoutGradientsKeepsNothing) {
  const Problem p = make({.name = "", .L = 64, .D = 32, .bare = true}, at::kFloat);
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("headloom::selective_scan_fused", "");
  const c10::IValue none;
  torch::jit::Stack stack = {p.x[0], p.x[1], p.x[2], p.x[3], p.x[4], none,
                             none,   none,   false,  none,   none,   false};
  op.callBoxed(stack);
  EXPECT_EQ(stack.at(0).toTensorVector().at(2).numel(), 0);
}

TEST(SelectiveScanFused, LesserInstructionSetsToo) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets(
      "SelectiveScanFused.MatchesTheReference:SelectiveScanFused.BFloat16ErrsLikeItsRounding"));
}

}  // namespace
}  // namespace headloom::selective_scan_fused_test
