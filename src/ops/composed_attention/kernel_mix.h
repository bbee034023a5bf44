// The dynamic part of a mix of one tile, and its gradients. A tile holds x[t * line + h *
// kBlock + s]: all maps of a query side by side, so the key is the vector lane
// and every branch is a few multiply-adds.
//
// Where plan.mixes_pairs is set, the inner products over maps and those over ranks multiply pairs
// of bfloat16 and sum in float. The maps themselves, and what they have by the gates, stay float.
#pragma once

#include "ops/composed_attention/kernel_scratch.h"
#include "ops/composed_attention/kernel_static_mix.h"
#include "ops/kernel/pairs.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

// The dynamic weights of a tile: q [t][h][q_width] scalars (down, up, gate), k
// [h][k_width][kBlock]. In pairs both are as PairedWeights has them, [t][size] and [size][kBlock].
struct MixWeights {
  const float* q;
  const float* k;
  bool paired, backward;
};

// What a dynamic mix adds to: x itself; what y holds, the static mix of x; or x times a factor for
// each query and map, which the mix is then of.
enum class MixOf { kOwn, kOnto, kScaled };

template <int A, int B, int C>
HL_INLINE void clear(vf (&x)[A][B][C]) {
#pragma GCC unroll 4
  for (auto& plane : x) {
#pragma GCC unroll 5
    for (auto& row : plane) {
#pragma GCC unroll 2
      for (vf& v : row) v = zero();
    }
  }
}

// y = base + x * (qg + kg) + sum_r (sum_h x qd) qu + (sum_h x kd) ku for TB queries and VB vectors
// of keys, heads [h0, h1). Offsets q_in .. k_out choose which half of the weights leads in and
// which out; exchanging them gives the gradient with respect to x.
// HEADS is h1 - h0, or 0 where it is not known. Y is float, or Pair: neighbouring keys of y as
// pair_columns() has them. A gate that is not there is packed as 0, which must not be multiplied
// with a score of -inf: `gated` says whether there is any.
template <int RQ, int RK, bool K, MixOf OF, int HEADS, int TB, int VB, typename Y>
HL_INLINE void mix_rows(int64_t h0, int64_t h1, const float* x, const float* factor,
                        int64_t factor_line, Y* y, int64_t line, bool gated, const float* q,
                        int64_t q_line, int q_in, int q_out, const float* k, int k_in, int k_out,
                        float* inner, int64_t inner_line) {
  constexpr int64_t kKeys = kPaired<Y> ? 2 : 1;  // of one element of y
  constexpr int QW = 2 * RQ + 1;
  constexpr int KW = 2 * RK + 1;
  const int64_t heads = HEADS > 0 ? HEADS : h1 - h0;
  x += h0 * kBlock;
  y = y ? y + h0 * kBlock / kKeys : nullptr;
  q += h0 * QW;
  k += h0 * KW * kBlock;
  if (OF == MixOf::kScaled) factor += h0;
  vf iq[TB][RQ > 0 ? RQ : 1][VB], ik[TB][RK > 0 ? RK : 1][VB];
  clear(iq);
  clear(ik);
  if constexpr (RQ + RK > 0) {
    for (int64_t h = 0; h < heads; ++h) {
      vf kd[RK > 0 ? RK : 1][VB];
#pragma GCC unroll 4
      for (int r = 0; r < RK; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) kd[r][v] = load(k + (h * KW + k_in + r) * kBlock + v * VL);
      }
#pragma GCC unroll 4
      for (int t = 0; t < TB; ++t) {
        const float* w = q + t * q_line + h * QW + q_in;
        vf a[VB];
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) {
          a[v] = load(x + t * line + h * kBlock + v * VL);
          if constexpr (OF == MixOf::kScaled) a[v] = a[v] * bcast(factor[t * factor_line + h]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < RQ; ++r) {
          const vf weight = bcast(w[r]);
#pragma GCC unroll 2
          for (int v = 0; v < VB; ++v) iq[t][r][v] = fma(a[v], weight, iq[t][r][v]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < RK; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < VB; ++v) ik[t][r][v] = fma(a[v], kd[r][v], ik[t][r][v]);
        }
      }
    }
    if (inner) {
#pragma GCC unroll 4
      for (int t = 0; t < TB; ++t) {
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) {
          float* at = inner + t * inner_line + v * VL;
#pragma GCC unroll 4
          for (int r = 0; r < RQ; ++r) store(at + r * kBlock, iq[t][r][v]);
#pragma GCC unroll 4
          for (int r = 0; r < RK; ++r) store(at + (RQ + r) * kBlock, ik[t][r][v]);
        }
      }
    }
  }
  if (!y) return;
  for (int64_t h = 0; h < heads; ++h) {
    vf ku[RK > 0 ? RK : 1][VB], kg[VB];
#pragma GCC unroll 2
    for (int v = 0; v < VB; ++v) {
      kg[v] = zero();
#pragma GCC unroll 4
      for (int r = 0; r < RK; ++r) ku[r][v] = load(k + (h * KW + k_out + r) * kBlock + v * VL);
      if constexpr (K) kg[v] = load(k + (h * KW + 2 * RK) * kBlock + v * VL);
    }
#pragma GCC unroll 4
    for (int t = 0; t < TB; ++t) {
      const float* w = q + t * q_line + h * QW;
      const int64_t at = t * line + h * kBlock;
      const vf q_gate = OF == MixOf::kOnto ? bcast(w[2 * RQ]) : bcast(w[2 * RQ]) + bcast(1.0f);
      vf own[VB], out[VB];
#pragma GCC unroll 2
      for (int v = 0; v < VB; ++v) {
        own[v] = load(x + at + v * VL);
        if constexpr (OF == MixOf::kScaled) own[v] = own[v] * bcast(factor[t * factor_line + h]);
        const vf gate = K ? q_gate + kg[v] : q_gate;
        if constexpr (OF == MixOf::kOnto) {
          out[v] = load(y + at + v * VL);
          if (gated) out[v] = fma(own[v], gate, out[v]);
        } else {
          out[v] = own[v] * gate;
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < RQ; ++r) {
        const vf weight = bcast(w[q_out + r]);
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) out[v] = fma(iq[t][r][v], weight, out[v]);
      }
#pragma GCC unroll 2
      for (int v = 0; v < VB; ++v) {
        // A sum of its own: one sum would take as long as all its terms after each other.
        vf key = RK > 0 ? ik[t][0][v] * ku[0][v] : zero();
#pragma GCC unroll 4
        for (int r = 1; r < RK; ++r) key = fma(ik[t][r][v], ku[r][v], key);
        if constexpr (RK > 0) out[v] = out[v] + key;
      }
      if constexpr (kPaired<Y>) {
        store_columns(y + t * line + h * kBlock / kKeys, out[0], out[VB - 1], VB == 2);
      } else {
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) store(y + at + v * VL, out[v]);
      }
    }
  }
}

