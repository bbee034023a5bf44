// Composed attention as its formula reads: loops over single numbers in double, no masks built, no
// tensors mixed. The operator is compared with this.
#pragma once

#include <cmath>
#include <vector>

#include "ops/composed_attention/op.h"
#include "testing/compare.h"

namespace headloom::test {

// q [B, T, H, D], k [B, S, Gk, D], v [B, S, Gv, E] in double -> [B, T, H', E].
class Naive {
 public:
  Naive(const Tensor& q, const Tensor& k, const Tensor& v, const ops::ComposedAttentionOptions& o)
      : q_(q.detach()), k_(k.detach()), v_(v.detach()), o_(o) {
    past_ = keys() - queries();
    if (o.mask.defined()) mask_ = o.mask.expand({q.size(0), 1, queries(), keys()}).contiguous();
    if (o.bias.defined()) {
      bias_ = o.bias.detach().expand({q.size(0), q.size(2), queries(), keys()}).contiguous();
    }
    for (int64_t b = 0; b < q.size(0); ++b) {
      for (int64_t t = 0; t < queries(); ++t) {
        for (int64_t s = 0; s < keys(); ++s) unmasked_.push_back(unmasked(b, t, s));
      }
    }
  }

  Tensor run() const {
    const int64_t out_heads = maps_after(o_.post, maps_after(o_.pre, q_.size(2)));
    Tensor out = at::zeros({q_.size(0), queries(), out_heads, v_.size(3)}, kDouble);
    for (int64_t b = 0; b < q_.size(0); ++b) {
      Maps a = scores(b);
      if (o_.pre_conv.defined()) a = convolved(a, o_.pre_conv, b, o_.conv_mask == "exact");
      a = mixed(a, o_.pre, b);
      softmax(a, b);
      if (o_.post_conv.defined()) {
        a = convolved(a, o_.post_conv, b, false);
        hide(a, b);
      }
      a = mixed(a, o_.post, b);
      auto y = out.accessor<double, 4>();
      const auto v = v_.accessor<double, 4>();
      for (int64_t h = 0; h < out_heads; ++h) {
        const int64_t group = h * v_.size(2) / out_heads;
        for (int64_t t = 0; t < queries(); ++t) {
          for (int64_t s = 0; s < keys(); ++s) {
            for (int64_t e = 0; e < v_.size(3); ++e) {
              y[b][t][h][e] += a[h][t][s] * v[b][s][group][e];
            }
          }
        }
      }
    }
    return out;
  }

 private:
  using Maps = std::vector<std::vector<std::vector<double>>>;  // [h][t][s]

  int64_t queries() const { return q_.size(1); }
  int64_t keys() const { return k_.size(1); }
  Maps zeros(int64_t heads) const {
    return Maps(heads, std::vector(queries(), std::vector<double>(keys(), 0.0)));
  }
  static int64_t maps_after(const ops::HeadMix& m, int64_t heads) {
    return m.static_matrix.defined() && m.static_matrix.dim() == 2 ? m.static_matrix.size(1)
                                                                   : heads;
  }

  // `horizon` is the query whose future counts as invisible: t itself, or a later one.
  bool visible(int64_t b, int64_t t, int64_t s, int64_t horizon) const {
    if (s < 0 || s >= keys() || t < 0 || t >= queries()) return false;
    if (o_.causal && s > horizon + past_) return false;
    return unmasked_[(b * queries() + t) * keys() + s];
  }

  bool unmasked(int64_t b, int64_t t, int64_t s) const {
    const int64_t distance = o_.causal ? t + past_ - s : std::abs(t + past_ - s);
    if (o_.window && distance >= *o_.window) return false;
    if (o_.lengths.defined() && s >= o_.lengths[b].item<int64_t>()) return false;
    if (o_.documents.defined() && document(b, t) != document(b, s - past_)) return false;
    return !mask_.defined() || mask_.accessor<bool, 4>()[b][0][t][s];
  }

  // Of the key beside query t.
  int64_t document(int64_t b, int64_t t) const {
    return o_.documents.accessor<int64_t, 2>()[b][t + past_];
  }

  Maps scores(int64_t b) const {
    const auto q = q_.accessor<double, 4>();
    const auto k = k_.accessor<double, 4>();
    const double scale = o_.scale.value_or(1 / std::sqrt(static_cast<double>(q_.size(3))));
    Maps a = zeros(q_.size(2));
    for (int64_t h = 0; h < q_.size(2); ++h) {
      const int64_t group = h * k_.size(2) / q_.size(2);
      for (int64_t t = 0; t < queries(); ++t) {
        for (int64_t s = 0; s < keys(); ++s) {
          for (int64_t d = 0; d < q_.size(3); ++d) {
            a[h][t][s] += scale * q[b][t][h][d] * k[b][s][group][d];
          }
          if (bias_.defined()) a[h][t][s] += bias_.accessor<double, 4>()[b][h][t][s];
        }
      }
    }
    return a;
  }

  Maps convolved(const Maps& x, const Tensor& given, int64_t b, bool exact) const {
    const Tensor kernel = (given.dim() == 3 ? given.unsqueeze(1) : given).detach().contiguous();
    const auto theta = kernel.accessor<double, 4>();
    const int64_t together = kernel.size(1), cq = kernel.size(2), ck = kernel.size(3);
    const int64_t left = o_.conv_padding == "both"   ? (ck - 1) / 2
                         : o_.conv_padding == "left" ? ck - 1
                                                     : 0;
    Maps y = zeros(kernel.size(0));
    for (int64_t h = 0; h < kernel.size(0); ++h) {
      for (int64_t t = 0; t < queries(); ++t) {
        for (int64_t s = 0; s < keys(); ++s) {
          for (int64_t c = 0; c < together; ++c) {
            for (int64_t i = 0; i < cq; ++i) {
              for (int64_t j = 0; j < ck; ++j) {
                const int64_t row = t - (cq - 1) + i, key = s - left + j;
                if (!visible(b, row, key, exact ? t : row)) continue;
                if (o_.documents.defined() && document(b, row) != document(b, t)) continue;
                y[h][t][s] += theta[h][c][i][j] * x[h / together * together + c][row][key];
              }
            }
          }
        }
      }
    }
    return y;
  }

  Maps mixed(const Maps& x, const ops::HeadMix& m, int64_t b) const {
    if (!m.defined()) return x;
    const auto heads = static_cast<int64_t>(x.size());
    const int64_t inside = heads / m.groups;
    const auto at3 = [](const Tensor& t, int64_t i, int64_t j, int64_t k) {
      return t.accessor<double, 3>()[i][j][k];
    };
    const auto at4 = [](const Tensor& t, int64_t i, int64_t j, int64_t k, int64_t l) {
      return t.accessor<double, 4>()[i][j][k][l];
    };
    Maps y = zeros(maps_after(m, heads));
    for (int64_t out = 0; out < static_cast<int64_t>(y.size()); ++out) {
      for (int64_t t = 0; t < queries(); ++t) {
        for (int64_t s = 0; s < keys(); ++s) {
          double& sum = y[out][t][s];
          if (!m.static_matrix.defined()) sum += x[out][t][s];
          if (m.q_gate.defined()) sum += x[out][t][s] * at3(m.q_gate, b, t, out);
          if (m.k_gate.defined()) sum += x[out][t][s] * at3(m.k_gate, b, s, out);
          for (int64_t h = 0; h < heads; ++h) {
            if (m.groups > 1 && h / inside != out / inside) continue;
            double weight = 0;
            if (m.static_matrix.defined()) {
              const Tensor& matrix = m.static_matrix;
              weight += matrix.dim() == 2 ? matrix.accessor<double, 2>()[h][out]
                                          : at3(matrix, h / inside, h % inside, out % inside);
            }
            for (int64_t r = 0; m.q_down.defined() && r < m.q_down.size(2); ++r) {
              weight += at4(m.q_down, b, t, r, h) * at4(m.q_up, b, t, r, out);
            }
            for (int64_t r = 0; m.k_down.defined() && r < m.k_down.size(2); ++r) {
              weight += at4(m.k_down, b, s, r, h) * at4(m.k_up, b, s, r, out);
            }
            sum += x[h][t][s] * weight;
          }
        }
      }
    }
    return y;
  }

  void softmax(Maps& a, int64_t b) const {
    for (auto& map : a) {
      for (int64_t t = 0; t < queries(); ++t) {
        double sum = 0, largest = -1e300;
        for (int64_t s = 0; s < keys(); ++s) {
          if (visible(b, t, s, t)) largest = std::max(largest, map[t][s]);
        }
        for (int64_t s = 0; s < keys(); ++s) {
          map[t][s] = visible(b, t, s, t) ? std::exp(map[t][s] - largest) : 0;
          sum += map[t][s];
        }
        for (double& p : map[t]) p = sum > 0 ? p / sum : 0;
      }
    }
  }

  void hide(Maps& a, int64_t b) const {
    for (auto& map : a) {
      for (int64_t t = 0; t < queries(); ++t) {
        for (int64_t s = 0; s < keys(); ++s) {
          if (!visible(b, t, s, t)) map[t][s] = 0;
        }
      }
    }
  }

  const Tensor q_, k_, v_;
  const ops::ComposedAttentionOptions& o_;
  Tensor mask_, bias_;
  int64_t past_;
  std::vector<bool> unmasked_;  // [b][t][s], causality apart
};

}  // namespace headloom::test
