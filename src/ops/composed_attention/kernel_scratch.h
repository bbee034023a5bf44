// Where things lie in the memory that the caller provides: the packed keys, one
// worker's key-side gradient sums and one worker's scratch. Each layout is
// written once and used for sizes and addresses.
#pragma once

#include "ops/composed_attention/kernel.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

// Of a block, the keys [begin, end) that anything sees, in whole vectors: what is invisible is left
// out of the products, and 0 where they write.
struct SeenKeys {
  int64_t begin, end;
  HL_INLINE int64_t count() const { return end - begin; }
};

// Hands out consecutive pieces of a buffer, each a whole number of cache lines;
// from null it only counts.
struct Arena {
  float* base;
  int64_t used = 0;
  HL_INLINE float* take(int64_t floats) {
    float* p = base ? base + used : nullptr;
    used += (floats + 15) / 16 * 16;
    return p;
  }
};

// Of a row of weights and a map: the lanes of two sums.
constexpr int64_t kRowSums = 32;

// Where plan.mixes_pairs is set: what one side of a mix has for one position, in elements that are
// a pair of bfloat16 or a float. What leads to inner products is in pairs of neighbouring maps,
// what leads back to maps in pairs of neighbouring ranks; an odd last one is paired with 0. Index 0
// is what the mix takes, 1 what its gradient takes, for which down and up change places.
struct PairedWeights {
  int64_t map_pairs, rank_pairs;  // of a group, of a map
  int64_t inward[2];              // [groups][rank][map_pairs]
  int64_t outward[2];             // [maps][rank_pairs]
  int64_t gate;                   // [maps] floats
  int64_t size;
};

HL_INLINE PairedWeights paired_weights(const Mix& mix, int64_t rank, bool backward) {
  PairedWeights w{};
  w.map_pairs = (mix.in / mix.groups + 1) / 2;
  w.rank_pairs = (rank + 1) / 2;
  const int64_t inward = mix.groups * rank * w.map_pairs, outward = mix.in * w.rank_pairs;
  w.outward[0] = inward;
  w.inward[1] = inward + outward;
  w.outward[1] = 2 * inward + outward;
  w.gate = backward ? 2 * (inward + outward) : inward + outward;
  w.size = w.gate + mix.in;
  return w;
}

// Floats of the dynamic weights of one position, as packed.
HL_INLINE int64_t query_weights_size(const Mix& mix, const Plan& p) {
  return p.mixes_pairs ? paired_weights(mix, mix.packed_q_rank(), p.backward).size
                       : mix.in * mix.q_width();
}
HL_INLINE int64_t key_weights_size(const Mix& mix, const Plan& p) {
  if (!mix.key_side()) return 0;
  return p.mixes_pairs ? paired_weights(mix, mix.packed_k_rank(), p.backward).size
                       : mix.in * mix.k_width();
}

// One key block, packed: read by every tile; where plan.direct is set, only the weights of the
// mixes, and where plan.by_map is set, only wide rows of keys and values. Where plan.half is set
// two bfloat16 along the summed dimension take the place of one float, and the second half of each
// head's piece is unused.
struct PackedBlock {
  float* k_panel;  // [Gk][Dp][kBlock]
  float* k_rows;   // [Gk][kBlock][Dp]    backward only
  float* v_panel;  // [Gv][Ep][kBlock]     backward only
  float* v_rows;   // [Gv][kBlock][Ep]    forward only
  float* pre;      // [H][k_width][kBlock], or as PairedWeights has it
  float* post;     // [H1][k_width][kBlock], likewise
  int64_t size;
};

// Floats from one row to the next where all heads of a row stand together. What is added keeps the
// rows of one head from falling into the same cache sets, and lets a vector reach over the last
// one.
HL_INLINE int64_t wide_row(int64_t heads, int64_t size) {
  return (heads * size + kAlign - 1) / kAlign * kAlign + kAlign;
}

