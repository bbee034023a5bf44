// The kernels of wkv, compiled once per instruction set.
//
// Sums before position t are A = a e^m and B = b e^m. With E = e^k, D = B + e^u E and
// y = (A + e^u E v) / D, and with g the gradient of y, p = g / D, the gradients of the sums run
// backwards: alpha = p + e^-w alpha', beta = -p y + e^-w beta' (primes: after the position), and
//   dv = E (e^u p + alpha')                dk = E (e^u p (v - y) + alpha' v + beta')
//   du = sum e^u E p (v - y)               dw = -sum e^-w (alpha' A + beta' B)
// alpha and beta are kept times e^m, as A and B are times e^-m.
#include "ops/wkv/kernel.h"

#include "ops/kernel/vec.h"

namespace headloom::ops::wkv_kernel {
namespace {

// Keys of a chunk further apart than this take the path that rescales at every step: e^30, e^-30
// and the bonus leave room for values.
constexpr float kFurthest = 60, kLargestBonus = 20;
constexpr float kEmpty = -1e38f;
constexpr int64_t kPlane = kChunk * kChannels;  // floats of one of the three scratch arrays

#if defined(CPU_CAPABILITY_AVX512)
constexpr int kVectors = 4;  // at once, so that one hides the other's latency
#else
constexpr int kVectors = 2;
#endif

// Positions [from, to) of the channels from `channel` on; `count` of them are there where a group
// is less than a vector.
struct Span {
  int64_t batch, channel, from, to, count;
  bool fresh;  // nothing before `from` counts
};

template <int NV, bool PART>
struct Group {
  int64_t count;

  template <typename T>
  HL_INLINE vf get(const T* p, int j) const {
    if constexpr (PART) return load_part(p, count);
    return load(p + j * VL);
  }
  template <typename T>
  HL_INLINE void put(T* p, int j, vf a) const {
    if constexpr (PART) {
      store_part(p, a, count);
    } else {
      store(p + j * VL, a);
    }
  }
};

template <typename T>
HL_INLINE const T* row(const Sequence& s, const Span& p, int64_t t) {
  return static_cast<const T*>(s.data) + p.batch * s.batch + t * s.time + p.channel;
}
template <typename T>
HL_INLINE T* row(void* data, const Args& a, const Span& p, int64_t t) {
  return static_cast<T*>(data) + (p.batch * a.T + t) * a.C + p.channel;
}

// Rows of [B, rows, C].
template <typename F>
HL_INLINE F* plane(F* data, int64_t rows, const Args& a, const Span& p) {
  return data ? data + p.batch * rows * a.C + p.channel : nullptr;
}
HL_INLINE float* checkpoint(float* data, const Args& a, const Span& p) {
  const int64_t count = (a.T + kChunk - 1) / kChunk;
  return data + (p.batch * count + p.from / kChunk) * 3 * a.C + p.channel;
}

HL_INLINE bool begins_document(const Args& a, int64_t batch, int64_t t) {
  if (a.documents == nullptr || t == 0 || t == a.T) return false;
  const int64_t* id = a.documents + batch * a.T;
  return id[t] != id[t - 1];
}

// Asks for a group's part of the row a chunk after or, in the backward, before: the chunks of all
// groups together are more than a processor fetches ahead by itself.
template <int NV, bool WRITE, typename T>
HL_INLINE void fetch(const T* p, int64_t stride) {
  constexpr int64_t kLine = 64 / sizeof(T);
#pragma GCC unroll 4
  for (int64_t i = 0; i < NV * VL; i += kLine) __builtin_prefetch(p + stride + i, WRITE, 2);
}

// What a chunk starts from, and what all its steps share.
template <int NV>
struct Chunk {
  vf a[NV], b[NV], m[NV];  // the sums
  vf w[NV], u[NV];
  vf last[NV];  // m after the chunk
  // The exponent of the whole chunk: halfway between its largest and its smallest, so that as much
  // of float32's range is left for small values as for large ones.
  vf middle[NV];
  bool close;  // which can be used
  // A key that is NaN counts for none of the exponents: the positions before it stay as they are,
  // and its own exponential makes the sums NaN. Only an m that is NaN already is kept, as its sums
  // are.
};

template <typename T, int NV, bool PART>
HL_INLINE Chunk<NV> begin_chunk(const Args& args, const Span& p, const Group<NV, PART>& group,
                                const float* state, int64_t ahead) {
  Chunk<NV> c;
  vf top[NV], bottom[NV];
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) {
    c.w[j] = group.get(args.decay + p.channel, j);
    c.u[j] = group.get(args.bonus + p.channel, j);
    c.a[j] = p.fresh ? zero() : group.get(state, j);
    c.b[j] = p.fresh ? zero() : group.get(state + args.C, j);
    c.m[j] = p.fresh ? bcast(kEmpty) : group.get(state + 2 * args.C, j);
    c.last[j] = top[j] = c.m[j];
    bottom[j] = bcast(-kEmpty);
  }
  for (int64_t t = p.from; t < p.to; ++t) {
    const T* k = row<T>(args.k, p, t);
    fetch<NV, false>(k, ahead * args.k.time);
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      const vf key = group.get(k, j);
      c.last[j] = vmax(key, c.last[j] - c.w[j]);
      top[j] = vmax(key, top[j]);
      bottom[j] = vmin(key, bottom[j]);
    }
  }
  vf apart = zero(), bonus = zero();
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) {
    const vf range = vmax(top[j] - bottom[j], zero());
    c.middle[j] = top[j] - range * bcast(0.5f);
    apart = vmax(range, apart);
    bonus = vmax(vmax(c.u[j], zero() - c.u[j]), bonus);
  }
  c.close = hmax(apart) <= kFurthest && hmax(bonus) <= kLargestBonus;
  return c;
}

