// Selective scan (Mamba, Gu & Dao 2023): a diagonal linear recurrence for each channel whose step
// and whose input and output maps are computed from the sequence.
//
//   dt_t  = delta_t + delta_bias, then softplus where asked
//   h_t   = exp(dt_t A) h_{t-1} + dt_t B_t u_t              [N] numbers a channel     (eq. 2a, 4)
//   y_t   = sum_n C_t[n] h_t[n] + D u_t,  times SiLU(z_t) where z is given            (eq. 2b)
//
// B enters by the Euler form dt B as in the published code, not by the exact zero-order hold.
// Cost: B L channels N exponentials, forward and again backward; memory linear in L, where the
// fused kernels keep one state every 32 positions for the backward.
//
// Legend: B batch, L length, N states a channel, G groups of channels that share B and C.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace headloom::ops {

struct SelectiveScanOptions {
  at::Tensor D;                // [channels]
  at::Tensor z = {};           // [B, L, channels]
  at::Tensor delta_bias = {};  // [channels]
  bool delta_softplus = false;
  at::Tensor state = {};      // [B, channels, N]: h before the first position; zero when absent
  at::Tensor documents = {};  // [B, L] int64 ids: the state starts anew wherever the id changes; an
                              // initial state belongs to the first position's document
  std::optional<std::string> backend = {};  // "reference", "fused"; absent: fused where it can run
};

// u, delta [B, L, channels], A [channels, N]; B and C [B, L, N], [B, L, G, N] (channel c reads
// group c G / channels) or, constant along the sequence, [channels, N] -> y [B, L, channels] of u's
// dtype and the state after the last position [B, channels, N], float64 for float64 and float32
// otherwise, the type in which everything is computed. delta, B, C and z have u's dtype; A, D and
// delta_bias have it or the wide one. Rows of u, delta and z whose channels are adjacent are read
// in place. Through the dispatcher (torch.ops.headloom.selective_scan); differentiable in every
// tensor but the documents. Throws c10::ValueError or c10::TypeError naming the argument,
// c10::NotImplementedError where `backend` cannot run.
std::tuple<at::Tensor, at::Tensor> selective_scan(const at::Tensor& u, const at::Tensor& delta,
                                                  const at::Tensor& A, const at::Tensor& B,
                                                  const at::Tensor& C,
                                                  const SelectiveScanOptions& options);

}  // namespace headloom::ops
