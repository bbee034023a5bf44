// The kernels of token_shift, compiled once per instruction set.
//
// Backward, with g^i the gradient of y^i, zero across documents and ends:
//   dx_t = sum_i mu^i g^i_t + (1 - mu^i) g^i_{t+1}     dmu^i = sum_t g^i_t (x_t - x_{t-1})
#include "ops/token_shift/kernel.h"

#include "ops/kernel/vec.h"

namespace headloom::ops::token_shift_kernel {
namespace {

constexpr int64_t kRows = 16;  // of the backward at once: what they hold stays in cache

template <typename T>
HL_INLINE const T* row(const Sequence& s, int64_t b, int64_t t) {
  return static_cast<const T*>(s.data) + b * s.batch + t * s.time;
}
template <typename T>
HL_INLINE T* row(void* data, const Args& a, int64_t b, int64_t t) {
  return static_cast<T*>(data) + (b * a.T + t) * a.C;
}

HL_INLINE bool begins_document(const Args& a, int64_t b, int64_t t) {
  return a.documents && a.documents[b * a.T + t] != a.documents[b * a.T + t - 1];
}

// What is before position t; null where that is zero.
template <typename T>
HL_INLINE const T* before(const Args& a, int64_t b, int64_t t) {
  if (t == 0) return a.last ? static_cast<const T*>(a.last) + b * a.C : nullptr;
  return begins_document(a, b, t) ? nullptr : row<T>(a.x, b, t - 1);
}

template <bool PART, typename T>
HL_INLINE vf get(const T* p, int64_t count) {
  if constexpr (PART) return load_part(p, count);
  return load(p);
}
template <bool PART, typename T>
HL_INLINE void put(T* p, vf a, int64_t count) {
  if constexpr (PART) {
    store_part(p, a, count);
  } else {
    store(p, a);
  }
}

template <typename T, int N, bool PART>
HL_INLINE void forward_vector(const Args& a, int64_t b, int64_t t, const T* x, const T* earlier,
                              int64_t c) {
  const int64_t count = a.C - c;
  const vf then = earlier ? get<PART>(earlier + c, count) : zero();
  const vf change = get<PART>(x + c, count) - then;
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    const vf mu = get<PART>(a.mix + i * a.C + c, count);
    put<PART>(row<T>(a.out[i], a, b, t) + c, fma(mu, change, then), count);
  }
}

template <typename T, int N>
void forward(const Args& a, const Task& task) {
  for (int64_t i = task.begin; i < task.end; ++i) {
    const int64_t b = i / a.T, t = i % a.T;
    const T *x = row<T>(a.x, b, t), *earlier = before<T>(a, b, t);
    int64_t c = 0;
    for (; c + VL <= a.C; c += VL) forward_vector<T, N, false>(a, b, t, x, earlier, c);
    if (c < a.C) forward_vector<T, N, true>(a, b, t, x, earlier, c);
  }
}

// Positions [from, to) of one sequence, one vector of channels.
template <typename T, int N, bool PART>
HL_INLINE void backward_vector(const Args& a, int64_t b, int64_t from, int64_t to, int64_t c,
                               float* sums) {
  const int64_t count = a.C - c;
  vf mu[N], grad_mu[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    mu[i] = get<PART>(a.mix + i * a.C + c, count);
    grad_mu[i] = get<PART>(sums + i * a.C + c, count);
  }
  // What position t owes to the one before it.
  vf owed = zero();
  if (to < a.T && !begins_document(a, b, to)) {
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const vf g = get<PART>(row<T>(a.grad_out[i], b, to) + c, count);
      owed = owed + fma(-mu[i], g, g);
    }
  }
  for (int64_t t = to - 1; t >= from; --t) {
    const T* earlier = before<T>(a, b, t);
    const vf change = get<PART>(row<T>(a.x, b, t) + c, count) -
                      (earlier ? get<PART>(earlier + c, count) : zero());
    vf kept = owed;
    owed = zero();
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const vf g = get<PART>(row<T>(a.grad_out[i], b, t) + c, count);
      kept = fma(mu[i], g, kept);
      owed = owed + fma(-mu[i], g, g);  // rounded as above, wherever the pieces begin
      grad_mu[i] = fma(g, change, grad_mu[i]);
    }
    put<PART>(row<T>(a.grad_x, a, b, t) + c, kept, count);
    if (t == 0 && a.grad_last) {
      put<PART>(static_cast<T*>(a.grad_last) + b * a.C + c, owed, count);
    }
    if (t > 0 && begins_document(a, b, t)) owed = zero();
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) put<PART>(sums + i * a.C + c, grad_mu[i], count);
}

template <typename T, int N>
void backward(const Args& a, const Task& task) {
  float* const sums = a.grad_mix + task.worker * N * a.C;
  for (int64_t i = task.begin; i < task.end;) {
    const int64_t b = i / a.T, from = i % a.T;
    int64_t rows = task.end - i < kRows ? task.end - i : kRows;
    if (rows > a.T - from) rows = a.T - from;
    int64_t c = 0;
    for (; c + VL <= a.C; c += VL) backward_vector<T, N, false>(a, b, from, from + rows, c, sums);
    if (c < a.C) backward_vector<T, N, true>(a, b, from, from + rows, c, sums);
    i += rows;
  }
}

template <typename T>
void forward_of(const Args& a, const Task& task) {
  constexpr Run* runs[] = {forward<T, 1>, forward<T, 2>, forward<T, 3>, forward<T, 4>};
  runs[a.N - 1](a, task);
}
template <typename T>
void backward_of(const Args& a, const Task& task) {
  constexpr Run* runs[] = {backward<T, 1>, backward<T, 2>, backward<T, 3>, backward<T, 4>};
  runs[a.N - 1](a, task);
}

}  // namespace

void HL_KERNEL(token_shift_forward)(const Args& a, const Task& task) {
  (a.type == Type::kBFloat16 ? forward_of<BFloat16> : forward_of<float>)(a, task);
}

void HL_KERNEL(token_shift_backward)(const Args& a, const Task& task) {
  (a.type == Type::kBFloat16 ? backward_of<BFloat16> : backward_of<float>)(a, task);
}

}  // namespace headloom::ops::token_shift_kernel