template <typename T, int NV, bool PART, bool GATE>
void forward_chunk(const Args& args, const Span& p) {
  const Group<NV, PART> group{p.count};
  float* const state = plane(args.end, 3, args, p);
  Chunk<NV> c = begin_chunk<T>(args, p, group, state, kChunk);
  if (args.checkpoints_out && p.from % kChunk == 0) {
    float* const kept = checkpoint(args.checkpoints_out, args, p);
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      group.put(kept, j, c.a[j]);
      group.put(kept + args.C, j, c.b[j]);
      group.put(kept + 2 * args.C, j, c.m[j]);
    }
  }
  if (c.close) {
    vf a[NV], b[NV], fade[NV], own[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      const vf scale = vexp(c.m[j] - c.middle[j]);
      a[j] = c.a[j] * scale;
      b[j] = c.b[j] * scale;
      fade[j] = vexp(zero() - c.w[j]);
      own[j] = vexp(c.u[j]);
    }
    for (int64_t t = p.from; t < p.to; ++t) {
      const T *k = row<T>(args.k, p, t), *v = row<T>(args.v, p, t);
      const T* r = GATE ? row<T>(args.r, p, t) : nullptr;
      T* out = row<T>(args.out, args, p, t);
      fetch<NV, false>(v, kChunk * args.v.time);
      if constexpr (GATE) fetch<NV, false>(r, kChunk * args.r.time);
      fetch<NV, true>(out, kChunk * args.C);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        const vf e = vexp(group.get(k, j) - c.middle[j]);
        const vf ev = e * group.get(v, j);
        vf below = fma(own[j], e, b[j]);
        if constexpr (GATE) below = below * sigmoid_inverse(group.get(r, j));
        group.put(out, j, fma(own[j], ev, a[j]) / below);
        a[j] = fma(fade[j], a[j], ev);
        b[j] = fma(fade[j], b[j], e);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      const vf scale = vexp(c.middle[j] - c.last[j]);
      c.a[j] = a[j] * scale;
      c.b[j] = b[j] * scale;
    }
  } else {
    for (int64_t t = p.from; t < p.to; ++t) {
      const T *k = row<T>(args.k, p, t), *v = row<T>(args.v, p, t);
      const T* r = GATE ? row<T>(args.r, p, t) : nullptr;
      T* out = row<T>(args.out, args, p, t);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        const vf key = group.get(k, j), value = group.get(v, j), own = c.u[j] + key;
        const vf scale = vmax(c.m[j], own);
        const vf past = vexp_or_zero(c.m[j] - scale), now = vexp_or_zero(own - scale);
        vf below = divisor(fma(past, c.b[j], now));
        if constexpr (GATE) below = below * sigmoid_inverse(group.get(r, j));
        group.put(out, j, fma(past, c.a[j], now * value) / below);
        const vf faded = c.m[j] - c.w[j], next = vmax(faded, key);
        const vf kept = vexp_or_zero(faded - next), added = vexp_or_zero(key - next);
        c.a[j] = fma(kept, c.a[j], added * value);
        c.b[j] = fma(kept, c.b[j], added);
        c.m[j] = next;
      }
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) {
    group.put(state, j, c.a[j]);
    group.put(state + args.C, j, c.b[j]);
    group.put(state + 2 * args.C, j, c.last[j] + (c.b[j] - c.b[j]));  // NaN where the sum is
  }
}

template <typename T, int NV, bool PART, bool GATE>
void backward_chunk(const Args& args, const Span& p, float* scratch) {
  const Group<NV, PART> group{p.count};
  constexpr int64_t kRow = NV * VL;
  float *const a_of = scratch, *const b_of = scratch + kPlane, *const e_of = scratch + 2 * kPlane;
  const float* start =
      p.fresh ? nullptr : checkpoint(const_cast<float*>(args.checkpoints), args, p);
  const Chunk<NV> c = begin_chunk<T>(args, p, group, start, -kChunk);
  float* const carried = plane(args.grad_state, 3, args, p);
  float* const rates = plane(args.grad_rates, 2, args, p);

  vf alpha[NV], beta[NV], grad_w[NV], grad_u[NV], fade[NV], own[NV];
  // What the chunk's end owes to the positions after it, relative to c.last.
  const bool cut = begins_document(args, p.batch, p.to);
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) {
    alpha[j] = cut ? zero() : group.get(carried, j);
    beta[j] = cut ? zero() : group.get(carried + args.C, j);
    grad_w[j] = group.get(rates, j);
    grad_u[j] = group.get(rates + args.C, j);
    fade[j] = vexp(zero() - c.w[j]);
    own[j] = vexp(c.u[j]);
  }

  // y's gradient and, with a gate, r's: g = out's gradient times sigmoid(r).
  const auto through_gate = [&](int64_t t, int j, vf y) {
    vf g = group.get(row<T>(args.grad_out, p, t), j);
    if constexpr (GATE) {
      const vf open = bcast(1.0f) / sigmoid_inverse(group.get(row<T>(args.r, p, t), j));
      g = g * open;
      group.put(row<T>(args.grad_r, args, p, t), j, g * y * (bcast(1.0f) - open));
    }
    return g;
  };

  if (c.close) {
    vf a[NV], b[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      const vf scale = vexp(c.m[j] - c.middle[j]), back = vexp(c.middle[j] - c.last[j]);
      a[j] = c.a[j] * scale;
      b[j] = c.b[j] * scale;
      alpha[j] = alpha[j] * back;
      beta[j] = beta[j] * back;
    }
    for (int64_t t = p.from; t < p.to; ++t) {
      const T *k = row<T>(args.k, p, t), *v = row<T>(args.v, p, t);
      fetch<NV, false>(v, -kChunk * args.v.time);
      const int64_t at = (t - p.from) * kRow;
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        const vf e = vexp(group.get(k, j) - c.middle[j]);
        store(a_of + at + j * VL, a[j]);
        store(b_of + at + j * VL, b[j]);
        store(e_of + at + j * VL, e);
        a[j] = fma(fade[j], a[j], e * group.get(v, j));
        b[j] = fma(fade[j], b[j], e);
      }
    }
    for (int64_t t = p.to - 1; t >= p.from; --t) {
      const T* v = row<T>(args.v, p, t);
      T *grad_k = row<T>(args.grad_k, args, p, t), *grad_v = row<T>(args.grad_v, args, p, t);
      fetch<NV, false>(row<T>(args.grad_out, p, t), -kChunk * args.grad_out.time);
      if constexpr (GATE) fetch<NV, false>(row<T>(args.r, p, t), -kChunk * args.r.time);
      fetch<NV, true>(grad_k, -kChunk * args.C);
      fetch<NV, true>(grad_v, -kChunk * args.C);
      const int64_t at = (t - p.from) * kRow;
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        const vf before_a = load(a_of + at + j * VL), before_b = load(b_of + at + j * VL);
        const vf e = load(e_of + at + j * VL), value = group.get(v, j);
        const vf own_e = own[j] * e;
        const vf share = bcast(1.0f) / (before_b + own_e);
        const vf y = fma(own_e, value, before_a) * share;
        const vf through = through_gate(t, j, y) * share;  // p
        const vf through_y = through * y;
        grad_w[j] = grad_w[j] - fade[j] * fma(alpha[j], before_a, beta[j] * before_b);
        grad_u[j] = fma(own_e, fma(through, value, zero() - through_y), grad_u[j]);
        const vf to_a = fma(own[j], through, alpha[j]);
        const vf to_b = beta[j] - own[j] * through_y;
        group.put(grad_v, j, e * to_a);
        group.put(grad_k, j, e * fma(to_a, value, to_b));
        alpha[j] = fma(fade[j], alpha[j], through);
        beta[j] = fma(fade[j], beta[j], zero() - through_y);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      const vf scale = vexp(c.m[j] - c.middle[j]);
      alpha[j] = alpha[j] * scale;
      beta[j] = beta[j] * scale;
    }
  } else {
    float* const m_of = e_of;
    vf a[NV], b[NV], m[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      a[j] = c.a[j];
      b[j] = c.b[j];
      m[j] = c.m[j];
    }
    for (int64_t t = p.from; t < p.to; ++t) {
      const T *k = row<T>(args.k, p, t), *v = row<T>(args.v, p, t);
      const int64_t at = (t - p.from) * kRow;
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        store(a_of + at + j * VL, a[j]);
        store(b_of + at + j * VL, b[j]);
        store(m_of + at + j * VL, m[j]);
        const vf key = group.get(k, j), faded = m[j] - c.w[j], next = vmax(faded, key);
        const vf kept = vexp_or_zero(faded - next), added = vexp_or_zero(key - next);
        a[j] = fma(kept, a[j], added * group.get(v, j));
        b[j] = fma(kept, b[j], added);
        m[j] = next;
      }
    }
    for (int64_t t = p.to - 1; t >= p.from; --t) {
      const T *k = row<T>(args.k, p, t), *v = row<T>(args.v, p, t);
      T *grad_k = row<T>(args.grad_k, args, p, t), *grad_v = row<T>(args.grad_v, args, p, t);
      const int64_t at = (t - p.from) * kRow;
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        const vf before_a = load(a_of + at + j * VL), before_b = load(b_of + at + j * VL);
        const vf before_m = load(m_of + at + j * VL);
        const vf key = group.get(k, j), value = group.get(v, j);
        const vf own_key = c.u[j] + key, scale = vmax(before_m, own_key);
        const vf past = vexp_or_zero(before_m - scale), now = vexp_or_zero(own_key - scale);
        const vf share = bcast(1.0f) / divisor(fma(past, before_b, now));
        const vf y = fma(past, before_a, now * value) * share;
        const vf through = through_gate(t, j, y) * share;  // p e^scale
        const vf through_y = through * y;
        // m[j] is the exponent after the position, that of alpha and beta.
        const vf kept = vexp_or_zero(before_m - c.w[j] - m[j]), added = vexp_or_zero(key - m[j]);
        grad_w[j] = grad_w[j] - kept * fma(alpha[j], before_a, beta[j] * before_b);
        grad_u[j] = fma(now, fma(through, value, zero() - through_y), grad_u[j]);
        const vf to_a = fma(now, through, added * alpha[j]);
        const vf to_b = added * beta[j] - now * through_y;
        group.put(grad_v, j, to_a);
        group.put(grad_k, j, fma(to_a, value, to_b));
        alpha[j] = fma(kept, alpha[j], past * through);
        beta[j] = kept * beta[j] - past * through_y;
        m[j] = before_m;
      }
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) {
    group.put(carried, j, alpha[j]);
    group.put(carried + args.C, j, beta[j]);
    group.put(carried + 2 * args.C, j, fma(alpha[j], c.a[j], beta[j] * c.b[j]));
    group.put(rates, j, grad_w[j]);
    group.put(rates + args.C, j, grad_u[j]);
  }
}

template <typename T, bool GATE>
void forward(const Args& a, const Task& task) {
  Span p{task.batch, task.begin, 0, 0, 0, a.state == nullptr};
  if (a.state) {
    const float* from = plane(a.state, 3, a, p);
    float* to = plane(a.end, 3, a, p);
    for (int64_t i = 0; i < 3; ++i) {
      std::memcpy(to + i * a.C, from + i * a.C,
                  sizeof(float) * static_cast<size_t>(task.end - task.begin));
    }
  }
  while (p.from < a.T) {
    p.to = p.from + 1;
    while (p.to < a.T && p.to % kChunk != 0 && !begins_document(a, p.batch, p.to)) ++p.to;
    p.channel = task.begin;
    for (; p.channel + kVectors * VL <= task.end; p.channel += kVectors * VL) {
      forward_chunk<T, kVectors, false, GATE>(a, p);
    }
    for (; p.channel + VL <= task.end; p.channel += VL) forward_chunk<T, 1, false, GATE>(a, p);
    p.count = task.end - p.channel;
    if (p.count > 0) forward_chunk<T, 1, true, GATE>(a, p);
    p.from = p.to;
    p.fresh = begins_document(a, p.batch, p.from);
  }
}

template <typename T, bool GATE>
void backward(const Args& a, const Task& task) {
  Span p{task.batch, task.begin, 0, a.T, 0, false};
  const auto row_bytes = sizeof(float) * static_cast<size_t>(task.end - task.begin);
  for (int64_t i = 0; i < 2; ++i) {
    std::memset(plane(a.grad_rates, 2, a, p) + i * a.C, 0, row_bytes);
    float* const carried = plane(a.grad_state, 3, a, p) + i * a.C;
    if (a.grad_end) {
      std::memcpy(carried, plane(a.grad_end, 3, a, p) + i * a.C, row_bytes);
    } else {
      std::memset(carried, 0, row_bytes);
    }
  }
  while (p.to > 0) {
    p.from = p.to - 1;
    while (p.from % kChunk != 0 && !begins_document(a, p.batch, p.from)) --p.from;
    p.fresh = begins_document(a, p.batch, p.from);
    p.channel = task.begin;
    for (; p.channel + kVectors * VL <= task.end; p.channel += kVectors * VL) {
      backward_chunk<T, kVectors, false, GATE>(a, p, task.scratch);
    }
    for (; p.channel + VL <= task.end; p.channel += VL) {
      backward_chunk<T, 1, false, GATE>(a, p, task.scratch);
    }
    p.count = task.end - p.channel;
    if (p.count > 0) backward_chunk<T, 1, true, GATE>(a, p, task.scratch);
    p.to = p.from;
  }
}

}  // namespace

void HL_KERNEL(wkv_forward)(const Args& a, const Task& task) {
  const bool half = a.type == Type::kBFloat16, gate = a.r.data != nullptr;
  (half   ? gate ? forward<BFloat16, true> : forward<BFloat16, false>
     : gate ? forward<float, true>
          : forward<float, false>)(a, task);
}

void HL_KERNEL(wkv_backward)(const Args& a, const Task& task) {
  const bool half = a.type == Type::kBFloat16, gate = a.r.data != nullptr;
  (half   ? gate ? backward<BFloat16, true> : backward<BFloat16, false>
     : gate ? backward<float, true>
          : backward<float, false>)(a, task);
}

}  // namespace headloom::ops::wkv_kernel
