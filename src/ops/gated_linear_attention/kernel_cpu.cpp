// The kernels of gated linear attention of one instruction set: compiled once for each, with
// CPU_CAPABILITY its name.
//
// The columns of the state are the lanes. Backward, with G_t the gradient of S_t:
//
//   G_t = q_t^T do_t + diag(alpha_{t+1}) G_{t+1}
//   dq_t = S_t do_t,   dk_t = G_t v_t,   dv_t = k_t G_t,
//   d log_decay_t = the row sums of (diag(alpha_t) S_{t-1}) * G_t
#include "ops/gated_linear_attention/kernel.h"

#include "ops/kernel/functions.h"
#include "ops/kernel/prefetch.h"

namespace headloom::ops::gated_linear_attention_kernel {
namespace {

// The tile that stays in registers: rows of the state, and vectors of the forward's and of the
// backward's.
constexpr int kRows = 4;
constexpr int kForward = VL == 16 ? 4 : 2;
constexpr int kBackward = 2;

// One head of one batch element.
struct Head {
  const Args& a;
  int64_t b, h;

  Head(const Args& args, int64_t item) : a(args), b(item / args.H), h(item % args.H) {}

  template <typename T>
  const T* row(const HeadSequence& x, int64_t t) const {
    return x.row<T>(b, t, h);
  }
  // Row t of a contiguous tensor.
  template <typename T>
  T* row(void* data, int64_t width, int64_t t) const {
    return static_cast<T*>(data) + ((b * a.T + t) * a.H + h) * width;
  }
  template <typename P>
  P state(P all) const {
    return all ? all + (b * a.H + h) * a.D * a.E : nullptr;
  }
  float* kept(int64_t group) const {
    return a.kept + ((b * a.H + h) * group_count(a.T) + group) * a.D * a.E;
  }
};

template <typename T>
HL_INLINE void read_row(const T* from, int64_t width, float* to) {
  for (int64_t x = 0; x < padded(width); x += VL) store(to + x, load_some(from + x, width - x));
}
template <typename T>
HL_INLINE void write_row(const float* from, int64_t width, T* to) {
  for (int64_t x = 0; x < width; x += VL) store_some(to + x, load(from + x), width - x);
}

HL_INLINE void clear(float* rows, int64_t count) {
  for (int64_t i = 0; i < count; i += VL) store(rows + i, zero());
}

// A state from [D, E], null for zeros, and back.
void read_state(const Args& a, const float* from, float* to) {
  const int64_t size = line(a.E);
  clear(to, padded(a.D) * size);
  for (int64_t d = 0; from && d < a.D; ++d) read_row(from + d * a.E, a.E, to + d * size);
}
void write_state(const Args& a, const float* from, float* to) {
  for (int64_t d = 0; d < a.D; ++d) write_row(from + d * line(a.E), a.E, to + d * a.E);
}

struct Chunk {
  const int64_t d_line, e_line;
  float *q, *k, *decay, *grad_q, *grad_k, *grad_decay;  // [kSteps, d_line]
  float *v, *out, *grad_v;                              // [kSteps, e_line]; out: or its gradient
  float *grad_state, *state;  // [D, e_line]; in the backward those of a group follow the state
  int64_t start = 0;
  int steps = 0;
  uint32_t reset = 0;  // steps whose state starts anew, as bits

  Chunk(const Args& a, float* scratch) : d_line(line(a.D)), e_line(line(a.E)) {
    const auto take = [&](int64_t floats) {
      float* const taken = scratch;
      scratch += floats;
      return taken;
    };
    q = take(kSteps * d_line);
    k = take(kSteps * d_line);
    decay = take(kSteps * d_line);
    grad_q = take(kSteps * d_line);
    grad_k = take(kSteps * d_line);
    grad_decay = take(kSteps * d_line);
    v = take(kSteps * e_line);
    out = take(kSteps * e_line);
    grad_v = take(kSteps * e_line);
    grad_state = take(padded(a.D) * e_line);
    state = scratch;
  }

