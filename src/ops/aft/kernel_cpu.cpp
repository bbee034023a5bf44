// The kernels of causal aft local and conv, compiled once per instruction set.
//
// With N and D the sums of a position, y = N / D, g the gradient of y and p = g / D, the gradient
// of [N | D] is G = [p | -p y]. That of X is the band's transpose times G and, for what has left
// the band, the sum of all later G; that of e^w the products of G and X along the channels.
#include "ops/aft/kernel.h"

#include "ops/aft/rows.h"
#include "ops/aft/scratch.h"
#include "ops/kernel/gemm.h"
#include "ops/kernel/prefetch.h"
#include "ops/kernel/transpose.h"

namespace headloom::ops::aft_kernel {
namespace {

// Keys further apart than this take the path with an exponent for each position. The chunk's one
// exponent is halfway between the largest and the smallest, so that as much of float32's range is
// left for small values as for large ones.
constexpr float kFurthest = 60;

// Positions [from, to); row h of the history is position from - (W - 1) + h.
struct Span {
  int64_t from, to;
  int64_t start;  // of the document; -(W - 1) for the first, which the state belongs to
};

struct Work : Rows {
  const Args& a;
  const Task& task;
  const Scratch s;

  HL_INLINE Work(const Args& args, const Task& t, bool backward)
      : Rows{args.T, args.C, t.batch, t.channel, t.count},
        a(args),
        task(t),
        s(args.W, backward, t.scratch) {}

  // Row i of a state.
  template <typename F>
  HL_INLINE F* of_state(F* state, int64_t i) const {
    return state + (task.batch * (2 * a.W + 1) + i) * a.C + task.channel;
  }
  HL_INLINE float* checkpoint(float* data, int64_t t, int64_t i) const {
    const int64_t chunks = (a.T + kChunk - 1) / kChunk;
    return data + ((task.batch * chunks + t / kChunk) * 3 + i) * a.C + task.channel;
  }

  // Asks for the inputs of position t: rows are too far apart for the processor to foresee.
  template <typename T>
  HL_INLINE void fetch(int64_t t) const {
    if (t < 0 || t >= a.T) return;
    const Sequence* const inputs[] = {&a.q, &a.k, &a.v, &a.grad_out};
    for (const Sequence* x : inputs) {
      if (x->data != nullptr) prefetch_row(row<T>(*x, t), count);
    }
  }

