// Keys and values held as int8, with a scale for each position and head: a KV cache of a quarter of
// float32's memory.
#pragma once

#include <utility>

#include "ops/composed_attention/op.h"

namespace headloom::ops {

// t [B, n, G, D] of a floating type as int8 [B, n, G, D] and scales [B, n, G] float32: the largest
// value of a position's head becomes 127, and |t - scale * int8| is at most half a scale. Where a
// value is not finite the scale is NaN, and so is what the head stands for.
std::pair<at::Tensor, at::Tensor> quantized_heads(const at::Tensor& t);
// What they stand for, as `type`.
at::Tensor dequantized_heads(const at::Tensor& values, const at::Tensor& scale,
                             at::ScalarType type);

// composed_attention of q [B, T, H, D] over keys and values that quantized_heads() gave, k
// [B, S, Gk, D] and v [B, S, Gv, E] with scales [B, S, Gk] and [B, S, Gv] -> [B, T, H', E]. Where a
// few queries read their keys in place, on the CPU, they are read as they lie; else they are
// dequantized first. Arguments are trusted, and there is no gradient.
at::Tensor composed_attention_int8(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& k_scale, const at::Tensor& v_scale,
                                   const ComposedAttentionOptions& options);

}  // namespace headloom::ops
