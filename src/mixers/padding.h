// Masks of padded batches.
#pragma once

#include <ATen/ATen.h>

namespace headloom {

// bool [B, T]: which of the T positions of each sequence are no padding, for lengths [B].
inline at::Tensor real_positions(const at::Tensor& lengths, const c10::SymInt& positions) {
  return at::arange(c10::Scalar(positions), lengths.options()).lt(lengths.unsqueeze(1));
}

}  // namespace headloom