// Inner products of `rows` queries in pairs of bfloat16, for the gradients of a mix: those by
// query-wise weights in pairs of neighbouring keys, [rows][groups][rank_q][kBlock / 2], and after
// them those by key-wise weights in pairs of neighbouring queries,
// [(rows + 1) / 2][groups][rank_k][kBlock].
struct InnerPairs {
  int64_t query_line, key_line, key_begin;
};
HL_INLINE InnerPairs inner_pairs(const Mix& mix, int64_t rows, int64_t rank_q, int64_t rank_k) {
  const int64_t query_line = mix.groups * rank_q * kBlock / 2;
  return {query_line, mix.groups * rank_k * kBlock, rows * query_line};
}

// Where one side's weights of a group are, and where its inner products go.
struct PairedSide {
  const Pair *inward, *outward;
  const float* gate;
  int64_t line = 0;  // from one query to the next
  Pair* inner;       // or null
  int64_t inner_line;
};

// What a mix writes: floats, pairs of bfloat16 of neighbouring keys or of neighbouring queries, or
// both kinds of pairs.
enum class MixTo { kFloats, kKeyPairs, kQueryPairs, kBothPairs };

// Where it does, and what is null otherwise. Key pairs are [rows][line], of which the first half is
// used, and query pairs [(rows + 1) / 2][line].
struct MixTargets {
  float* y = nullptr;
  Pair* key_pairs = nullptr;
  Pair* query_pairs = nullptr;
};

