// The fused kernels of one instruction set: compiled once for each, with CPU_CAPABILITY its name.
//
// bfloat16 where the processor multiplies it: the factors of the products are narrowed to pairs
// (Args::narrow); sums, what is carried from chunk to chunk and the forward's state stay float.
//
// Names: c positions in a chunk, n a query's and m a key's position in it, S the state [D, E].
// Factors of products are padded copies: rows of D and E values, far enough apart that the rows of
// one column do not fall into the same cache sets. What is left of earlier chunks and what a chunk
// adds are one product: their left factors stand side by side, the right ones one below the other.
#include <type_traits>

#include "ops/kernel/pairs.h"
#include "ops/kernel/prefetch.h"
#include "ops/kernel/tiles.h"
#include "ops/kernel/transpose.h"
#include "ops/retention/scratch.h"

namespace headloom::ops::retention_kernel {
namespace {

// Rows of scores computed at once: what lies beyond their diagonal is left out.
constexpr int64_t kRows = kAlign;

// bfloat16 of which the products' factors are not narrowed.
struct Widened : BFloat16 {};

template <typename T>
constexpr bool kHalf = HL_BFLOAT16 && std::is_same_v<T, BFloat16>;
// What a product multiplies for inputs of type T, and how many numbers of its sum are one element
// of the right factor.
template <typename T>
using Number = std::conditional_t<kHalf<T>, BFloat16, float>;
template <typename T>
using Element = std::conditional_t<kHalf<T>, Pair, float>;
template <typename T>
constexpr int64_t kSummed = kHalf<T> ? 2 : 1;

template <typename T>
Number<T>* numbers(float* room) {
  return reinterpret_cast<Number<T>*>(room);
}
template <typename T>
Element<T>* elements(float* room) {
  return reinterpret_cast<Element<T>*>(room);
}

// Where rows are kept that in float are a right factor as they are, and here are yet to be paired.
template <typename T, typename To>
To* beside(float* apart, Element<T>* factor) {
  if constexpr (kHalf<T>) {
    return reinterpret_cast<To*>(apart);
  } else {
    return factor;
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
        powers(args.powers + h * 3 * args.chunk),
        first(args.chunks + args.first_chunk[b]),
        last(args.chunks + args.first_chunk[b + 1]) {}

  // gamma^i; those before it in memory are of i + 1, ...
  const float* power(int64_t i) const { return powers + a.chunk - i; }
  // 1, gamma, gamma^2, ...; kRows - 1 zeros before them.
  const float* rising() const { return powers + 2 * a.chunk; }
  const float* state_of(const float* all) const {
    return all ? all + (b * a.H + h) * a.D * a.E : nullptr;
  }
  float* state_of(float* all) const { return all ? all + (b * a.H + h) * a.D * a.E : nullptr; }

  // Row r of a chunk.
  template <typename T>
  const T* row(const HeadSequence& x, const Chunk& chunk, int64_t r) const {
    return x.row<T>(b, chunk.begin + r, h);
  }
};

// Asks for row r of a chunk, if there is one.
template <typename T>
HL_INLINE void fetch(const Head& head, const HeadSequence& from, const Chunk* chunk, int64_t r,
                     int64_t width) {
  if (chunk == nullptr || r >= chunk->length) return;
  prefetch_row(head.row<T>(from, *chunk, r), width);
}

// Copies a chunk's rows of `width` values, zeros up to the padded width and to a multiple of kAlign
// rows, to `to` and, row r times factors[r * step], to `decayed`; either may be null. Meanwhile
// fetches the rows of `next`.
template <typename T, typename To, typename Decayed = float>
void pack(const Head& head, const HeadSequence& from, const Chunk& chunk, const Chunk* next,
          int64_t width, To* to, int64_t line, const float* factors = nullptr, int64_t step = 0,
          Decayed* decayed = nullptr, int64_t decayed_line = 0) {
  const int64_t whole = padded(width);
  for (int64_t r = 0; r < chunk.length; ++r) {
    const T* row = head.row<T>(from, chunk, r);
    fetch<T>(head, from, next, r, width);
    if (to != nullptr) {
      int64_t i = 0;
      if constexpr (std::is_same_v<T, To>) {
        for (; i + VL <= width; i += VL) std::memcpy(to + r * line + i, row + i, VL * sizeof(T));
      }
      for (; i < whole; i += VL) store(to + r * line + i, load_some(row + i, width - i));
    }
    if (decayed != nullptr) {
      const vf factor = bcast(factors[r * step]);
      for (int64_t i = 0; i < whole; i += VL) {
        store(decayed + r * decayed_line + i, factor * load_some(row + i, width - i));
      }
    }
  }
  for (int64_t r = chunk.length; r % kAlign != 0; ++r) {
    for (int64_t i = 0; i < whole; i += VL) {
      if (to != nullptr) store(to + r * line + i, zero());
      if (decayed != nullptr) store(decayed + r * decayed_line + i, zero());
    }
  }
}

// The same as right factors of sums over the rows.
template <typename T>
void pack_columns(const Head& head, const HeadSequence& from, const Chunk& chunk, const Chunk* next,
                  int64_t width, Element<T>* to, int64_t line, const float* factors = nullptr,
                  int64_t step = 0, Element<T>* decayed = nullptr) {
  if constexpr (!kHalf<T>) {
    pack<T>(head, from, chunk, next, width, to, line, factors, step, decayed, line);
  } else {
    const int64_t whole = padded(width);
    for (int64_t r = 0; r < padded(chunk.length); r += 2) {
      const bool first = r < chunk.length, second = r + 1 < chunk.length;
      const T* low = first ? head.row<T>(from, chunk, r) : nullptr;
      const T* high = second ? low + from.time : nullptr;
      fetch<T>(head, from, next, r, width);
      fetch<T>(head, from, next, r + 1, width);
      const vf low_factor = bcast(decayed && first ? factors[r * step] : 0);
      const vf high_factor = bcast(decayed && second ? factors[(r + 1) * step] : 0);
      for (int64_t i = 0; i < whole; i += VL) {
        const vf a = first ? load_some(low + i, width - i) : zero();
        const vf b = second ? load_some(high + i, width - i) : zero();
        store(to + r / 2 * line + i, pair_vectors(a, b));
        if (decayed) {
          store(decayed + r / 2 * line + i, pair_vectors(low_factor * a, high_factor * b));
        }
      }
    }
  }
}

// Writes `rows` rows of a chunk's results [B, T, H, width] from row r on.
template <typename T>
void unpack(const Head& head, const float* from, int64_t line, const Chunk& chunk, int64_t r,
            int64_t rows, int64_t width, void* to) {
  const Args& a = head.a;
  T* out = static_cast<T*>(to) + ((head.b * a.T + chunk.begin + r) * a.H + head.h) * width;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < width; j += VL) {
      store_some(out + i * a.H * width + j, load(from + i * line + j), width - j);
    }
  }
}

void clear(float* to, int64_t rows, int64_t line) {
  for (int64_t i = 0; i < rows * line; ++i) to[i] = 0;
}

void scale(float* x, int64_t rows, int64_t columns, int64_t line, float by) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < columns; i += VL) {
      store(x + r * line + i, bcast(by) * load(x + r * line + i));
    }
  }
}

