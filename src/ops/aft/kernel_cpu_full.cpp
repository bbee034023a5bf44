// The kernels of causal aft full, compiled once per instruction set. Notation as in kernel_cpu.cpp.
//
// With one exponent m for all queries of a chunk everything is a product of matrices: the sums are
// rows of e^w times X, the gradient of X is these rows' transpose times G, and that of e^w is G
// times X. X is made anew for each chunk of queries and of keys, relative to m, which takes an
// exponential for kFullChunk pairs. Where keys are far below m they vanish, as they do in the
// formula.
#include "ops/aft/kernel.h"
#include "ops/aft/rows.h"
#include "ops/kernel/gemm.h"
#include "ops/kernel/transpose.h"

namespace headloom::ops::aft_kernel {
namespace {

constexpr int64_t kPairLine = 2 * kChannels, kSumsLine = 3 * kChannels;

// How far the largest key that a query sees may be below the one that its chunk is relative to.
constexpr float kFarthestBelow = 40;

struct FullWork : Rows {
  const FullArgs& a;
  const int64_t group;
  const Chunk& own;

  HL_INLINE FullWork(const FullArgs& args, int64_t chunk, int64_t g)
      : Rows{args.T, args.C, args.chunks[chunk].batch, g * kChannels,
             args.C - g * kChannels < kChannels ? args.C - g * kChannels : kChannels},
        a(args),
        group(g),
        own(args.chunks[chunk]) {}

  template <typename F>
  HL_INLINE F* of_position(F* data, int64_t t, int64_t line) const {
    return data + ((batch * a.groups() + group) * T + t) * line;
  }
  HL_INLINE const float* sums(int64_t t) const { return of_position(a.sums, t, kSumsLine); }
  HL_INLINE const float* grad_sums(int64_t t) const {
    return of_position(a.grad_sums, t, kPairLine);
  }
  HL_INLINE bool& alone(int64_t chunk) const { return a.alone[chunk * a.groups() + group]; }
};

// Where w or e^w of a chunk's first query and another's first key stands.
HL_INLINE int64_t pair_of(int64_t line, const Chunk& queries, const Chunk& keys) {
  return queries.place * line + keys.place;
}
// Keys of a chunk that query t sees.
HL_INLINE int64_t seen_by(int64_t t, const Chunk& keys) {
  return (t < keys.to ? t + 1 : keys.to) - keys.from;
}

// e^w of two chunks, [queries, kFullChunk]; 0 where a query does not see a key. Rows of the table
// itself would displace each other from the cache.
void copy_weights(const FullArgs& a, const Chunk& queries, const Chunk& keys, float* to) {
  const float* from = a.weight + pair_of(a.weight_line, queries, keys);
  const int64_t n = keys.to - keys.from;
  for (int64_t t = queries.from; t < queries.to; ++t, from += a.weight_line, to += kFullChunk) {
    const int64_t seen = seen_by(t, keys);
    std::memcpy(to, from, sizeof(float) * static_cast<size_t>(seen));
    fill(to + seen, n - seen, 0);
  }
}

// X of a chunk of keys relative to `exponent`, [keys, kPairLine].
template <typename F>
void make_x(const FullWork& w, const Chunk& keys, const float* exponent, float* x) {
  for (int64_t s = keys.from; s < keys.to; ++s, x += kPairLine) {
    const F *k = w.row<F>(w.a.k, s), *v = w.row<F>(w.a.v, s);
    for (int64_t c = 0; c < kChannels; c += VL) {
      const vf e = vexp_or_zero(w.get(k, c) - load(exponent + c));
      store(x + c, e * w.get(v, c));
      store(x + kChannels + c, e);
    }
  }
}

// The chunk's exponent, halfway between the largest key up to its end and the largest that its
// first query sees, so that as much of float32's range is left for small values as for large ones;
// whether it will do.
template <typename F>
bool find_exponent(const FullWork& w, float* exponent) {
  float top[kChannels], least[kChannels];
  fill(top, kChannels, kEmpty);
  const auto raise = [&](int64_t from, int64_t to) {
    for (int64_t s = from; s < to; ++s) {
      const F* k = w.row<F>(w.a.k, s);
      for (int64_t c = 0; c < kChannels; c += VL) {
        store(top + c, vmax(w.get(k, c), load(top + c)));  // NaN counts for no exponent
      }
    }
  };
  raise(w.a.chunks[w.own.first].from, w.own.from + 1);
  for (int64_t c = 0; c < kChannels; c += VL) store(least + c, load(top + c));
  raise(w.own.from + 1, w.own.to);
  vf apart = zero(), finite = zero();
  for (int64_t c = 0; c < kChannels; c += VL) {
    const vf range = load(top + c) - load(least + c);
    store(exponent + c, load(top + c) - range * bcast(0.5f));
    apart = vmax(range, apart);
    for (int64_t s = w.own.from; s < w.own.to; ++s) {
      finite = finite + zero() * (w.get(w.row<F>(w.a.k, s), c) + w.get(w.row<F>(w.a.v, s), c));
    }
  }
  // A product with the band would carry what is not finite to queries before it.
  return w.a.mild && hmax(apart) <= kFarthestBelow && hsum(finite) == 0;
}

// The sums of query t by itself: with v, without, exponent.
template <typename F>
void sum_of_query(const FullWork& w, int64_t t, float* to) {
  const float* const bias = w.a.bias + (w.own.place + t - w.own.from) * w.a.bias_line;
  for (int64_t c = 0; c < kChannels; c += VL) {
    vf top = bcast(kEmpty), above = zero(), below = zero();
    const auto each_key = [&](const auto& f) {
      const int64_t start = w.a.chunks[w.own.first].from;
      const float* of_key = bias + w.a.chunks[w.own.first].place;
      for (int64_t s = start; s <= t; ++s) f(s, w.get(w.row<F>(w.a.k, s), c), of_key[s - start]);
    };
    each_key([&](int64_t, vf key, float b) { top = vmax(key + bcast(b), top); });
    each_key([&](int64_t s, vf key, float b) {
      const vf e = weight_of(key, b, top);
      above = fma(e, w.get(w.row<F>(w.a.v, s), c), above);
      below = below + e;
    });
    store(to + c, above);
    store(to + kChannels + c, divisor(below));
    store(to + 2 * kChannels + c, top);
  }
}

template <typename F>
void full_forward(const FullArgs& a, int64_t chunk, int64_t group, float* scratch) {
  const FullWork w(a, chunk, group);
  const int64_t n = w.own.to - w.own.from;
  float *const band = scratch, *const x = band + kFullChunk * kFullChunk,
               *const sums = x + kFullChunk * kPairLine;
  float exponent[kChannels];
  const bool close = find_exponent<F>(w, exponent);
  if (close) {
    fill(sums, n * kPairLine, 0);
    for (int64_t j = w.own.first; j <= chunk; ++j) {
      const Chunk& keys = a.chunks[j];
      copy_weights(a, w.own, keys, band);
      make_x<F>(w, keys, exponent, x);
      gemm<true, true>(n, kPairLine, keys.to - keys.from, band, kFullChunk, x, kPairLine, sums,
                       kPairLine);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t t = w.own.from + i;
    float of_query[kSumsLine];
    if (close) {
      std::memcpy(of_query, sums + i * kPairLine, sizeof(float) * kPairLine);
      std::memcpy(of_query + kPairLine, exponent, sizeof(float) * kChannels);
    } else {
      sum_of_query<F>(w, t, of_query);
    }
    const F* q = w.row<F>(a.q, t);
    F* const out = w.row<F>(a.out, t);
    for (int64_t c = 0; c < kChannels; c += VL) {
      const vf below = load(of_query + kChannels + c);
      w.put(out, c, load(of_query + c) / (below * sigmoid_inverse(w.get(q, c))));
    }
    if (a.sums_out) {
      std::memcpy(w.of_position(a.sums_out, t, kSumsLine), of_query, sizeof(of_query));
    }
  }
}

// The gradients of q and of the sums.
template <typename F>
void full_sums(const FullArgs& a, int64_t chunk, int64_t group) {
  const FullWork w(a, chunk, group);
  const float* const first = w.sums(w.own.from) + kPairLine;
  vf apart = zero(), finite = zero();
  for (int64_t t = w.own.from; t < w.own.to; ++t) {
    const float* const sums = w.sums(t);
    float* const grad = w.of_position(a.grad_sums, t, kPairLine);
    for (int64_t c = 0; c < kChannels; c += VL) {
      const vf share = bcast(1.0f) / load(sums + kChannels + c), y = load(sums + c) * share;
      const vf through = w.through_gate<F>(a, t, c, y) * share, through_y = through * y;
      store(grad + c, through);
      store(grad + kChannels + c, zero() - through_y);
      const vf difference = load(sums + kPairLine + c) - load(first + c);
      apart = apart + difference * difference;
      finite = finite + zero() * through_y;
    }
  }
  w.alone(chunk) = !a.mild || !(hsum(apart) == 0 && hsum(finite) == 0);
}

// The gradients of a chunk's keys and values.
template <typename F>
void full_keys(const FullArgs& a, int64_t chunk, int64_t group, float* scratch) {
  const FullWork w(a, chunk, group);
  const int64_t n = w.own.to - w.own.from;
  float *const band = scratch, *const x = band + kFullChunk * kFullChunk;
  float *const k = x + kFullChunk * kPairLine, *const v = k + kFullChunk * kChannels;
  float* const grad = v + kFullChunk * kChannels;  // as x: of values, then of keys
  for (int64_t j = 0; j < n; ++j) {
    w.copy(w.row<F>(a.k, w.own.from + j), k + j * kChannels);
    w.copy(w.row<F>(a.v, w.own.from + j), v + j * kChannels);
  }
  fill(grad, n * kPairLine, 0);
  for (int64_t i = chunk; i <= w.own.last; ++i) {
    const Chunk& queries = a.chunks[i];
    if (w.alone(i)) {
      for (int64_t t = queries.from; t < queries.to; ++t) {
        const float* const bias =
            a.bias + pair_of(a.bias_line, queries, w.own) + (t - queries.from) * a.bias_line;
        const float *const top = w.sums(t) + kPairLine, *const through = w.grad_sums(t);
        for (int64_t j = 0; j < seen_by(t, w.own); ++j) {
          float* const g = grad + j * kPairLine;
          for (int64_t c = 0; c < kChannels; c += VL) {
            const vf e = weight_of(load(k + j * kChannels + c), bias[j], load(top + c));
            const vf of_v = load(through + c);
            const vf of_k = fma(of_v, load(v + j * kChannels + c), load(through + kChannels + c));
            store(g + c, fma(e, of_v, load(g + c)));
            store(g + kChannels + c, fma(e, of_k, load(g + kChannels + c)));
          }
        }
      }
      continue;
    }
    copy_weights(a, queries, w.own, band);
    gemm<false, false>(n, kPairLine, queries.to - queries.from, band, kFullChunk,
                       w.grad_sums(queries.from), kPairLine, x, kPairLine);
    const float* const top = w.sums(queries.from) + kPairLine;
    for (int64_t j = 0; j < n; ++j) {
      float* const g = grad + j * kPairLine;
      for (int64_t c = 0; c < kChannels; c += VL) {
        const vf e = vexp_or_zero(load(k + j * kChannels + c) - load(top + c));
        const vf of_v = load(x + j * kPairLine + c);
        const vf of_k =
            fma(of_v, load(v + j * kChannels + c), load(x + j * kPairLine + kChannels + c));
        store(g + c, fma(e, of_v, load(g + c)));
        store(g + kChannels + c, fma(e, of_k, load(g + kChannels + c)));
      }
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t c = 0; c < kChannels; c += VL) {
      w.put(w.row<F>(a.grad_v, w.own.from + j), c, load(grad + j * kPairLine + c));
      w.put(w.row<F>(a.grad_k, w.own.from + j), c, load(grad + j * kPairLine + kChannels + c));
    }
  }
}

// The gradient of rows `place` to place + kFullChunk of w, of which one chunk of a document has the
// queries. Of a chunk with one exponent it is gathered without e^w, transposed: [keys, kFullChunk].
template <typename F>
void full_bias(const FullArgs& a, int64_t place, float* scratch) {
  float* const x = scratch;
  float* const grads = x + kFullChunk * kPairLine;
  float* const columns = grads + kFullChunk * kPairLine;
  float* const tile = columns + kFullChunk * kPairLine;
  float* const gathered = tile + kFullChunk * kFullChunk;
  int64_t keys_seen = 0;  // of those with one exponent
  for (int64_t i = 0; i < a.chunk_count; ++i) {
    const Chunk& queries = a.chunks[i];
    const int64_t before = queries.place - place, n = queries.to - queries.from;
    if (before < 0 || before >= kFullChunk) continue;
    const int64_t start = a.chunks[queries.first].from, start_place = a.chunks[queries.first].place;
    for (int64_t group = 0; group < a.groups(); ++group) {
      const FullWork w(a, i, group);
      if (w.alone(i)) {
        for (int64_t t = queries.from; t < queries.to; ++t) {
          const int64_t row = queries.place + t - queries.from;
          const float* const bias = a.bias + row * a.bias_line + start_place;
          float* const to = a.grad_bias + row * a.grad_line + start_place;
          const float *const top = w.sums(t) + kPairLine, *const through = w.grad_sums(t);
          for (int64_t s = start; s <= t; ++s) {
            vf sum = zero();
            for (int64_t c = 0; c < w.count; c += VL) {
              const vf e = weight_of(w.get(w.row<F>(a.k, s), c), bias[s - start], load(top + c));
              const vf value = w.get(w.row<F>(a.v, s), c);
              sum = fma(e, fma(load(through + c), value, load(through + kChannels + c)), sum);
            }
            to[s - start] += hsum(sum);
          }
        }
        continue;
      }
      const int64_t end = queries.place + n;
      if (end > keys_seen)
        fill(gathered + keys_seen * kFullChunk, (end - keys_seen) * kFullChunk, 0);
      keys_seen = end > keys_seen ? end : keys_seen;
      fill(grads, kFullChunk * kPairLine, 0);
      std::memcpy(grads + before * kPairLine, w.grad_sums(queries.from),
                  sizeof(float) * static_cast<size_t>(n * kPairLine));
      transpose(kFullChunk, kPairLine, grads, kPairLine, columns, kFullChunk);
      for (int64_t j = queries.first; j <= i; ++j) {
        const Chunk& keys = a.chunks[j];
        make_x<F>(w, keys, w.sums(queries.from) + kPairLine, x);
        gemm<true, true>(keys.to - keys.from, kFullChunk, kPairLine, x, kPairLine, columns,
                         kFullChunk, gathered + keys.place * kFullChunk, kFullChunk);
      }
    }
  }
  for (int64_t from = 0; from < keys_seen; from += kFullChunk) {
    const int64_t keys = keys_seen - from < kFullChunk ? keys_seen - from : kFullChunk;
    fill(gathered + (from + keys) * kFullChunk, (kFullChunk - keys) * kFullChunk, 0);
    transpose(kFullChunk, kFullChunk, gathered + from * kFullChunk, kFullChunk, tile, kFullChunk);
    for (int64_t row = place; row < place + kFullChunk && row < keys_seen; ++row) {
      const float* const weight = a.weight + row * a.weight_line + from;
      const float* const product = tile + (row - place) * kFullChunk;
      float* const to = a.grad_bias + row * a.grad_line + from;
      // A document never has keys after the query.
      const int64_t seen = row - from < keys ? row - from + 1 : keys;
      for (int64_t j = 0; j < seen; ++j) to[j] += weight[j] * product[j];
    }
  }
}

}  // namespace

void HL_KERNEL(aft_full)(const FullArgs& a, int64_t task, float* scratch) {
  (a.type == Type::kBFloat16 ? full_forward<BFloat16> : full_forward<float>)(a, task / a.groups(),
                                                                             task % a.groups(),
                                                                             scratch);
}

void HL_KERNEL(aft_full_sums)(const FullArgs& a, int64_t task, float*) {
  (a.type == Type::kBFloat16 ? full_sums<BFloat16> : full_sums<float>)(a, task / a.groups(),
                                                                       task % a.groups());
}

void HL_KERNEL(aft_full_keys)(const FullArgs& a, int64_t task, float* scratch) {
  (a.type == Type::kBFloat16 ? full_keys<BFloat16> : full_keys<float>)(a, task / a.groups(),
                                                                       task % a.groups(), scratch);
}

void HL_KERNEL(aft_full_bias)(const FullArgs& a, int64_t task, float* scratch) {
  (a.type == Type::kBFloat16 ? full_bias<BFloat16> : full_bias<float>)(a, task * kFullChunk,
                                                                       scratch);
}

}  // namespace headloom::ops::aft_kernel
