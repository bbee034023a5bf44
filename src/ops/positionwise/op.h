// What a layer does to each position by itself, beside its linear maps: a norm, the rotation of
// queries and keys, the gate of a feed-forward network. ATen has each only as several passes over
// memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace headloom::ops {

// All of them go through the dispatcher (torch.ops.headloom.NAME), compute in float32 or wider and
// return x's dtype. `backend`: "fused" (CPU, float32 and bfloat16, and but for gelu_tanh NVIDIA
// GPUs with Triton, float16 too: kernels of its own forward and backward; the gradient of the
// gradient is the definition's) or "reference" (plain ATen: any floating dtype and device); absent:
// fused where it can. They throw c10::ValueError or c10::TypeError naming the argument,
// NotImplementedError where "fused" cannot run.

// x / sqrt(mean(x^2) + eps) * scale, the mean over the last dimension (Zhang & Sennrich 2019).
// x [..., E], scale [E] of any floating dtype or undefined, eps >= 0 -> [..., E].
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& scale, double eps,
                    const std::optional<std::string>& backend = {});

// Rotary positions (Su et al. 2021): pairs of a head's first 2 P dimensions turned by their
// position's angles.
//
//   (a, b) -> (a cos - b sin, b cos + a sin)
//
// Pair p is dimensions (p, p + P), or interleaved (2 p, 2 p + 1); the dimensions after them stay.
// x [B, T, H, D], cos and sin [T, P] or [B, T, P], float32 or (with x) float64 -> [B, T, H, D],
// contiguous. Differentiable in x.
at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                  bool interleaved, const std::optional<std::string>& backend = {});

// SiLU(g) * u of x = [g | u] (Shazeer 2020): x [..., 2 I] -> [..., I].
at::Tensor swiglu(const at::Tensor& x, const std::optional<std::string>& backend = {});

// GELU by its approximation (Hendrycks & Gimpel 2016, GPT-2's "gelu_new"), with
// tanh(u) = 2 sigmoid(2 u) - 1: x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)). x of any shape.
at::Tensor gelu_tanh(const at::Tensor& x, const std::optional<std::string>& backend = {});

}  // namespace headloom::ops
