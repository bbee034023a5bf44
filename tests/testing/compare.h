// Comparing tensors, and gradients with finite differences.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace headloom::test {

using at::Tensor;

inline const auto kDouble = at::TensorOptions().dtype(at::kDouble);
inline const auto kLong = at::TensorOptions().dtype(at::kLong);

// The largest difference relative to the largest expected value; infinite where shapes differ or a
// value is not finite.
inline double relative_error(const Tensor& actual, const Tensor& expected) {
  const double bad = std::numeric_limits<double>::infinity();
  if (!actual.defined() || !expected.defined() || actual.sizes() != expected.sizes()) return bad;
  const Tensor a = actual.detach().to(at::kDouble), e = expected.detach().to(at::kDouble);
  if (a.numel() == 0) return 0;
  if (!a.isfinite().all().item<bool>()) return bad;
  const double largest = e.abs().max().item<double>();
  return (a - e).abs().max().item<double>() / std::max(largest, 1e-30);
}

inline ::testing::AssertionResult close(const Tensor& actual, const Tensor& expected,
                                        double tolerance) {
  const double error = relative_error(actual, expected);
  if (error <= tolerance) return ::testing::AssertionSuccess();
  auto result = ::testing::AssertionFailure()
                << "relative error " << error << " exceeds " << tolerance;
  if (actual.defined() && expected.defined()) {
    result << " (shapes " << actual.sizes() << " and " << expected.sizes() << ")";
  }
  return result;
}

// The low-precision rule: `got` errs at most twice as much as `plain`, the plain low-precision
// computation, and `slack`.
inline ::testing::AssertionResult errs_like_rounding(const Tensor& got, const Tensor& plain,
                                                     const Tensor& exact, double slack) {
  const double error = relative_error(got, exact), allowed = relative_error(plain, exact);
  if (error <= 2 * allowed + slack) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "relative error " << error << ", of the plain computation " << allowed;
}

// A leaf of its own that records gradients.
inline Tensor leaf(const Tensor& t) { return t.detach().clone().requires_grad_(true); }

inline void clear_gradients(const std::vector<Tensor>& tensors) {
  for (const Tensor& t : tensors) t.mutable_grad() = Tensor();
}

// Compares the gradients that backward gives with central differences of `loss` along a random
// direction in each of `inputs` (double leaves, changed in place and restored). Names the input
// that disagrees.
inline ::testing::AssertionResult gradients_agree(const std::function<Tensor()>& loss,
                                                  const std::vector<Tensor>& inputs,
                                                  double tolerance = 1e-6) {
  clear_gradients(inputs);
  loss().backward();
  std::vector<Tensor> analytic;
  for (const Tensor& x : inputs) {
    if (x.scalar_type() != at::kDouble) return ::testing::AssertionFailure() << "not double";
    analytic.push_back(x.grad().defined() ? x.grad().clone() : at::zeros_like(x));
  }
  clear_gradients(inputs);
  at::NoGradGuard no_grad;
  const double step = 1e-6;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensor x = inputs[i];
    const Tensor direction = at::randn_like(x);
    const Tensor start = x.clone();
    const auto at_step = [&](double by) {
      x.copy_(start + by * direction);
      return loss().item<double>();
    };
    const double numeric = (at_step(step) - at_step(-step)) / (2 * step);
    x.copy_(start);
    const double expected = (analytic[i] * direction).sum().item<double>();
    const double size = std::max({std::abs(expected), std::abs(numeric), 1e-3});
    if (!(std::abs(numeric - expected) <= tolerance * size)) {
      return ::testing::AssertionFailure()
             << "input " << i << " " << x.sizes() << ": backward gives " << expected
             << ", differences " << numeric;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace headloom::test
