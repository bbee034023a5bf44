// Attention over a KV cache: what decoding computes in every mixer that is a softmax attention.
// Mixers call it from compute_next() and extend_cross().
#pragma once

#include <algorithm>
#include <functional>
#include <limits>

#include "mixers/mixer.h"
#include "ops/composed_attention/op.h"

namespace headloom {

// How a mixer's queries see its keys.
struct AttendOptions {
  Rotary* rotary = nullptr;  // null: nothing is rotated
  // ALiBi of distances [B or 1, T, S] -> [B or 1, H, T, S]. Empty: none.
  std::function<Tensor(const Tensor& distance)> bias = {};
  std::optional<int64_t> window = {};  // as in ops::ComposedAttentionOptions
};

// How many of the newest keys a cache must keep, so that the next query and the `earlier` queries
// before it find all that their window reaches. The largest int64 stands for no window and must not
// overflow.
inline int64_t keys_in_reach(int64_t window, int64_t earlier) {
  return std::min(window, std::numeric_limits<int64_t>::max() - earlier) - 1 + earlier;
}

// ops::composed_attention of q [B, n, H, D] over the keys and values that `state` keeps and k, v
// [B, n, ...], none of them rotated yet -> [B, n, H', E]. `o` holds what is composed, for these
// positions alone.
//
// state.cache keeps "key", "value" and the key-wise weights, all or as many as window and
// state.policy leave; where the policy holds keys and values in int8, "key.scale" and "value.scale"
// too, and these positions' own are read back from that as well, so that a sequence may be cut
// anywhere; of "query" and the query-wise weights those that convolutions reach back to.
Tensor attend(Tensor q, Tensor k, Tensor v, ops::ComposedAttentionOptions o,
              const AttendOptions& how, MixerState& state, const MixerContext& context);

// The same in cross-attention, over a memory that is there from the start. build_cross_cache()
// gives the state of its keys k, values v [B, S, ...] and of what `o` composes of them, of which
// `lengths` [B] positions are real (undefined: all).
MixerState build_cross_cache(const Tensor& k, const Tensor& v,
                             const ops::ComposedAttentionOptions& o, const Tensor& lengths);
// q [B, n, H, D] over it -> [B, n, H', E]; `o` has the rest.
Tensor attend_cross(Tensor q, ops::ComposedAttentionOptions o, MixerState& state);

}  // namespace headloom
