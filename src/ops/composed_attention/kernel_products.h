// The matrix products of a tile with keys, values, queries and output
// gradients: in float, or, where plan.half is set, in pairs of bfloat16 with
// float sums.
#pragma once

#include "ops/composed_attention/kernel_conv.h"
#include "ops/composed_attention/kernel_scratch.h"
#include "ops/kernel/pairs.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

// Which of its heads map h of `maps` reads: consecutive maps share one.
HL_INLINE int64_t shared_head(int64_t h, int64_t heads, int64_t maps) { return h * heads / maps; }

HL_INLINE Pair* pairs(float* p) { return reinterpret_cast<Pair*>(p); }
HL_INLINE const Pair* pairs(const float* p) { return reinterpret_cast<const Pair*>(p); }

// scores[r][h] = scale q k (in float the scale is already in q).
void score_product(const Args& a, const Plan& p, int64_t rows, const Scratch& w,
                   const PackedBlock& keys, float* scores) {
  for (int64_t h = 0; h < a.H; ++h) {
    const float* q = w.q + h * p.height * p.Dp;
    const float* panel = keys.k_panel + shared_head(h, a.Gk, a.H) * p.Dp * kBlock;
    if (HL_BFLOAT16 && p.half) {
      gemm<false, true>(rows, kBlock, (a.D + 1) / 2, pairs(q), p.Dp / 2, pairs(panel), kBlock,
                        scores + h * kBlock, p.line, a.scale);
    } else {
      gemm<false, true>(rows, kBlock, a.D, q, p.Dp, panel, kBlock, scores + h * kBlock, p.line);
    }
  }
}

// out[h'][r] += x v.
void value_product(const Args& a, const Plan& p, int64_t rows, const Scratch& w,
                   const PackedBlock& keys, const float* x) {
  const Pair* halves = HL_BFLOAT16 && p.half
                           ? pair_columns(rows, a.H2 * kBlock, x, p.line, pairs(w.halves), p.line)
                           : nullptr;
  for (int64_t h = 0; h < a.H2; ++h) {
    const float* v = keys.v_rows + shared_head(h, a.Gv, a.H2) * kBlock * p.Ep;
    float* out = w.out + h * p.rows * p.Ep;
    if (halves) {
      gemm<true, true>(rows, p.Ep, kBlock / 2, halves + h * kBlock / 2, p.line, pairs(v), p.Ep, out,
                       p.Ep);
    } else {
      gemm<true, true>(rows, p.Ep, kBlock, x + h * kBlock, p.line, v, p.Ep, out, p.Ep);
    }
  }
}

// grad[r][h'] = dO v.
void output_product(const Args& a, const Plan& p, int64_t rows, const Scratch& w,
                    const PackedBlock& keys, float* grad) {
  for (int64_t h = 0; h < a.H2; ++h) {
    const float* dout = w.grad_out + h * p.rows * p.Ep;
    const float* panel = keys.v_panel + shared_head(h, a.Gv, a.H2) * p.Ep * kBlock;
    if (HL_BFLOAT16 && p.half) {
      gemm<false, true>(rows, kBlock, (a.E + 1) / 2, pairs(dout), p.Ep / 2, pairs(panel), kBlock,
                        grad + h * kBlock, p.line);
    } else {
      gemm<false, true>(rows, kBlock, a.E, dout, p.Ep, panel, kBlock, grad + h * kBlock, p.line);
    }
  }
}

// dV += x^T dO.
void value_grad_product(const Args& a, const Plan& p, int64_t rows, const Scratch& w,
                        const float* x, float* grad_v) {
  const Pair* halves = HL_BFLOAT16 && p.half
                           ? pair_rows(rows, a.H2 * kBlock, x, p.line, pairs(w.halves), p.line)
                           : nullptr;
  for (int64_t h = 0; h < a.H2; ++h) {
    float* to = grad_v + shared_head(h, a.Gv, a.H2) * kBlock * p.Ep;
    if (halves) {
      gemm<true, false>(kBlock, p.Ep, (rows + 1) / 2, halves + h * kBlock, p.line,
                        pairs(w.grad_out_pairs + h * ((p.rows + 1) / 2) * p.Ep), p.Ep, to, p.Ep);
    } else {
      gemm<true, false>(kBlock, p.Ep, rows, x + h * kBlock, p.line, w.grad_out + h * p.rows * p.Ep,
                        p.Ep, to, p.Ep);
    }
  }
}

// dQ += dS k (still to be scaled) and dK += dS^T q (in pairs still to be
// scaled).
void score_grad_products(const Args& a, const Plan& p, int64_t rows, const Scratch& w,
                         const PackedBlock& keys, const float* x, float* grad_k) {
  const bool half = HL_BFLOAT16 && p.half;
  const Pair* by_key =
      half ? pair_columns(rows, a.H * kBlock, x, p.line, pairs(w.halves), p.line) : nullptr;
  for (int64_t h = 0; h < a.H; ++h) {
    const float* k = keys.k_rows + shared_head(h, a.Gk, a.H) * kBlock * p.Dp;
    float* to = w.grad_q + h * p.height * p.Dp;
    if (half) {
      gemm<true, true>(rows, p.Dp, kBlock / 2, by_key + h * kBlock / 2, p.line, pairs(k), p.Dp, to,
                       p.Dp);
    } else {
      gemm<true, true>(rows, p.Dp, kBlock, x + h * kBlock, p.line, k, p.Dp, to, p.Dp);
    }
  }
  const Pair* by_row =
      half ? pair_rows(rows, a.H * kBlock, x, p.line, pairs(w.halves), p.line) : nullptr;
  for (int64_t h = 0; h < a.H; ++h) {
    float* to = grad_k + shared_head(h, a.Gk, a.H) * kBlock * p.Dp;
    if (half) {
      gemm<true, false>(kBlock, p.Dp, (rows + 1) / 2, by_row + h * kBlock, p.line,
                        pairs(w.q_pairs + h * ((p.height + 1) / 2) * p.Dp), p.Dp, to, p.Dp);
    } else {
      gemm<true, false>(kBlock, p.Dp, rows, x + h * kBlock, p.line, w.q + h * p.height * p.Dp, p.Dp,
                        to, p.Dp);
    }
  }
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel
