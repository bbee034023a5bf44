// Forward: a tile of queries, all maps, all the key blocks it sees. First pass:
// scores, mix, exponentials against the running maximum, kept for the whole
// row. Second pass: normalise, mix, multiply with values.
#pragma once

#include "ops/composed_attention/kernel_direct.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

// A running maximum stays where no score of a block is larger by more than this: exponentials of
// at most e^16, and their sums, are far from where float32 ends.
constexpr float kRoom = 16;

// kRounded: weights are rounded to bfloat16 before they are multiplied (Plan::half).
template <bool kRounded>
HL_INLINE vf weight_of(vf score, vf maximum) {
  const vf below = score - maximum;
  return kRounded ? vexp_to_be_rounded(below) : vexp_of_negative(below);
}

// x = exp(x - maximum) for one map of a query that sees all keys of a block, and its sum added to
// `sum`. False where the maximum has to rise; x is then what it was.
template <bool kRounded>
HL_INLINE bool exponentials_below(float maximum, float* x, float* sum) {
  vf most = bcast(-FLT_MAX);
#pragma GCC unroll 16
  for (int v = 0; v < kBlock; v += VL) most = vmax(load(x + v), most);
  if (any(above(most, bcast(maximum + kRoom)))) return false;
  const vf shift = bcast(maximum);
  vf s = load(sum);
#pragma GCC unroll 16
  for (int v = 0; v < kBlock; v += VL) {
    const vf e = weight_of<kRounded>(load(x + v), shift);
    s = s + e;
    store(x + v, e);
  }
  store(sum, s);
  return true;
}

// The same for maps [begin, end) of a query that sees the keys of `bits`: maxima rise to the
// largest score, and sums are rescaled. Invisible keys become 0.
template <bool kRounded>
HL_INLINE void exponentials_from_maximum(int64_t begin, int64_t end, uint64_t bits, float* x,
                                         float* high, float* total) {
  constexpr int V = kBlock / VL;
  const bool all = bits == ~uint64_t{0};
  float change[kMaxHeads], top[kMaxHeads];
  const auto highest = [&](int64_t h) {
    vf best = bcast(-FLT_MAX);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      const vf e = load(x + h * kBlock + v * VL);
      best = vmax(all ? e : select(lanes(bits, v), e, bcast(-FLT_MAX)), best);
    }
    return best;
  };
  const int64_t first = begin / VL * VL, last = (end + VL - 1) / VL * VL;
  fill(top + first, last - first, -FLT_MAX);
  int64_t h = begin;
  for (; h + 4 <= end; h += 4) {
    hmax4(highest(h), highest(h + 1), highest(h + 2), highest(h + 3), top + h);
  }
  for (; h < end; ++h) top[h] = hmax(highest(h));
  for (h = first; h < last; h += VL) {
    const vf old = load(high + h), now = vmax(old, load(top + h));
    store(high + h, now);
    store(change + h, vexp(old - now));
  }
  for (h = begin; h < end; ++h) {
    const vf shift = bcast(high[h]);
    vf s = load(total + h * 16) * bcast(change[h]);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      vf e = weight_of<kRounded>(load(x + h * kBlock + v * VL), shift);
      if (!all) e = select(lanes(bits, v), e, zero());
      s = s + e;
      store(x + h * kBlock + v * VL, e);
    }
    store(total + h * 16, s);
  }
}

// x = exp(x - running maximum), 0 where invisible, for one block; updates maximum and sum of each
// row. A maximum is that of the scores seen so far, or at most kRoom below it.
template <bool kRounded>
void exponentials_of_rows(const Args& a, const Plan& p, int64_t rows, const uint64_t* visible,
                          float* x, float* high, float* block_high, float* total) {
  for (int64_t t = 0; t < rows; ++t) {
    const uint64_t bits = visible[t];
    float* const row = x + t * p.line;
    float* const m = high + t * p.heads_padded;
    float* const sums = total + t * a.H1 * 16;
    if (bits == 0) {
      fill(row, a.H1 * kBlock, 0);
    } else if (bits != ~uint64_t{0} || m[0] == -FLT_MAX) {
      exponentials_from_maximum<kRounded>(0, a.H1, bits, row, m, sums);
    } else {
      for (int64_t h = 0; h < a.H1; ++h) {
        if (!exponentials_below<kRounded>(m[h], row + h * kBlock, sums + h * 16)) {
          exponentials_from_maximum<kRounded>(h, h + 1, bits, row, m, sums);
        }
      }
    }
    std::memcpy(block_high + t * p.heads_padded, m, sizeof(float) * p.heads_padded);
  }
}
void exponentials(const Args& a, const Plan& p, int64_t rows, const uint64_t* visible, float* x,
                  float* high, float* block_high, float* total) {
  p.half ? exponentials_of_rows<true>(a, p, rows, visible, x, high, block_high, total)
         : exponentials_of_rows<false>(a, p, rows, visible, x, high, block_high, total);
}

