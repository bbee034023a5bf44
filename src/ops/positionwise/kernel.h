// Free of torch. Rows are contiguous unless strides are given, in elements.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::positionwise_kernel {

struct NormArgs {
  int64_t width = 0;  // E
  Type type = Type::kFloat;
  float eps = 0;
  const void* x = nullptr;       // [rows, E]
  const float* scale = nullptr;  // [E] or null
  void* y = nullptr;             // forward
  const void* grad = nullptr;    // backward: of y
  void* grad_x = nullptr;
  float* grad_scale = nullptr;  // [E], added to; null where there is no scale
};

struct RotaryArgs {
  int64_t length = 0, heads = 0, width = 0, pairs = 0;  // T, H, D, P
  bool interleaved = false;
  bool back = false;  // turns the other way, which is the backward
  Type type = Type::kFloat;
  HeadSequence x;
  const float *cos = nullptr, *sin = nullptr;
  int64_t table_stride[2] = {0, 0};  // [B, T, P]; 0 for B: the same for all
  void* y = nullptr;                 // [B, T, H, D] contiguous
};

struct GateArgs {
  int64_t width = 0;  // I
  Type type = Type::kFloat;
  const void* x = nullptr;     // [rows, 2 I]
  void* y = nullptr;           // forward: [rows, I]
  const void* grad = nullptr;  // backward: of y
  void* grad_x = nullptr;
};

struct GeluArgs {
  Type type = Type::kFloat;
  const void* x = nullptr;     // [n]
  void* y = nullptr;           // forward: [n]
  const void* grad = nullptr;  // backward: of y
  void* grad_x = nullptr;
};

// Rows begin ... end: of rotary the pairs of batch and position, of GELU single values. All but
// rotary run the backward where there is a gradient, else the forward.
using Norm = void(const NormArgs& args, int64_t begin, int64_t end);
using Rotary = void(const RotaryArgs& args, int64_t begin, int64_t end);
using Gate = void(const GateArgs& args, int64_t begin, int64_t end);
using Gelu = void(const GeluArgs& args, int64_t begin, int64_t end);
Norm norm_DEFAULT, norm_AVX2, norm_AVX512, norm_AVX512_BF16;
Rotary rotary_DEFAULT, rotary_AVX2, rotary_AVX512, rotary_AVX512_BF16;
Gate gate_DEFAULT, gate_AVX2, gate_AVX512, gate_AVX512_BF16;
Gelu gelu_tanh_DEFAULT, gelu_tanh_AVX2, gelu_tanh_AVX512, gelu_tanh_AVX512_BF16;

}  // namespace headloom::ops::positionwise_kernel
