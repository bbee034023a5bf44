// Rows of channels in memory, as both families of aft's kernels read and write them.
#pragma once

#include "ops/aft/kernel.h"
#include "ops/kernel/vec.h"

namespace headloom::ops::aft_kernel {
namespace {

constexpr float kEmpty = -1e38f;  // the exponent of sums of nothing

inline void fill(float* to, int64_t floats, float value) {
  for (int64_t i = 0; i < floats; ++i) to[i] = value;
}

// e^(k + w - top). The key may be so large that its sum with w loses what is after the point, and
// so may w where it cancels a key: what the sum is rounded by is added at the end.
HL_INLINE vf weight_of(vf key, float bias, vf top) {
  const vf sum = key + bcast(bias), of_bias = sum - key;
  const vf error = (key - (sum - of_bias)) + (bcast(bias) - of_bias);
  // NaN where the sum is not finite.
  const vf rest = select(above(bcast(FLT_MAX), error), error, zero());
  return vexp_or_zero((sum - top) + rest);
}

// `count` channels from `channel` on of one batch element.
struct Rows {
  const int64_t T, C, batch, channel, count;

  template <typename F>
  HL_INLINE const F* row(const Sequence& x, int64_t t) const {
    return static_cast<const F*>(x.data) + batch * x.batch + t * x.time + channel;
  }
  template <typename F>
  HL_INLINE F* row(void* x, int64_t t) const {
    return static_cast<F*>(x) + (batch * T + t) * C + channel;
  }

  // Channels c.. of a row in memory; those that are not there are zero.
  template <typename F>
  HL_INLINE vf get(const F* p, int64_t c) const {
    if (c + VL <= count) return load(p + c);
    return c < count ? load_part(p + c, count - c) : zero();
  }
  template <typename F>
  HL_INLINE void put(F* p, int64_t c, vf x) const {
    if (c + VL <= count) {
      store(p + c, x);
    } else if (c < count) {
      store_part(p + c, x, count - c);
    }
  }
  template <typename F>
  HL_INLINE void copy(const F* from, float* to) const {
    for (int64_t c = 0; c < kChannels; c += VL) store(to + c, get(from, c));
  }
  HL_INLINE void copy_back(const float* from, float* to) const {
    for (int64_t c = 0; c < kChannels; c += VL) put(to, c, load(from + c));
  }

  // The gradient of y at position t, where `y` is known: out's through the gate, and q's written.
  template <typename F, typename A>
  HL_INLINE vf through_gate(const A& a, int64_t t, int64_t c, vf y) const {
    const vf g = get(row<F>(a.grad_out, t), c);
    const vf open = bcast(1.0f) / sigmoid_inverse(get(row<F>(a.q, t), c));
    put(row<F>(a.grad_q, t), c, g * open * y * (bcast(1.0f) - open));
    return g * open;
  }
};

}  // namespace
}  // namespace headloom::ops::aft_kernel
