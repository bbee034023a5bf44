// The mathematics of a comparison: intervals and tests of means over seeds, and of how many seeds a
// difference needs.
//
// Two models that train from the same seed see the same data in the same order. They are compared
// by the differences d_1 ... d_n of their results, one a seed, which is the paired t test (Student
// 1908). Its interval is widened for the sampling error of the evaluation data. That data is the
// same for all seeds, so its part does not shrink with more of them. The half width of the 95%
// interval is
//
//   sqrt(t^2 s^2 / n + u^2 v),
//
// where s is the sample standard deviation of the differences and t the 97.5% quantile of Student's
// distribution with n - 1 degrees of freedom. v is the variance that the evaluation data gives to
// the difference, and u the quantile with as many degrees of freedom as v was estimated with. Each
// part keeps its own quantile. One quantile for the sum of the variances, with Welch's and
// Satterthwaite's degrees of freedom, is wrong in the far tails that Holm's procedure asks for: at
// n = 5 it rejects a true hypothesis with 1.1% instead of 0.5%. The form used here stays at or
// below every level for every n and v.
#pragma once

#include <limits>
#include <vector>

namespace headloom::report {

// P(T <= t) of Student's distribution with `df` > 0 degrees of freedom, which may be infinite (the
// normal distribution) or fractional. It is computed from the regularised incomplete beta function
// (Abramowitz and Stegun 1964, 26.7.1) by its continued fraction (26.5.8).
double student_t_cdf(double t, double df);
// The t with P(T <= t) = p, for 0 < p < 1.
double student_t_quantile(double p, double df);

// What a sample says of its mean.
struct Estimate {
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  int count = 0;
  double mean = kNone;       // without values
  double deviation = kNone;  // sample standard deviation; unknown below two values
  // The standard error that all values have in common, and its degrees of freedom. 0 if unknown.
  double shared_error = 0;
  double shared_df = std::numeric_limits<double>::infinity();
  double half_width = kNone;  // of the mean's 95% interval; unknown below two values
  double low() const { return mean - half_width; }
  double high() const { return mean + half_width; }
};
// Of the values given, which must be finite. A `shared_error` that is not finite counts as 0.
Estimate estimate(const std::vector<double>& values, double shared_error,
                  double shared_df = std::numeric_limits<double>::infinity());

// The level at which the estimate's interval just reaches `reference`: the two-sided p value of the
// hypothesis that the mean is `reference`. NaN below two values.
double p_value(const Estimate& estimate, double reference);

// The standard error of the mean of `values`, a sample. NaN below two values.
double standard_error(const std::vector<double>& values);

// The standard error that the evaluation data gives to the difference of two models whose results
// have the standard errors `first` and `second`, where nothing is known of how the models err on
// the same part of the data. This assumes no correlation, which is the largest error that any
// correlation of zero or more allows. An unknown one counts as 0.
double independent_error(double first, double second);

// How many seeds a paired comparison needs to find a difference like the estimate's with a
// two-sided 5% test in 90% of cases: the smallest n of at least `least` with
//   (t_0.975 + t_0.9)^2 s^2 / n + (u_0.975 + u_0.9)^2 v <= mean^2.
// For large n and v = 0 this is n = 10.5 (s / mean)^2. -1 where 1000 seeds are too few, as where
// the evaluation data is too small for the difference.
int seeds_needed(const Estimate& difference, int least);

// Holm's step-down procedure (1979): p values adjusted so that rejecting those of at most 5% makes
// one or more false rejections with a probability of at most 5%. In the order given.
std::vector<double> holm(const std::vector<double>& p);

}  // namespace headloom::report
