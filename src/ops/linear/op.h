// A linear map, the one that every projection, head and embedding-sized product of a model uses.
//
//   y[m, o] = scale[o] * sum_i x[m, i] * weight[o, i] + bias[o]
//
// Few rows, as decoding has them, take the time of reading the weights, once. More rows are a dense
// product (ops/product/product.h), and so are both gradients.
//
// The weights are of x's type, float32, int8 with a scale for each output, or of four bits with a
// scale for each group of 32 inputs (int4.h); symmetric, so that 0 stays 0. Float32 weights of a
// narrower x are rounded to its type where they are multiplied. Autocast leaves them so where a
// processor with AMX multiplies many rows: the rounded copy would take as long as the product. The
// gradient of such weights is float32; the blocked product does not round it, but a library that
// is faster may round it to x's type.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>

namespace headloom::ops {

// Most rows for which reading the weights decides, whatever their type, and not the product.
constexpr int64_t kStreamedRows = 16;

// x [..., I], weight [O, I] of x's dtype, or float32, or int8 with `scale` [O] float32, or, of four
// bits, uint8 [O, 16 G] with `scale` [O, G] bfloat16 where G = ceil(I / 32); bias [O] of x's dtype
// or undefined -> [..., O] of x's dtype; sums in float32 or wider. Through the dispatcher
// (torch.ops.headloom.linear). `backend`: "fused" (CPU, float32 and bfloat16; with quantised
// weights where no gradient is wanted) or "reference" (plain ATen: any floating dtype and device,
// differentiable in x and in floating weights); absent: fused where it can. Throws c10::ValueError
// or c10::TypeError naming the argument, NotImplementedError where "fused" cannot run.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale = {},
                  const at::Tensor& bias = {}, const std::optional<std::string>& backend = {});

// weight [O, I] as int8 and the scales [O] float32 with which |weight - scale * int8| is at most
// half a scale; a row's largest value becomes 127. Throws c10::ValueError for values that are not
// finite.
std::pair<at::Tensor, at::Tensor> quantized_int8(const at::Tensor& weight);

// weight [O, I] as four bits: uint8 [O, 16 G] and the scales [O, G] bfloat16, G = ceil(I / 32). A
// group's value furthest from 0 becomes -8 times its scale, or as little more or less, of five
// candidates, as gives the group's least sum of squared errors. Throws c10::ValueError for values
// that are not finite.
std::pair<at::Tensor, at::Tensor> quantized_int4(const at::Tensor& weight);
// What they stand for: [O, I] float32. Throws c10::ValueError or c10::TypeError where they are not
// of `in` inputs.
at::Tensor dequantized_int4(const at::Tensor& values, const at::Tensor& scale, int64_t in);

}  // namespace headloom::ops
