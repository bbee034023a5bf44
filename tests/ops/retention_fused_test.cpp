// The fused retention kernels against the reference in float64: outputs, states and every gradient,
// with memory that a kernel fails to write poisoned with NaN, and again with the kernels of lesser
// instruction sets.
#include "fused.h"
#include "linear_attention.h"
#include "ops/retention/op.h"
#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/instruction_sets.h"

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
  Problem p;
  p.leaves = random_qkv(c, type);
  if (c.state) p.leaves.push_back(at::randn({c.B, c.H, c.D, c.E}));
  p.gamma = 1 - at::exp2(-c.first_gamma - at::arange(c.H, kDouble));
  p.options.chunk = c.chunk;
  p.options.documents = document_ids(c);
  return p;
}

Evaluate evaluation(const Case& c, at::ScalarType given) {
  return [c, p = make(c, given)](const char* backend, at::ScalarType type) {
    const std::vector<Tensor> leaves = leaves_of(p.leaves, 3, type, c.strided);
    RetentionOptions o = p.options;
    o.backend = backend;
    if (leaves.size() > 3) o.state = leaves[3];
    const auto [out, state] = retention(leaves[0], leaves[1], leaves[2], p.gamma, o);
    return output_and_gradients(out, state, leaves, p.leaves[0].scalar_type(), c);
  };
}

std::vector<Case> cases() {
  std::vector<Case> out = linear_attention_cases<Case>();
  for (const int64_t T : {1, 2, 15, 16, 17, 63, 64, 65, 130, 1000}) {
    out.push_back({.name = "T " + std::to_string(T), .T = T});
  }
  for (const Case& c : {Case{.name = "one position", .B = 2, .T = 1, .E = 150, .state = true},
                        Case{.name = "one strided", .B = 3, .T = 1, .state = true, .strided = true},
                        Case{.name = "RetNet", .B = 2, .T = 200, .H = 2, .D = 64, .E = 128},
                        Case{.name = "large", .T = 70, .H = 1, .D = 256, .E = 300},
                        Case{.name = "fast decay", .T = 150, .first_gamma = 0.01},
                        Case{.name = "chunks of 1", .T = 50, .chunk = 1},
                        Case{.name = "chunks of 100", .T = 500, .chunk = 100},
                        Case{.name = "chunks of 1000", .T = 500, .chunk = 1000}}) {
    out.push_back(c);
  }
  return out;
}

TEST(RetentionFused, MatchesTheReference) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    expect_matches_reference(evaluation(c, at::kFloat), 5e-6);
  }
}

// A low-precision kernel may err at most twice as much as the plain low-precision computation.
TEST(RetentionFused, BFloat16ErrsLikeItsRounding) {
  for (const Case& c : {Case{.name = "bfloat16", .T = 150, .D = 64, .E = 128},
                        Case{.name = "bfloat16 odd", .B = 3, .T = 67, .H = 5, .D = 9, .E = 33},
                        Case{.name = "bfloat16 documents", .B = 2, .T = 200, .document = 30},
                        Case{.name = "bfloat16 state", .B = 2, .T = 200, .state = true},
                        Case{.name = "bfloat16 position", .T = 1, .E = 150, .state = true},
                        Case{.name = "bfloat16 scalars", .B = 3, .T = 100, .D = 1, .E = 1},
                        Case{.name = "bfloat16 strided", .T = 50, .strided = true}}) {
    SCOPED_TRACE(c.name);
    expect_errs_like_rounding(evaluation(c, at::kBFloat16), 1e-6);
  }
}

TEST(RetentionFused, RowsMayLieApart) {
  for (Case c : {Case{.name = "positions", .B = 2, .T = 70, .state = true},
                 Case{.name = "odd", .B = 2, .T = 37, .H = 5, .D = 9, .E = 33, .state = true},
                 Case{.name = "one position", .B = 2, .T = 1, .state = true}}) {
    SCOPED_TRACE(c.name);
    const Evaluate adjacent = evaluation(c, at::kFloat);
    c.strided = true;
    expect_same_with_rows_apart(adjacent, evaluation(c, at::kFloat));
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
  expect_same_on_any_number_of_threads(evaluation(c, at::kFloat));
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

TEST(RetentionFused, LesserInstructionSetsToo) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets(
      "RetentionFused.MatchesTheReference:RetentionFused.BFloat16ErrsLikeItsRounding"));
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
  EXPECT_TRUE(
      contains(reason(parallel), "cannot run this case because the fused kernels compute the"));
  EXPECT_TRUE(contains(reason(wide), "float32 and bfloat16 only"));
  EXPECT_TRUE(contains(reason(learned), "gamma wants a gradient"));
}

}  // namespace
}  // namespace headloom::ops::retention_fused_test
