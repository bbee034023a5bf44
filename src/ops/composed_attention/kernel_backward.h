// Backward: everything is recomputed from q, k, v and the saved log-sum-exp. First pass over the
// key blocks: weights P, their gradient dP and what belongs to the values and the mix after
// softmax; the row sums of P dP. Second pass: the gradient of the scores and all that is before
// softmax.
#pragma once

#include "ops/composed_attention/kernel_tile.h"

namespace headloom::ops::fused {
namespace {

// x = exp(x - lse), 0 where invisible.
void weights_from_lse(const Args& a, const Plan& p, int64_t rows, const uint64_t* visible,
                      const float* lse, float* x) {
  constexpr int V = kBlock / VL;
  for (int64_t t = 0; t < rows; ++t) {
    const uint64_t bits = visible[t];
    const bool all = bits == ~uint64_t{0};
    for (int64_t h = 0; h < a.H1; ++h) {
      float* row = x + t * p.line + h * kBlock;
      const vf shift = bcast(lse[t * a.H1 + h]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        vf e = vexp(load(row + v * VL) - shift);
        if (!all) e = select(lanes(bits, v), e, zero());
        store(row + v * VL, e);
      }
    }
  }
}

// delta[t][h] += sum over keys of P dP, by lane.
void add_delta(const Args& a, const Plan& p, int64_t rows, const float* weights, const float* grad,
               float* delta) {
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t h = 0; h < a.H1; ++h) {
      const int64_t at = t * p.line + h * kBlock;
      float* to = delta + (t * a.H1 + h) * 16;
      vf sum = load(to);
#pragma GCC unroll 16
      for (int64_t s = 0; s < kBlock; s += VL) {
        sum = fma(load(weights + at + s), load(grad + at + s), sum);
      }
      store(to, sum);
    }
  }
}

// grad = weights * (grad - delta).
void softmax_grad(const Args& a, const Plan& p, int64_t rows, const float* weights,
                  const float* delta, float* grad) {
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t h = 0; h < a.H1; ++h) {
      const int64_t at = t * p.line + h * kBlock;
      const vf shift = bcast(delta[(t * a.H1 + h) * 16]);
#pragma GCC unroll 16
      for (int64_t s = 0; s < kBlock; s += VL) {
        store(grad + at + s, load(weights + at + s) * (load(grad + at + s) - shift));
      }
    }
  }
}

HL_INLINE void mix_gradients(const Mix& mix, int64_t worker, int64_t rows, int64_t line,
                             const float* x, const float* dy, const Scratch& w, float* q_sum,
                             float* k_sum) {
  if (mix.dynamic()) mix_grad(mix, {rows, line, x, dy, w.inner, w.grad_inner, q_sum, k_sum});
  if (mix.matrix && mix.grad.matrix) {
    float* sum = mix.grad.matrix + worker * mix.in * mix.out / mix.groups;
    mix_static_grad(mix, rows, line, x, dy, sum);
  }
}

// Writes the query-side gradients of a tile from their sums by lane, [t][h][q_width][VL].
void write_query_grads(const Mix& mix, const Args& a, int64_t batch, int64_t first, int64_t rows,
                       const float* sum) {
  if (!mix.query_side()) return;
  const int64_t width = mix.q_width(), rank = (width - 1) / 2;
  for (int64_t t = 0; t < rows; ++t) {
    const int64_t row = batch * a.T + first + t;
    for (int64_t h = 0; h < mix.in; ++h) {
      const float* from = sum + (t * mix.in + h) * width * VL;
      for (int64_t r = 0; r < mix.q_rank; ++r) {
        mix.grad.q_down[(row * mix.q_rank + r) * mix.in + h] = hsum(load(from + r * VL));
        mix.grad.q_up[(row * mix.q_rank + r) * mix.in + h] = hsum(load(from + (rank + r) * VL));
      }
      if (mix.q_gate.data) mix.grad.q_gate[row * mix.in + h] = hsum(load(from + 2 * rank * VL));
    }
  }
}

