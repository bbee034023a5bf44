// The fused kernels of one instruction set: compiled once for each, with CPU_CAPABILITY its name.
//
// Names: c positions in a chunk, n a query's and m a key's position in it, S the state [D, E].
// Products read padded copies in float: rows of D and E values, `wide` floats apart so that the
// rows of one column do not fall into the same cache sets.
#include "ops/kernel/gemm.h"
#include "ops/kernel/transpose.h"
#include "ops/retention/scratch.h"

namespace headloom::ops::retaining {
namespace {

// Rows of scores computed at once: what lies beyond their diagonal is left out.
constexpr int64_t kRows = kAlign;

// Copies `rows` rows of `width` values as float, zeros up to the padded width and to a multiple of
// kAlign rows. With `decayed`, a second copy: row r times factors[r * step]. Meanwhile fetches the
// rows of `next`, if there is one: they are too far apart for the processor to foresee.
template <typename T>
void pack(const Rows& from, const Chunk& chunk, const Chunk* next, int64_t b, int64_t h,
          int64_t width, int64_t wide, float* to, const float* factors = nullptr, int64_t step = 0,
          float* decayed = nullptr) {
  const int64_t padded = (width + kAlign - 1) / kAlign * kAlign;
  const T* const first = static_cast<const T*>(from.data) + b * from.batch + h * from.head;
  for (int64_t r = 0; r < chunk.length; ++r) {
    const T* row = first + (chunk.begin + r) * from.position;
    if (next && r < next->length) {
      const T* soon = first + (next->begin + r) * from.position;
      for (int64_t i = 0; i < width; i += 64 / static_cast<int64_t>(sizeof(T))) {
        __builtin_prefetch(soon + i, 0, 2);
      }
    }
    float* out = to + r * wide;
    int64_t i = 0;
    for (; i + VL <= width; i += VL) store(out + i, load(row + i));
    for (; i < width; ++i) out[i] = widen(row[i]);
    for (; i < padded; ++i) out[i] = 0;
    if (decayed == nullptr) continue;
    const vf factor = bcast(factors[r * step]);
    for (i = 0; i < padded; i += VL) store(decayed + r * wide + i, factor * load(out + i));
  }
  for (int64_t r = chunk.length; r % kAlign != 0; ++r) {
    for (int64_t i = 0; i < padded; ++i) to[r * wide + i] = 0;
  }
}

template <typename T>
void unpack(const float* from, int64_t wide, const Chunk& chunk, int64_t b, int64_t h,
            const Args& a, int64_t width, void* to) {
  for (int64_t r = 0; r < chunk.length; ++r) {
    T* out = static_cast<T*>(to) + ((b * a.T + chunk.begin + r) * a.H + h) * width;
    const float* row = from + r * wide;
    int64_t i = 0;
    for (; i + VL <= width; i += VL) store(out + i, load(row + i));
    for (; i < width; ++i) narrow(row[i], out + i);
  }
}

void clear(float* to, int64_t rows, int64_t wide) {
  for (int64_t i = 0; i < rows * wide; ++i) to[i] = 0;
}

void scale(float* x, int64_t rows, int64_t columns, int64_t wide, float by) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < columns; i += VL) {
      store(x + r * wide + i, bcast(by) * load(x + r * wide + i));
    }
  }
}

// Rows [D, E] as they are given and taken, [D, wide] padded with zeros inside.
void read_state(const Args& a, const float* from, int64_t wide, float* to) {
  clear(to, padded(a.D), wide);
  if (from == nullptr) return;
  for (int64_t d = 0; d < a.D; ++d) std::memcpy(to + d * wide, from + d * a.E, a.E * sizeof(float));
}
void write_state(const Args& a, const float* from, int64_t wide, float* to) {
  for (int64_t d = 0; d < a.D; ++d) std::memcpy(to + d * a.E, from + d * wide, a.E * sizeof(float));
}

// x[n][m] = gamma^(n-m) (a_n . b_m) for the rows n = first ... of a chunk, m up to the last of them
// rounded up; zero for m > n. b is transposed.
void scores(int64_t first, int64_t rows, int64_t width, const float* a, int64_t a_wide,
            const float* b, const float* powers, int64_t chunk, int64_t line, float* x) {
  const int64_t columns = first + kRows;
  gemm<false, true>(rows, columns, width, a + first * a_wide, a_wide, b, line, x, line);
  for (int64_t r = 0; r < rows; ++r) {
    const float* decay = powers + chunk - (first + r);
    for (int64_t m = 0; m < columns; m += VL) {
      store(x + r * line + m, load(x + r * line + m) * load(decay + m));
    }
  }
}

