// The causal convolution of one instruction set: compiled once for each, with CPU_CAPABILITY its
// name. A position at a time, all its channels: the rows it reads are those of its neighbours.
#include "ops/causal_conv1d/kernel.h"
#include "ops/kernel/functions.h"

namespace headloom::ops::causal_conv1d_kernel {
namespace {

// A position of one sequence, and the rows its taps meet.
template <typename T>
struct Position {
  const T* rows[kMaxTaps];  // row k: the position k before
  int64_t count = 0;        // rows that count

  Position(const Args& a, int64_t b, int64_t t) {
    const int64_t* id = a.documents ? a.documents + b * a.L : nullptr;
    for (int64_t k = 0; k < a.taps; ++k) {
      const int64_t from = t - k;
      if (from < 0 && !a.state) return;
      if (id && k > 0 && from >= 0 && id[from] != id[from + 1]) return;
      rows[count++] =
          from >= 0 ? static_cast<const T*>(a.x.data) + b * a.x.batch + from * a.x.time
                    : static_cast<const T*>(a.state) + (b * (a.taps - 1) + a.taps - 1 + from) * a.C;
    }
  }
  // The convolution of VL channels from c on, before the activation.
  HL_INLINE vf sum(const Args& a, int64_t c) const {
    const int64_t left = a.C - c;
    vf y = a.bias ? load_some(a.bias + c, left) : zero();
    for (int64_t k = 0; k < count; ++k) {
      y = fma(load_some(a.weight + k * a.C + c, left), load_some(rows[k] + c, left), y);
    }
    return y;
  }
};

template <typename T>
T* row_of(const Args& a, void* data, int64_t b, int64_t t) {
  return static_cast<T*>(data) + (b * a.L + t) * a.C;
}

template <typename T>
void forward_position(const Args& a, int64_t b, int64_t t) {
  const Position<T> p(a, b, t);
  T* out = row_of<T>(a, a.out, b, t);
  for (int64_t c = 0; c < a.C; c += VL) {
    vf y = p.sum(a, c);
    if (a.silu) y = y * vsigmoid(y);
    store_some(out + c, y, a.C - c);
  }
}

// The gradient before the activation of a position into `slope`; its share of the weights' where
// the position is the worker's own.
template <typename T>
void slope_of(const Args& a, const Position<T>& p, int64_t b, int64_t t, float* slope,
              float* grad_weight, float* grad_bias) {
  const T* grad =
      static_cast<const T*>(a.grad_out.data) + b * a.grad_out.batch + t * a.grad_out.time;
  for (int64_t c = 0; c < a.C; c += VL) {
    const int64_t left = a.C - c;
    vf g = load_some(grad + c, left);
    if (a.silu) {
      const vf y = p.sum(a, c);
      g = g * silu_slope(y, vsigmoid(y));
    }
    store_some(slope + c, g, left);
    if (!grad_weight) continue;
    for (int64_t k = 0; k < p.count; ++k) {
      float* to = grad_weight + k * a.C + c;
      store_some(to, fma(g, load_some(p.rows[k] + c, left), load_some(to, left)), left);
    }
    store_some(grad_bias + c, load_some(grad_bias + c, left) + g, left);
  }
}

// The positions first .. last - 1 of sequence b, from the last to the first. The positions after
// them that their rows reach are computed again.
template <typename T>
void backward_stretch(const Args& a, const Task& task, int64_t b, int64_t first, int64_t last) {
  float* const grad_weight = a.grad_weight + task.worker * a.taps * a.C;
  float* const grad_bias = a.grad_bias + task.worker * a.C;
  int64_t reach[kMaxTaps];  // how many rows position t counts, at t modulo the taps
  const auto slot = [&](int64_t t) { return t % a.taps; };
  const int64_t begin = first == 0 && a.state ? 1 - a.taps : first;
  const int64_t end = last - 1 + a.taps < a.L ? last - 1 + a.taps : a.L;
  for (int64_t t = end - 1; t >= begin; --t) {
    if (t >= 0) {
      const Position<T> p(a, b, t);
      reach[slot(t)] = p.count;
      const bool own = t < last;
      slope_of(a, p, b, t, task.scratch + slot(t) * a.C, own ? grad_weight : nullptr, grad_bias);
      if (!own) continue;
    }
    // The row t met tap k of the position k after.
    const float *weights[kMaxTaps], *slopes[kMaxTaps];
    int64_t count = 0;
    for (int64_t k = t < 0 ? -t : 0; k < a.taps && t + k < end; ++k) {
      if (reach[slot(t + k)] <= k) continue;
      weights[count] = a.weight + k * a.C;
      slopes[count++] = task.scratch + slot(t + k) * a.C;
    }
    T* grad = t >= 0 ? row_of<T>(a, a.grad_x, b, t)
                     : static_cast<T*>(a.grad_state) + (b * (a.taps - 1) + a.taps - 1 + t) * a.C;
    for (int64_t c = 0; c < a.C; c += VL) {
      const int64_t left = a.C - c;
      vf g = zero();
      for (int64_t i = 0; i < count; ++i) {
        g = fma(load_some(weights[i] + c, left), load_some(slopes[i] + c, left), g);
      }
      store_some(grad + c, g, left);
    }
  }
}

template <typename T>
void run(const Args& a, const Task& task) {
  for (int64_t at = task.begin; at < task.end;) {
    const int64_t b = at / a.L, first = at % a.L;
    const int64_t last = first + task.end - at < a.L ? first + task.end - at : a.L;
    if (task.backward) {
      backward_stretch<T>(a, task, b, first, last);
    } else {
      for (int64_t t = first; t < last; ++t) forward_position<T>(a, b, t);
    }
    at += last - first;
  }
}

}  // namespace

void HL_KERNEL(run)(const Args& a, const Task& task) {
  a.type == Type::kBFloat16 ? run<BFloat16>(a, task) : run<float>(a, task);
}

}  // namespace headloom::ops::causal_conv1d_kernel