  template <typename T>
  void read(const Head& head, int64_t chunk) {
    const Args& a = head.a;
    start = chunk * kSteps;
    steps = static_cast<int>(a.T - start < kSteps ? a.T - start : kSteps);
    reset = 0;
    for (int t = 0; t < steps; ++t) {
      const int64_t at = start + t;
      const int64_t* id = a.documents ? a.documents + head.b * a.T + at : nullptr;
      const bool anew = id && at > 0 && id[0] != id[-1];
      reset |= uint32_t{anew} << t;
      read_row(head.row<T>(a.q, at), a.D, q + t * d_line);
      read_row(head.row<T>(a.k, at), a.D, k + t * d_line);
      read_row(head.row<T>(a.v, at), a.E, v + t * e_line);
      float* const row = decay + t * d_line;
      if (a.decay_type == Type::kBFloat16) {
        read_row(head.row<BFloat16>(a.log_decay, at), a.D, row);
      } else {
        read_row(head.row<float>(a.log_decay, at), a.D, row);
      }
      // Where the state starts anew nothing is left, whatever the decay.
      for (int64_t x = 0; x < padded(a.D); x += VL) {
        store(row + x, anew ? zero() : vexp_or_zero(load(row + x)));
      }
    }
  }
};

// While a chunk is computed, tile by tile, asks for the rows of another: they lie pages apart,
// where no prefetcher of the machine follows.
template <typename T>
struct Ahead {
  const Head& head;
  const int64_t from, tiles;
  int64_t done = 0, asked = 0;

  Ahead(const Head& of, int64_t chunk, int64_t width)
      : head(of),
        from(chunk * kSteps),
        tiles((of.a.D + kRows - 1) / kRows * ((of.a.E + width - 1) / width)) {}

  HL_INLINE void tile() {
    const Args& a = head.a;
    for (const int64_t until = kSteps * ++done / tiles; asked < until; ++asked) {
      const int64_t t = from + asked;
      if (t < 0 || t >= a.T) continue;
      prefetch_row<3>(head.row<T>(a.q, t), a.D);
      prefetch_row<3>(head.row<T>(a.k, t), a.D);
      prefetch_row<3>(head.row<T>(a.v, t), a.E);
      if (a.grad_out.data) prefetch_row<3>(head.row<T>(a.grad_out, t), a.E);
      if (a.decay_type == Type::kBFloat16) {
        prefetch_row<3>(head.row<BFloat16>(a.log_decay, t), a.D);
      } else {
        prefetch_row<3>(head.row<float>(a.log_decay, t), a.D);
      }
    }
  }
};

// kRows rows and V vectors of a state or of its gradient.
template <int V>
struct Block {
  vf v[kRows][V];

  HL_INLINE Block(const float* from, int64_t line) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) v[i][j] = load(from + i * line + j * VL);
    }
  }
  HL_INLINE void put(float* to, int64_t line) const {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) store(to + i * line + j * VL, v[i][j]);
    }
  }
  HL_INLINE void clear() {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) v[i][j] = zero();
    }
  }
};

// Rows from d and columns from e of the state through a chunk, and their share of the output.
template <int V, bool OUTPUT>
void advance(const Chunk& s, const float* before, float* after, int64_t d, int64_t e) {
  const int64_t d_line = s.d_line, e_line = s.e_line;
  const float *q = s.q + d, *k = s.k + d, *decay = s.decay + d, *v = s.v + e;
  float* out = s.out + e;
  const int steps = s.steps;
  const uint32_t reset = s.reset;
  Block<V> state(before + d * e_line + e, e_line);
  for (int t = 0; t < steps; ++t) {
    if (reset >> t & 1) state.clear();
    vf value[V], sum[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) {
      value[j] = load(v + j * VL);
      if constexpr (OUTPUT) sum[j] = load(out + j * VL);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) {
        state.v[i][j] = fma(bcast(k[i]), value[j], bcast(decay[i]) * state.v[i][j]);
        if constexpr (OUTPUT) sum[j] = fma(bcast(q[i]), state.v[i][j], sum[j]);
      }
    }
    if constexpr (OUTPUT) {
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) store(out + j * VL, sum[j]);
    }
    q += d_line;
    k += d_line;
    decay += d_line;
    v += e_line;
    out += e_line;
  }
  state.put(after + d * e_line + e, e_line);
}

// The state through the chunk that was read, and the output.
template <bool OUTPUT, typename T>
void advance_all(const Head& head, const Chunk& s, const float* before, float* after,
                 int64_t next) {
  const Args& a = head.a;
  Ahead<T> ahead(head, next, kForward * VL);
  for (int64_t e = 0; e < a.E;) {
    const int64_t vectors = (a.E - e + VL - 1) / VL;
    const int width = vectors >= kForward ? kForward : vectors >= 2 ? 2 : 1;
    const auto run = width == kForward ? advance<kForward, OUTPUT>
                     : width == 2      ? advance<2, OUTPUT>
                                       : advance<1, OUTPUT>;
    for (int64_t d = 0; d < a.D; d += kRows) {
      run(s, before, after, d, e);
      ahead.tile();
    }
    e += width * VL;
  }
}

int64_t chunk_count(const Args& a) { return (a.T + kSteps - 1) / kSteps; }

template <typename T>
void forward(const Head& head, Chunk& s) {
  const Args& a = head.a;
  read_state(a, head.state(a.state), s.state);
  for (int64_t chunk = 0; chunk < chunk_count(a); ++chunk) {
    s.read<T>(head, chunk);
    if (a.kept && chunk % kGroup == 0) write_state(a, s.state, head.kept(chunk / kGroup));
    clear(s.out, s.steps * s.e_line);
    advance_all<true, T>(head, s, s.state, s.state, chunk + 1);
    for (int t = 0; t < s.steps; ++t) {
      write_row(s.out + t * s.e_line, a.E, head.row<T>(a.out, a.E, s.start + t));
    }
  }
  write_state(a, s.state, head.state(a.last));
}

// What the backward holds of kRows rows of the state: for the newest tile what each step leaves of
// the state before it, and sums over the columns so far, lane by lane.
struct Tile {
  alignas(64) float left[kSteps][kRows][kBackward][VL];
  alignas(64) float grad_q[kSteps][kRows][VL];
  alignas(64) float grad_k[kSteps][kRows][VL];
  alignas(64) float grad_decay[kSteps][kRows][VL];
};

// A tile through a chunk once more, for what is left of it and the gradient of q.
template <int V, bool FIRST>
HL_INLINE void recompute(const Chunk& s, const float* before, Tile& tile, int64_t d, int64_t e) {
  const int64_t d_line = s.d_line, e_line = s.e_line;
  const float *k = s.k + d, *decay = s.decay + d, *v = s.v + e, *out = s.out + e;
  const int steps = s.steps;
  const uint32_t reset = s.reset;
  Block<V> state(before + d * e_line + e, e_line);
  for (int t = 0; t < steps; ++t) {
    if (reset >> t & 1) state.clear();
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      vf grad_q = FIRST ? zero() : load(tile.grad_q[t][i]);
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) {
        const vf left = bcast(decay[i]) * state.v[i][j];
        store(tile.left[t][i][j], left);
        state.v[i][j] = fma(bcast(k[i]), load(v + j * VL), left);
        grad_q = fma(state.v[i][j], load(out + j * VL), grad_q);
      }
      store(tile.grad_q[t][i], grad_q);
    }
    k += d_line;
    decay += d_line;
    v += e_line;
    out += e_line;
  }
}

// Backward through the same; what reaches the state from later chunks is in grad_state.
template <int V, bool FIRST>
HL_INLINE void retreat(const Chunk& s, Tile& tile, int64_t d, int64_t e) {
  const int64_t d_line = s.d_line, e_line = s.e_line, last = s.steps - 1;
  const float *q = s.q + last * d_line + d, *k = s.k + last * d_line + d,
              *decay = s.decay + last * d_line + d, *v = s.v + last * e_line + e,
              *out = s.out + last * e_line + e;
  float *grad_v = s.grad_v + last * e_line + e, *grad_state = s.grad_state + d * e_line + e;
  const uint32_t reset = s.reset;
  Block<V> grad(grad_state, e_line);
  for (int64_t t = last; t >= 0; --t) {
    vf sum_v[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) sum_v[j] = load(grad_v + j * VL);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      vf grad_k = FIRST ? zero() : load(tile.grad_k[t][i]);
      vf grad_decay = FIRST ? zero() : load(tile.grad_decay[t][i]);
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) {
        const vf g = fma(bcast(q[i]), load(out + j * VL), grad.v[i][j]);
        grad_k = fma(g, load(v + j * VL), grad_k);
        sum_v[j] = fma(bcast(k[i]), g, sum_v[j]);
        grad_decay = fma(g, load(tile.left[t][i][j]), grad_decay);
        grad.v[i][j] = bcast(decay[i]) * g;
      }
      store(tile.grad_k[t][i], grad_k);
      store(tile.grad_decay[t][i], grad_decay);
    }
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) store(grad_v + j * VL, sum_v[j]);
    if (reset >> t & 1) grad.clear();
    q -= d_line;
    k -= d_line;
    decay -= d_line;
    v -= e_line;
    out -= e_line;
    grad_v -= e_line;
  }
  grad.put(grad_state, e_line);
}

template <int V, bool FIRST>
void turn(const Chunk& s, const float* before, Tile& tile, int64_t d, int64_t e) {
  recompute<V, FIRST>(s, before, tile, d, e);
  retreat<V, FIRST>(s, tile, d, e);
}

// Columns d .. d + kRows - 1 of rows in scratch: sums over the lanes. A vector of sums may be those
// of steps after the last; there is room for them.
HL_INLINE void add_up(const Chunk& s, const float (&lanes)[kSteps][kRows][VL], int64_t d,
                      float* to) {
  constexpr int kTogether = VL / kRows;
  for (int t = 0; t < s.steps; t += kTogether) {
    float sums[VL];
    store(sums, row_sums(lanes[t][0]));
    for (int i = 0; i < kTogether; ++i) {
      std::memcpy(to + (t + i) * s.d_line + d, sums + i * kRows, kRows * sizeof(float));
    }
  }
}

// The gradients of the chunk that was read; `before` is the state before it, `next` the chunk that
// is read after it.
template <typename T>
void backward_chunk(const Head& head, Chunk& s, Tile& tile, const float* before, int64_t next) {
  const Args& a = head.a;
  for (int t = 0; t < s.steps; ++t) {
    read_row(head.row<T>(a.grad_out, s.start + t), a.E, s.out + t * s.e_line);
  }
  clear(s.grad_v, s.steps * s.e_line);
  Ahead<T> ahead(head, next, kBackward * VL);
  for (int64_t d = 0; d < a.D; d += kRows) {
    for (int64_t e = 0; e < a.E; e += kBackward * VL) {
      const auto run = a.E - e > VL ? (e == 0 ? turn<kBackward, true> : turn<kBackward, false>)
                                    : (e == 0 ? turn<1, true> : turn<1, false>);
      run(s, before, tile, d, e);
      ahead.tile();
    }
    add_up(s, tile.grad_q, d, s.grad_q);
    add_up(s, tile.grad_k, d, s.grad_k);
    add_up(s, tile.grad_decay, d, s.grad_decay);
  }
  for (int t = 0; t < s.steps; ++t) {
    const int64_t at = s.start + t, row = t * s.d_line;
    // Here the decay decays nothing; the product with a gradient of NaN would not be zero.
    if (s.reset >> t & 1) clear(s.grad_decay + row, padded(a.D));
    write_row(s.grad_q + row, a.D, head.row<T>(a.grad_q, a.D, at));
    write_row(s.grad_k + row, a.D, head.row<T>(a.grad_k, a.D, at));
    write_row(s.grad_decay + row, a.D, head.row<float>(a.grad_log_decay, a.D, at));
    write_row(s.grad_v + t * s.e_line, a.E, head.row<T>(a.grad_v, a.E, at));
  }
}

template <typename T>
void backward(const Head& head, Chunk& s, Tile& tile) {
  const Args& a = head.a;
  const int64_t size = padded(a.D) * s.e_line;
  read_state(a, head.state(a.grad_last), s.grad_state);
  for (int64_t group = group_count(a.T) - 1; group >= 0; --group) {
    const int64_t first = group * kGroup;
    const int64_t end = first + kGroup < chunk_count(a) ? first + kGroup : chunk_count(a);
    read_state(a, head.kept(group), s.state);
    float* before = s.state;
    for (int64_t chunk = first; chunk + 1 < end; ++chunk) {
      s.read<T>(head, chunk);
      advance_all<false, T>(head, s, before, before + size, chunk + 1);
      before += size;
    }
    for (int64_t chunk = end - 1; chunk >= first; --chunk) {
      s.read<T>(head, chunk);
      backward_chunk<T>(head, s, tile, before, chunk > first ? chunk - 1 : first - kGroup);
      before -= size;
    }
  }
  if (a.grad_state) write_state(a, s.grad_state, head.state(a.grad_state));
}

template <typename T>
void run(const Args& a, const Task& task) {
  Chunk s(a, task.scratch);
  Tile tile;
  for (int64_t item = task.begin; item < task.end; ++item) {
    const Head head(a, item);
    if (task.backward) {
      backward<T>(head, s, tile);
    } else {
      forward<T>(head, s);
    }
  }
}

}  // namespace

void HL_KERNEL(run)(const Args& a, const Task& task) {
  a.type == Type::kBFloat16 ? run<BFloat16>(a, task) : run<float>(a, task);
}

}  // namespace headloom::ops::gated_linear_attention_kernel
