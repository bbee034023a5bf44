// Maps of mixers that are no attention but linear in their values: what they make of a value that
// stands at one position alone is how every position reads that one.
#pragma once

#include <ATen/ATen.h>

#include <functional>

#include "mixers/mixer.h"

namespace headloom {

// A value for each position, [B, T, H, T] for `like` [B, T, H, D]: 1 where the last index is the
// position. A mixer by heads makes its map [B, T, H, S] of them.
inline Tensor values_of_positions(const Tensor& like) {
  const int64_t length = like.size(1);
  return at::eye(length, like.options().requires_grad(false))
      .unsqueeze(1)
      .expand({like.size(0), length, like.size(2), length});
}

// The map [B, 1, T, S] of a mixer whose channels have maps of their own: their mean. `like` and
// what `mix` takes and gives are [B, T, channels].
inline Tensor mean_channel_map(const Tensor& like,
                               const std::function<Tensor(const Tensor& values)>& mix) {
  std::vector<Tensor> columns = {at::empty({like.size(0), 1, like.size(1), 0}, like.options())};
  for (int64_t s = 0; s < like.size(1); ++s) {
    Tensor values = at::zeros_like(like);
    values.select(1, s).fill_(1);
    columns.push_back(mix(values).mean(-1).unsqueeze(1).unsqueeze(-1));
  }
  return at::cat(columns, -1);
}

}  // namespace headloom
