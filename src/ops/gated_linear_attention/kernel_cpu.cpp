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
  const T* row(const Rows& rows, int64_t t) const {
    return static_cast<const T*>(rows.data) + b * rows.batch + t * rows.position + h * rows.head;
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
  int64_t chunks() const { return (a.T + kSteps - 1) / kSteps; }
  float* kept(int64_t chunk) const {
    return a.kept + ((b * a.H + h) * chunks() + chunk) * a.D * a.E;
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
  float *state, *grad_state;                            // [D, e_line]
  int64_t start = 0;
  int steps = 0;
  uint64_t reset = 0;  // steps whose state starts anew, as bits

  Chunk(const Args& a, float* scratch) : d_line(line(a.D)), e_line(line(a.E)) {
    const auto take = [&](int64_t floats) {
      float* const taken = scratch;
      scratch += floats;
      return taken;
    };
    const int64_t rows = chunk_rows(a);
    q = take(rows * d_line);
    k = take(rows * d_line);
    decay = take(rows * d_line);
    grad_q = take(rows * d_line);
    grad_k = take(rows * d_line);
    grad_decay = take(rows * d_line);
    v = take(rows * e_line);
    out = take(rows * e_line);
    grad_v = take(rows * e_line);
    state = take(padded(a.D) * e_line);
    grad_state = take(padded(a.D) * e_line);
  }
  bool resets(int t) const { return reset >> t & 1; }

  template <typename T>
  void read(const Head& head, int64_t chunk) {
    const Args& a = head.a;
    start = chunk * kSteps;
    steps = static_cast<int>(a.T - start < kSteps ? a.T - start : kSteps);
    reset = 0;
    for (int t = 0; t < steps; ++t) {
      const int64_t at = start + t;
      const int64_t* id = a.documents ? a.documents + head.b * a.T + at : nullptr;
      if (id && at > 0 && id[0] != id[-1]) reset |= uint64_t{1} << t;
      read_row(head.row<T>(a.q, at), a.D, q + t * d_line);
      read_row(head.row<T>(a.k, at), a.D, k + t * d_line);
      read_row(head.row<T>(a.v, at), a.E, v + t * e_line);
      if (a.decay_type == Type::kBFloat16) {
        read_row(head.row<BFloat16>(a.log_decay, at), a.D, decay + t * d_line);
      } else {
        read_row(head.row<float>(a.log_decay, at), a.D, decay + t * d_line);
      }
      // Where the state starts anew nothing is left, whatever the decay.
      for (int64_t x = 0; x < padded(a.D); x += VL) {
        float* const row = decay + t * d_line + x;
        store(row, resets(t) ? zero() : vexp_or_zero(load(row)));
      }
    }
  }
};

// kRows rows from d and V vectors from e of the state through a chunk, and their share of the
// output.
template <int V>
void advance(const Chunk& s, int64_t d, int64_t e) {
  vf state[kRows][V];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < V; ++j) state[i][j] = load(s.state + (d + i) * s.e_line + e + j * VL);
  }
  for (int t = 0; t < s.steps; ++t) {
    if (s.resets(t)) {
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < V; ++j) state[i][j] = zero();
      }
    }
    const int64_t row = t * s.d_line + d, column = t * s.e_line + e;
    vf v[V], out[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) {
      v[j] = load(s.v + column + j * VL);
      out[j] = load(s.out + column + j * VL);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const vf decay = bcast(s.decay[row + i]), k = bcast(s.k[row + i]), q = bcast(s.q[row + i]);
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) {
        state[i][j] = fma(k, v[j], decay * state[i][j]);
        out[j] = fma(q, state[i][j], out[j]);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) store(s.out + column + j * VL, out[j]);
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < V; ++j) store(s.state + (d + i) * s.e_line + e + j * VL, state[i][j]);
  }
}

template <typename T>
void forward(const Head& head, Chunk& s) {
  const Args& a = head.a;
  read_state(a, head.state(a.state), s.state);
  for (int64_t chunk = 0; chunk < head.chunks(); ++chunk) {
    s.read<T>(head, chunk);
    if (a.kept) write_state(a, s.state, head.kept(chunk));
    clear(s.out, s.steps * s.e_line);
    for (int64_t e = 0; e < a.E;) {
      const int64_t vectors = (a.E - e + VL - 1) / VL;
      const int width = vectors >= kForward ? kForward : vectors >= 2 ? 2 : 1;
      const auto run = width == kForward ? advance<kForward> : width == 2 ? advance<2> : advance<1>;
      for (int64_t d = 0; d < a.D; d += kRows) run(s, d, e);
      e += width * VL;
    }
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

HL_INLINE void add(float* to, vf value, bool first) { store(to, first ? value : value + load(to)); }

// A tile through a chunk once more, for what is left of it and the gradient of q.
template <int V>
void recompute(const Chunk& s, Tile& tile, int64_t d, int64_t e) {
  vf state[kRows][V];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < V; ++j) state[i][j] = load(s.state + (d + i) * s.e_line + e + j * VL);
  }
  for (int t = 0; t < s.steps; ++t) {
    if (s.resets(t)) {
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < V; ++j) state[i][j] = zero();
      }
    }
    const int64_t row = t * s.d_line + d, column = t * s.e_line + e;
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const vf decay = bcast(s.decay[row + i]), k = bcast(s.k[row + i]);
      vf grad_q = zero();
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) {
        const vf left = decay * state[i][j];
        store(tile.left[t][i][j], left);
        state[i][j] = fma(k, load(s.v + column + j * VL), left);
        grad_q = fma(state[i][j], load(s.out + column + j * VL), grad_q);
      }
      add(tile.grad_q[t][i], grad_q, e == 0);
    }
  }
}

// Backward through the same; what reaches the state from later chunks is in grad_state.
template <int V>
void retreat(const Chunk& s, Tile& tile, int64_t d, int64_t e) {
  vf grad[kRows][V];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < V; ++j) grad[i][j] = load(s.grad_state + (d + i) * s.e_line + e + j * VL);
  }
  for (int t = s.steps - 1; t >= 0; --t) {
    const int64_t row = t * s.d_line + d, column = t * s.e_line + e;
    vf grad_v[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) grad_v[j] = load(s.grad_v + column + j * VL);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const vf decay = bcast(s.decay[row + i]), k = bcast(s.k[row + i]), q = bcast(s.q[row + i]);
      vf grad_k = zero(), grad_decay = zero();
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) {
        const vf g = fma(q, load(s.out + column + j * VL), grad[i][j]);
        grad_k = fma(g, load(s.v + column + j * VL), grad_k);
        grad_v[j] = fma(k, g, grad_v[j]);
        grad_decay = fma(g, load(tile.left[t][i][j]), grad_decay);
        grad[i][j] = decay * g;
      }
      add(tile.grad_k[t][i], grad_k, e == 0);
      add(tile.grad_decay[t][i], grad_decay, e == 0);
    }
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) store(s.grad_v + column + j * VL, grad_v[j]);
    if (s.resets(t)) {
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < V; ++j) grad[i][j] = zero();
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < V; ++j) store(s.grad_state + (d + i) * s.e_line + e + j * VL, grad[i][j]);
  }
}

// Columns d .. d + kRows - 1 of rows in scratch: sums over the lanes. A vector of sums may be those
// of steps behind the last; there is room for them.
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

template <typename T>
void backward(const Head& head, Chunk& s, Tile& tile) {
  const Args& a = head.a;
  read_state(a, head.state(a.grad_last), s.grad_state);
  for (int64_t chunk = head.chunks() - 1; chunk >= 0; --chunk) {
    s.read<T>(head, chunk);
    for (int t = 0; t < s.steps; ++t) {
      read_row(head.row<T>(a.grad_out, s.start + t), a.E, s.out + t * s.e_line);
    }
    read_state(a, head.kept(chunk), s.state);
    clear(s.grad_v, s.steps * s.e_line);
    for (int64_t d = 0; d < a.D; d += kRows) {
      for (int64_t e = 0; e < a.E; e += kBackward * VL) {
        if (a.E - e > VL) {
          recompute<kBackward>(s, tile, d, e);
          retreat<kBackward>(s, tile, d, e);
        } else {
          recompute<1>(s, tile, d, e);
          retreat<1>(s, tile, d, e);
        }
      }
      add_up(s, tile.grad_q, d, s.grad_q);
      add_up(s, tile.grad_k, d, s.grad_k);
      add_up(s, tile.grad_decay, d, s.grad_decay);
    }
    for (int t = 0; t < s.steps; ++t) {
      const int64_t at = s.start + t, row = t * s.d_line;
      // Here the decay decays nothing; the product with a gradient of NaN would not be zero.
      if (s.resets(t)) clear(s.grad_decay + row, padded(a.D));
      write_row(s.grad_q + row, a.D, head.row<T>(a.grad_q, a.D, at));
      write_row(s.grad_k + row, a.D, head.row<T>(a.grad_k, a.D, at));
      write_row(s.grad_decay + row, a.D, head.row<float>(a.grad_log_decay, a.D, at));
      write_row(s.grad_v + t * s.e_line, a.E, head.row<T>(a.grad_v, a.E, at));
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