// mix_rows() in pairs, for all keys and a group of `heads` maps, of which x, factor and `to` are
// the first.
template <int RQ, int RK, bool K, MixOf OF, MixTo TO, int HEADS, int TB, int VB>
HL_INLINE void mix_rows_in_pairs(int64_t heads, const float* x, const float* factor,
                                 int64_t factor_line, const MixTargets& to, int64_t line,
                                 bool gated, const PairedSide& q, const PairedSide& k) {
  constexpr int RPQ = (RQ + 1) / 2, RPK = (RK + 1) / 2;
  if (HEADS > 0) heads = HEADS;
  const int64_t map_pairs = (heads + 1) / 2;
  for (int64_t s = 0; s < kBlock; s += VB * VL) {
    const auto value = [&](int t, int64_t h, int v) {
      vf a = load(x + s + t * line + h * kBlock + v * VL);
      if constexpr (OF == MixOf::kScaled) a = a * bcast(factor[t * factor_line + h]);
      return a;
    };
    vp q_inner[TB][RPQ > 0 ? RPQ : 1][VB], k_inner[TB][RPK > 0 ? RPK : 1][VB];
    if constexpr (RQ + RK > 0) {
      vf iq[TB][2 * RPQ + 1][VB], ik[TB][2 * RPK + 1][VB];
      clear(iq);
      clear(ik);
      for (int64_t i = 0; i < map_pairs; ++i) {
        vp weight[RK > 0 ? RK : 1][VB];
#pragma GCC unroll 4
        for (int r = 0; r < RK; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < VB; ++v) {
            weight[r][v] = load(k.inward + s + (r * map_pairs + i) * kBlock + v * VL);
          }
        }
        const bool two = (HEADS > 0 && HEADS % 2 == 0) || 2 * i + 1 < heads;
#pragma GCC unroll 4
        for (int t = 0; t < TB; ++t) {
          vp a[VB];
#pragma GCC unroll 2
          for (int v = 0; v < VB; ++v) {
            a[v] = pair_vectors(value(t, 2 * i, v), two ? value(t, 2 * i + 1, v) : zero());
          }
#pragma GCC unroll 4
          for (int r = 0; r < RQ; ++r) {
            const vp by = bcast(q.inward[t * q.line + r * map_pairs + i]);
#pragma GCC unroll 2
            for (int v = 0; v < VB; ++v) iq[t][r][v] = fma(a[v], by, iq[t][r][v]);
          }
#pragma GCC unroll 4
          for (int r = 0; r < RK; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < VB; ++v) ik[t][r][v] = fma(a[v], weight[r][v], ik[t][r][v]);
          }
        }
      }
      if (q.inner) {
#pragma GCC unroll 4
        for (int t = 0; t < TB; ++t) {
#pragma GCC unroll 4
          for (int r = 0; r < RQ; ++r) {
            store_columns(q.inner + s / 2 + t * q.inner_line + r * (kBlock / 2), iq[t][r][0],
                          iq[t][r][VB - 1], VB == 2);
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < RK; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < VB; ++v) {
            store(k.inner + s + r * kBlock + v * VL,
                  pair_vectors(ik[0][r][v], TB > 1 ? ik[TB - 1][r][v] : zero()));
          }
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < TB; ++t) {
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) {
#pragma GCC unroll 2
          for (int r = 0; r < RPQ; ++r) {
            q_inner[t][r][v] = pair_vectors(iq[t][2 * r][v], iq[t][2 * r + 1][v]);
          }
#pragma GCC unroll 2
          for (int r = 0; r < RPK; ++r) {
            k_inner[t][r][v] = pair_vectors(ik[t][2 * r][v], ik[t][2 * r + 1][v]);
          }
        }
      }
    }
    if (TO == MixTo::kFloats && !to.y) continue;