// Rows [D, E] as they are given and taken, [D, line] padded with zeros inside.
void read_state(const Args& a, const float* from, int64_t line, float* to) {
  clear(to, padded(a.D), line);
  if (from == nullptr) return;
  for (int64_t d = 0; d < a.D; ++d) std::memcpy(to + d * line, from + d * a.E, a.E * sizeof(float));
}
void write_state(const Args& a, const float* from, int64_t line, float* to) {
  for (int64_t d = 0; d < a.D; ++d) std::memcpy(to + d * a.E, from + d * line, a.E * sizeof(float));
}

// The right factor of a sum over the rows of x: x itself, or its pairs at `pairs`.
template <typename T, typename From>
const Element<T>* columns_of(int64_t rows, int64_t columns, const From* x, int64_t line,
                             Element<T>* pairs) {
  if constexpr (kHalf<T>) {
    return pair_rows(rows, columns, x, line, pairs, line);
  } else {
    (void)rows, (void)columns, (void)line, (void)pairs;
    return x;
  }
}

// The right factor of a sum along the rows of x [rows, columns]: to [columns / kSummed, rows].
template <typename T>
const Element<T>* transposed(int64_t rows, int64_t columns, const Number<T>* x, int64_t line,
                             Element<T>* to, int64_t to_line) {
  transpose(rows, columns / kSummed<T>, reinterpret_cast<const float*>(x), line / kSummed<T>,
            reinterpret_cast<float*>(to), to_line);
  return to;
}