struct Head {
  const Args& a;
  int64_t b, h;
  const float* powers;  // of this head
  const Chunk *first, *last;

  Head(const Args& args, int64_t item)
      : a(args),
        b(item / args.H),
        h(item % args.H),
        powers(args.powers + h * 2 * args.chunk),
        first(args.chunks + args.first_chunk[b]),
        last(args.chunks + args.first_chunk[b + 1]) {}

  // gamma^i.
  const float* power(int64_t i) const { return powers + a.chunk - i; }
  const float* state_of(const float* all) const {
    return all ? all + (b * a.H + h) * a.D * a.E : nullptr;
  }
  float* state_of(float* all) const { return all ? all + (b * a.H + h) * a.D * a.E : nullptr; }
};

// What is left of the state before a chunk after it.
void advance(float* state, int64_t rows, int64_t columns, int64_t wide, const Chunk& c,
             const Head& head) {
  if (c.fresh) {
    clear(state, rows, wide);
  } else {
    scale(state, rows, columns, wide, *head.power(c.length));
  }
}

template <typename T>
void forward(const Args& a, int64_t item, float* scratch) {
  const Head head(a, item);
  const Layout l(a);
  const Forward w(a, scratch);
  const int64_t De = padded(a.D), Ee = padded(a.E);
  read_state(a, head.state_of(a.state), l.e, w.state);
  for (const Chunk* c = head.first; c != head.last; ++c) {
    const Chunk* next = c + 1 != head.last ? c + 1 : nullptr;
    const int64_t n = c->length;
    pack<T>(a.q, *c, next, head.b, head.h, a.D, l.d, w.q, head.power(1), -1, w.q_decayed);
    pack<T>(a.k, *c, next, head.b, head.h, a.D, l.d, w.k, head.power(n - 1), 1, w.k_decayed);
    pack<T>(a.v, *c, next, head.b, head.h, a.E, l.e, w.v);
    transpose(padded(n), De, w.k, l.d, w.k_columns, l.c);
    if (c->fresh) {
      clear(w.out, n, l.e);
    } else {
      gemm<false, true>(n, Ee, a.D, w.q_decayed, l.d, w.state, l.e, w.out, l.e);
    }
    for (int64_t r = 0; r < n; r += kRows) {
      const int64_t rows = n - r < kRows ? n - r : kRows;
      scores(r, rows, a.D, w.q, l.d, w.k_columns, head.powers, a.chunk, l.c, w.scores);
      gemm<true, true>(rows, Ee, r + rows, w.scores, l.c, w.v, l.e, w.out + r * l.e, l.e);
    }
    unpack<T>(w.out, l.e, *c, head.b, head.h, a, a.E, a.out);
    advance(w.state, a.D, Ee, l.e, *c, head);
    gemm<true, false>(a.D, Ee, n, w.k_decayed, l.d, w.v, l.e, w.state, l.e);
  }
  write_state(a, w.state, l.e, head.state_of(a.final_state));
}

// dQ, and the scores' gradients, with the transposed state carried forwards.
template <typename T>
void backward_queries(const Head& head, const Layout& l, const Backward& w) {
  const Args& a = head.a;
  const int64_t De = padded(a.D), Ee = padded(a.E);
  read_state(a, head.state_of(a.state), l.e, w.state);
  transpose(De, Ee, w.state, l.e, w.state_columns, l.d);
  for (const Chunk* c = head.first; c != head.last; ++c) {
    const Chunk* next = c + 1 != head.last ? c + 1 : nullptr;
    const int64_t n = c->length;
    pack<T>(a.k, *c, next, head.b, head.h, a.D, l.d, w.k, head.power(n - 1), 1, w.k_decayed);
    pack<T>(a.v, *c, next, head.b, head.h, a.E, l.e, w.v);
    pack<T>(a.grad_out, *c, next, head.b, head.h, a.E, l.e, w.out, head.power(1), -1,
            w.out_decayed);
    transpose(padded(n), Ee, w.v, l.e, w.columns, l.c);
    if (c->fresh) {
      clear(w.grad_q, n, l.d);
    } else {
      gemm<false, true>(n, De, a.E, w.out_decayed, l.e, w.state_columns, l.d, w.grad_q, l.d);
    }
    float* x = w.grad_scores + c->begin * l.c;
    for (int64_t r = 0; r < n; r += kRows) {
      const int64_t rows = n - r < kRows ? n - r : kRows;
      scores(r, rows, a.E, w.out, l.e, w.columns, head.powers, a.chunk, l.c, x + r * l.c);
      gemm<true, true>(rows, De, r + rows, x + r * l.c, l.c, w.k, l.d, w.grad_q + r * l.d, l.d);
    }
    unpack<T>(w.grad_q, l.d, *c, head.b, head.h, a, a.D, a.grad_q);
    if (c + 1 == head.last) break;
    advance(w.state_columns, a.E, De, l.d, *c, head);
    gemm<true, false>(a.E, De, n, w.v, l.e, w.k_decayed, l.d, w.state_columns, l.d);
  }
}

// dK and dV, with the state's gradient carried backwards.
template <typename T>
void backward_keys(const Head& head, const Layout& l, const Backward& w) {
  const Args& a = head.a;
  const int64_t De = padded(a.D), Ee = padded(a.E);
  read_state(a, head.state_of(a.grad_final_state), l.e, w.state);
  bool nothing = a.grad_final_state == nullptr;  // the state's gradient is zero
  for (const Chunk* c = head.last; c-- != head.first;) {
    const Chunk* next = c != head.first ? c - 1 : nullptr;
    const int64_t n = c->length;
    pack<T>(a.q, *c, next, head.b, head.h, a.D, l.d, w.q, head.power(1), -1, w.q_decayed);
    pack<T>(a.k, *c, next, head.b, head.h, a.D, l.d, w.k, head.power(n - 1), 1, w.k_decayed);
    pack<T>(a.v, *c, next, head.b, head.h, a.E, l.e, w.v, head.power(n - 1), 1, w.v_decayed);
    pack<T>(a.grad_out, *c, next, head.b, head.h, a.E, l.e, w.out);
    transpose(padded(n), De, w.k, l.d, w.columns, l.c);
    if (nothing) {
      clear(w.grad_k, n, l.d);
      clear(w.grad_v, n, l.e);
    } else {
      transpose(De, Ee, w.state, l.e, w.state_columns, l.d);
      gemm<false, true>(n, Ee, a.D, w.k_decayed, l.d, w.state, l.e, w.grad_v, l.e);
      gemm<false, true>(n, De, a.E, w.v_decayed, l.e, w.state_columns, l.d, w.grad_k, l.d);
    }
    const float* x = w.grad_scores + c->begin * l.c;
    for (int64_t r = 0; r < n; r += kRows) {
      const int64_t rows = n - r < kRows ? n - r : kRows;
      scores(r, rows, a.D, w.q, l.d, w.columns, head.powers, a.chunk, l.c, w.scores + r * l.c);
    }
    for (int64_t m = 0; m < n; m += kRows) {
      const int64_t rows = n - m < kRows ? n - m : kRows;
      gemm<true, false>(rows, Ee, n - m, w.scores + m * l.c + m, l.c, w.out + m * l.e, l.e,
                        w.grad_v + m * l.e, l.e);
      gemm<true, false>(rows, De, n - m, x + m * l.c + m, l.c, w.q + m * l.d, l.d,
                        w.grad_k + m * l.d, l.d);
    }
    unpack<T>(w.grad_k, l.d, *c, head.b, head.h, a, a.D, a.grad_k);
    unpack<T>(w.grad_v, l.e, *c, head.b, head.h, a, a.E, a.grad_v);
    nothing = c->fresh;
    if (nothing) {
      clear(w.state, De, l.e);
    } else {
      scale(w.state, a.D, Ee, l.e, *head.power(n));
      gemm<true, false>(a.D, Ee, n, w.q_decayed, l.d, w.out, l.e, w.state, l.e);
    }
  }
  if (a.grad_state != nullptr) write_state(a, w.state, l.e, head.state_of(a.grad_state));
}

template <typename T>
void run(const Args& a, const Task& task) {
  for (int64_t i = task.begin; i < task.end; ++i) {
    if (!task.backward) {
      forward<T>(a, i, task.scratch);
    } else {
      const Head head(a, i);
      const Layout l(a);
      const Backward w(a, task.scratch);
      backward_queries<T>(head, l, w);
      backward_keys<T>(head, l, w);
    }
  }
}

}  // namespace

void HL_KERNEL(run)(const Args& args, const Task& task) {
  if (args.type == Type::kBFloat16) {
    run<BFloat16>(args, task);
  } else {
    run<float>(args, task);
  }
}

}  // namespace headloom::ops::retaining
