// The kernels of an operator against its reference, with memory that they fail to write poisoned
// with NaN.
#pragma once

#include <ATen/Parallel.h>

#include "testing/compare.h"
#include "testing/poison.h"

namespace headloom::test {

// Results and gradients of one problem, computed by a backend in a type.
using Evaluate = std::function<std::vector<Tensor>(const char* backend, at::ScalarType type)>;

// That of the problem make(c, given), by the evaluate(problem, c, backend, type) of the file of
// `c`.
template <typename Case>
Evaluate evaluation(const Case& c, at::ScalarType given) {
  return [c, p = make(c, given)](const char* backend, at::ScalarType type) {
    return evaluate(p, c, backend, type);
  };
}

inline std::vector<Tensor> evaluate_poisoned(const Evaluate& evaluate, at::ScalarType type) {
  const Poison poison;
  return evaluate("fused", type);
}

// That the kernels in float32 are within `tolerance` of the reference in float64.
inline void expect_matches_reference(const Evaluate& evaluate, double tolerance) {
  const std::vector<Tensor> expected = evaluate("reference", at::kDouble);
  const std::vector<Tensor> got = evaluate_poisoned(evaluate, at::kFloat);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(close(got[i], expected[i], tolerance)) << "result or gradient " << i;
  }
}

// That values much smaller or larger than 1 are right beside keys that are apart, but not too far
// for one exponent: the products of both are ordinary numbers still.
template <typename Case>
void expect_takes_small_and_large_values(const Case& c) {
  for (const double size : {1e-26, 1e26}) {
    auto p = make(c, at::kFloat);
    p.k = p.k - 19;
    p.k.select(1, 31).add_(38);
    p.k.select(1, 63).add_(38);
    p.v = p.v * size;
    const std::vector<Tensor> expected = evaluate(p, c, "reference", at::kDouble);
    const Poison poison;
    const std::vector<Tensor> got = evaluate(p, c, "fused", at::kFloat);
    for (size_t i = 0; i < got.size(); ++i) {
      if (i == 1) continue;  // the state
      EXPECT_TRUE(close(got[i], expected[i], 1e-5)) << c.name << " " << size << " " << i;
    }
  }
}

// That the kernels in bfloat16 return the types that the reference does, and err at most twice as
// much as it does there (errs_like_rounding).
inline void expect_errs_like_rounding(const Evaluate& evaluate, double slack) {
  const std::vector<Tensor> exact = evaluate("reference", at::kDouble);
  const std::vector<Tensor> plain = evaluate("reference", at::kBFloat16);
  const std::vector<Tensor> got = evaluate_poisoned(evaluate, at::kBFloat16);
  ASSERT_EQ(got.size(), exact.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].scalar_type(), plain[i].scalar_type()) << "result or gradient " << i;
    EXPECT_TRUE(errs_like_rounding(got[i], plain[i], exact[i], slack))
        << "result or gradient " << i;
  }
}

// That inputs and cotangents whose rows lie apart (rows_apart), as `apart` has them, give what those
// that `adjacent` has give, which lie side by side. A kernel may pack one of them and not the other.
inline void expect_same_with_rows_apart(const Evaluate& adjacent, const Evaluate& apart) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const std::vector<Tensor> expected = adjacent("fused", type);
    const std::vector<Tensor> got = evaluate_poisoned(apart, type);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(close(got[i], expected[i], type == at::kFloat ? 1e-5 : 1e-2))
          << "result or gradient " << i << ", " << type;
    }
  }
}

// That the kernels in float32 give on several threads what they give on one: exactly, or within
// `tolerance` where threads share what is summed.
inline void expect_same_on_any_number_of_threads(const Evaluate& evaluate, double tolerance = 0) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const std::vector<Tensor> alone = evaluate("fused", at::kFloat);
  for (const int threads : {2, 3, 5, 8}) {
    at::set_num_threads(threads);
    const std::vector<Tensor> shared = evaluate("fused", at::kFloat);
    EXPECT_EQ(shared.size(), alone.size());
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_TRUE(close(shared[i], alone[i], tolerance))
          << "result or gradient " << i << ", threads " << threads;
    }
  }
  at::set_num_threads(before);
}

}  // namespace headloom::test