// out [M, N] = a [M, K] b [K, N]. Lines in numbers and elements.
template <typename T>
void product(bool amx, int64_t M, int64_t N, int64_t K, const Number<T>* a, int64_t a_line,
             const Element<T>* b, int64_t b_line, float* out, int64_t line) {
  if constexpr (kHalf<T>) {
    if (amx) {
      return tile_gemm<false>(M, N, (K + 1) / 2, reinterpret_cast<const Pair*>(a), a_line / 2, b,
                              b_line, out, line, 1);
    }
  }
  gemm<false, true>(M, N, (K + kSummed<T> - 1) / kSummed<T>, reinterpret_cast<const Element<T>*>(a),
                    a_line / kSummed<T>, b, b_line, out, line);
}

// to[r][i] = decay[i - r] (a_r . b_i), i < columns. b is transposed, x is room for the products.
template <typename T>
void scores(bool amx, int64_t rows, int64_t columns, int64_t width, const Number<T>* a,
            int64_t a_line, const Element<T>* b, int64_t line, const float* decay, float* x,
            Number<T>* to, int64_t to_line) {
  product<T>(amx, rows, columns, width, a, a_line, b, line, x, line);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < columns; i += VL) {
      store(to + r * to_line + i, load(x + r * line + i) * load(decay - r + i));
    }
  }
}

// What is left of the state before a chunk after it.
void advance(float* state, int64_t rows, int64_t columns, int64_t line, const Chunk& c,
             const Head& head) {
  if (c.fresh) {
    clear(state, rows, line);
  } else {
    scale(state, rows, columns, line, *head.power(c.length));
  }
}

template <typename T>
void forward(const Args& a, int64_t item, float* scratch) {
  const Head head(a, item);
  const Forward w(a, scratch);
  const Layout& l = w.l;
  const int64_t De = padded(a.D), Ee = padded(a.E);
  Number<T>*const q = numbers<T>(w.q), *const k = numbers<T>(w.k), *const left = numbers<T>(w.left);
  Element<T>*const right = elements<T>(w.right), *const right_v = right + De / kSummed<T> * l.e;
  float* const state = beside<T, float>(w.state, right);
  float* const v = beside<T, float>(w.v, right_v);
  read_state(a, head.state_of(a.state), l.e, state);
  for (const Chunk* c = head.first; c != head.last; ++c) {
    const Chunk* next = c + 1 != head.last ? c + 1 : nullptr;
    const int64_t n = c->length;
    pack<T>(head, a.q, *c, next, a.D, q, l.d, head.power(1), -1, left, w.left_line);
    pack<T>(head, a.k, *c, next, a.D, k, l.d, head.power(n - 1), 1, w.k_decayed, l.d);
    pack<T>(head, a.v, *c, next, a.E, v, l.e);
    const auto keys = transposed<T>(padded(n), De, k, l.d, elements<T>(w.k_columns), l.c);
    columns_of<T>(n, Ee, v, l.e, right_v);
    if (!c->fresh) columns_of<T>(De, Ee, state, l.e, right);
    const int64_t skip = c->fresh ? De : 0;
    for (int64_t r = 0; r < n; r += kRows) {
      const int64_t rows = n - r < kRows ? n - r : kRows;
      Number<T>* const at = left + r * w.left_line;
      scores<T>(a.amx, rows, r + kRows, De, q + r * l.d, l.d, keys, l.c, head.power(r), w.scores,
                at + De, w.left_line);
      product<T>(a.amx, rows, Ee, De - skip + r + rows, at + skip, w.left_line,
                 right + skip / kSummed<T> * l.e, l.e, w.out, l.e);
      unpack<T>(head, w.out, l.e, *c, r, rows, a.E, a.out);
    }
    advance(state, a.D, Ee, l.e, *c, head);
    // Always in float: the state is a result, and what it loses every later chunk loses too.
    gemm<true, false>(a.D, Ee, n, w.k_decayed, l.d, v, l.e, state, l.e);
  }
  write_state(a, state, l.e, head.state_of(a.final_state));
}