// The largest score adds 1 to a row's sum of exponentials: less than that is a row that sees no
// key, or whose scores are all -inf, which hides a key as a mask does. NaN stays.
HL_INLINE float inverse_of_sum(float sum) { return sum >= 0.5f ? 1.0f / sum : sum - sum; }
HL_INLINE float log_of_sum(float high, float sum) {
  return sum < 0.5f ? 0.0f : high + __builtin_logf(sum);
}

// Turns the sums of a row into their inverses side by side, where the first ones stood, and writes
// the log-sum-exp of the rows that are this tile's own, if asked to.
void finish_rows(const Args& a, const Plan& p, const Tile& tile, const float* high, float* total,
                 bool write = true) {
  for (int64_t r = tile.prob; r < tile.count; ++r) {
    const int64_t t = r - tile.prob;
    float* const row = total + t * a.H1 * 16;
    for (int64_t h = 0; h < a.H1; ++h) {
      const float s = hsum(load(row + h * 16));
      if (write && r >= tile.out) {
        a.lse[(tile.batch * a.H1 + h) * a.T + tile.first + r] =
            log_of_sum(high[t * p.heads_padded + h], s);
      }
      row[h] = inverse_of_sum(s);
    }
  }
}

// What takes exponentials below the maxima `from` of one query's maps to those below `to`.
HL_INLINE void rescaling(const Plan& p, const float* from, const float* to, float* factor) {
  for (int64_t h = 0; h < p.heads_padded; h += VL) {
    store(factor + h, vexp(load(from + h) - load(to + h)));
  }
}

// What makes weights of the softmax of the exponentials of one block and query.
HL_INLINE void weight_factors(const Args& a, const Plan& p, const float* high,
                              const float* block_high, const float* inverses, float* factor) {
  rescaling(p, block_high, high, factor);
  for (int64_t h = 0; h < a.H1; h += VL) store(factor + h, load(factor + h) * load(inverses + h));
}

// The weights of the softmax from one block's exponentials; `to` may be x. A row that is NaN is NaN
// where it sees a key, and 0 elsewhere.
void normalise(const Args& a, const Plan& p, int64_t rows, const uint64_t* visible,
               const float* high, const float* block_high, const float* total, const float* x,
               float* to) {
  float factor[kMaxHeads];
  for (int64_t t = 0; t < rows; ++t) {
    const int64_t at = t * p.heads_padded;
    weight_factors(a, p, high + at, block_high + at, total + t * a.H1 * 16, factor);
    for (int64_t h = 0; h < a.H1; ++h) {
      const float f = factor[h];
      const float* from = x + t * p.line + h * kBlock;
      float* row = to + t * p.line + h * kBlock;
#pragma GCC unroll 16
      for (int64_t s = 0; s < kBlock; s += VL) store(row + s, load(from + s) * bcast(f));
      if (f != f) hide(1, 1, p.line, visible + t, row);
    }
  }
}

// The weights x of one block mixed, rows [first, first + rows) of it: in x itself or a tile of the
// scratch.
HL_INLINE float* mixed_weights(const Args& a, const Plan& p, int64_t first, int64_t rows,
                               const Scratch& w, const PackedBlock& keys, float* x) {
  if (!a.post.present) return x;
  float* y = a.post.matrix ? w.tile[0] : x;
  const int64_t at = first * p.line;
  tile_mix(a.post, mix_weights(p, a.post, w.post_q, first, keys.post), rows, p.line, x + at, y + at,
           false, nullptr);
  return y;
}

template <typename T>
void write_outputs(const Args& a, const Plan& p, const Tile& tile, const Scratch& w) {
  T* out = static_cast<T*>(a.out) + (tile.batch * a.T + tile.first + tile.out) * a.H2 * a.E;
  for (int64_t t = 0; t < tile.count - tile.out; ++t) {
    for (int64_t h = 0; h < a.H2; ++h) {
      store_scaled(w.out + (h * p.rows + t) * p.Ep, a.E, 1, out + (t * a.H2 + h) * a.E);
    }
  }
}

template <typename T>
void prepare_forward(const Args& a, const Plan& p, const Task& task, const Tile& tile,
                     const Scratch& w) {
  const int64_t prob_rows = tile.count - tile.prob;
  prepare_tile<T>(a, p, task, tile, w);
  fill(w.high, prob_rows * p.heads_padded, -FLT_MAX);
  fill(w.total, prob_rows * a.H1 * 16, 0);
  fill(w.out, a.H2 * p.rows * p.Ep, 0);
}

