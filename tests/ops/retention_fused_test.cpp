// The fused retention kernels against the reference in float64: outputs, states and every gradient,
// with memory that a kernel fails to write poisoned with NaN. Run again with
// ATEN_CPU_CAPABILITY=avx2 and =default.
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "ops/retention/op.h"
#include "testing/compare.h"
#include "testing/poison.h"

namespace headloom::ops::retention_fused_test {
namespace {

using namespace test;

struct Case {
  std::string name = "";
  int64_t B = 1, T = 63, H = 6, D = 20, E = 24, chunk = 64;
  bool state = false, strided = false, last_state = true;  // last_state: its gradient is wanted
  int64_t document = 0;                                    // positions a document; 0: all one
  double first_gamma = 5;                                  // gamma_h = 1 - 2^-(first_gamma + h)
};

struct Problem {
  std::vector<Tensor> leaves;  // q, k, v and the state, where there is one
  Tensor gamma;
  RetentionOptions options;
};

Problem make(const Case& c, at::ScalarType type) {
  at::manual_seed(7);
  const auto random = [&](int64_t width) {
    const Tensor t = at::randn({c.B, c.T, c.H, c.strided ? 2 * width : width}).to(type);
    return c.strided ? t.slice(-1, 0, 2 * width, 2) : t;
  };
  Problem p;
  p.leaves = {random(c.D), random(c.D), random(c.E)};
  if (c.strided) p.leaves[1] = at::randn({c.D, c.H, c.B, c.T}).to(type).permute({2, 3, 1, 0});
  if (c.state) p.leaves.push_back(at::randn({c.B, c.H, c.D, c.E}));
  p.gamma = 1 - at::exp2(-c.first_gamma - at::arange(c.H, kDouble));
  p.options.chunk = c.chunk;
  if (c.document > 0) {
    p.options.documents = at::arange(c.T, kLong).div(c.document, "floor").repeat({c.B, 1});
    // Uneven ones, and a change at the second position, in the last element of the batch.
    p.options.documents[-1] = (at::rand({c.T}) < 1.0 / static_cast<double>(c.document))
                                  .to(at::kLong)
                                  .cumsum(0)
                                  .remainder(2);
    if (c.T > 2) p.options.documents[-1][0] = 2;
  }
  return p;
}

// Output, last state and gradients under fixed random cotangents.
std::vector<Tensor> evaluate(Problem p, const Case& c, const char* backend, at::ScalarType type) {
  const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<Tensor> leaves;
  for (size_t i = 0; i < p.leaves.size(); ++i) {
    leaves.push_back(p.leaves[i].to(i < 3 ? type : wide).detach().requires_grad_());
  }
  p.options.backend = backend;
  if (leaves.size() > 3) p.options.state = leaves[3];
  const auto [out, state] = retention(leaves[0], leaves[1], leaves[2], p.gamma, p.options);
  at::manual_seed(11);
  const Tensor cotangent = at::randn(out.sizes()).to(p.leaves[0].scalar_type());
  const Tensor state_cotangent = at::randn(state.sizes());
  std::vector<Tensor> all = {out.detach(), state.detach()};
  std::vector<Tensor> outputs = {out}, cotangents = {cotangent.to(type)};
  if (c.last_state) {
    outputs.push_back(state);
    cotangents.push_back(state_cotangent.to(wide));
  }
  for (Tensor& g : torch::autograd::grad(outputs, leaves, cotangents)) all.push_back(g);
  return all;
}

void expect_close(const Case& c, at::ScalarType type, double tolerance) {
  SCOPED_TRACE(c.name);
  const Problem p = make(c, type);
  const auto expected = evaluate(p, c, "reference", at::kDouble);
  std::vector<Tensor> got;
  {
    Poison poison;
    got = evaluate(p, c, "fused", type);
  }
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(close(got[i], expected[i], tolerance))
        << "result " << i << " (output, state, gradients)";
  }
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const int64_t T : {1, 2, 15, 16, 17, 63, 64, 65, 130, 1000}) {
    out.push_back({.name = "T " + std::to_string(T), .T = T});
  }
  for (Case c : {Case{.name = "RetNet", .B = 2, .T = 200, .H = 2, .D = 64, .E = 128},
                 Case{.name = "odd", .B = 3, .T = 70, .H = 5, .D = 9, .E = 33},
                 Case{.name = "narrow values", .T = 70, .D = 40, .E = 1},
                 Case{.name = "one", .T = 70, .H = 1, .D = 1, .E = 1},
                 Case{.name = "large", .T = 70, .H = 1, .D = 256, .E = 300},
                 Case{.name = "state", .B = 2, .T = 100, .state = true},
                 Case{.name = "state of one chunk", .T = 5, .state = true},
                 Case{.name = "last state unused", .T = 100, .state = true, .last_state = false},
                 Case{.name = "strided", .B = 2, .T = 100, .strided = true},
                 Case{.name = "fast decay", .T = 150, .first_gamma = 0.01},
                 Case{.name = "chunks of 1", .T = 50, .chunk = 1},
                 Case{.name = "chunks of 100", .T = 500, .chunk = 100},
                 Case{.name = "chunks of 1000", .T = 500, .chunk = 1000}}) {
    out.push_back(c);
  }
  for (const int64_t document : {1, 5, 64, 90}) {
    for (const bool state : {false, true}) {
      out.push_back({.name = "documents of " + std::to_string(document) + (state ? ", state" : ""),
                     .B = 2,
                     .T = 200,
                     .state = state,
                     .document = document});
    }
  }
  return out;
}

TEST(RetentionFused, MatchesTheReference) {
  for (const Case& c : cases()) expect_close(c, at::kFloat, 5e-6);
}

// A low-precision kernel may err at most twice as much as the plain low-precision computation.
TEST(RetentionFused, BFloat16ErrsLikeItsRounding) {
  for (const Case& c : {Case{.name = "bfloat16", .T = 150, .D = 64, .E = 128},
                        Case{.name = "bfloat16 odd", .B = 3, .T = 67, .H = 5, .D = 9, .E = 33},
                        Case{.name = "bfloat16 documents", .B = 2, .T = 200, .document = 30},
                        Case{.name = "bfloat16 strided", .T = 50, .strided = true}}) {
    SCOPED_TRACE(c.name);
    const Problem p = make(c, at::kBFloat16);
    const auto exact = evaluate(p, c, "reference", at::kDouble);
    const auto plain = evaluate(p, c, "reference", at::kBFloat16);
    std::vector<Tensor> got;
    {
      Poison poison;
      got = evaluate(p, c, "fused", at::kBFloat16);
    }
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(errs_like_rounding(got[i], plain[i], exact[i], 1e-6)) << i;
    }
  }
}

TEST(RetentionFused, PiecesWithTheStateBetweenAreTheWhole) {
  Problem p = make({.name = "whole", .B = 2, .T = 150}, at::kFloat);
  p.options.backend = "fused";
  const auto [whole, last] = retention(p.leaves[0], p.leaves[1], p.leaves[2], p.gamma, p.options);
  for (const std::vector<int64_t>& cuts :
       {std::vector<int64_t>{1, 149}, {64, 86}, {77, 1, 72}, {149, 1}}) {
    std::vector<Tensor> pieces;
    RetentionOptions o = p.options;
    int64_t from = 0;
    for (const int64_t length : cuts) {
      const auto cut = [&](const Tensor& t) { return t.narrow(1, from, length); };
      auto [out, state] =
          retention(cut(p.leaves[0]), cut(p.leaves[1]), cut(p.leaves[2]), p.gamma, o);
      pieces.push_back(out);
      o.state = state;
      from += length;
    }
    EXPECT_TRUE(close(at::cat(pieces, 1), whole, 1e-6)) << cuts;
    EXPECT_TRUE(close(o.state, last, 1e-6)) << cuts;
  }
}

TEST(RetentionFused, IsTheSameOnAnyNumberOfThreads) {
  const Case c{.name = "threads", .B = 3, .T = 200, .state = true, .document = 70};
  const Problem p = make(c, at::kFloat);
  const int before = at::get_num_threads();
  std::vector<std::vector<Tensor>> results;
  for (const int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    results.push_back(evaluate(p, c, "fused", at::kFloat));
  }
  at::set_num_threads(before);
  for (size_t i = 0; i < results[0].size(); ++i) {
    EXPECT_TRUE(at::equal(results[1][i], results[0][i])) << i;
    EXPECT_TRUE(at::equal(results[2][i], results[0][i])) << i;
  }
}

// What one document's numbers grow to must not reach the next.
TEST(RetentionFused, DocumentsShareNothingNotEvenInfinity) {
  Problem p = make({.name = "infinite", .T = 128, .document = 64}, at::kFloat);
  p.options.documents = at::arange(128, kLong).div(64, "floor").view({1, 128});
  p.options.backend = "fused";
  p.leaves[2].narrow(1, 0, 64).fill_(std::numeric_limits<float>::infinity());
  const auto [out, state] = retention(p.leaves[0], p.leaves[1], p.leaves[2], p.gamma, p.options);
  EXPECT_TRUE(out.narrow(1, 64, 64).isfinite().all().item<bool>());
  EXPECT_TRUE(state.isfinite().all().item<bool>());
}

TEST(RetentionFused, RefusesWhatItCannotRun) {
  const auto reason = [](Problem p) -> std::string {
    EXPECT_NO_THROW(retention(p.leaves[0], p.leaves[1], p.leaves[2], p.gamma, p.options));
    p.options.backend = "fused";
    try {
      retention(p.leaves[0], p.leaves[1], p.leaves[2], p.gamma, p.options);
    } catch (const c10::NotImplementedError& e) {
      return e.what_without_backtrace();
    }
    return "accepted";
  };
  Problem parallel = make({}, at::kFloat), wide = make({}, at::kDouble), learned = parallel;
  parallel.options.form = "parallel";
  learned.gamma.requires_grad_();
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_PRED2(has, reason(parallel), "cannot run this case because the fused kernels compute the");
  EXPECT_PRED2(has, reason(wide), "float32 and bfloat16 only");
  EXPECT_PRED2(has, reason(learned), "gamma wants a gradient");
}

}  // namespace
}  // namespace headloom::ops::retention_fused_test
