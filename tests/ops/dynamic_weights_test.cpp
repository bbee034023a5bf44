// The second half of DCMHA's weight networks: its formula side by side and group by group, the
// kernels against the reference with memory that a kernel fails to write poisoned with NaN, and
// what is refused.
#include "ops/dynamic_weights/op.h"

#include "fused.h"
#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/instruction_sets.h"
#include "testing/poison.h"
#include "testing/strided.h"

namespace headloom::dynamic_weights_test {
namespace {

using namespace test;

struct Call {
  Tensor hidden, w2;  // double
  int64_t rank;
};

std::vector<Call> calls() {
  at::manual_seed(5);
  std::vector<Call> out;
  // Batch, length, sides, groups, heads of a group, rank, inner.
  for (const auto& [b, l, s, g, n, r, i] : {std::tuple(1, 1, 4, 1, 12, 2, 48),
                                            {1, 1, 1, 1, 1, 1, 1},
                                            {2, 3, 2, 3, 5, 1, 10},
                                            {1, 16, 3, 2, 6, 3, 36},
                                            {3, 1, 4, 1, 64, 2, 7},
                                            {4, 4, 1, 4, 3, 4, 24},
                                            {0, 3, 4, 1, 2, 2, 8},
                                            {1, 2, 2, 1, 20, 2, 0}}) {
    out.push_back({.hidden = 2 * at::randn({b, l, s * g * i}, kDouble),
                   .w2 = at::randn({s, g, i, 2 * r * n}, kDouble),
                   .rank = r});
  }
  // Strides that a projection's parts have.
  out.push_back({.hidden = at::randn({2, 3, 96}, kDouble).narrow(2, 48, 48),
                 .w2 = at::randn({1, 24, 2, 16}, kDouble).transpose(1, 2),
                 .rank = 2});
  return out;
}

Tensor run(const Call& c, const char* backend, at::ScalarType type) {
  const Tensor hidden = in_its_strides(c.hidden, type), w2 = in_its_strides(c.w2, type);
  const auto weights = ops::dynamic_weights(hidden, w2, c.rank, backend);
  return at::stack(weights);
}

TEST(DynamicWeights, ReferenceIsItsFormula) {
  for (const Call& c : calls()) {
    const int64_t sides = c.w2.size(0), groups = c.w2.size(1), inner = c.w2.size(2);
    const int64_t heads = c.w2.size(3) / (2 * c.rank);
    const auto got = ops::dynamic_weights(c.hidden, c.w2, c.rank, "reference");
    ASSERT_EQ(static_cast<int64_t>(got.size()), 2 * sides);
    for (int64_t s = 0; s < sides; ++s) {
      std::vector<Tensor> down, up;
      for (int64_t g = 0; g < groups; ++g) {
        const Tensor part = c.hidden.narrow(2, (s * groups + g) * inner, inner);
        const Tensor w = at::matmul(at::gelu(part), c.w2[s][g]).unflatten(-1, {2, c.rank, heads});
        const Tensor d = w.select(2, 0);
        down.push_back(d / (d.square().mean(-1, true) + 1e-6).sqrt());
        up.push_back(w.select(2, 1));
      }
      EXPECT_TRUE(close(got[static_cast<size_t>(s)], at::cat(down, -1), 1e-12)) << s;
      EXPECT_TRUE(close(got[static_cast<size_t>(sides + s)], at::cat(up, -1), 1e-12)) << s;
    }
  }
}

TEST(DynamicWeights, FusedMatchesTheReference) {
  for (const Call& c : calls()) {
    const Tensor expected = run(c, "reference", at::kDouble);
    Poison poison;
    EXPECT_TRUE(close(run(c, "fused", at::kFloat), expected, 4e-6))
        << c.hidden.sizes() << " " << c.w2.sizes();
  }
}

// A low-precision kernel may err at most twice as much as the plain low-precision computation.
TEST(DynamicWeights, BFloat16ErrsLikeItsRounding) {
  for (const Call& c : calls()) {
    const Tensor exact = run(c, "reference", at::kDouble);
    const Tensor plain = run(c, "reference", at::kBFloat16);
    Poison poison;
    const Tensor got = run(c, "fused", at::kBFloat16);
    ASSERT_EQ(got.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(errs_like_rounding(got, plain, exact, 1e-6))
        << c.hidden.sizes() << " " << c.w2.sizes();
  }
}

TEST(DynamicWeights, IsTheSameOnAnyNumberOfThreads) {
  for (const Call& c : calls()) {
    SCOPED_TRACE(::testing::Message() << c.hidden.sizes() << c.w2.sizes());
    expect_same_on_any_number_of_threads(
        [&](const char* backend, at::ScalarType type) -> std::vector<Tensor> {
          return {run(c, backend, type)};
        });
  }
}

TEST(DynamicWeights, GradientsGoThroughTheReference) {
  Tensor hidden = at::randn({1, 2, 12}, kDouble).requires_grad_();
  Tensor w2 = at::randn({2, 1, 6, 8}, kDouble).requires_grad_();
  EXPECT_TRUE(gradients_agree(
      [&] { return at::stack(ops::dynamic_weights(hidden, w2, 2)).pow(3).sum(); }, {hidden, w2}));
}

TEST(DynamicWeights, LesserInstructionSetsPass) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets("DynamicWeights.*"));
}

TEST(DynamicWeights, RefusesInOneSentence) {
  const Tensor hidden = at::randn({1, 2, 12}), w2 = at::randn({2, 1, 6, 8});
  const auto refused = [](const std::function<void()>& f, const char* part) {
    expect_refused("dynamic_weights", part, f);
  };
  refused([&] { ops::dynamic_weights(hidden.to(at::kLong), w2, 2); }, "hidden has dtype Long");
  refused([&] { ops::dynamic_weights(hidden, w2.to(at::kLong), 2); }, "w2 has dtype Long");
  refused([&] { ops::dynamic_weights(hidden, w2, 0); }, "rank is 0");
  refused([&] { ops::dynamic_weights(hidden, w2, 3); }, "w2 has shape [2, 1, 6, 8]");
  refused([&] { ops::dynamic_weights(hidden, w2[0], 2); }, "w2 has shape [1, 6, 8]");
  refused([&] { ops::dynamic_weights(hidden[0], w2, 2); }, "hidden has shape [2, 12]");
  refused([&] { ops::dynamic_weights(at::randn({1, 2, 13}), w2, 2); },
          "hidden has shape [1, 2, 13]");
  refused([&] { ops::dynamic_weights(hidden, w2, 2, "quick"); }, "backend is \"quick\"");
  refused([&] { ops::dynamic_weights(at::randn({1, 17, 12}), w2, 2, "fused"); },
          "more than 16 rows");
  refused([&] { ops::dynamic_weights(hidden, at::randn({2, 1, 6, 1028}), 2, "fused"); },
          "more than 1024 weights");
}

}  // namespace
}  // namespace headloom::dynamic_weights_test
