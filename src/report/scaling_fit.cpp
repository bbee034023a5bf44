#include "report/scaling_fit.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>

namespace headloom::report {
namespace {

constexpr double kLeastExponent = 0.01, kMostExponent = 0.99;  // bounds of an exponent
constexpr double kGridLow = 0.05, kGridHigh = 0.95;            // of the grid
constexpr size_t kMost = 3;  // columns: 1 and a power of each variable
constexpr double kNever = std::numeric_limits<double>::infinity();

using Columns = std::vector<std::array<double, kMost>>;  // a row for each point
using Weights = std::array<double, kMost>;

// Solves the normal equations of the columns in `used`; false where they are dependent.
bool solve(const Columns& rows, const std::vector<double>& values, const std::vector<size_t>& used,
           Weights& out) {
  const size_t n = used.size();
  std::array<std::array<double, kMost + 1>, kMost> m{};
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < n; ++j) m[i][j] += rows[r][used[i]] * rows[r][used[j]];
      m[i][n] += rows[r][used[i]] * values[r];
    }
  }
  for (size_t i = 0; i < n; ++i) {
    size_t pivot = i;
    for (size_t r = i + 1; r < n; ++r) {
      if (std::abs(m[r][i]) > std::abs(m[pivot][i])) pivot = r;
    }
    std::swap(m[i], m[pivot]);
    if (!(std::abs(m[i][i]) > 1e-14 * static_cast<double>(rows.size()))) return false;
    for (size_t r = 0; r < n; ++r) {
      if (r == i) continue;
      const double factor = m[r][i] / m[i][i];
      for (size_t c = i; c <= n; ++c) m[r][c] -= factor * m[i][c];
    }
  }
  out = {};
  for (size_t i = 0; i < n; ++i) out[used[i]] = m[i][n] / m[i][i];
  return true;
}

double squares(const Columns& rows, const std::vector<double>& values, const Weights& w) {
  double sum = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    double residual = -values[r];
    for (size_t i = 0; i < kMost; ++i) residual += w[i] * rows[r][i];
    sum += residual * residual;
  }
  return sum;
}

// Non-negative least squares: with so few columns, the best of all subsets that have a feasible
// solution.
double project(const Columns& rows, const std::vector<double>& values, size_t columns,
               Weights& best) {
  double least = kNever;
  for (unsigned subset = 1; subset < 1u << columns; ++subset) {
    std::vector<size_t> used;
    for (size_t i = 0; i < columns; ++i) {
      if (subset >> i & 1u) used.push_back(i);
    }
    Weights w{};
    if (!solve(rows, values, used, w)) continue;
    if (std::any_of(w.begin(), w.end(), [](double one) { return one < 0; })) continue;
    const double sum = squares(rows, values, w);
    if (sum < least) {
      least = sum;
      best = w;
    }
  }
  return least;
}

using Exponents = std::vector<double>;

// Nelder and Mead's simplex from `start`.
Exponents minimum(const std::function<double(const Exponents&)>& f, const Exponents& start) {
  struct Vertex {
    Exponents x;
    double y;
  };
  const size_t n = start.size();
  const auto vertex = [&](Exponents x) {
    for (double& one : x) one = std::clamp(one, kLeastExponent, kMostExponent);
    const double y = f(x);
    return Vertex{std::move(x), y};
  };
  std::vector<Vertex> simplex{vertex(start)};
  for (size_t i = 0; i < n; ++i) {
    Exponents x = start;
    x[i] += x[i] < 0.5 ? 0.03 : -0.03;
    simplex.push_back(vertex(std::move(x)));
  }
  for (int step = 0; step < 400; ++step) {
    std::sort(simplex.begin(), simplex.end(),
              [](const Vertex& a, const Vertex& b) { return a.y < b.y; });
    double width = 0;
    for (size_t i = 0; i < n; ++i) {
      width = std::max(width, std::abs(simplex.back().x[i] - simplex.front().x[i]));
    }
    if (width < 1e-10) break;
    // A point on the line from the worst vertex through the middle of the others.
    const auto along = [&](double t) {
      Exponents x(n, 0);
      for (size_t i = 0; i < n; ++i) {
        for (size_t v = 0; v < n; ++v) x[i] += simplex[v].x[i] / static_cast<double>(n);
        x[i] += t * (x[i] - simplex.back().x[i]);
      }
      return vertex(std::move(x));
    };
    const Vertex reflected = along(1);
    if (reflected.y < simplex.front().y) {
      Vertex expanded = along(2);
      simplex.back() = expanded.y < reflected.y ? std::move(expanded) : reflected;
    } else if (reflected.y < simplex[n - 1].y) {
      simplex.back() = reflected;
    } else {
      Vertex contracted = along(reflected.y < simplex.back().y ? 0.5 : -0.5);
      if (contracted.y < std::min(reflected.y, simplex.back().y)) {
        simplex.back() = std::move(contracted);
      } else {
        for (size_t v = 1; v <= n; ++v) {
          Exponents x = simplex[v].x;
          for (size_t i = 0; i < n; ++i) x[i] = 0.5 * (x[i] + simplex[0].x[i]);
          simplex[v] = vertex(std::move(x));
        }
      }
    }
  }
  return std::min_element(simplex.begin(), simplex.end(),
                          [](const Vertex& a, const Vertex& b) { return a.y < b.y; })
      ->x;
}

}  // namespace

double PowerLaw::at(const std::vector<double>& x) const {
  double y = floor;
  for (size_t k = 0; k < factors.size(); ++k) y += factors[k] * std::pow(x[k], -exponents[k]);
  return y;
}

bool PowerLaw::at_bound() const {
  constexpr double kNear = 1e-6;
  for (size_t k = 0; k < exponents.size(); ++k) {
    const double one = exponents[k];
    if (falls(k) && (one < kLeastExponent + kNear || one > kMostExponent - kNear)) return true;
  }
  return false;
}

PowerLaw fit_power_law(const std::vector<std::vector<double>>& points,
                       const std::vector<double>& values, int grid) {
  PowerLaw law;
  if (points.empty()) return law;
  const size_t variables = points[0].size();
  if (points.size() < 1 + 2 * variables) return law;
  // Powers of x / its smallest value lie between 0 and 1, which keeps the equations well
  // conditioned.
  std::vector<double> smallest(variables, kNever);
  for (const std::vector<double>& p : points) {
    for (size_t k = 0; k < variables; ++k) smallest[k] = std::min(smallest[k], p[k]);
  }
  Columns rows(points.size());
  Weights weights{};
  const auto sum_of_squares = [&](const Exponents& exponents) {
    for (size_t r = 0; r < points.size(); ++r) {
      rows[r] = {1};
      for (size_t k = 0; k < variables; ++k) {
        rows[r][k + 1] = std::pow(points[r][k] / smallest[k], -exponents[k]);
      }
    }
    return project(rows, values, variables + 1, weights);
  };
  Exponents best(variables, 0.5);
  double least = kNever;
  const auto value = [&](int i) {
    return kGridLow + (kGridHigh - kGridLow) * static_cast<double>(i) / std::max(grid - 1, 1);
  };
  for (int i = 0; i < grid; ++i) {
    for (int j = 0; j < (variables > 1 ? grid : 1); ++j) {
      Exponents at{value(i)};
      if (variables > 1) at.push_back(value(j));
      const double sum = sum_of_squares(at);
      if (sum < least) {
        least = sum;
        best = at;
      }
    }
  }
  law.exponents = minimum(sum_of_squares, best);
  const double sum = sum_of_squares(law.exponents);
  law.floor = weights[0];
  for (size_t k = 0; k < variables; ++k) {
    law.factors.push_back(weights[k + 1] * std::pow(smallest[k], law.exponents[k]));
  }
  law.error = std::sqrt(sum / static_cast<double>(points.size()));
  return law;
}

double inverse(const PowerLaw& law, double y) {
  if (law.factors.empty() || !(y > law.floor)) return kNever;
  if (!(law.factors[0] > 0)) return 0;  // a loss that does not fall is below y everywhere
  return std::pow((y - law.floor) / law.factors[0], -1 / law.exponents[0]);
}

PowerLaw frontier(const PowerLaw& law, double k) {
  const double a = law.factors[0], b = law.factors[1];
  const double alpha = law.exponents[0], beta = law.exponents[1];
  if (!law.falls(0) || !law.falls(1)) return {};
  // The N that minimises A N^-alpha + B (C / (k N))^-beta, at C = 1.
  const double n =
      std::pow(alpha * a / (beta * b), 1 / (alpha + beta)) * std::pow(1 / k, beta / (alpha + beta));
  return {.floor = law.floor,
          .factors = {a * std::pow(n, -alpha) + b * std::pow(1 / (k * n), -beta)},
          .exponents = {alpha * beta / (alpha + beta)},
          .error = law.error};
}

}  // namespace headloom::report