  HL_INLINE bool begins_document(int64_t t) const {
    if (a.documents == nullptr || t <= 0 || t >= a.T) return false;
    const int64_t* id = a.documents + task.batch * a.T;
    return id[t] != id[t - 1];
  }
  HL_INLINE int64_t document_of(int64_t t) const {  // where it starts
    if (a.documents == nullptr) return 1 - a.W;
    while (t > 0 && !begins_document(t)) --t;
    return t > 0 ? t : 1 - a.W;
  }
  // The row of w's table for position t.
  HL_INLINE int64_t entry(const Span& p, int64_t t) const {
    if (a.by_distance) return task.head * a.W;
    return (p.start > 0 ? t - p.start : t + a.offset) * a.W;
  }
};

// Keys and values of the history, the first row that counts, and whether one exponent a channel
// (s.middle) will do.
struct History {
  int64_t first;
  bool close;
};

// Whether a state has no position here. A key may be as low in single channels.
HL_INLINE bool is_empty(const Work& w, const float* k) {
  for (int64_t c = 0; c < w.count; ++c) {
    if (!(k[c] < kEmpty / 10)) return false;
  }
  return true;
}

template <typename T>
History read(const Work& w, const Span& p) {
  const Scratch& s = w.s;
  const int64_t ring = w.a.W - 1, rows = ring + p.to - p.from;
  History out = {0, true};
  for (int64_t h = 0; h < rows; ++h) {
    float *k = s.k + h * kChannels, *v = s.v + h * kChannels;
    const int64_t t = p.from - ring + h;
    if (t >= 0 && t >= p.start) {
      w.copy(w.row<T>(w.a.k, t), k);
      w.copy(w.row<T>(w.a.v, t), v);
    } else if (t >= p.start && w.a.state) {
      w.copy(w.of_state(w.a.state, 3 + ring + t), k);
      w.copy(w.of_state(w.a.state, 3 + 2 * ring + t), v);
      if (out.first == h && is_empty(w, k)) out.first = h + 1;
    } else {
      fill(k, kChannels, kEmpty);
      fill(v, kChannels, 0);
      out.first = h + 1;
    }
  }
  vf apart = zero(), finite = zero();
  for (int64_t c = 0; c < kChannels; c += VL) {
    vf top = load(s.running + 2 * kChannels + c), negative = bcast(kEmpty);
    for (int64_t h = out.first; h < rows; ++h) {
      const vf key = load(s.k + h * kChannels + c);
      finite = finite + zero() * (key + load(s.v + h * kChannels + c));
      // A key that is NaN counts for no exponent: the positions before it stay as they are.
      top = vmax(key, top);
      negative = vmax(zero() - key, negative);
    }
    const vf range = vmax(top + negative, zero());
    store(s.middle + c, top - range * bcast(0.5f));
    apart = vmax(range, apart);
  }
  // A product with the band would carry what is not finite to positions that do not see it.
  out.close = w.a.mild && hmax(apart) <= kFurthest && hsum(finite) == 0;
  return out;
}

// e^w of the positions from `t` on, `rows` of them, each shifted by one more.
HL_INLINE void make_band(const Work& w, const Span& p, int64_t t, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    float* const to = w.s.band + i * w.s.band_line;
    fill(to, w.a.W - 1 + rows, 0);
    std::memcpy(to + i, w.a.weight + w.entry(p, t + i), sizeof(float) * static_cast<size_t>(w.a.W));
  }
}

template <typename F>
HL_INLINE void each_band(const Span& p, const F& f) {
  const int64_t n = p.to - p.from;
  for (int64_t i = 0; i < n; i += kRows) f(i, n - i < kRows ? n - i : kRows);
}

// X of the history and the sums of every position, relative to s.middle.
void sum(const Work& w, const Span& p, const History& history) {
  const Scratch& s = w.s;
  const int64_t n = p.to - p.from, rows = w.a.W - 1 + n;
  fill(s.x, history.first * kPair, 0);
  for (int64_t c = 0; c < kChannels; c += VL) {
    const vf middle = load(s.middle + c);
    for (int64_t h = history.first; h < rows; ++h) {
      const vf e = vexp(load(s.k + h * kChannels + c) - middle);
      store(s.x + h * kPair + c, e * load(s.v + h * kChannels + c));
      store(s.x + h * kPair + kChannels + c, e);
    }
    const vf scale = vexp(load(s.running + 2 * kChannels + c) - middle);
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = half * kChannels + c;
      vf total = load(s.running + at) * scale;
      for (int64_t i = 0; i < n; ++i) {
        store(s.sums + i * kPair + at, total);
        total = total + load(s.x + i * kPair + at);
      }
    }
  }
  each_band(p, [&](int64_t i, int64_t count) {
    make_band(w, p, p.from + i, count);
    gemm<true, true>(count, kPair, w.a.W - 1 + count, s.band, s.band_line, s.x + i * kPair, kPair,
                     s.sums + i * kPair, kPair);
  });
}

// The running sums after a chunk with one exponent: the first `n` rows of the history have left the
// band.
void advance(const Work& w, const Span& p, const History& history) {
  const Scratch& s = w.s;
  const int64_t n = p.to - p.from;
  if (history.first >= n) return;
  for (int64_t c = 0; c < kChannels; c += VL) {
    const vf middle = load(s.middle + c), before = load(s.running + 2 * kChannels + c);
    const vf scale = vexp(before - middle);
    vf a = load(s.running + c) * scale, b = load(s.running + kChannels + c) * scale, m = before;
    for (int64_t h = history.first; h < n; ++h) {
      m = vmax(load(s.k + h * kChannels + c), m);
      a = a + load(s.x + h * kPair + c);
      b = b + load(s.x + h * kPair + kChannels + c);
    }
    const vf back = vexp(middle - m);
    store(s.running + c, a * back);
    store(s.running + kChannels + c, b * back);
    store(s.running + 2 * kChannels + c, m + (b - b));  // NaN where the sum is
  }
}

void clear_running(const Scratch& s) {
  fill(s.running, 2 * kChannels, 0);
  fill(s.running + 2 * kChannels, kChannels, kEmpty);
}

// The sums of position `t` = from + i of channels c.., for the path with an exponent for each: N,
// D, and that exponent.
struct Sums {
  vf above, below, top;
};
HL_INLINE Sums sum_alone(const Work& w, const Span& p, const History& history, int64_t i, int64_t c,
                         vf a, vf b, vf m) {
  const Scratch& s = w.s;
  const float* bias = w.a.bias + w.entry(p, p.from + i);
  const int64_t first = history.first > i ? history.first : i, last = i + w.a.W;
  Sums out = {a, b, m};
  for (int64_t h = first; h < last; ++h) {
    out.top = vmax(load(s.k + h * kChannels + c) + bcast(bias[h - i]), out.top);
  }
  const vf past = vexp_or_zero(m - out.top);
  out.above = a * past;
  out.below = b * past;
  for (int64_t h = first; h < last; ++h) {
    const vf e = weight_of(load(s.k + h * kChannels + c), bias[h - i], out.top);
    out.above = fma(e, load(s.v + h * kChannels + c), out.above);
    out.below = out.below + e;
  }
  out.below = divisor(out.below);  // nothing has any weight where every key is -inf
  return out;
}

// What has left the band at position i joins the running sums.
HL_INLINE void leave(const Work& w, const History& history, int64_t i, int64_t c, vf& a, vf& b,
                     vf& m) {
  if (i < history.first) return;
  const vf key = load(w.s.k + i * kChannels + c), next = vmax(m, key);
  const vf kept = vexp_or_zero(m - next), added = vexp_or_zero(key - next);
  a = fma(kept, a, added * load(w.s.v + i * kChannels + c));
  b = fma(kept, b, added);
  m = next + (b - b);  // NaN where the sum is
}

template <typename T>
void forward(const Args& args, const Task& task) {
  const Work w(args, task, false);
  const Scratch& s = w.s;
  const int64_t ring = args.W - 1;
  clear_running(s);
  if (args.state) {
    for (int64_t i = 0; i < 3; ++i) {
      w.copy(w.of_state(args.state, i), s.running + i * kChannels);
    }
  }
  Span p{0, 0, -ring};
  History history{0, true};
  while (p.from < args.T) {
    p.to = p.from + 1;
    while (p.to < args.T && p.to % kChunk != 0 && !w.begins_document(p.to)) ++p.to;
    if (args.checkpoints_out && p.from % kChunk == 0) {
      for (int64_t i = 0; i < 3; ++i) {
        w.copy_back(s.running + i * kChannels, w.checkpoint(args.checkpoints_out, p.from, i));
      }
    }
    history = read<T>(w, p);
    const int64_t n = p.to - p.from;
    if (history.close) {
      sum(w, p, history);
      advance(w, p, history);
    } else {
      for (int64_t c = 0; c < kChannels; c += VL) {
        vf a = load(s.running + c), b = load(s.running + kChannels + c);
        vf m = load(s.running + 2 * kChannels + c);
        for (int64_t i = 0; i < n; ++i) {
          const Sums x = sum_alone(w, p, history, i, c, a, b, m);
          store(s.sums + i * kPair + c, x.above);
          store(s.sums + i * kPair + kChannels + c, x.below);
          leave(w, history, i, c, a, b, m);
        }
        store(s.running + c, a);
        store(s.running + kChannels + c, b);
        store(s.running + 2 * kChannels + c, m);
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      w.fetch<T>(p.to + i);
      const T* q = w.row<T>(args.q, p.from + i);
      T* out = w.row<T>(args.out, p.from + i);
      for (int64_t c = 0; c < kChannels; c += VL) {
        const float* const x = s.sums + i * kPair + c;
        w.put(out, c, load(x) / (load(x + kChannels) * sigmoid_inverse(w.get(q, c))));
      }
    }
    p.from = p.to;
    if (w.begins_document(p.from)) {
      p.start = p.from;
      clear_running(s);
    }
  }
  if (args.end == nullptr) return;
  for (int64_t i = 0; i < 3; ++i) {
    w.copy_back(s.running + i * kChannels, w.of_state(args.end, i));
  }
  read<T>(w, p);  // of no position: the last W - 1
  for (int64_t i = 0; i < ring; ++i) {
    w.copy_back(s.k + i * kChannels, w.of_state(args.end, 3 + i));
    w.copy_back(s.v + i * kChannels, w.of_state(args.end, 3 + ring + i));
  }
}

// Gradients of the history into s.grad_x as [of v | of k], those of the running sums before the
// chunk into s.carried; s.grad_x holds zeros before. One exponent for the chunk. False, and nothing
// is done, where a gradient is not finite: the products would carry it to keys that it is not of.
template <typename T>
bool backward_close(const Work& w, const Span& p, const History& history, float* grad_bias) {
  const Scratch& s = w.s;
  const int64_t n = p.to - p.from, rows = w.a.W - 1 + n;
  sum(w, p, history);
  vf finite = zero();
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < kChannels; c += VL) {
      const float* const x = s.sums + i * kPair + c;
      const vf share = bcast(1.0f) / load(x + kChannels), y = load(x) * share;
      const vf through = w.through_gate<T>(w.a, p.from + i, c, y) * share;
      store(s.grad_sums + i * kPair + c, through);
      store(s.grad_sums + i * kPair + kChannels + c, zero() - through * y);
      finite = finite + zero() * (through * y);
    }
  }
  if (hsum(finite) != 0) return false;
  // The exponent of the running sums after the chunk: what left the band in it is part of them.
  const bool joined = history.first < n;
  for (int64_t c = 0; c < kChannels; c += VL) {
    const vf middle = load(s.middle + c), before = load(s.running + 2 * kChannels + c);
    vf after = before;
    for (int64_t h = history.first; h < n; ++h) after = vmax(load(s.k + h * kChannels + c), after);
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = half * kChannels + c;
      const vf later = load(s.carried + at);
      vf total = joined ? later * vexp(middle - after) : zero();
      for (int64_t i = n - 1; i >= 0; --i) {
        store(s.grad_x + i * kPair + at, total);
        total = total + load(s.grad_sums + i * kPair + at);
      }
      total = total * vexp(before - middle);
      store(s.carried + at, joined ? total : total + later);
    }
  }
  transpose((rows + 3) / 4 * 4, kPair, s.x, kPair, s.columns, s.columns_line);
  each_band(p, [&](int64_t i, int64_t count) {
    const int64_t keys = w.a.W - 1 + count;
    make_band(w, p, p.from + i, count);
    gemm<true, false>(keys, kPair, count, s.band, s.band_line, s.grad_sums + i * kPair, kPair,
                      s.grad_x + i * kPair, kPair);
    gemm<false, true>(count, (keys + VL - 1) / VL * VL, kPair, s.grad_sums + i * kPair, kPair,
                      s.columns + i, s.columns_line, s.grad_band, s.band_line);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t entry = w.entry(p, p.from + i + j);
      const float *weight = w.a.weight + entry, *product = s.grad_band + j * s.band_line + j;
      float* const to = grad_bias + entry;
      for (int64_t c = 0; c < w.a.W; ++c) to[c] += weight[c] * product[c];
    }
  });
  fill(s.grad_x, history.first * kPair, 0);  // not of this document, whatever reached them above
  for (int64_t h = history.first; h < rows; ++h) {
    float* const g = s.grad_x + h * kPair;
    for (int64_t c = 0; c < kChannels; c += VL) {
      const vf e = load(s.x + h * kPair + kChannels + c), of_ev = load(g + c);
      const vf of_k = e * fma(of_ev, load(s.v + h * kChannels + c), load(g + kChannels + c));
      store(g + c, e * of_ev);
      store(g + kChannels + c, of_k);
    }
  }
  return true;
}