template <typename T>
void forward_tile(const Args& a, const Plan& p, const Task& task, int64_t index) {
  const Scratch w = scratch(a, p, task.scratch);
  const Tile tile = make_tile(a, p, task.batch, index);
  const int64_t blocks = tile.blocks.end - tile.blocks.begin;
  const int64_t prob_rows = tile.count - tile.prob, rows = tile.count - tile.out;
  const int64_t high_size = p.height * p.heads_padded;
  const bool pre_conv = a.pre_conv.kernel, post_conv = a.post_conv.kernel;
  prepare_forward<T>(a, p, task, tile, w);

  const auto keys = [&](int64_t i) {
    return packed_block(a, p, task.packed, tile.blocks.begin + i);
  };
  // While block i is computed: the keys or values of block `next`, and what its row takes or holds.
  const auto upcoming = [&](int64_t next, bool values) {
    Upcoming out;
    if (next < 0 || next >= blocks) return out;
    out.first = values ? keys(next).v_rows : keys(next).k_panel;
    out.first_size = kBlock * (values ? p.Ep : p.Dp) / (p.half ? 2 : 1);
    out.chunks[0] = w.weights + next * p.chunk;
    out.chunk_size = p.chunk;
    return out;
  };
  const auto raw = [&](int64_t i) {
    if (!pre_conv || i >= blocks) return;
    raw_scores(a, p, task, tile, w, i, upcoming(i + 1, false), w.scores + i * p.chunk);
  };
  raw(0);
  for (int64_t i = 0; i < blocks; ++i) {
    raw(i + 1);
    if (!any_visible(p, tile, w.visible, i, tile.prob)) continue;
    float* x = w.weights + i * p.chunk;
    mixed_scores(a, p, task, tile, w, i, upcoming(i + 1, false), x, [&](int64_t r, int64_t n) {
      const int64_t at = tile.prob + r, high = r * p.heads_padded;
      exponentials(a, p, n, w.visible + i * p.height + at, x + at * p.line, w.high + high,
                   w.block_high + i * high_size + high, w.total + r * a.H1 * 16);
    });
  }
  finish_rows(a, p, tile, w.high, w.total);
  fetch_next_keys<T>(a, p, task, index);

  // Rows [r, r + n) of a block's weights, counted from `prob`, into `to`.
  const auto weights = [&](int64_t i, int64_t r, int64_t n, float* to) {
    const int64_t row = tile.prob + r, high = r * p.heads_padded;
    normalise(a, p, n, w.visible + i * p.height + row, w.high + high,
              w.block_high + i * high_size + high, w.total + r * a.H1 * 16,
              w.weights + i * p.chunk + row * p.line, to + row * p.line);
  };
  // The same mixed, in one step: the mix takes the factors of the weights along. A row that is NaN
  // is NaN for all keys of the block, which then only enter sums that are NaN already. A dynamic
  // mix narrows what it has in registers, and leaves `to` alone.
  const bool paired = HL_BFLOAT16 && p.half && a.post.dynamic() && mixes_scaled(a.post);
  const auto scaled = [&](int64_t i, int64_t r, int64_t n, float* to) {
    float factor[kFewRows * kMaxHeads];
    const int64_t at = (tile.prob + r) * p.line;
    for (int64_t t = r; t < r + n; ++t) {
      const int64_t high = t * p.heads_padded;
      weight_factors(a, p, w.high + high, w.block_high + i * high_size + high,
                     w.total + t * a.H1 * 16, factor + (t - r) * p.heads_padded);
    }
    tile_mix_scaled(a.post, mix_weights(p, a.post, w.post_q, r, keys(i).post), n, p.line,
                    w.weights + i * p.chunk + at, factor, p.heads_padded, to + at,
                    paired ? pairs(w.halves) + r * p.line : nullptr);
  };
  const auto values = [&](int64_t i, const float* x, const Upcoming& next) {
    value_product(a, p, rows, w, keys(i), seen_keys(p, tile, w.visible, i, tile.out), next, x);
  };
  if (post_conv) {
    const auto in_place = [&](int64_t i) {
      if (i >= blocks || !any_visible(p, tile, w.visible, i, tile.prob)) return;
      weights(i, 0, prob_rows, w.weights + i * p.chunk);
    };
    in_place(0);
    for (int64_t i = 0; i < blocks; ++i) {
      in_place(i + 1);
      if (!any_visible(p, tile, w.visible, i, tile.out)) continue;
      const Neighbours near = neighbours(p, tile, w.visible, i, tile.prob, w.weights);
      float* x = w.tile[1];
      conv_apply(a.post_conv, false, a.H1, p.line, near,
                 conv_rows_of(a, tile, {tile.prob, tile.count}), {tile.out, tile.count}, kNoLimit,
                 x, w.conv);
      x += tile.out * p.line;
      hide(rows, a.H1, p.line, w.visible + i * p.height + tile.out, x);
      values(i, mixed_weights(a, p, 0, rows, w, keys(i), x), upcoming(i + 1, true));
    }
  } else {
    // The other way round: the row's end was written last, so that it is still near. What has
    // outputs is what has weights, and is not changed in the row, which may lie in slow memory.
    float* const x = w.tile[1] + tile.out * p.line;
    for (int64_t i = blocks - 1; i >= 0; --i) {
      if (!any_visible(p, tile, w.visible, i, tile.out)) continue;
      const float* mixed = paired ? nullptr : x;
      few_rows(rows, [&](int64_t r, int64_t n) {
        if (mixes_scaled(a.post)) return scaled(i, r, n, w.tile[1]);
        weights(i, r, n, w.tile[1]);
        mixed = mixed_weights(a, p, r, n, w, keys(i), x);
      });
      values(i, mixed, upcoming(i - 1, true));
    }
  }
  write_outputs<T>(a, p, tile, w);
}