// dQ, and the scores' gradients, with the transposed state carried forwards.
template <typename T>
void backward_queries(const Head& head, const Layout& l, const Queries& w, float* kept) {
  const Args& a = head.a;
  const int64_t De = padded(a.D), Ee = padded(a.E);
  Number<T>*const out = numbers<T>(w.out), *const v = numbers<T>(w.v);
  Number<T>* const left = numbers<T>(w.left);
  Element<T>* const k_decayed = elements<T>(w.k_decayed);
  Element<T>*const right = elements<T>(w.right), *const right_k = right + Ee / kSummed<T> * l.d;
  float* const state = beside<T, float>(w.state, right);
  read_state(a, head.state_of(a.state), l.e, w.given);
  transpose(De, Ee, w.given, l.e, state, l.d);
  for (const Chunk* c = head.first; c != head.last; ++c) {
    const Chunk* next = c + 1 != head.last ? c + 1 : nullptr;
    const int64_t n = c->length;
    pack_columns<T>(head, a.k, *c, next, a.D, right_k, l.d, head.power(n - 1), 1, k_decayed);
    pack<T>(head, a.v, *c, next, a.E, v, l.e);
    pack<T>(head, a.grad_out, *c, next, a.E, out, l.e, head.power(1), -1, left, w.left_line);
    const auto values = transposed<T>(padded(n), Ee, v, l.e, elements<T>(w.v_columns), l.c);
    if (!c->fresh) columns_of<T>(Ee, De, state, l.d, right);
    const int64_t skip = c->fresh ? Ee : 0;
    Number<T>* const keep = numbers<T>(kept) + c->begin * l.c;
    for (int64_t r = 0; r < n; r += kRows) {
      const int64_t rows = n - r < kRows ? n - r : kRows;
      Number<T>* const at = left + r * w.left_line;
      scores<T>(a.amx, rows, r + kRows, Ee, out + r * l.e, l.e, values, l.c, head.power(r),
                w.scores, at + Ee, w.left_line);
      for (int64_t i = r; i < r + rows; ++i) {
        std::memcpy(keep + i * l.c, left + i * w.left_line + Ee, (r + kRows) * sizeof(Number<T>));
      }
      product<T>(a.amx, rows, De, Ee - skip + r + rows, at + skip, w.left_line,
                 right + skip / kSummed<T> * l.d, l.d, w.grad_q, l.d);
      unpack<T>(head, w.grad_q, l.d, *c, r, rows, a.D, a.grad_q);
    }
    if (c + 1 == head.last) break;
    advance(state, a.E, De, l.d, *c, head);
    gemm<true, false>(a.E, De, (n + kSummed<T> - 1) / kSummed<T>,
                      columns_of<T>(n, Ee, v, l.e, elements<T>(w.v_pairs)), l.e,
                      static_cast<const Element<T>*>(k_decayed), l.d, state, l.d);
  }
}

// dK and dV, with the state's gradient carried backwards. A chunk's rows end where the state's
// begin.
template <typename T>
void backward_keys(const Head& head, const Layout& l, const Keys& w, float* kept) {
  const Args& a = head.a;
  const int64_t De = padded(a.D), Ee = padded(a.E), P = kSummed<T>;
  Number<T>* const k = numbers<T>(w.k);
  Element<T>* const q_decayed = elements<T>(w.q_decayed);
  Number<T>*const left_v = numbers<T>(w.left_v), *const left_k = numbers<T>(w.left_k);
  Element<T>*const right_v = elements<T>(w.right_v), *const right_k = elements<T>(w.right_k);
  Element<T>*const state_v = right_v + a.chunk / P * l.e, *const state_k =
                                                              right_k + a.chunk / P * l.d;
  float* const state = beside<T, float>(w.state, state_v);
  read_state(a, head.state_of(a.grad_final_state), l.e, state);
  bool nothing = a.grad_final_state == nullptr;  // the state's gradient is zero
  for (const Chunk* c = head.last; c-- != head.first;) {
    const Chunk* next = c != head.first ? c - 1 : nullptr;
    const int64_t n = c->length, whole = padded(n), start = a.chunk - whole;
    Element<T>*const out_v = right_v + start / P * l.e, *const q_k = right_k + start / P * l.d;
    Number<T>* const q = beside<T, Number<T>>(w.q, q_k);
    Number<T>* const none = nullptr;
    if (kHalf<T>) pack<T>(head, a.q, *c, nullptr, a.D, q, l.d);
    pack_columns<T>(head, a.q, *c, next, a.D, q_k, l.d, head.power(1), -1, q_decayed);
    pack<T>(head, a.k, *c, next, a.D, k, l.d, head.power(n - 1), 1, left_v + a.chunk, w.line_v);
    pack<T>(head, a.v, *c, next, a.E, none, 0, head.power(n - 1), 1, left_k + a.chunk, w.line_k);
    pack_columns<T>(head, a.grad_out, *c, next, a.E, out_v, l.e);
    const auto queries = transposed<T>(whole, De, q, l.d, elements<T>(w.q_columns), l.c);
    // Later chunks are done: the rows that pad this one may lie in theirs.
    Number<T>* const keep = numbers<T>(kept) + c->begin * l.c;
    std::memset(keep + n * l.c, 0, (whole - n) * l.c * sizeof(Number<T>));
    transpose(whole / P, whole,
              reinterpret_cast<const float*>(
                  columns_of<T>(whole, whole, keep, l.c, elements<T>(w.pairs))),
              l.c, reinterpret_cast<float*>(left_k + start), w.line_k / P);
    if (!nothing) {
      columns_of<T>(De, Ee, state, l.e, state_v);
      if constexpr (kHalf<T>) {
        pair_columns(De, Ee, state, l.e, elements<T>(w.state_pairs), l.e / P);
        transposed<T>(De, Ee, numbers<T>(w.state_pairs), l.e, state_k, l.d);
      } else {
        transposed<T>(De, Ee, state, l.e, state_k, l.d);
      }
    }
    for (int64_t m = 0; m < n; m += kRows) {
      const int64_t rows = n - m < kRows ? n - m : kRows, inside = whole - m, at = start + m;
      Number<T>* const x = left_v + m * w.line_v + at;
      scores<T>(a.amx, rows, inside, De, k + m * l.d, l.d, queries + m, l.c, head.rising(),
                w.scores, x, w.line_v);
      product<T>(a.amx, rows, Ee, inside + (nothing ? 0 : De), x, w.line_v, right_v + at / P * l.e,
                 l.e, w.grad_v, l.e);
      unpack<T>(head, w.grad_v, l.e, *c, m, rows, a.E, a.grad_v);
      product<T>(a.amx, rows, De, inside + (nothing ? 0 : Ee), left_k + m * w.line_k + at, w.line_k,
                 right_k + at / P * l.d, l.d, w.grad_k, l.d);
      unpack<T>(head, w.grad_k, l.d, *c, m, rows, a.D, a.grad_k);
    }
    nothing = c->fresh;
    if (nothing) {
      clear(state, De, l.e);
    } else {
      scale(state, a.D, Ee, l.e, *head.power(n));
      if (kHalf<T> && a.grad_state != nullptr) {
        // In float, as the state in the forward, where this is a result too. The chunk's right
        // factors are read no more.
        pack<T>(head, a.q, *c, nullptr, a.D, none, 0, head.power(1), -1, w.q_decayed, l.d);
        pack<T>(head, a.grad_out, *c, nullptr, a.E, w.right_v, l.e);
        gemm<true, false>(a.D, Ee, n, w.q_decayed, l.d, w.right_v, l.e, state, l.e);
      } else {
        gemm<true, false>(a.D, Ee, whole / P, static_cast<const Element<T>*>(q_decayed), l.d,
                          static_cast<const Element<T>*>(out_v), l.e, state, l.e);
      }
    }
  }
  if (a.grad_state != nullptr) write_state(a, state, l.e, head.state_of(a.grad_state));
}

// One position, as decoding has it: a step of the recurrence, which reads and writes each value of
// the state once, in float.
template <typename T>
void forward_one(const Args& a, int64_t item) {
  constexpr int kVectors = 4;  // columns that stay in registers while the rows pass
  const Head head(a, item);
  const Chunk& c = *head.first;
  const T *const q = head.row<T>(a.q, c, 0), *const k = head.row<T>(a.k, c, 0);
  const T* const v = head.row<T>(a.v, c, 0);
  T* const out = static_cast<T*>(a.out) + item * a.E;
  const float* const before = c.fresh ? nullptr : head.state_of(a.state);
  float* const after = head.state_of(a.final_state);
  const vf gamma = bcast(*head.power(1));
  for (int64_t e = 0; e < a.E; e += kVectors * VL) {
    vf value[kVectors], sum[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      value[j] = e + j * VL < a.E ? load_some(v + e + j * VL, a.E - e - j * VL) : zero();
      sum[j] = zero();
    }
    for (int64_t d = 0; d < a.D; ++d) {
      const vf key = bcast(widen(k[d])), query = bcast(widen(q[d]));
      for (int j = 0; j < kVectors && e + j * VL < a.E; ++j) {
        const int64_t at = d * a.E + e + j * VL, columns = a.E - e - j * VL;
        vf row = key * value[j];
        if (before != nullptr) row = fma(gamma, load_some(before + at, columns), row);
        store_some(after + at, row, columns);
        sum[j] = fma(query, row, sum[j]);
      }
    }
    for (int j = 0; j < kVectors && e + j * VL < a.E; ++j) {
      store_some(out + e + j * VL, sum[j], a.E - e - j * VL);
    }
  }
}

template <typename T>
void run(const Args& a, const Task& task) {
  for (int64_t i = task.begin; i < task.end; ++i) {
    if (!task.backward && a.T == 1) {
      forward_one<T>(a, i);
    } else if (!task.backward) {
      forward<T>(a, i, task.scratch);
    } else {
      const Head head(a, i);
      const Backward w(a, task.scratch);
      backward_queries<T>(head, w.l, w.queries, w.grad_scores);
      backward_keys<T>(head, w.l, w.keys, w.grad_scores);
    }
  }
}

}  // namespace

void HL_KERNEL(run)(const Args& args, const Task& task) {
  const TilesInUse in_use(args.amx);
  if (args.type != Type::kBFloat16) return run<float>(args, task);
  if constexpr (HL_BFLOAT16) {
    if (!args.narrow) return run<Widened>(args, task);
  }
  run<BFloat16>(args, task);
}

}  // namespace headloom::ops::retention_kernel