template <typename T>
void backward_tile(const Args& a, const Plan& p, const Task& task, int64_t tile) {
  const Scratch w = scratch(a, p, task.scratch);
  const int64_t batch = task.batch, first = tile * p.rows, rows = lesser(p.rows, a.T - first);
  const Range blocks = block_range(a, batch, first, rows);
  pack_queries<T>(a, p, batch, first, rows, w.q);
  pack_query_weights(a.pre, batch, first, rows, w.pre_q);
  pack_query_weights(a.post, batch, first, rows, w.post_q);
  tile_visibility(a, p, batch, first, rows, blocks, w.visible);
  for (int64_t h = 0; h < a.H2; ++h) {
    const T* from = static_cast<const T*>(a.grad_out) + batch * a.grad_out_stride[0] +
                    first * a.grad_out_stride[1] + h * a.grad_out_stride[2];
    pack_rows(from, a.grad_out_stride, rows, rows, a.E, p.Ep, 1, w.grad_out + h * p.rows * p.Ep);
  }
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t h = 0; h < a.H1; ++h) {
      w.lse[t * a.H1 + h] = a.lse[(batch * a.H1 + h) * a.T + first + t];
    }
  }
  fill(w.grad_q, a.H * p.rows * p.Dp, 0);
  fill(w.delta, rows * a.H1 * 16, 0);
  fill(w.pre_sum, rows * a.H * a.pre.q_width() * VL, 0);
  fill(w.post_sum, rows * a.H1 * a.post.q_width() * VL, 0);

  for (int64_t j = blocks.begin; j < blocks.end; ++j) {
    const int64_t i = j - blocks.begin;
    if (!any_visible(w.visible + i * p.rows, rows)) continue;
    const PackedBlock keys = packed_block(a, p, task.packed, j);
    const BlockSums sums = block_sums(a, p, task.sums, j);
    float* weights = w.row[1] + i * p.chunk;
    float* grad = w.row[2] + i * p.chunk;
    float* scores = a.pre.present ? w.row[0] + i * p.chunk : weights;
    tile_scores(a, p, batch, first, rows, j, w.q, keys, scores);
    if (a.pre.present) {
      tile_mix(a.pre, {w.pre_q, keys.pre}, rows, p.line, scores, weights, false, nullptr);
    }
    weights_from_lse(a, p, rows, w.visible + i * p.rows, w.lse, weights);

    float* mixed = weights;
    float* mixed_grad = a.post.present ? w.tile[0] : grad;
    for (int64_t h = 0; h < a.H2; ++h) {
      gemm<false, true>(rows, kBlock, a.E, w.grad_out + h * p.rows * p.Ep, p.Ep,
                        keys.v_panel + shared_head(h, a.Gv, a.H2) * a.E * kBlock, kBlock,
                        mixed_grad + h * kBlock, p.line);
    }
    if (a.post.present) {
      const MixWeights by{w.post_q, keys.post};
      mixed = w.tile[1];
      tile_mix(a.post, by, rows, p.line, weights, mixed, false, w.inner);
      tile_mix(a.post, by, rows, p.line, mixed_grad, grad, true, w.grad_inner);
      mix_gradients(a.post, task.worker, rows, p.line, weights, mixed_grad, w, w.post_sum,
                    sums.post);
    }
    for (int64_t h = 0; h < a.H2; ++h) {
      gemm<true, false>(kBlock, p.Ep, rows, mixed + h * kBlock, p.line,
                        w.grad_out + h * p.rows * p.Ep, p.Ep,
                        sums.v + shared_head(h, a.Gv, a.H2) * kBlock * p.Ep, p.Ep);
    }
    add_delta(a, p, rows, weights, grad, w.delta);
  }
  for (int64_t i = 0; i < rows * a.H1; ++i) w.delta[i * 16] = hsum(load(w.delta + i * 16));
  for (int64_t j = blocks.begin; j < blocks.end; ++j) {
    const int64_t i = j - blocks.begin;
    if (!any_visible(w.visible + i * p.rows, rows)) continue;
    const PackedBlock keys = packed_block(a, p, task.packed, j);
    const BlockSums sums = block_sums(a, p, task.sums, j);
    float* grad = w.row[2] + i * p.chunk;
    softmax_grad(a, p, rows, w.row[1] + i * p.chunk, w.delta, grad);
    if (a.pre.present) {
      const MixWeights by{w.pre_q, keys.pre};
      const float* scores = w.row[0] + i * p.chunk;
      if (a.pre.dynamic()) {
        mix_apply(a.pre, by, {rows, p.line, scores, scores, nullptr, false, w.inner});
      }
      tile_mix(a.pre, by, rows, p.line, grad, w.tile[0], true, w.grad_inner);
      mix_gradients(a.pre, task.worker, rows, p.line, scores, grad, w, w.pre_sum, sums.pre);
      grad = w.tile[0];
    }
    for (int64_t h = 0; h < a.H; ++h) {
      const int64_t g = shared_head(h, a.Gk, a.H);
      gemm<true, true>(rows, p.Dp, kBlock, grad + h * kBlock, p.line,
                       keys.k_rows + g * kBlock * p.Dp, p.Dp, w.grad_q + h * p.rows * p.Dp, p.Dp);
      gemm<true, false>(kBlock, p.Dp, rows, grad + h * kBlock, p.line, w.q + h * p.rows * p.Dp,
                        p.Dp, sums.k + g * kBlock * p.Dp, p.Dp);
    }
  }
  write_query_grads(a.pre, a, batch, first, rows, w.pre_sum);
  write_query_grads(a.post, a, batch, first, rows, w.post_sum);
  T* out = static_cast<T*>(a.grad_q) + (batch * a.T + first) * a.H * a.D;
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t h = 0; h < a.H; ++h) {
      const float* from = w.grad_q + (h * p.rows + t) * p.Dp;
      for (int64_t d = 0; d < a.D; ++d) {
        narrow(a.scale * from[d], out + (t * a.H + h) * a.D + d);
      }
    }
  }
}

// Adds the workers' sums into those of the first and clears the others.
HL_INLINE void gather(const Plan& p, float* sums, int64_t n) {
  for (int64_t i = 0; i < n; i += VL) {
    vf total = load(sums + i);
    for (int64_t w = 1; w < p.workers; ++w) {
      float* other = sums + w * p.sums + i;
      total = total + load(other);
      store(other, zero());
    }
    store(sums + i, total);
  }
}

void write_key_grads(const Mix& mix, const Args& a, int64_t batch, int64_t first, int64_t n,
                     const float* sum) {
  if (!mix.key_side()) return;
  const int64_t width = mix.k_width(), rank = (width - 1) / 2;
  for (int64_t s = 0; s < n; ++s) {
    const int64_t row = batch * a.S + first + s;
    for (int64_t h = 0; h < mix.in; ++h) {
      const float* from = sum + h * width * kBlock + s;
      for (int64_t r = 0; r < mix.k_rank; ++r) {
        mix.grad.k_down[(row * mix.k_rank + r) * mix.in + h] = from[r * kBlock];
        mix.grad.k_up[(row * mix.k_rank + r) * mix.in + h] = from[(rank + r) * kBlock];
      }
      if (mix.k_gate.data) mix.grad.k_gate[row * mix.in + h] = from[2 * rank * kBlock];
    }
  }
}

template <typename T>
void reduce_block(const Args& a, const Plan& p, const Task& task, int64_t block) {
  const BlockSums sums = block_sums(a, p, task.sums, block);
  gather(p, sums.k, sums.size);
  const int64_t first = block * kBlock, n = lesser(kBlock, a.S - first);
  const auto write = [&](const float* from, void* to, int64_t heads, int64_t size, int64_t padded) {
    T* out = static_cast<T*>(to) + (task.batch * a.S + first) * heads * size;
    for (int64_t s = 0; s < n; ++s) {
      for (int64_t g = 0; g < heads; ++g) {
        for (int64_t d = 0; d < size; ++d) {
          narrow(from[(g * kBlock + s) * padded + d], out + (s * heads + g) * size + d);
        }
      }
    }
  };
  write(sums.k, a.grad_k, a.Gk, a.D, p.Dp);
  write(sums.v, a.grad_v, a.Gv, a.E, p.Ep);
  write_key_grads(a.pre, a, task.batch, first, n, sums.pre);
  write_key_grads(a.post, a, task.batch, first, n, sums.post);
  fill(sums.k, sums.size, 0);
}

}  // namespace
}  // namespace headloom::ops::fused
