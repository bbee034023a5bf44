// The networks that compute DCMHA's dynamic composition weights from tokens (Xiao et al. 2024, eq.
// 7 and section 3.2).
//
// A "side" is one set of weights: before or after softmax, from the query's or the key's token.
// With R the rank, n = H / g the heads of a group and I = 2 n R, each side and group has
//
//   hidden = GELU(x W1), W1 [C, I]              (exact GELU)
//   down, up = split(hidden W2), W2 [I, 2 R n]  (first R rows of n heads: down; last R: up)
//   down = down / sqrt(mean over the n heads of down^2 + 1e-6)
//   gate = tanh(x Wg), Wg [C, H]
//
// All sides' parameters are stored together so that one product each computes them, W1 and Wg as
// linear maps.
#pragma once

#include <memory>
#include <vector>

#include "mixers/nn.h"

namespace headloom {

// What one side contributes to the operator: [B, L, R, H] twice and [B, L, H]; undefined where the
// branch is off.
struct DynamicWeights {
  Tensor down, up, gate;
};

struct DynamicWeightNetworks {
  std::shared_ptr<Linear> w1;    // C -> sides g I, or null: no projections
  Tensor w2;                     // [sides, g, I, 2 R n]
  std::shared_ptr<Linear> gate;  // C -> sides H, or null: no gates
  int64_t sides = 0, heads = 0, groups = 1, rank = 2;

  // W1 Xavier normal, W2 ~ N(0, 0.02 / (sqrt(2 n R) (n + R))), Wg ~ N(0, 0.05 sqrt(2 / (C + n))).
  void initialize(int64_t width, bool with_projection, bool with_gate);
  // Weights of sides [from, from + count), computed from x [B, L, C].
  std::vector<DynamicWeights> operator()(const Tensor& x, int64_t from, int64_t count) const;
  // The rows of W1 or Wg, of `rows` of which each side has as many.
  std::vector<int64_t> segments(int64_t rows) const {
    return std::vector<int64_t>(static_cast<size_t>(sides), rows / sides);
  }
  // Values of one side kept for a token.
  int64_t values_per_token() const;
};

}  // namespace headloom