#pragma GCC unroll 2
    for (int64_t h = 0; h < heads; ++h) {
      vp weight[RPK > 0 ? RPK : 1][VB];
      vf k_gate[VB];
#pragma GCC unroll 2
      for (int v = 0; v < VB; ++v) {
#pragma GCC unroll 2
        for (int r = 0; r < RPK; ++r) {
          weight[r][v] = load(k.outward + s + (h * RPK + r) * kBlock + v * VL);
        }
        k_gate[v] = K ? load(k.gate + s + h * kBlock + v * VL) : zero();
      }
      vf out[TB][VB];
#pragma GCC unroll 4
      for (int t = 0; t < TB; ++t) {
        const vf q_gate = OF == MixOf::kOnto ? bcast(q.gate[t * q.line + h])
                                             : bcast(q.gate[t * q.line + h]) + bcast(1.0f);
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) {
          const vf own = value(t, h, v), gate = K ? q_gate + k_gate[v] : q_gate;
          vf sum;
          if constexpr (OF == MixOf::kOnto) {
            sum = load(to.y + s + t * line + h * kBlock + v * VL);
            if (gated) sum = fma(own, gate, sum);
          } else {
            sum = own * gate;
          }
#pragma GCC unroll 2
          for (int r = 0; r < RPQ; ++r) {
            const vp by = bcast(q.outward[t * q.line + h * RPQ + r]);
            sum = fma(q_inner[t][r][v], by, sum);
          }
#pragma GCC unroll 2
          for (int r = 0; r < RPK; ++r) sum = fma(k_inner[t][r][v], weight[r][v], sum);
          out[t][v] = sum;
          if constexpr (TO == MixTo::kFloats) store(to.y + s + t * line + h * kBlock + v * VL, sum);
        }
        if constexpr (TO == MixTo::kKeyPairs || TO == MixTo::kBothPairs) {
          store_columns(to.key_pairs + t * line + (h * kBlock + s) / 2, out[t][0], out[t][VB - 1],
                        VB == 2);
        }
      }
      if constexpr (TO == MixTo::kQueryPairs || TO == MixTo::kBothPairs) {
#pragma GCC unroll 2
        for (int v = 0; v < VB; ++v) {
          store(to.query_pairs + h * kBlock + s + v * VL,
                pair_vectors(out[0][v], TB > 1 ? out[TB - 1][v] : zero()));
        }
      }
    }
  }
}

struct MixCall {
  int64_t rows, line;
  const float* x;
  const float* factor;  // MixOf::kScaled: [rows][factor_line]
  int64_t factor_line;
  MixTo to;
  MixTargets targets;  // y may be x; if it is null, a mix to floats has only its inner products
  bool swapped;        // the gradient with respect to x: x is then the gradient of y
  float* inner;        // [rows][groups][rank_q + rank_k][kBlock], InnerPairs, or null
};

// Rows [t, t + ROWS) of a mix.
template <int RQ, int RK, bool K, MixOf OF, MixTo TO, int HEADS, int ROWS, int VB>
HL_INLINE void mix_some(const Mix& mix, const MixWeights& w, const MixCall& c, int64_t t) {
  static_assert(TO == MixTo::kFloats || TO == MixTo::kKeyPairs);
  constexpr int QW = 2 * RQ + 1;
  const int q_in = c.swapped ? RQ : 0, q_out = RQ - q_in;
  const int k_in = c.swapped ? RK : 0, k_out = RK - k_in;
  const int64_t heads = mix.in, size = heads / mix.groups;
  const int64_t inner_line = mix.groups * (RQ + RK) * kBlock;
  const auto group = [&](int64_t g, auto* y) {
    constexpr int64_t kKeys = kPaired<std::remove_pointer_t<decltype(y)>> ? 2 : 1;
    for (int64_t s = 0; s < kBlock; s += VB * VL) {
      float* inner = c.inner ? c.inner + t * inner_line + g * (RQ + RK) * kBlock + s : nullptr;
      mix_rows<RQ, RK, K, OF, HEADS, ROWS, VB>(
          g * size, (g + 1) * size, c.x + t * c.line + s, c.factor + t * c.factor_line,
          c.factor_line, y ? y + t * c.line + s / kKeys : nullptr, c.line, mix.gated(),
          w.q + t * heads * QW, heads * QW, q_in, q_out, w.k + s, k_in, k_out, inner, inner_line);
    }
  };
  for (int64_t g = 0; g < mix.groups; ++g) {
    if constexpr (TO == MixTo::kFloats) {
      group(g, c.targets.y);
    } else {
      group(g, c.targets.key_pairs);
    }
  }
}

// The same in pairs.
template <int RQ, int RK, bool K, MixOf OF, MixTo TO, int HEADS, int ROWS, int VB>
HL_INLINE void mix_some_in_pairs(const Mix& mix, const MixWeights& w, const MixCall& c, int64_t t) {
  const int64_t size = mix.in / mix.groups;
  const int way = c.swapped ? 1 : 0;
  const PairedWeights q_at = paired_weights(mix, RQ, w.backward);
  const PairedWeights k_at = paired_weights(mix, RK, w.backward);
  const InnerPairs inner_at = inner_pairs(mix, c.rows, RQ, RK);
  const float* const q_floats = w.q + t * q_at.size;
  const Pair* const q = reinterpret_cast<const Pair*>(q_floats);
  const Pair* const k = reinterpret_cast<const Pair*>(w.k);
  Pair* const inner = reinterpret_cast<Pair*>(c.inner);
  const MixTargets& all = c.targets;
  for (int64_t g = 0; g < mix.groups; ++g) {
    const int64_t h = g * size;
    PairedSide by_query{q + q_at.inward[way] + g * RQ * q_at.map_pairs,
                        q + q_at.outward[way] + h * q_at.rank_pairs,
                        q_floats + q_at.gate + h,
                        q_at.size,
                        nullptr,
                        inner_at.query_line};
    PairedSide by_key{k + (k_at.inward[way] + g * RK * k_at.map_pairs) * kBlock,
                      k + (k_at.outward[way] + h * k_at.rank_pairs) * kBlock,
                      w.k + (k_at.gate + h) * kBlock,
                      0,
                      nullptr,
                      0};
    if (inner) {
      by_query.inner = inner + t * inner_at.query_line + g * RQ * kBlock / 2;
      by_key.inner = inner + inner_at.key_begin + t / 2 * inner_at.key_line + g * RK * kBlock;
    }
    MixTargets to;
    if (all.y) to.y = all.y + t * c.line + h * kBlock;
    if (all.key_pairs) to.key_pairs = all.key_pairs + t * c.line + h * kBlock / 2;
    if (all.query_pairs) to.query_pairs = all.query_pairs + t / 2 * c.line + h * kBlock;
    const float* const factor = OF == MixOf::kScaled ? c.factor + t * c.factor_line + h : nullptr;
    mix_rows_in_pairs<RQ, RK, K, OF, TO, HEADS, ROWS, VB>(size, c.x + t * c.line + h * kBlock,
                                                          factor, c.factor_line, to, c.line,
                                                          mix.gated(), by_query, by_key);
  }
}

// A few queries after each other with all their keys: their maps are then in the first-level cache
// for the second time that they are read.
template <int RQ, int RK, bool K, MixOf OF, MixTo TO, bool PAIRED>
void mix_dynamic(const Mix& mix, const MixWeights& w, const MixCall& c) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int TB = 2, VB = RQ + RK <= 4 ? 2 : 1;
#else
  constexpr int TB = 1, VB = RQ + RK <= 4 ? 2 : 1;
#endif
  const auto some = [&]<int ROWS, int HEADS>(int64_t t) {
    if constexpr (PAIRED) {
      mix_some_in_pairs<RQ, RK, K, OF, TO, HEADS, ROWS, VB>(mix, w, c, t);
    } else {
      mix_some<RQ, RK, K, OF, TO, HEADS, ROWS, VB>(mix, w, c, t);
    }
  };
  int64_t t = 0;
  if (mix.in / mix.groups == 8) {
    for (; t + TB <= c.rows; t += TB) some.template operator()<TB, 8>(t);
  } else {
    for (; t + TB <= c.rows; t += TB) some.template operator()<TB, 0>(t);
  }
  for (; t < c.rows; ++t) some.template operator()<1, 0>(t);
}

// What one step of a gradient multiplies: a vector, or pairs of bfloat16 of two vectors that belong
// to neighbouring keys of a query or to neighbouring queries of a key.
enum class Step { kVector, kPairOfKeys, kPairOfQueries };

// `next` is from a query to the next one; the last of an odd number of them is paired with 0.
template <Step STEP>
HL_INLINE auto step_of(const float* x, int64_t next, bool two) {
  if constexpr (STEP == Step::kVector) {
    return load(x);
  } else if constexpr (STEP == Step::kPairOfKeys) {
    return pair_lanes(load(x), load(x + VL));
  } else {
    return pair_vectors(load(x), two ? load(x + next) : zero());
  }
}

// Inner products of a step, and from one step to the next and from one rank to the next.
template <Step STEP>
struct InnerSteps {
  using Element = std::conditional_t<STEP == Step::kVector, float, Pair>;
  const Element *x, *dy;  // of x, and of dy (a swapped mix)
  int64_t step, rank;
};

// Adds, for HB heads, the products that make the gradients of one side's weights over `lines`
// vectors, `line` apart. Key side: queries of one vector of keys, sum[h][2R+1] vectors, kBlock
// apart. Query side (FOLD): keys of one query, sum[h][2R+1][kFolded].
template <int R, int HB, Step STEP, bool FOLD>
HL_INLINE void grad_heads(int64_t lines, int64_t line, const float* x, const float* dy,
                          const InnerSteps<STEP>& inner, float* sum) {
  constexpr int kLines = STEP == Step::kVector ? 1 : 2;  // of a step
  constexpr int W = 2 * R + 1, kSums = HB * W, kTogether = VL / kFolded;
  vf sums[(kSums + kTogether - 1) / kTogether * kTogether];
#pragma GCC unroll 40
  for (int i = 0; i < kSums; ++i) sums[i] = FOLD ? zero() : load(sum + i * kBlock);
  for (int64_t i = 0; i * kLines < lines; ++i) {
    const bool two = (i + 1) * kLines <= lines;
    decltype(load(inner.x)) in[R > 0 ? R : 1], din[R > 0 ? R : 1];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      in[r] = load(inner.x + i * inner.step + r * inner.rank);
      din[r] = load(inner.dy + i * inner.step + r * inner.rank);
    }
#pragma GCC unroll 8
    for (int h = 0; h < HB; ++h) {
      const int64_t at = i * kLines * line + h * kBlock;
      vf* const own = sums + h * W;
      const auto a = step_of<STEP>(x + at, line, two), b = step_of<STEP>(dy + at, line, two);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        own[r] = fma(a, din[r], own[r]);
        own[R + r] = fma(b, in[r], own[R + r]);
      }
      own[2 * R] = fma(a, b, own[2 * R]);
    }
  }
  if constexpr (FOLD) {
#pragma GCC unroll 4
    for (int i = kSums; i % kTogether > 0; ++i) sums[i] = zero();
#pragma GCC unroll 10
    for (int i = 0; i < kSums; i += kTogether) {
      float* const to = sum + i * kFolded;
      store(to, load(to) + fold(sums + i));
    }
  } else {
#pragma GCC unroll 40
    for (int i = 0; i < kSums; ++i) store(sum + i * kBlock, sums[i]);
  }
}

template <int R, Step STEP, bool FOLD>
void grad_side(int64_t heads, int64_t lines, int64_t line, const float* x, const float* dy,
               const InnerSteps<STEP>& inner, float* sum) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int kAccumulators = 20;
#else
  constexpr int kAccumulators = 10;
#endif
  constexpr int W = 2 * R + 1, kWidth = FOLD ? kFolded : kBlock;
  constexpr int HB = kAccumulators / W >= 4 ? 4 : kAccumulators / W >= 2 ? 2 : 1;
  int64_t h = 0;
  for (; h + HB <= heads; h += HB) {
    grad_heads<R, HB, STEP, FOLD>(lines, line, x + h * kBlock, dy + h * kBlock, inner,
                                  sum + h * W * kWidth);
  }
  for (; h < heads; ++h) {
    grad_heads<R, 1, STEP, FOLD>(lines, line, x + h * kBlock, dy + h * kBlock, inner,
                                 sum + h * W * kWidth);
  }
}

struct MixGradCall {
  int64_t rows, line;
  const float *x, *dy;
  const float *inner, *dinner;  // of x, and of dy (a swapped mix)
  float* q_sum;                 // [rows][h][q_width][kFolded], and a vector that may be written
  float* k_sum;                 // [h][k_width][kBlock]
  bool paired;                  // inner products are as InnerPairs has them
};