// The same with an exponent for each position.
template <typename T>
void backward_alone(const Work& w, const Span& p, const History& history, float* grad_bias) {
  const Scratch& s = w.s;
  const int64_t n = p.to - p.from;
  for (int64_t c = 0; c < kChannels; c += VL) {
    // Running sums before every position, in the place of the sums.
    float exponents[(kChunk + 1) * VL];
    vf a = load(s.running + c), b = load(s.running + kChannels + c);
    vf m = load(s.running + 2 * kChannels + c);
    for (int64_t i = 0; i < n; ++i) {
      store(s.sums + i * kPair + c, a);
      store(s.sums + i * kPair + kChannels + c, b);
      store(exponents + i * VL, m);
      leave(w, history, i, c, a, b, m);
    }
    store(exponents + n * VL, m);
    vf alpha = load(s.carried + c), beta = load(s.carried + kChannels + c);
    for (int64_t i = n - 1; i >= 0; --i) {
      const vf before = load(exponents + i * VL), after = load(exponents + (i + 1) * VL);
      float* const left = s.grad_x + i * kPair + c;
      if (i >= history.first) {
        const vf e = vexp_or_zero(load(s.k + i * kChannels + c) - after);
        const vf value = load(s.v + i * kChannels + c);
        store(left, fma(e, alpha, load(left)));
        store(left + kChannels, fma(e, fma(alpha, value, beta), load(left + kChannels)));
      }
      a = load(s.sums + i * kPair + c);
      b = load(s.sums + i * kPair + kChannels + c);
      const Sums x = sum_alone(w, p, history, i, c, a, b, before);
      const vf share = bcast(1.0f) / x.below, y = x.above * share;
      const vf through = w.through_gate<T>(w.a, p.from + i, c, y) * share, through_y = through * y;
      const int64_t entry = w.entry(p, p.from + i);
      for (int64_t h = history.first > i ? history.first : i; h < i + w.a.W; ++h) {
        const vf e = weight_of(load(s.k + h * kChannels + c), w.a.bias[entry + h - i], x.top);
        const vf value = load(s.v + h * kChannels + c);
        const vf of_key = e * fma(through, value, zero() - through_y);
        float* const g = s.grad_x + h * kPair + c;
        store(g, fma(e, through, load(g)));
        store(g + kChannels, load(g + kChannels) + of_key);
        grad_bias[entry + h - i] += hsum(of_key);
      }
      const vf kept = vexp_or_zero(before - after), own = vexp_or_zero(before - x.top);
      alpha = fma(kept, alpha, own * through);
      beta = kept * beta - own * through_y;
    }
    store(s.carried + c, alpha);
    store(s.carried + kChannels + c, beta);
  }
}

