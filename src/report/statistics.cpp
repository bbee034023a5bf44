#include "report/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

namespace headloom::report {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The continued fraction of the incomplete beta function by Lentz's method; converges quickly for
// x < (a + 1) / (a + b + 2).
double beta_fraction(double x, double a, double b) {
  constexpr double kTiny = 1e-300;
  const auto away_from_zero = [](double v) { return std::abs(v) < kTiny ? kTiny : v; };
  double c = 1;
  double d = 1 / away_from_zero(1 - (a + b) * x / (a + 1));
  double out = d;
  for (int m = 1; m <= 10000; ++m) {
    const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    d = 1 / away_from_zero(1 + even * d);
    c = away_from_zero(1 + even / c);
    out *= c * d;
    const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    d = 1 / away_from_zero(1 + odd * d);
    c = away_from_zero(1 + odd / c);
    out *= c * d;
    if (std::abs(c * d - 1) < 1e-15) break;
  }
  return out;
}

// I_x(a, b), with `rest` = 1 - x given apart so that nothing cancels near x = 1.
double incomplete_beta(double x, double rest, double a, double b) {
  if (x <= 0) return 0;
  if (rest <= 0) return 1;
  const double front = std::exp(std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) +
                                a * std::log(x) + b * std::log(rest));
  if (x < (a + 1) / (a + b + 2)) return front * beta_fraction(x, a, b) / a;
  return 1 - front * beta_fraction(rest, b, a) / b;
}

// P(T > t) for t >= 0, exact in the far tail.
double upper_tail(double t, double df) {
  if (std::isinf(df)) return 0.5 * std::erfc(t / std::sqrt(2.0));
  const double square = t * t;
  return 0.5 * incomplete_beta(df / (df + square), square / (df + square), df / 2, 0.5);
}

// The density at t.
double density(double t, double df) {
  if (std::isinf(df)) return std::exp(-0.5 * t * t) / std::sqrt(2 * std::numbers::pi);
  return std::exp(std::lgamma(0.5 * (df + 1)) - std::lgamma(0.5 * df) -
                  0.5 * (df + 1) * std::log1p(t * t / df)) /
         std::sqrt(df * std::numbers::pi);
}

// The t >= 0 with P(T > t) = `tail`, for tail <= 0.5: Newton's method on the logarithm of the tail,
// which is nearly straight, inside a bracket.
double upper_quantile(double tail, double df) {
  double low = 0, high = kInfinity, t = 0;
  for (int i = 0; i < 200; ++i) {
    const double here = upper_tail(t, df);
    (here > tail ? low : high) = t;
    double next = t + std::log(here / tail) * here / density(t, df);
    if (!(next >= low && next <= high)) next = std::isinf(high) ? 2 * t + 1 : 0.5 * (low + high);
    if (std::abs(next - t) <= 1e-14 * next) return next;
    t = next;
  }
  return t;
}

}  // namespace

double student_t_cdf(double t, double df) {
  return t < 0 ? upper_tail(-t, df) : 1 - upper_tail(t, df);
}

double student_t_quantile(double p, double df) {
  return p < 0.5 ? -upper_quantile(p, df) : upper_quantile(1 - p, df);
}

namespace {

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// The sample standard deviation of at least two values.
double deviation_of(const std::vector<double>& values) {
  const double mean = mean_of(values);
  double squares = 0;
  for (const double v : values) squares += (v - mean) * (v - mean);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

}  // namespace

double standard_error(const std::vector<double>& values) {
  if (values.size() < 2) return Estimate::kNone;
  return deviation_of(values) / std::sqrt(static_cast<double>(values.size()));
}

Estimate estimate(const std::vector<double>& values, double shared_error, double shared_df) {
  Estimate out;
  out.count = static_cast<int>(values.size());
  if (std::isfinite(shared_error)) {
    out.shared_error = shared_error;
    out.shared_df = shared_df;
  }
  if (out.count == 0) return out;
  out.mean = mean_of(values);
  if (out.count < 2) return out;
  out.deviation = deviation_of(values);
  out.half_width = std::hypot(student_t_quantile(0.975, out.count - 1) * standard_error(values),
                              student_t_quantile(0.975, out.shared_df) * out.shared_error);
  return out;
}

double p_value(const Estimate& e, double reference) {
  if (e.count < 2) return Estimate::kNone;
  const double distance = std::abs(e.mean - reference);
  const double seeds = e.deviation / std::sqrt(e.count), df = e.count - 1;
  // Differences of equal numbers may leave rounding behind, and no spread to judge it by.
  if (distance <= 1e-12 * std::abs(reference) || distance == 0) return 1;
  if (e.shared_error == 0) return seeds > 0 ? 2 * upper_tail(distance / seeds, df) : 0;
  if (seeds == 0) return 2 * upper_tail(distance / e.shared_error, e.shared_df);
  // The level is searched through the normal quantile z, with which the half width grows. By
  // bisection: far out Student's quantile grows too steeply for anything that follows its slope.
  double low = 0, high = distance / std::hypot(seeds, e.shared_error);
  if (upper_tail(high, kInfinity) < 1e-300) high = 37;  // below which nothing can be told apart
  for (int i = 0; i < 50; ++i) {
    const double z = 0.5 * (low + high);
    const double tail = upper_tail(z, kInfinity);
    const double t = upper_quantile(tail, df), u = upper_quantile(tail, e.shared_df);
    (std::hypot(t * seeds, u * e.shared_error) < distance ? low : high) = z;
  }
  return 2 * upper_tail(0.5 * (low + high), kInfinity);
}

double independent_error(double first, double second) {
  return std::hypot(std::isfinite(first) ? first : 0, std::isfinite(second) ? second : 0);
}

int seeds_needed(const Estimate& d, int least) {
  if (d.count < 2 || d.mean == 0) return -1;
  const auto factor = [](double df) {
    return student_t_quantile(0.975, df) + student_t_quantile(0.9, df);
  };
  const double evaluation = factor(d.shared_df) * d.shared_error;
  const auto enough = [&](int n) {
    return std::hypot(factor(n - 1) * d.deviation / std::sqrt(n), evaluation) <= std::abs(d.mean);
  };
  int low = least - 1, high = 1000;  // too few, enough
  if (!enough(high)) return -1;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (enough(middle) ? high : low) = middle;
  }
  return high;
}

std::vector<double> holm(const std::vector<double>& p) {
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] < p[b]; });
  std::vector<double> out(p.size());
  double highest = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    highest = std::max(highest, static_cast<double>(p.size() - i) * p[order[i]]);
    out[order[i]] = std::min(1.0, highest);
  }
  return out;
}

}  // namespace headloom::report
