// A block of channels and a chunk of steps of it, as the kernels of the selective scan hold them.
#pragma once

#include "ops/kernel/functions.h"
#include "ops/kernel/prefetch.h"
#include "ops/selective_scan/kernel.h"

namespace headloom::ops::selective_scan_kernel {
namespace {

// What is computed together: two vectors of channels. A block is one tile with AVX-512.
constexpr int64_t kTile = 2 * VL;

// One value a step and channel.
struct alignas(64) Grid {
  float at[kSteps][kChannels];
};

// Where a block lies.
struct Block {
  int64_t batch, group, first, width;  // channels first .. first + width - 1, at most kChannels

  Block(const Args& a, int64_t index) {
    const int64_t blocks = blocks_of_group(a), inside = a.channels / a.groups;
    batch = index / (a.groups * blocks);
    group = index / blocks % a.groups;
    const int64_t from = index % blocks * kChannels;
    first = group * inside + from;
    width = inside - from < kChannels ? inside - from : kChannels;
  }

  // Row `row` of [rows, channels] floats, from the block's first channel on.
  const float* row(const Args& a, const float* of, int64_t row) const {
    return of + row * a.channels + first;
  }
  float* row(const Args& a, float* of, int64_t row) const { return of + row * a.channels + first; }
  // b or c of state n, one value a step.
  int64_t varying(const Args& a, int64_t n) const {
    return ((batch * a.groups + group) * a.states + n) * a.L;
  }
};

// What a block carries from chunk to chunk: rows of kChannels, zero beyond the block's width.
struct Carried {
  float *h, *grad_h, *grad_A, *grad_b, *grad_c;  // a row a state
  float *grad_bias, *grad_D;                     // a row

  Carried(const Args& a, float* data) {
    const int64_t size = a.states * kChannels;
    h = data;
    grad_h = h + size;
    grad_A = grad_h + size;
    grad_b = grad_A + size;
    grad_c = grad_b + size;
    grad_bias = grad_c + size;
    grad_D = grad_bias + kChannels;
  }
};

// Rows `rows` of [rows, channels] floats, null for zeros, to rows of kChannels; and back.
HL_INLINE void read_rows(const Args& a, const Block& k, const float* from, int64_t rows,
                         float* to) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t x = 0; x < kChannels; x += VL) {
      store(to + i * kChannels + x, from ? load_some(k.row(a, from, i) + x, k.width - x) : zero());
    }
  }
}
HL_INLINE void write_rows(const Args& a, const Block& k, const float* from, int64_t rows,
                          float* to) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t x = 0; x < k.width; x += VL) {
      store_some(k.row(a, to, i) + x, load(from + i * kChannels + x), k.width - x);
    }
  }
}

template <typename T>
HL_INLINE const T* at_row(const Sequence& rows, const Block& k, int64_t t) {
  return static_cast<const T*>(rows.data) + k.batch * rows.batch + t * rows.time + k.first;
}
template <typename T>
HL_INLINE T* at_row(void* data, const Args& a, const Block& k, int64_t t) {
  return static_cast<T*>(data) + (k.batch * a.L + t) * a.channels + k.first;
}

// Steps whose state starts anew, as bits.
HL_INLINE uint32_t resets(const Args& a, const Block& k, int64_t start, int steps) {
  uint32_t bits = 0;
  if (!a.documents) return bits;
  const int64_t* id = a.documents + k.batch * a.L + start;
  for (int t = start == 0 ? 1 : 0; t < steps; ++t) bits |= uint32_t{id[t] != id[t - 1]} << t;
  return bits;
}

// The next block's inputs at step t are asked for while this one is computed: no prefetcher of the
// machine sees through rows a page apart. Addresses beyond the last channel do no harm.
template <typename T>
HL_INLINE void prefetch_next(const Sequence& rows, const Block& k, int64_t t) {
  if (!rows.data) return;
  prefetch_row(at_row<T>(rows, k, t) + kChannels, kChannels);
}
// Steps' share of states n and n + 1.
template <typename T>
HL_INLINE void prefetch_share(const Args& a, const Block& k, int64_t start, int64_t steps,
                              int64_t n) {
  for (int64_t t = n * steps / a.states; t < (n + 2) * steps / a.states && t < steps; ++t) {
    prefetch_next<T>(a.u, k, start + t);
    prefetch_next<T>(a.delta, k, start + t);
    prefetch_next<T>(a.z, k, start + t);
    prefetch_next<T>(a.grad_out, k, start + t);
  }
}

struct alignas(64) Chunk {
  int64_t start = 0;  // the first step
  int steps = 0;
  uint32_t reset = 0;
  Grid dt, w, y;  // softplus(delta + bias), dt u, the output before the gate

  // What only the backward needs: u, d dt / d delta, the gradient of y, that of the output times
  // the slope of the gate, and the sums over states that lead to the gradients of w and dt.
  Grid u, slope, gy, gate, gw, gdt;
  // Of two states and a tile: exp(dt A) and, times the state before, what it leaves of that.
  alignas(64) float decay[2][kSteps][kTile];
  alignas(64) float left[2][kSteps][kTile];
  alignas(64) float sum_b[2][kSteps][VL];
  alignas(64) float sum_c[2][kSteps][VL];

  template <typename T, bool BACKWARD>
  void load_rows(const Args& a, const Block& k, int64_t from) {
    start = from;
    steps = static_cast<int>(a.L - from < kSteps ? a.L - from : kSteps);
    reset = resets(a, k, from, steps);
    for (int64_t x = 0; x < kChannels; x += VL) {
      const int64_t count = k.width - x;
      const vf shift = a.bias ? load_some(a.bias + k.first + x, count) : zero();
      const vf skip = a.D ? load_some(a.D + k.first + x, count) : zero();
      for (int t = 0; t < steps; ++t) {
        const vf in = load_some(at_row<T>(a.u, k, from + t) + x, count);
        const vf raw = load_some(at_row<T>(a.delta, k, from + t) + x, count) + shift;
        vf step = raw, rise = bcast(1.0f);
        if (a.softplus) {
          const vf e = exp_minus_abs(raw);
          step = softplus_from(raw, e);
          rise = sigmoid_from(raw, e);
        }
        store(dt.at[t] + x, step);
        store(w.at[t] + x, step * in);
        store(y.at[t] + x, skip * in);
        if constexpr (BACKWARD) {
          store(u.at[t] + x, in);
          store(slope.at[t] + x, rise);
          vf g = load_some(at_row<T>(a.grad_out, k, from + t) + x, count);
          if (a.z.data) {
            const vf gated = load_some(at_row<T>(a.z, k, from + t) + x, count);
            const vf s = vsigmoid(gated);
            store(gate.at[t] + x, g * silu_slope(gated, s));
            g = g * gated * s;
          }
          store(gy.at[t] + x, g);
          store(gw.at[t] + x, zero());
          store(gdt.at[t] + x, zero());
        }
      }
    }
  }
};

// b or c of one state over a chunk: one value a step for all channels, or one a channel for all
// steps.
template <bool CONSTANT>
struct Factor {
  vf fixed[2];
  const float* steps;

  HL_INLINE Factor(const Args& a, const Block& k, const float* of, int64_t n, int64_t x,
                   int64_t start) {
    if constexpr (CONSTANT) {
      const float* row = k.row(a, of, n) + x;
      for (int v = 0; v < 2; ++v) fixed[v] = load_some(row + v * VL, k.width - x - v * VL);
    } else {
      steps = of + k.varying(a, n) + start;
    }
  }
  HL_INLINE vf at(int t, int v) const {
    if constexpr (CONSTANT) {
      return fixed[v];
    } else {
      return bcast(steps[t]);
    }
  }
};

}  // namespace
}  // namespace headloom::ops::selective_scan_kernel