// A few queries against many keys: the workers share the key blocks of the one tile, so nothing may
// look at neighbouring blocks. Each packs a block when it comes to it.

// The scratch of worker k.
HL_INLINE Scratch scratch_of(const Args& a, const Plan& p, const Task& task, int64_t k) {
  return scratch(a, p,
                 p.workers == 1 ? task.scratch : task.scratch + (k - task.worker) * p.scratch);
}

// Calls f(i, end) for this worker's share of the tile's blocks, which ends before key `end`.
template <typename F>
HL_INLINE void own_blocks(const Args& a, const Plan& p, const Task& task, const Tile& tile,
                          const Scratch& w, F&& f) {
  const int64_t blocks = tile.blocks.end - tile.blocks.begin, k = p.workers == 1 ? 0 : task.worker;
  const int64_t end = blocks * (k + 1) / p.workers;
  for (int64_t i = blocks * k / p.workers; i < end; ++i) {
    if (any_visible(p, tile, w.visible, i, 0)) {
      f(i, lesser(a.S, (tile.blocks.begin + end) * kBlock));
    }
  }
}

template <typename T>
void split_scores(const Args& a, const Plan& p, const Task& task) {
  const Scratch w = scratch(a, p, task.scratch);
  const Tile tile = make_tile(a, p, task.batch, 0);
  prepare_forward<T>(a, p, task, tile, w);
  own_blocks(a, p, task, tile, w, [&](int64_t i, int64_t end) {
    const int64_t block = tile.blocks.begin + i;
    const PackedBlock keys = packed_block(a, p, task.packed, block);
    const uint64_t* visible = w.visible + i * p.height;
    float* x = w.weights + i * p.chunk;
    float* raw = a.pre.matrix ? w.tile[0] : x;
    const SeenKeys seen = seen_keys(p, tile, w.visible, i, 0);
    if (p.direct) {
      pack_key_weights<T>(a, p, a.pre, task.batch, block, keys.pre);
      fetch_key_weights<T>(a, a.pre, task.batch, block + 1);
      const Range reach = seen_keys(tile.count, visible);
      a.k_scale ? direct_scores<int8_t>(a, p, task.batch, block, reach, end, w, raw)
                : direct_scores<T>(a, p, task.batch, block, reach, end, w, raw);
    } else {
      pack_keys<T>(a, p, task.batch, block, keys);
      score_product(a, p, tile.count, w, keys, seen, {}, raw);
    }
    add_bias(a, p, tile, block, raw);
    if (a.pre.present) {
      tile_mix(a.pre, mix_weights(p, a.pre, w.pre_q, 0, keys.pre), tile.count, p.line, raw, x,
               false, nullptr);
    }
    exponentials(a, p, tile.count, visible, x, w.high, w.block_high + i * p.height * p.heads_padded,
                 w.total);
  });
}

