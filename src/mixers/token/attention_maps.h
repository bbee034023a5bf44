// Attention whose maps are shown to a Recording.
//
// The names, each [B, H, T, S] unless it says otherwise:
//
//   scores               before any composition; -inf where a key is invisible
//   scores.convolved     after the convolution, where there is one
//   scores.static, scores.query, scores.key
//                        the terms of the composition (DCMHA eq. 7): the skip or the static matrix,
//                        what the query-wise and what the key-wise weights add; 0 where invisible
//   scores.composed      what softmax is given: the sum of the three
//   scores.unmasked, scores.composed_unmasked
//                        both with all pairs, the invisible ones too: their ranks mean something
//   scores.map_static [H, H'], scores.map_query [B, T, H, H], scores.map_key [B, S, H, H]
//                        composition maps (eq. 8), whose sum at (t, s) takes scores to composed
//                        ones
//   weights, weights.*   the same after softmax; weights.composed is what the values are given
//
// A term that a mixer does not have is not there. In cross-attention the names begin with "cross.".
#pragma once

#include "mixers/mixer.h"
#include "ops/composed_attention/op.h"

namespace headloom {

// Whether the context's recording, if there is one, wants any of these maps.
bool wants_maps(const MixerContext& context);

// ops::composed_attention() by its definition, whose maps go to context.recording. `order` [H]
// int64: which score map of the operator is the mixer's map h; undefined: h itself.
Tensor attention_with_maps(const Tensor& q, const Tensor& k, const Tensor& v,
                           const ops::ComposedAttentionOptions& options,
                           const MixerContext& context, const Tensor& order = {});

// attention_with_maps() where maps are wanted, else ops::composed_attention().
inline Tensor shown_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                              const ops::ComposedAttentionOptions& options,
                              const MixerContext& context, const Tensor& order = {}) {
  return wants_maps(context) ? attention_with_maps(q, k, v, options, context, order)
                             : ops::composed_attention(q, k, v, options);
}

}  // namespace headloom