template <int RQ, int RK, bool Q, bool K>
void mix_grad_dynamic(const Mix& mix, const MixGradCall& c) {
  const int64_t heads = mix.in, size = heads / mix.groups;
  const int64_t inner_line = mix.groups * (RQ + RK) * kBlock;
  const InnerPairs pairs_at = inner_pairs(mix, c.rows, RQ, RK);
  const Pair* const pairs = reinterpret_cast<const Pair*>(c.inner);
  const Pair* const dpairs = reinterpret_cast<const Pair*>(c.dinner);
  const auto query = [&]<Step STEP>(int64_t t, int64_t h, const InnerSteps<STEP>& inner) {
    const int64_t at = t * c.line + h * kBlock;
    grad_side<RQ, STEP, true>(size, kBlock / VL, VL, c.x + at, c.dy + at, inner,
                              c.q_sum + (t * heads + h) * (2 * RQ + 1) * kFolded);
  };
  const auto key = [&]<Step STEP>(int64_t h, int64_t s, const InnerSteps<STEP>& inner) {
    const int64_t at = h * kBlock + s;
    grad_side<RK, STEP, false>(size, c.rows, c.line, c.x + at, c.dy + at, inner,
                               c.k_sum + h * (2 * RK + 1) * kBlock + s);
  };
  for (int64_t g = 0; g < mix.groups; ++g) {
    const int64_t h = g * size;
    if constexpr (Q) {
      for (int64_t t = 0; t < c.rows; ++t) {
        const int64_t at = t * inner_line + g * (RQ + RK) * kBlock;
        const int64_t pair_at = t * pairs_at.query_line + g * RQ * kBlock / 2;
        if constexpr (HL_BFLOAT16) {
          if (c.paired) {
            query(t, h,
                  InnerSteps<Step::kPairOfKeys>{pairs + pair_at, dpairs + pair_at, VL, kBlock / 2});
            continue;
          }
        }
        query(t, h, InnerSteps<Step::kVector>{c.inner + at, c.dinner + at, VL, kBlock});
      }
    }
    if constexpr (K) {
      for (int64_t s = 0; s < kBlock; s += VL) {
        const int64_t at = (g * (RQ + RK) + RQ) * kBlock + s;
        const int64_t pair_at = pairs_at.key_begin + g * RK * kBlock + s;
        if constexpr (HL_BFLOAT16) {
          if (c.paired) {
            key(h, s,
                InnerSteps<Step::kPairOfQueries>{pairs + pair_at, dpairs + pair_at,
                                                 pairs_at.key_line, kBlock});
            continue;
          }
        }
        key(h, s, InnerSteps<Step::kVector>{c.inner + at, c.dinner + at, inner_line, kBlock});
      }
    }
  }
}

// Chooses the instantiation; f.template operator()<RQ, RK, Q, K>().
template <typename F>
HL_INLINE void with_ranks(const Mix& m, F&& f) {
  const bool q = m.q_rank > 0, k = m.k_rank > 0;
#define HL_RANK(R)                                                            \
  case R:                                                                     \
    if (q && k) return f.template operator()<R, R, true, true>();             \
    if (q && m.k_gate.data) return f.template operator()<R, 0, true, true>(); \
    if (q) return f.template operator()<R, 0, true, false>();                 \
    if (m.q_gate.data) return f.template operator()<0, R, true, true>();      \
    return f.template operator()<0, R, false, true>();
  switch (m.rank) {
    HL_RANK(1)
    HL_RANK(2)
    HL_RANK(3)
    HL_RANK(4)
    default:
      if (m.q_gate.data && m.k_gate.data) return f.template operator()<0, 0, true, true>();
      if (m.q_gate.data) return f.template operator()<0, 0, true, false>();
      return f.template operator()<0, 0, false, true>();
  }
#undef HL_RANK
}

template <MixOf OF>
void mix_apply(const Mix& mix, const MixWeights& w, const MixCall& call) {
  const auto to = [&]<MixTo TO, bool PAIRED>() {
    with_ranks(mix, [&]<int RQ, int RK, bool Q, bool K>() {
      mix_dynamic<RQ, RK, K, OF, TO, PAIRED>(mix, w, call);
    });
  };
  if constexpr (HL_BFLOAT16) {
    if constexpr (OF == MixOf::kScaled) {
      if (call.to == MixTo::kKeyPairs) {
        return w.paired ? to.template operator()<MixTo::kKeyPairs, true>()
                        : to.template operator()<MixTo::kKeyPairs, false>();
      }
    } else {
      if (call.to == MixTo::kQueryPairs) return to.template operator()<MixTo::kQueryPairs, true>();
      if (call.to == MixTo::kBothPairs) return to.template operator()<MixTo::kBothPairs, true>();
    }
    if (w.paired) return to.template operator()<MixTo::kFloats, true>();
  }
  to.template operator()<MixTo::kFloats, false>();
}

void mix_grad(const Mix& mix, const MixGradCall& call) {
  with_ranks(mix,
             [&]<int RQ, int RK, bool Q, bool K>() { mix_grad_dynamic<RQ, RK, Q, K>(mix, call); });
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel
