// What the fused CPU kernels of composed attention read and write: pointers,
// strides and sizes. No torch.
//
// One worker runs one tile of queries at a time, over blocks of kBlock keys: all heads together
// where mixes join them, else, with small heads, one after the other. docs/composed_attention.md
// has the derivation.
#pragma once

#include <cstdint>

#include "ops/kernel/inline.h"
#include "ops/kernel/types.h"

namespace headloom::ops::composed_attention_kernel {

constexpr int64_t kBlock = 64;  // keys of a block: one bit of a 64-bit word each
constexpr int64_t kMaxHeads = 64;
constexpr int64_t kMaxRank = 4;
constexpr int64_t kDirectQueries = 16;  // most that read a head's keys where they lie
constexpr int64_t kMaxConvQueries = 8;
constexpr int64_t kMaxConvKeys = 33;
constexpr int64_t kAlign = 16;  // rows are padded to this many floats

// A four-dimensional strided view; strides in elements, 0 where broadcast.
// Absent when data is null.
template <typename T>
struct View {
  T* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
  HL_INLINE T* at(int64_t i, int64_t j, int64_t k, int64_t l) const {
    return data + i * stride[0] + j * stride[1] + k * stride[2] + l * stride[3];
  }
};

// The same in the type of q.
struct AnyView {
  const void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
  template <typename T>
  HL_INLINE T get(int64_t i, int64_t j, int64_t k, int64_t l) const {
    return static_cast<const T*>(
        data)[i * stride[0] + j * stride[1] + k * stride[2] + l * stride[3]];
  }
};

// Gradients of one mix, contiguous float: query side [B,T,R,H], [B,T,H]; key
// side [B,S,R,H], [B,S,H]. The static gradient is a sum over workers and batch:
// [workers, g, H/g, H'/g], zeroed by the caller.
struct MixGrads {
  float* matrix = nullptr;
  float *q_down = nullptr, *q_up = nullptr, *q_gate = nullptr;
  float *k_down = nullptr, *k_up = nullptr, *k_gate = nullptr;
};

// One head composition (HeadMix of op.h).
struct Mix {
  bool present = false;
  int64_t in = 0, out = 0, groups = 1;
  int64_t rank = 0;                // of both low-rank branches; a smaller one is padded with zeros
  int64_t q_rank = 0, k_rank = 0;  // as given; 0 is absent
  const float* matrix = nullptr;   // [g, in/g, out/g] contiguous
  AnyView q_down, q_up;            // [B, T, R, H]
  AnyView q_gate;                  // [B, T, H]
  AnyView k_down, k_up;            // [B, S, R, H]
  AnyView k_gate;                  // [B, S, H]
  MixGrads grad;

  HL_INLINE bool query_side() const { return q_rank > 0 || q_gate.data; }
  HL_INLINE bool key_side() const { return k_rank > 0 || k_gate.data; }
  HL_INLINE bool dynamic() const { return query_side() || key_side(); }
  HL_INLINE bool gated() const { return q_gate.data || k_gate.data; }
  // The rank that either side is packed with.
  HL_INLINE int64_t packed_q_rank() const { return q_rank > 0 ? rank : 0; }
  HL_INLINE int64_t packed_k_rank() const { return k_rank > 0 ? rank : 0; }
  // Floats a head needs for one position on either side: down, up, gate.
  HL_INLINE int64_t q_width() const { return 2 * packed_q_rank() + 1; }
  HL_INLINE int64_t k_width() const { return 2 * packed_k_rank() + 1; }
};

// One key-query convolution over maps: kernel [H, c_h, c_q, c_k] contiguous.
struct Conv {
  const float* kernel = nullptr;
  int64_t heads = 1, queries = 1, keys = 1;  // c_h, c_q, c_k
  int64_t left = 0;                          // keys before the current one that tap 0 reaches
  float* grad = nullptr;                     // [workers, H, c_h, c_q, c_k], zeroed by the caller

  HL_INLINE int64_t halo() const { return kernel ? queries - 1 : 0; }
};

struct Args {
  int64_t B = 0, T = 0, S = 0;
  int64_t H = 0, H1 = 0, H2 = 0;  // maps of q k^T, of the softmax, of the output
  int64_t Gk = 0, Gv = 0, D = 0, E = 0;
  Type type = Type::kFloat;
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  int64_t q_stride[4], k_stride[4], v_stride[4];  // [B, T or S, heads, D or E]
  float scale = 1;
  // Keys and values are int8, each head of a position times its scale [B, S, heads]; only where the
  // plan is direct. Null: they are of q's type.
  const float *k_scale = nullptr, *v_scale = nullptr;
  int64_t k_scale_stride[4], v_scale_stride[4];  // the last is 1
  Mix pre, post;
  Conv pre_conv, post_conv;
  bool exact_mask = false;
  bool past_cache = true;  // few queries fetch keys and values past the second level of cache

  View<const float> bias;  // [B, H, T, S]
  bool causal = false;
  int64_t window = 0;                  // 0: none
  const int64_t* lengths = nullptr;    // [B]
  const int64_t* documents = nullptr;  // [B, S] contiguous
  View<const bool> mask;               // [B, 1, T, S]

  void* out = nullptr;   // [B, T, H2, E] contiguous
  float* lse = nullptr;  // [B, H1, T]: log sum exp of the mixed scores; written
                         // forward, read backward

  // Backward only. Gradients of q, k, v are contiguous, in the type of q.
  const void* grad_out = nullptr;
  int64_t grad_out_stride[4];
  void *grad_q = nullptr, *grad_k = nullptr, *grad_v = nullptr;
  // Of the bias, if wanted: [B, H, T, S], added to. Worker w adds grad_bias_size * w floats
  // further.
  View<float> grad_bias;
  int64_t grad_bias_size = 0;
};

// Sizes that follow from Args; made by make_plan, shared by all workers.
struct Plan {
  bool backward = false;
  bool split = false;  // forward: one tile whose key blocks the workers share
  // split: each worker takes the softmax of its own keys, and their outputs are joined at the end,
  // where no mix needs the weights of the whole one before.
  bool joined = false;
  bool direct = false;  // split: keys and values are read where they lie, not packed
  bool by_map = false;  // maps are computed one by one: nothing joins them, and heads are small
  bool half = false;    // products in pairs of bfloat16: the type of q and the
                        // processor allow it
  bool amx = false;     // half: by the tile registers of AMX
  // half: dynamic mixes multiply pairs too. Not where tile registers multiply, because such a
  // processor takes longer for a pair in a vector than for two floats.
  bool mixes_pairs = false;
  float half_scale = 1;  // half: the part of the scale that packed queries have
  // Backward: the weights of the whole row are kept; otherwise its second pass computes them from
  // the scores again, which takes less time than to write and read them.
  bool keeps_weights = true;
  int64_t rows = 0;          // queries of a tile
  int64_t height = 0;        // and the earlier ones that convolutions reach back to
  int64_t tiles = 0;         // tiles of one batch element
  int64_t blocks = 0;        // key blocks of one batch element
  int64_t span = 0;          // most key blocks that one tile sees
  int64_t Dp = 0, Ep = 0;    // D and E padded
  int64_t heads_padded = 0;  // H1 padded
  int64_t maps = 0;          // most maps at any stage
  int64_t line = 0;          // floats from one query to the next in a tile: maps *
                             // kBlock and padding
  int64_t chunk = 0;         // floats of one tile by one key block
  int64_t workers = 1;
  int64_t packed = 0;   // floats of the packed keys and values of one batch element, or (split) of
                        // one block
  int64_t scratch = 0;  // floats of one worker's scratch
  int64_t sums = 0;     // floats of one worker's gradient sums (zeroed by the caller)
};

enum class Phase {
  kPack,
  kForward,
  kBackward,
  kReduce,
  kBoundary,
  kSplitScores,
  kSplitValues,
  kSplitOutput
};

// What one call does: Phase kPack packs key blocks [begin, end) of `batch`;
// kForward and kBackward run tiles [begin, end) as worker `worker`; kReduce
// adds the workers' sums for key blocks [begin, end) and writes the key-side
// gradients, `sums` being those of worker 0 and the others following;
// kBoundary, one item, adds what each worker owes to queries of the worker
// before it. Where the plan splits, every worker runs kSplitScores, after it
// kSplitValues (unless it joins: then both at once), each for its share of the blocks; one runs
// kSplitOutput at the end.
struct Task {
  Phase phase;
  int64_t batch, worker, begin, end;
  float* packed;      // plan.packed floats
  float* scratch;     // plan.scratch floats
  float* sums;        // plan.sums floats
  int64_t next = -1;  // the batch element after this one, which is fetched meanwhile; -1: none
};

using Run = void(const Args&, const Plan&, const Task&);
Run run_DEFAULT, run_AVX2, run_AVX512, run_AVX512_BF16;

// How the processor multiplies values of the type of q: as floats, in pairs of bfloat16, or such by
// tile registers.
enum class Products { kFloats, kPairs, kAmx };
Plan make_plan(const Args& args, bool backward, Products products, int64_t workers);

}  // namespace headloom::ops::composed_attention_kernel
