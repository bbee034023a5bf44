#include "data/shapes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

namespace headloom::data {
namespace {

// Whether (x, y) lies in a shape about the origin that fits the unit circle.
bool inside(int64_t shape, double x, double y) {
  const double r = std::hypot(x, y);
  switch (shape) {
    case 0:  // circle
      return r <= 0.85;
    case 1:  // square
      return std::max(std::abs(x), std::abs(y)) <= 0.7;
    case 2:  // triangle, a corner up
      return y >= -0.5 && y <= 1 - std::sqrt(3.0) * std::abs(x);
    case 3:  // cross
      return std::max(std::abs(x), std::abs(y)) <= 0.9 &&
             std::min(std::abs(x), std::abs(y)) <= 0.27;
    case 4:  // ring
      return r <= 0.95 && r >= 0.55;
    case 5: {  // star of five points: inside the edge between a point and the notch beside it
      const double turn = std::numbers::pi / 5;
      double angle = std::fmod(std::abs(std::atan2(x, y)), 2 * turn);
      angle = std::min(angle, 2 * turn - angle);
      const double px = r * std::cos(angle), py = r * std::sin(angle);
      const double notch_x = 0.42 * std::cos(turn), notch_y = 0.42 * std::sin(turn);
      return (1 - px) * notch_y >= (1 - notch_x) * py;
    }
    case 6:  // bar
      return std::abs(x) <= 0.95 && std::abs(y) <= 0.25;
    default:  // crescent
      return r <= 0.95 && std::hypot(x - 0.45, y) >= 0.7;
  }
}

// The share of the square of side `step` with its corner at (x, y) that lies in the shape turned by
// an angle: of a few points, for soft edges.
double covered(int64_t shape, double x, double y, double step, double cosine, double sine) {
  if (std::hypot(x, y) > 1 + 2 * step) return 0;
  constexpr int kSub = 3;
  int count = 0;
  for (int i = 0; i < kSub * kSub; ++i) {
    const int row = i / kSub, column = i % kSub;
    const double px = x + step * (column + 0.5) / kSub, py = y + step * (row + 0.5) / kSub;
    count += inside(shape, cosine * px + sine * py, cosine * py - sine * px);
  }
  return static_cast<double>(count) / (kSub * kSub);
}

// About normal, with mean 0 and standard deviation 1: the sum of four uniform numbers, all of one
// draw.
double bump(Random& random) {
  const int64_t bits = random.below(int64_t{1} << 60);
  double sum = -2;
  for (int i = 0; i < 4; ++i) {
    sum += static_cast<double>((bits >> (15 * i)) & 0x7fff) / (1 << 15);
  }
  return sum * std::sqrt(3.0);
}

// Uniform in [0, 1).
double share(Random& random) { return static_cast<double>(random.below(1 << 30)) / (1 << 30); }

using Colour = std::array<double, 3>;

// Each channel uniform over a range of 0.4 that begins at `from`.
Colour colour(Random& random, double from) {
  Colour colour;
  for (double& channel : colour) channel = from + 0.4 * share(random);
  return colour;
}

}  // namespace

const std::vector<std::string>& shape_names() {
  static const std::vector<std::string> names = {"circle", "square", "triangle", "cross",
                                                 "ring",   "star",   "bar",      "crescent"};
  return names;
}

std::vector<uint8_t> draw_shape(int64_t shape, int64_t size, double noise, Random& random) {
  const double side = static_cast<double>(size);
  const double radius = side * (0.22 + 0.18 * share(random));
  const double centre_x = radius + (side - 2 * radius) * share(random);
  const double centre_y = radius + (side - 2 * radius) * share(random);
  const double angle = std::numbers::pi / 6 * (2 * share(random) - 1);
  const Colour back = colour(random, 0.0), front = colour(random, 0.6);

  std::vector<uint8_t> pixels;
  pixels.reserve(static_cast<size_t>(size * size * 3));
  for (int64_t row = 0; row < size; ++row) {
    for (int64_t column = 0; column < size; ++column) {
      const double cover = covered(shape, (static_cast<double>(column) - centre_x) / radius,
                                   (static_cast<double>(row) - centre_y) / radius, 1 / radius,
                                   std::cos(angle), std::sin(angle));
      for (size_t c = 0; c < 3; ++c) {
        const double value = back[c] + cover * (front[c] - back[c]) + noise * bump(random);
        pixels.push_back(static_cast<uint8_t>(std::lround(255 * std::clamp(value, 0.0, 1.0))));
      }
    }
  }
  return pixels;
}

}  // namespace headloom::data
