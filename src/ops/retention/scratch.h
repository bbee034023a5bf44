// Where things lie in a worker's scratch. Each layout is written once and used for sizes (from
// null) and addresses.
#pragma once

#include "ops/kernel/inline.h"
#include "ops/retention/kernel.h"

namespace headloom::ops::retention_kernel {
namespace {

HL_INLINE int64_t padded(int64_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

// Distances of rows, in floats; the extra cache line keeps them out of each other's cache sets.
struct Layout {
  int64_t d, e, c;
  explicit HL_INLINE Layout(const Args& a)
      : d(padded(a.D) + kAlign), e(padded(a.E) + kAlign), c(a.chunk + kAlign) {}
};

struct Arena {
  float* base;
  int64_t used = 0;
  HL_INLINE float* take(int64_t floats) {
    float* p = base ? base + used : nullptr;
    used += floats;
    return p;
  }
};

// Factors of products are laid out as floats and take half the room as pairs of bfloat16.
struct Forward {
  Layout l;
  int64_t left_line;
  float *q, *k;      // [c, d]
  float* k_columns;  // [D, c]
  float* left;       // [c, D + c]: decayed q, scores
  float* right;      // [D + c, e]: state, v
  float* scores;     // [kAlign, c]
  float* out;        // [kAlign, e]
  float* k_decayed;  // [c, d]
  float *v, *state;  // [c, e], [D, e] where the ones in `right` are narrowed
  int64_t size;

  HL_INLINE Forward(const Args& a, float* base) : l(a), left_line(padded(a.D) + l.c) {
    Arena arena{base};
    q = arena.take(a.chunk * l.d);
    k = arena.take(a.chunk * l.d);
    k_columns = arena.take(padded(a.D) * l.c);
    left = arena.take(a.chunk * left_line);
    right = arena.take((padded(a.D) + a.chunk) * l.e);
    scores = arena.take(kAlign * l.c);
    out = arena.take(kAlign * l.e);
    k_decayed = arena.take(a.chunk * l.d);
    const bool apart = a.type == Type::kBFloat16;
    v = arena.take(apart ? a.chunk * l.e : 0);
    state = arena.take(apart ? padded(a.D) * l.e : 0);
    size = arena.used;
  }
};

// The backward's first pass.
struct Queries {
  int64_t left_line;
  float *out, *v;    // [c, e]; out: of the gradient
  float* v_columns;  // [E, c]
  float* left;       // [c, E + c]: decayed out, gradients of the scores
  float* right;      // [E + c, d]: transposed state, k
  float* scores;     // [kAlign, c]
  float* grad_q;     // [kAlign, d]
  float* k_decayed;  // [c, d]
  float* given;      // [D, e]
  float* v_pairs;    // [c, e]
  float* state;      // [E, d]

  HL_INLINE Queries(const Args& a, const Layout& l, Arena& arena) : left_line(padded(a.E) + l.c) {
    out = arena.take(a.chunk * l.e);
    v = arena.take(a.chunk * l.e);
    v_columns = arena.take(padded(a.E) * l.c);
    left = arena.take(a.chunk * left_line);
    right = arena.take((padded(a.E) + a.chunk) * l.d);
    scores = arena.take(kAlign * l.c);
    grad_q = arena.take(kAlign * l.d);
    k_decayed = arena.take(a.chunk * l.d);
    given = arena.take(padded(a.D) * l.e);
    const bool apart = a.type == Type::kBFloat16;
    v_pairs = arena.take(apart ? a.chunk * l.e : 0);
    state = arena.take(apart ? padded(a.E) * l.d : 0);
  }
};

// The second.
struct Keys {
  int64_t line_v, line_k;
  float* k;                  // [c, d]
  float* q_columns;          // [D, c]
  float *left_v, *left_k;    // [c, c + D]: scores, decayed k; [c, c + E]: their gradient, decayed v
  float *right_v, *right_k;  // [c + D, e]: out, state's gradient; [c + E, d]: q, it transposed
  float* scores;             // [kAlign, c]
  float *grad_k, *grad_v;    // [kAlign, d], [kAlign, e]
  float* q_decayed;          // [c, d]
  float* q;                  // [c, d]
  float *pairs, *state_pairs;  // [c, c], [D, e]
  float* state;                // [D, e]

  HL_INLINE Keys(const Args& a, const Layout& l, Arena& arena)
      : line_v(padded(a.D) + l.c), line_k(padded(a.E) + l.c) {
    k = arena.take(a.chunk * l.d);
    q_columns = arena.take(padded(a.D) * l.c);
    left_v = arena.take(a.chunk * line_v);
    left_k = arena.take(a.chunk * line_k);
    right_v = arena.take((a.chunk + padded(a.D)) * l.e);
    right_k = arena.take((a.chunk + padded(a.E)) * l.d);
    scores = arena.take(kAlign * l.c);
    grad_k = arena.take(kAlign * l.d);
    grad_v = arena.take(kAlign * l.e);
    q_decayed = arena.take(a.chunk * l.d);
    const bool apart = a.type == Type::kBFloat16;
    q = arena.take(apart ? a.chunk * l.d : 0);
    pairs = arena.take(apart ? a.chunk * l.c : 0);
    state_pairs = arena.take(apart ? padded(a.D) * l.e : 0);
    state = arena.take(apart ? padded(a.D) * l.e : 0);
  }
};

struct Backward {
  Layout l;
  Arena arena;
  float* grad_scores;  // [T, c], a chunk's rows padded
  Arena second;
  Queries queries;
  Keys keys;
  int64_t size;

  HL_INLINE Backward(const Args& a, float* base)
      : l(a),
        arena{base},
        grad_scores(arena.take((a.T + kAlign) * l.c)),
        second(arena),
        queries(a, l, arena),
        keys(a, l, second),
        size(arena.used > second.used ? arena.used : second.used) {}
};

}  // namespace
}  // namespace headloom::ops::retention_kernel
