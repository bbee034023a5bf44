// Composed attention that also shows its maps (op.h has the definition and the legend).
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/composed_attention/op.h"

namespace headloom::ops {

// The maps around one of the two compositions, [B, heads, T, S] each. Nothing is masked in those
// before softmax: an invisible pair has whatever the formula gives.
struct CompositionTrace {
  at::Tensor before;     // scores, or weights after softmax
  at::Tensor convolved;  // undefined without a convolution
  // The terms of Compose (DCMHA eq. 7), which add up to `after`. by_static is the skip where there
  // is no matrix; all three are undefined where nothing is composed, and each where its term is
  // absent.
  at::Tensor by_static, by_query, by_key;
  at::Tensor after;  // what softmax, or the values, are given
};

struct ComposedAttentionTrace {
  CompositionTrace scores, weights;
  at::Tensor visible;  // [B or 1, 1, T, S] boolean; undefined: every pair
};

// composed_attention_maps(), which fills `trace`.
at::Tensor composed_attention_traced(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const ComposedAttentionOptions& options,
                                     ComposedAttentionTrace& trace);

// The composition maps of a HeadMix (DCMHA eq. 8): the map of the pair (t, s) is
// static + query[t] + key[s], entry [h, h'] being what map h gives to map h'.
struct CompositionMaps {
  at::Tensor by_static;  // [H, H']
  at::Tensor by_query;   // [B, T, H, H]; undefined where absent
  at::Tensor by_key;     // [B, S, H, H]
};
// `heads` is H, of the skip.
CompositionMaps composition_maps(const HeadMix& mix, int64_t heads, const at::TensorOptions& like);

}  // namespace headloom::ops