template <typename T>
void backward(const Args& args, const Task& task) {
  const Work w(args, task, true);
  const Scratch& s = w.s;
  const int64_t ring = args.W - 1;
  float* const grad_bias = args.grad_bias + task.worker * args.bias_size;
  fill(s.carried, 2 * kChannels, 0);
  fill(s.pending, ring * kPair, 0);
  Span p{0, args.T, w.document_of(args.T - 1)};
  if (args.grad_end) {
    for (int64_t i = 0; i < 2; ++i) {
      w.copy(w.of_state(args.grad_end, i), s.carried + i * kChannels);
    }
    for (int64_t i = 0; i < ring; ++i) {
      if (args.T - ring + i < p.start) continue;  // of an earlier document: nothing was kept
      w.copy(w.of_state(args.grad_end, 3 + ring + i), s.pending + i * kPair);
      w.copy(w.of_state(args.grad_end, 3 + i), s.pending + i * kPair + kChannels);
    }
  }
  while (p.to > 0) {
    p.from = p.to - 1;
    while (p.from % kChunk != 0 && !w.begins_document(p.from)) --p.from;
    clear_running(s);
    if (!w.begins_document(p.from)) {
      for (int64_t i = 0; i < 3; ++i) {
        w.copy(w.checkpoint(const_cast<float*>(args.checkpoints), p.from, i),
               s.running + i * kChannels);
      }
    }
    const History history = read<T>(w, p);
    const int64_t n = p.to - p.from;
    fill(s.grad_x, (ring + n) * kPair, 0);
    if (!history.close || !backward_close<T>(w, p, history, grad_bias)) {
      backward_alone<T>(w, p, history, grad_bias);
    }
    for (int64_t i = 0; i < ring * kPair; ++i) s.grad_x[n * kPair + i] += s.pending[i];
    for (int64_t i = 0; i < n; ++i) {
      w.fetch<T>(p.from - 1 - i);
      const float* const g = s.grad_x + (ring + i) * kPair;
      for (int64_t c = 0; c < kChannels; c += VL) {
        w.put(w.row<T>(args.grad_v, p.from + i), c, load(g + c));
        w.put(w.row<T>(args.grad_k, p.from + i), c, load(g + kChannels + c));
      }
    }
    std::memcpy(s.pending, s.grad_x, sizeof(float) * static_cast<size_t>(ring * kPair));
    p.to = p.from;
    if (w.begins_document(p.from)) {
      fill(s.carried, 2 * kChannels, 0);
      p.start = w.document_of(p.from - 1);
    }
  }
  if (args.grad_state == nullptr) return;
  for (int64_t i = 0; i < 2; ++i) {
    w.copy_back(s.carried + i * kChannels, w.of_state(args.grad_state, i));
  }
  // m enters as a e^m and b e^m.
  for (int64_t c = 0; c < kChannels; c += VL) {
    w.put(w.of_state(args.grad_state, 2), c,
          fma(load(s.carried + c), load(s.running + c),
              load(s.carried + kChannels + c) * load(s.running + kChannels + c)));
  }
  for (int64_t i = 0; i < ring; ++i) {
    w.copy_back(s.pending + i * kPair + kChannels, w.of_state(args.grad_state, 3 + i));
    w.copy_back(s.pending + i * kPair, w.of_state(args.grad_state, 3 + ring + i));
  }
}

}  // namespace

void HL_KERNEL(aft_forward)(const Args& a, const Task& task) {
  (a.type == Type::kBFloat16 ? forward<BFloat16> : forward<float>)(a, task);
}

void HL_KERNEL(aft_backward)(const Args& a, const Task& task) {
  (a.type == Type::kBFloat16 ? backward<BFloat16> : backward<float>)(a, task);
}

}  // namespace headloom::ops::aft_kernel
