// Where things lie in the memory that the caller provides: the packed keys, one worker's key-side
// gradient sums and one worker's scratch. Each layout is written once and used for sizes and
// addresses.
#pragma once

#include "ops/composed_attention/kernel.h"

namespace headloom::ops::fused {
namespace {

// Hands out consecutive pieces of a buffer, each a whole number of cache lines; from null it only
// counts.
struct Arena {
  float* base;
  int64_t used = 0;
  HL_INLINE float* take(int64_t floats) {
    float* p = base ? base + used : nullptr;
    used += (floats + 15) / 16 * 16;
    return p;
  }
};

// One key block, packed: read by every tile.
struct PackedBlock {
  float* k_panel;  // [Gk][D][kBlock]
  float* k_rows;   // [Gk][kBlock][Dp]    backward only
  float* v_panel;  // [Gv][E][kBlock]     backward only
  float* v_rows;   // [Gv][kBlock][Ep]    forward only
  float* pre;      // [H][k_width][kBlock]
  float* post;     // [H1][k_width][kBlock]
  int64_t size;
};

HL_INLINE PackedBlock packed_block(const Args& a, const Plan& p, float* base, int64_t block) {
  PackedBlock out;
  const int64_t k = a.Gk * a.D * kBlock, kr = a.Gk * p.Dp * kBlock;
  const int64_t v = a.Gv * a.E * kBlock, vr = a.Gv * p.Ep * kBlock;
  const int64_t pre = a.pre.key_side() ? a.H * a.pre.k_width() * kBlock : 0;
  const int64_t post = a.post.key_side() ? a.H1 * a.post.k_width() * kBlock : 0;
  const int64_t size = k + pre + post + (p.backward ? kr + v : vr);
  Arena arena{base + block * size};
  out.k_panel = arena.take(k);
  out.k_rows = arena.take(p.backward ? kr : 0);
  out.v_panel = arena.take(p.backward ? v : 0);
  out.v_rows = arena.take(p.backward ? 0 : vr);
  out.pre = arena.take(pre);
  out.post = arena.take(post);
  out.size = size;
  return out;
}

// The gradients of one key block, summed over one worker's tiles.
struct BlockSums {
  float* k;     // [Gk][kBlock][Dp]
  float* v;     // [Gv][kBlock][Ep]
  float* pre;   // [H][k_width][kBlock]
  float* post;  // [H1][k_width][kBlock]
  int64_t size;
};

HL_INLINE BlockSums block_sums(const Args& a, const Plan& p, float* base, int64_t block) {
  BlockSums out;
  const int64_t k = a.Gk * p.Dp * kBlock, v = a.Gv * p.Ep * kBlock;
  const int64_t pre = a.pre.key_side() ? a.H * a.pre.k_width() * kBlock : 0;
  const int64_t post = a.post.key_side() ? a.H1 * a.post.k_width() * kBlock : 0;
  out.size = k + v + pre + post;
  Arena arena{base + block * out.size};
  out.k = arena.take(k);
  out.v = arena.take(v);
  out.pre = arena.take(pre);
  out.post = arena.take(post);
  return out;
}

struct Scratch {
  float* q;               // [H][rows][Dp], times scale
  float *pre_q, *post_q;  // [rows][H][q_width], [rows][H1][q_width]
  float* row[3];          // [span][chunk]: forward: weights; backward: scores, weights, gradients
  float* tile[2];         // [chunk]
  uint64_t* visible;      // [span][rows]
  // Forward.
  float* out;                // [H2][rows][Ep]
  float *high, *block_high;  // [rows][heads_padded], [span][rows][heads_padded]: running maxima
  float* total;              // [rows][H1][16]: running sums, by lane
  // Backward.
  float* grad_out;            // [H2][rows][Ep]
  float* grad_q;              // [H][rows][Dp]
  float* lse;                 // [rows][H1]
  float* delta;               // [rows][H1][16]
  float *pre_sum, *post_sum;  // [rows][H][q_width][16]
  float *inner, *grad_inner;  // [rows][groups][2 rank][kBlock]
  int64_t size;
};

HL_INLINE Scratch scratch(const Args& a, const Plan& p, float* base) {
  Scratch s{};
  Arena arena{base};
  const int64_t rows = p.rows;
  const int64_t pre_q = rows * a.H * a.pre.q_width(), post_q = rows * a.H1 * a.post.q_width();
  s.q = arena.take(a.H * rows * p.Dp);
  s.pre_q = arena.take(pre_q);
  s.post_q = arena.take(post_q);
  for (int i = 0; i < (p.backward ? 3 : 1); ++i) s.row[i] = arena.take(p.span * p.chunk);
  for (int i = 0; i < 2; ++i) s.tile[i] = arena.take(p.chunk);
  s.visible = reinterpret_cast<uint64_t*>(arena.take(2 * p.span * rows));
  if (p.backward) {
    s.grad_out = arena.take(a.H2 * rows * p.Ep);
    s.grad_q = arena.take(a.H * rows * p.Dp);
    s.lse = arena.take(rows * a.H1);
    s.delta = arena.take(rows * a.H1 * 16);
    s.pre_sum = arena.take(pre_q * 16);
    s.post_sum = arena.take(post_q * 16);
    const int64_t rank = a.pre.rank > a.post.rank ? a.pre.rank : a.post.rank;
    const int64_t groups = a.pre.groups > a.post.groups ? a.pre.groups : a.post.groups;
    s.inner = arena.take(rows * groups * 2 * rank * kBlock);
    s.grad_inner = arena.take(rows * groups * 2 * rank * kBlock);
  } else {
    s.out = arena.take(a.H2 * rows * p.Ep);
    s.high = arena.take(rows * p.heads_padded);
    s.block_high = arena.take(p.span * rows * p.heads_padded);
    s.total = arena.take(rows * a.H1 * 16);
  }
  s.size = arena.used;
  return s;
}

}  // namespace
}  // namespace headloom::ops::fused