// Maxima and sums over the shares of all workers.
void gather_rows(const Args& a, const Plan& p, const Task& task, const Tile& tile,
                 const Scratch& w) {
  const int64_t rows = tile.count;
  fill(w.all_high, rows * p.heads_padded, -FLT_MAX);
  fill(w.all_total, rows * a.H1 * 16, 0);
  for (int64_t k = 0; k < p.workers; ++k) {
    const Scratch other = scratch_of(a, p, task, k);
    for (int64_t i = 0; i < rows * p.heads_padded; i += VL) {
      store(w.all_high + i, vmax(load(w.all_high + i), load(other.high + i)));
    }
  }
  float factor[kMaxHeads];
  for (int64_t k = 0; k < p.workers; ++k) {
    const Scratch other = scratch_of(a, p, task, k);
    for (int64_t t = 0; t < rows; ++t) {
      const int64_t at = t * p.heads_padded;
      rescaling(p, other.high + at, w.all_high + at, factor);
      for (int64_t h = 0; h < a.H1; ++h) {
        const int64_t sum = (t * a.H1 + h) * 16;
        store(w.all_total + sum,
              fma(load(other.total + sum), bcast(factor[h]), load(w.all_total + sum)));
      }
    }
  }
}

template <typename T>
void split_values(const Args& a, const Plan& p, const Task& task) {
  const Scratch w = scratch(a, p, task.scratch);
  const Tile tile = make_tile(a, p, task.batch, 0);
  if (p.joined) {
    // This worker's own softmax; the sums stay for split_output.
    store_scaled(w.high, tile.count * p.heads_padded, 1, w.all_high);
    store_scaled(w.total, tile.count * a.H1 * 16, 1, w.all_total);
    finish_rows(a, p, tile, w.all_high, w.all_total, false);
  } else {
    gather_rows(a, p, task, tile, w);
    finish_rows(a, p, tile, w.all_high, w.all_total, p.workers == 1 || task.worker == 0);
  }
  own_blocks(a, p, task, tile, w, [&](int64_t i, int64_t end) {
    const int64_t block = tile.blocks.begin + i;
    const PackedBlock keys = packed_block(a, p, task.packed, block);
    float* x = w.weights + i * p.chunk;
    normalise(a, p, tile.count, w.visible + i * p.height, w.all_high,
              w.block_high + i * p.height * p.heads_padded, w.all_total, x, x);
    if (p.direct) {
      pack_key_weights<T>(a, p, a.post, task.batch, block, keys.post);
      fetch_key_weights<T>(a, a.post, task.batch, block + 1);
      const Range seen = seen_keys(tile.count, w.visible + i * p.height);
      float* const weights = mixed_weights(a, p, 0, tile.count, w, keys, x);
      a.v_scale ? direct_values<int8_t>(a, p, task.batch, block, seen, end, w, weights)
                : direct_values<T>(a, p, task.batch, block, seen, end, w, weights);
    } else {
      pack_values<T>(a, p, task.batch, block, keys);
      value_product(a, p, tile.count, w, keys, seen_keys(p, tile, w.visible, i, 0), {},
                    mixed_weights(a, p, 0, tile.count, w, keys, x));
    }
  });
}

// The outputs of the workers' own softmaxes, each times its part in the whole one.
void join_outputs(const Args& a, const Plan& p, const Task& task, const Tile& tile,
                  const Scratch& w) {
  gather_rows(a, p, task, tile, w);
  finish_rows(a, p, tile, w.all_high, w.all_total);
  for (int64_t k = 0; k < p.workers; ++k) {
    const Scratch other = scratch_of(a, p, task, k);
    for (int64_t t = 0; t < tile.count; ++t) {
      float factor[kMaxHeads];
      const int64_t at = t * p.heads_padded, sums = t * a.H1 * 16;
      weight_factors(a, p, w.all_high + at, other.high + at, w.all_total + sums, factor);
      for (int64_t h = 0; h < a.H1; ++h) {
        const int64_t row = (h * p.rows + t) * p.Ep;
        const vf part = bcast(factor[h] * hsum(load(other.total + sums + h * 16)));
        for (int64_t e = 0; e < p.Ep; e += VL) {
          const vf own = part * load(other.out + row + e);
          store(w.out + row + e, k == 0 ? own : own + load(w.out + row + e));
        }
      }
    }
  }
}

template <typename T>
void split_output(const Args& a, const Plan& p, const Task& task) {
  const Scratch w = scratch(a, p, task.scratch);
  const Tile tile = make_tile(a, p, task.batch, 0);
  if (p.joined) {
    join_outputs(a, p, task, tile, w);
  } else {
    for (int64_t k = 1; k < p.workers; ++k) {
      const Scratch other = scratch_of(a, p, task, k);
      for (int64_t i = 0; i < a.H2 * p.rows * p.Ep; i += VL) {
        store(w.out + i, load(w.out + i) + load(other.out + i));
      }
    }
  }
  write_outputs<T>(a, p, tile, w);
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel
