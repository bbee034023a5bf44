// Power laws of the loss: fitted by variable projection, and inverted to compare two families of
// models.
#pragma once

#include <cstddef>
#include <vector>

namespace headloom::report {

// y = floor + sum_k factors[k] x_k^-exponents[k], with floor and factors of at least 0 and
// exponents from 0.01 to 0.99. With one variable x is the compute: L(C) = E + a C^-b. With two it
// is L(N, D) = E + A N^-alpha + B D^-beta (Hoffmann et al. 2022, equation 2).
struct PowerLaw {
  double floor = 0;
  std::vector<double> factors, exponents;
  double error = 0;  // root of the mean squared residual

  // The value at x, which has as many numbers as there are factors.
  double at(const std::vector<double>& x) const;
  // Whether y falls with variable k. If not, its exponent says nothing.
  bool falls(size_t k) const { return factors[k] > 0; }
  // Whether an exponent ended at a bound of the search, beyond which a better one may lie.
  bool at_bound() const;
};

// The least squares fit to points[i] -> values[i]. All points have the same number of positive
// coordinates, 1 or 2. For given exponents the fit is linear, so that only they are searched: on a
// grid of `grid` values each, then by Nelder and Mead's simplex (variable projection, Golub &
// Pereyra 1973). Needs as many points as the law has unknowns (3 or 5) at least; fewer give no
// factors.
PowerLaw fit_power_law(const std::vector<std::vector<double>>& points,
                       const std::vector<double>& values, int grid = 32);

// For a law of one variable: the x at which it takes the value y; infinity where it never falls so
// far, and 0 where it is below y without falling.
double inverse(const PowerLaw& law, double y);

// The best loss for a given compute C = k N D under a law of two variables, which is again a power
// law of one: L(C) = E + a C^-b with b = alpha beta / (alpha + beta). No factors where the loss
// does not fall with N or not with D: then no N is the best for a C.
PowerLaw frontier(const PowerLaw& law, double k);

}  // namespace headloom::report
