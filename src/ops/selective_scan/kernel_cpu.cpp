// The selective scan of one instruction set: compiled once for each, with CPU_CAPABILITY its name.
//
// Channels are the lanes. Blocks go chunk by chunk; inside a chunk the states are the outer loop
// and the steps the inner one, so that a state stays in registers, and two states at once share the
// loads of what does not depend on the state. The backward takes the chunks from the last to the
// first, each computed again from the state kept at its start.
#include "ops/selective_scan/block.h"

namespace headloom::ops::selective_scan_kernel {
namespace {

constexpr float kLog2e = 1.44269504f;

// Rows of P states and a tile.
template <int P>
struct Tile {
  vf v[P][2];

  HL_INLINE Tile() {
    for (int i = 0; i < P; ++i) v[i][0] = v[i][1] = zero();
  }
  HL_INLINE explicit Tile(const float* rows) {
    for (int i = 0; i < P; ++i) {
      for (int j = 0; j < 2; ++j) v[i][j] = load(rows + i * kChannels + j * VL);
    }
  }
  // Of A.
  HL_INLINE Tile(const Args& a, const Block& k, int64_t n, int64_t x) {
    for (int i = 0; i < P; ++i) {
      for (int j = 0; j < 2; ++j) {
        v[i][j] = load_some(k.row(a, a.A, n + i) + x + j * VL, k.width - x - j * VL);
      }
    }
  }
  HL_INLINE void put(float* rows) const {
    for (int i = 0; i < P; ++i) {
      for (int j = 0; j < 2; ++j) store(rows + i * kChannels + j * VL, v[i][j]);
    }
  }
  HL_INLINE void add_to(float* rows) const {
    for (int i = 0; i < P; ++i) {
      for (int j = 0; j < 2; ++j) {
        float* to = rows + i * kChannels + j * VL;
        store(to, load(to) + v[i][j]);
      }
    }
  }
};

// The recurrence of states n .. n + P - 1 over a chunk and its share of y. The backward also keeps
// what it needs of each step, and sums the gradient of c.
template <int P, bool BACKWARD, bool B_CONSTANT, bool C_CONSTANT>
void advance(const Args& a, const Block& k, Chunk& s, const Carried& carried, int64_t n,
             int64_t x) {
  const int64_t at = n * kChannels + x;
  Tile<P> h(carried.h + at), rate(a, k, n, x);
  const Factor<B_CONSTANT> b[2] = {{a, k, a.b, n, x, s.start}, {a, k, a.b, n + P - 1, x, s.start}};
  const Factor<C_CONSTANT> c[2] = {{a, k, a.c, n, x, s.start}, {a, k, a.c, n + P - 1, x, s.start}};
  Tile<P> grad;
  for (int i = 0; i < P; ++i) {
    for (int v = 0; v < 2; ++v) rate.v[i][v] = rate.v[i][v] * bcast(kLog2e);
  }
  for (int from = 0; from < s.steps;) {
    if (s.reset >> from & 1) {
      for (int i = 0; i < P; ++i) h.v[i][0] = h.v[i][1] = zero();
    }
    int to = from + 1;
    while (to < s.steps && !(s.reset >> to & 1)) ++to;
    for (int t = from; t < to; ++t) {
      vf sum_c[P];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const vf dt = load(s.dt.at[t] + x + v * VL), w = load(s.w.at[t] + x + v * VL);
        vf y = load(s.y.at[t] + x + v * VL);
#pragma GCC unroll 2
        for (int i = 0; i < P; ++i) {
          const vf decay = vexp2(dt * rate.v[i][v]);
          const vf left = decay * h.v[i][v];
          h.v[i][v] = fma(w, b[i].at(t, v), left);
          y = fma(c[i].at(t, v), h.v[i][v], y);
          if constexpr (BACKWARD) {
            store(s.decay[i][t] + v * VL, decay);
            store(s.left[i][t] + v * VL, left);
            const vf gy = load(s.gy.at[t] + x + v * VL);
            if constexpr (C_CONSTANT) {
              grad.v[i][v] = fma(gy, h.v[i][v], grad.v[i][v]);
            } else {
              sum_c[i] = v == 0 ? gy * h.v[i][v] : fma(gy, h.v[i][v], sum_c[i]);
            }
          }
        }
        store(s.y.at[t] + x + v * VL, y);
      }
      if constexpr (BACKWARD && !C_CONSTANT) {
        for (int i = 0; i < P; ++i) {
          store(s.sum_c[i][t], x == 0 ? sum_c[i] : sum_c[i] + load(s.sum_c[i][t]));
        }
      }
    }
    from = to;
  }
  h.put(carried.h + at);
  if constexpr (BACKWARD && C_CONSTANT) grad.add_to(carried.grad_c + at);
}

// Backward through the same: grad_h is what reaches the states from later chunks.
template <int P, bool B_CONSTANT, bool C_CONSTANT>
void retreat(const Args& a, const Block& k, Chunk& s, const Carried& carried, int64_t n,
             int64_t x) {
  const int64_t at = n * kChannels + x;
  Tile<P> g(carried.grad_h + at), sum_A(carried.grad_A + at);
  const Tile<P> rate(a, k, n, x);
  const Factor<B_CONSTANT> b[2] = {{a, k, a.b, n, x, s.start}, {a, k, a.b, n + P - 1, x, s.start}};
  const Factor<C_CONSTANT> c[2] = {{a, k, a.c, n, x, s.start}, {a, k, a.c, n + P - 1, x, s.start}};
  Tile<P> grad;
  for (int to = s.steps; to > 0;) {
    int from = to - 1;
    while (from > 0 && !(s.reset >> from & 1)) --from;
    for (int t = to - 1; t >= from; --t) {
      vf sum_b[P];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const vf dt = load(s.dt.at[t] + x + v * VL), w = load(s.w.at[t] + x + v * VL);
        const vf gy = load(s.gy.at[t] + x + v * VL);
        vf gw = load(s.gw.at[t] + x + v * VL), gdt = load(s.gdt.at[t] + x + v * VL);
#pragma GCC unroll 2
        for (int i = 0; i < P; ++i) {
          const vf gh = fma(gy, c[i].at(t, v), g.v[i][v]);
          gw = fma(gh, b[i].at(t, v), gw);
          const vf inside = gh * load(s.left[i][t] + v * VL);  // gradient of dt A
          gdt = fma(inside, rate.v[i][v], gdt);
          sum_A.v[i][v] = fma(inside, dt, sum_A.v[i][v]);
          if constexpr (B_CONSTANT) {
            grad.v[i][v] = fma(gh, w, grad.v[i][v]);
          } else {
            sum_b[i] = v == 0 ? gh * w : fma(gh, w, sum_b[i]);
          }
          g.v[i][v] = gh * load(s.decay[i][t] + v * VL);
        }
        store(s.gw.at[t] + x + v * VL, gw);
        store(s.gdt.at[t] + x + v * VL, gdt);
      }
      if constexpr (!B_CONSTANT) {
        for (int i = 0; i < P; ++i) {
          store(s.sum_b[i][t], x == 0 ? sum_b[i] : sum_b[i] + load(s.sum_b[i][t]));
        }
      }
    }
    if (s.reset >> from & 1) {
      for (int i = 0; i < P; ++i) g.v[i][0] = g.v[i][1] = zero();
    }
    to = from;
  }
  g.put(carried.grad_h + at);
  sum_A.put(carried.grad_A + at);
  if constexpr (B_CONSTANT) grad.add_to(carried.grad_b + at);
}

// Adds the sums over the channels of a chunk to the gradient of b or c of state n.
HL_INLINE void add_sums(const Args& a, const Block& k, const Chunk& s,
                        const float (&sums)[kSteps][VL], int64_t n, int64_t worker, float* grad) {
  float* to = grad + worker * a.B * a.groups * a.states * a.L + k.varying(a, n) + s.start;
  for (int t = 0; t < s.steps; t += VL) {
    const int64_t count = s.steps - t;
    store_some(to + t, load_some(to + t, count) + row_sums(sums[t]), count);
  }
}

// Gradients of the inputs of a chunk, once all states are through.
template <typename T>
void store_rows(const Args& a, const Block& k, const Chunk& s, const Carried& carried) {
  for (int64_t x = 0; x < k.width; x += VL) {
    const int64_t count = k.width - x;
    const vf skip = a.D ? load_some(a.D + k.first + x, count) : zero();
    vf bias = load(carried.grad_bias + x), D = load(carried.grad_D + x);
    for (int t = 0; t < s.steps; ++t) {
      const vf u = load(s.u.at[t] + x), gy = load(s.gy.at[t] + x), gw = load(s.gw.at[t] + x);
      const vf gdt = fma(gw, u, load(s.gdt.at[t] + x)) * load(s.slope.at[t] + x);
      const int64_t row = s.start + t;
      store_some(at_row<T>(a.grad_u, a, k, row) + x, fma(gw, load(s.dt.at[t] + x), gy * skip),
                 count);
      store_some(at_row<T>(a.grad_delta, a, k, row) + x, gdt, count);
      if (a.z.data) {
        const vf gz = load(s.gate.at[t] + x) * load(s.y.at[t] + x);
        store_some(at_row<T>(a.grad_z, a, k, row) + x, gz, count);
      }
      bias = bias + gdt;
      D = fma(gy, u, D);
    }
    store(carried.grad_bias + x, bias);
    store(carried.grad_D + x, D);
  }
}

int64_t chunk_count(const Args& a) { return (a.L + kSteps - 1) / kSteps; }

// [N, channels] of a batch row.
template <typename P>
P of_batch(const Args& a, const Block& k, P data) {
  return data ? data + k.batch * a.states * a.channels : nullptr;
}
float* kept_state(const Args& a, const Block& k, int64_t chunk) {
  return a.kept + (k.batch * chunk_count(a) + chunk) * a.states * a.channels;
}

template <typename T, bool B_CONSTANT, bool C_CONSTANT>
void forward_chunk(const Args& a, const Block& k, Chunk& s, const Carried& carried, int64_t chunk) {
  if (chunk == 0) read_rows(a, k, of_batch(a, k, a.state), a.states, carried.h);
  s.load_rows<T, false>(a, k, chunk * kSteps);
  if (a.kept) write_rows(a, k, carried.h, a.states, kept_state(a, k, chunk));
  for (int64_t n = 0; n < a.states; n += 2) {
    prefetch_share<T>(a, k, s.start, s.steps, n);
    for (int64_t x = 0; x < k.width; x += kTile) {
      if (n + 1 < a.states) {
        advance<2, false, B_CONSTANT, C_CONSTANT>(a, k, s, carried, n, x);
      } else {
        advance<1, false, B_CONSTANT, C_CONSTANT>(a, k, s, carried, n, x);
      }
    }
  }
  for (int t = 0; t < s.steps; ++t) {
    T* out = at_row<T>(a.out, a, k, s.start + t);
    for (int64_t x = 0; x < k.width; x += VL) {
      vf y = load(s.y.at[t] + x);
      if (a.z.data) {
        const vf z = load_some(at_row<T>(a.z, k, s.start + t) + x, k.width - x);
        y = y * z * vsigmoid(z);
      }
      store_some(out + x, y, k.width - x);
    }
  }
  if (chunk + 1 == chunk_count(a)) {
    write_rows(a, k, carried.h, a.states, of_batch(a, k, a.last));
  }
}

template <typename T, bool B_CONSTANT, bool C_CONSTANT>
void backward_chunk(const Args& a, const Block& k, Chunk& s, const Carried& carried, int64_t chunk,
                    int64_t worker) {
  if (chunk + 1 == chunk_count(a)) {
    read_rows(a, k, of_batch(a, k, a.grad_last), a.states, carried.grad_h);
    read_rows(a, k, nullptr, 3 * a.states + 2, carried.grad_A);  // and all that follow
  }
  s.load_rows<T, true>(a, k, chunk * kSteps);
  read_rows(a, k, kept_state(a, k, chunk), a.states, carried.h);
  for (int64_t n = 0; n < a.states; n += 2) {
    const bool two = n + 1 < a.states;
    prefetch_share<T>(a, k, s.start, s.steps, n);
    for (int64_t x = 0; x < k.width; x += kTile) {
      if (two) {
        advance<2, true, B_CONSTANT, C_CONSTANT>(a, k, s, carried, n, x);
        retreat<2, B_CONSTANT, C_CONSTANT>(a, k, s, carried, n, x);
      } else {
        advance<1, true, B_CONSTANT, C_CONSTANT>(a, k, s, carried, n, x);
        retreat<1, B_CONSTANT, C_CONSTANT>(a, k, s, carried, n, x);
      }
    }
    for (int i = 0; i < (two ? 2 : 1); ++i) {
      if (!B_CONSTANT) add_sums(a, k, s, s.sum_b[i], n + i, worker, a.grad_b);
      if (!C_CONSTANT) add_sums(a, k, s, s.sum_c[i], n + i, worker, a.grad_c);
    }
  }
  store_rows<T>(a, k, s, carried);
  if (chunk > 0) return;
  write_rows(a, k, carried.grad_h, a.states, of_batch(a, k, a.grad_state));
  write_rows(a, k, carried.grad_A, a.states, of_batch(a, k, a.grad_A));
  if (B_CONSTANT) write_rows(a, k, carried.grad_b, a.states, of_batch(a, k, a.grad_b));
  if (C_CONSTANT) write_rows(a, k, carried.grad_c, a.states, of_batch(a, k, a.grad_c));
  write_rows(a, k, carried.grad_bias, 1, a.grad_bias + k.batch * a.channels);
  write_rows(a, k, carried.grad_D, 1, a.grad_D + k.batch * a.channels);
}

template <typename T, bool B_CONSTANT, bool C_CONSTANT>
void run(const Args& a, const Task& task) {
  Chunk s;
  const int64_t chunks = chunk_count(a), together = blocks_together(a);
  for (int64_t first = task.begin; first < task.end; first += together) {
    const int64_t last = first + together < task.end ? first + together : task.end;
    for (int64_t i = 0; i < chunks; ++i) {
      for (int64_t block = first; block < last; ++block) {
        const Block k(a, block);
        const Carried carried(a,
                              task.scratch + (block - first) * selective_scan_kernel::carried(a));
        if (task.backward) {
          backward_chunk<T, B_CONSTANT, C_CONSTANT>(a, k, s, carried, chunks - 1 - i, task.worker);
        } else {
          forward_chunk<T, B_CONSTANT, C_CONSTANT>(a, k, s, carried, i);
        }
      }
    }
  }
}

template <typename T>
void run(const Args& a, const Task& task) {
  const auto f = a.constant_b ? (a.constant_c ? run<T, true, true> : run<T, true, false>)
                              : (a.constant_c ? run<T, false, true> : run<T, false, false>);
  f(a, task);
}

}  // namespace

void HL_KERNEL(run)(const Args& a, const Task& task) {
  a.type == Type::kBFloat16 ? run<BFloat16>(a, task) : run<float>(a, task);
}

}  // namespace headloom::ops::selective_scan_kernel