HL_INLINE PackedBlock packed_block(const Args& a, const Plan& p, float* base, int64_t block) {
  PackedBlock out;
  const auto floats = [&](int64_t heads, int64_t size, int64_t padded) {
    return p.direct ? 0 : kBlock * (p.by_map ? wide_row(heads, size) : heads * padded);
  };
  const int64_t k = floats(a.Gk, a.D, p.Dp), v = floats(a.Gv, a.E, p.Ep);
  const int64_t pre = key_weights_size(a.pre, p) * kBlock;
  const int64_t post = key_weights_size(a.post, p) * kBlock;
  const int64_t size = k + v + pre + post + (p.backward && !p.by_map ? k : 0);
  Arena arena{base + (p.split ? 0 : block) * size};
  out.k_panel = arena.take(p.by_map ? 0 : k);
  out.k_rows = arena.take(p.backward || p.by_map ? k : 0);
  out.v_panel = arena.take(p.backward && !p.by_map ? v : 0);
  out.v_rows = arena.take(p.backward && !p.by_map ? 0 : v);
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

// What a worker owes to the queries before its first tile, where convolutions
// reach back to them.
struct Boundary {
  int64_t* rows;  // batch, first query and count; count is 0 where nothing is owed
  float* grad_q;  // [halo][H][D]
  float* pre;     // [halo][H][q_width]
  int64_t size;
};

HL_INLINE Boundary boundary(const Args& a, float* base) {
  Arena arena{base};
  Boundary out;
  const int64_t halo = a.pre_conv.halo() + a.post_conv.halo();
  out.rows = reinterpret_cast<int64_t*>(arena.take(16));
  out.grad_q = arena.take(halo * a.H * a.D);
  out.pre = arena.take(halo * a.H * a.pre.q_width());
  out.size = arena.used;
  return out;
}

// Pairs of a line where the pairs of rows of a tile are turned (turn_rows in kernel/tiles.h).
HL_INLINE int64_t turned_pairs(int64_t rows) { return (rows + 31) / 32 * 16; }

// Rows of a tile: [0, height) have scores, the last ones of them weights, the
// last `rows` outputs.
struct Scratch {
  float* q;               // [H][height][Dp], times scale
  float *pre_q, *post_q;  // [height][H][q_width], [rows][H1][q_width], or as PairedWeights has it
  // One chunk for each key block of the tile.
  float* scores;          // before the convolution, or (backward) before the mix
  float* mix_in;          // backward: between convolution and mix
  float* weights;         // one chunk in all where the plan does not keep them
  float* grads;           // backward: of the weights after the convolution, then of what
                          // precedes
  float* conv_grads;      // backward: of the weights before the convolution
  uint64_t* visible;      // [span][height]
  uint64_t* raw_visible;  // [span][height]: what the convolution before softmax counts
  float* tile[3];         // one chunk each
  float* halves;     // a tile in pairs of bfloat16, where plan.half is set: of neighbouring keys
  float* row_pairs;  // and of neighbouring queries, [(height + 1) / 2][line], backward, not amx
  float* q_pairs;    // [H][(height + 1) / 2][Dp] pairs of rows, likewise, backward
  float* grad_out_pairs;  // [H2][(rows + 1) / 2][Ep], likewise
  float* conv;            // for conv_apply
  // Forward.
  float* out;                   // [H2][rows][Ep]
  float *high, *block_high;     // [height][heads_padded],
                                // [span][height][heads_padded]: maxima
  float* total;                 // [height][H1][16]: running sums, by lane
  float *all_high, *all_total;  // those of all workers, where the plan splits
  // Backward.
  float* grad_out;              // [H2][rows][Ep]
  float* grad_q;                // [H][height][Dp]
  float* lse;                   // [height][H1]
  float* delta;                 // [height][H1][kRowSums]: the sums; then the mean of dP, once
  float *pre_sum, *post_sum;    // [height][H][q_width][kFolded], [rows][H1][q_width][kFolded]
  float *inner, *grad_inner;    // [height][groups][2 rank][kBlock], or as InnerPairs has it
  float *pre_taps, *post_taps;  // [H][c_h][c_q][c_k][16]
  int64_t size;
};

HL_INLINE int64_t conv_taps(const Conv& c, int64_t maps) {
  return c.kernel ? maps * c.heads * c.queries * c.keys : 0;
}

HL_INLINE Scratch scratch(const Args& a, const Plan& p, float* base) {
  Scratch s{};
  Arena arena{base};
  const int64_t height = p.height, row = p.span * p.chunk;
  const bool pre_conv = a.pre_conv.kernel, post_conv = a.post_conv.kernel;
  const int64_t pre_sum = height * a.H * a.pre.q_width();
  const int64_t post_sum = p.rows * a.H1 * a.post.q_width();
  const int64_t bits = 2 * p.span * height;
  s.q = arena.take(a.H * height * p.Dp);
  s.pre_q = arena.take(height * query_weights_size(a.pre, p));
  s.post_q = arena.take(p.rows * query_weights_size(a.post, p));
  s.weights = arena.take(p.keeps_weights ? row : p.chunk);
  if (pre_conv || (p.backward && a.pre.present)) s.scores = arena.take(row);
  s.visible = reinterpret_cast<uint64_t*>(arena.take(bits));
  s.raw_visible = s.visible;
  if (pre_conv && a.exact_mask && a.causal) {
    s.raw_visible = reinterpret_cast<uint64_t*>(arena.take(bits));
  }
  for (int i = 0; i < (p.backward && post_conv ? 3 : 2); ++i) s.tile[i] = arena.take(p.chunk);
  if (pre_conv || post_conv) {
    const int64_t heads =
        a.pre_conv.heads > a.post_conv.heads ? a.pre_conv.heads : a.post_conv.heads;
    s.conv = arena.take(heads * (height + kMaxConvQueries) * (kBlock + kMaxConvKeys + 15));
  }
  if (p.half) {
    const int64_t turned = p.amx ? p.maps * kBlock * turned_pairs(height) : 0;
    s.halves = arena.take(turned > p.chunk ? turned : p.chunk);
    if (p.backward) {
      if (!p.amx) s.row_pairs = arena.take((height + 1) / 2 * p.line);
      s.q_pairs = arena.take(a.H * ((height + 1) / 2) * p.Dp);
      s.grad_out_pairs = arena.take(a.H2 * ((p.rows + 1) / 2) * p.Ep);
    }
  }
  if (p.backward) {
    s.grads = arena.take(row);
    if (pre_conv && a.pre.present) s.mix_in = arena.take(row);
    if (post_conv) s.conv_grads = arena.take(row);
    s.grad_out = arena.take(a.H2 * p.rows * p.Ep);
    s.grad_q = arena.take(a.H * height * p.Dp);
    s.lse = arena.take(height * a.H1);
    s.delta = arena.take(height * a.H1 * kRowSums);
    s.pre_sum = arena.take(pre_sum * 4 + 16);  // and a vector after them
    s.post_sum = arena.take(post_sum * 4 + 16);
    const int64_t rank = a.pre.rank > a.post.rank ? a.pre.rank : a.post.rank;
    const int64_t groups = a.pre.groups > a.post.groups ? a.pre.groups : a.post.groups;
    s.inner = arena.take(height * groups * 2 * rank * kBlock);
    s.grad_inner = arena.take(height * groups * 2 * rank * kBlock);
    s.pre_taps = arena.take(conv_taps(a.pre_conv, a.H) * 16);
    s.post_taps = arena.take(conv_taps(a.post_conv, a.H1) * 16);
  } else {
    s.out = arena.take(a.H2 * p.rows * p.Ep);
    s.high = arena.take(height * p.heads_padded);
    s.block_high = arena.take(p.span * height * p.heads_padded);
    s.total = arena.take(height * a.H1 * 16);
    if (p.split) {
      s.all_high = arena.take(height * p.heads_padded);
      s.all_total = arena.take(height * a.H1 * 16);
    }
  }
  s.size = arena.used;
  return s;
}

// Where maps are computed one by one: queries of a tile, at most, and of each half of it, and the
// keys that go together.
constexpr int64_t kMapRows = 32;
constexpr int64_t kMapHalf = 16;
constexpr int64_t kKeyStep = 16;

// What such a tile sees of one block. A half sees nothing outside its [begin, end), which are whole
// steps, all of its queries see the keys [begin, whole), and bit r of rows[s] says whether query r
// of the tile sees a key s after them.
struct ShownKeys {
  struct Half {
    int64_t begin, whole, end;
  };
  // Keys [begin, end) of which the same halves see anything: queries [row, row + rows).
  struct Run {
    int64_t begin, end, row, rows;
  };
  Half half[kMapRows / kMapHalf];
  Run runs[kBlock / kKeyStep];
  int64_t run_count;
  uint32_t rows[kBlock];
};

// The scratch of one worker where maps are computed one by one (plan.by_map). Rows are wide; turned
// tensors have the tile's queries side by side, those after its last one 0.
struct MapScratch {
  ShownKeys* shown;    // [span]
  float* q;            // [kMapRows][wide], times scale; backward: or as two_queries()
  float* q_turned;     // [wide][kMapRows]
  float* weights;      // of one map, [span * kBlock][kMapRows]: scores, then weights
  float* turned_back;  // [kMapRows][wide]: rows before they are turned, and what is written
  // Forward.
  float* factor;  // [kMapRows]: inverse sums of exponentials
  float* out;     // turned, [wide][kMapRows]
  // Backward.
  float* grads;            // as weights: of the weights, then of the scores
  float* grad_out;         // [kMapRows][wide], or as two_queries()
  float* grad_out_turned;  // [wide][kMapRows]
  float* grad_q;           // turned, [wide][kMapRows]
  int64_t size;
};

HL_INLINE MapScratch map_scratch(const Args& a, const Plan& p, float* base) {
  MapScratch s{};
  Arena arena{base};
  const int64_t map = p.span * kBlock * kMapRows;
  const int64_t q = kMapRows * wide_row(a.H, a.D), out = kMapRows * wide_row(a.H, a.E);
  s.shown = reinterpret_cast<ShownKeys*>(
      arena.take(p.span * static_cast<int64_t>(sizeof(ShownKeys) / sizeof(float))));
  s.q = arena.take(q);
  s.q_turned = arena.take(q);
  s.weights = arena.take(map);
  if (p.backward) {
    s.turned_back = arena.take(q > out ? q : out);
    s.grads = arena.take(map);
    s.grad_out = arena.take(out);
    s.grad_out_turned = arena.take(out);
    s.grad_q = arena.take(q);
  } else {
    s.turned_back = arena.take(out);
    s.factor = arena.take(kMapRows);
    s.out = arena.take(out);
  }
  s.size = arena.used;
  return s;
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel
