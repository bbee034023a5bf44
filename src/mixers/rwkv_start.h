// What RWKV-4's parameters start from, by depth and channel (Peng et al. 2023, appendix D, as the
// authors' code has it).
#pragma once

#include <ATen/ATen.h>

#include <cmath>

#include "mixers/mixer.h"

namespace headloom {

class RwkvStart {
 public:
  explicit RwkvStart(const LayerShape& shape)
      : share_(at::arange(shape.width, at::kDouble) / static_cast<double>(shape.width)),
        depth_(shape.depth > 1
                   ? static_cast<double>(shape.layer) / static_cast<double>(shape.depth - 1)
                   : 0),
        rest_(1 - static_cast<double>(shape.layer) / static_cast<double>(shape.depth)) {}

  // Proportions of the position itself, [C]. Those of values may exceed 1.
  at::Tensor key_mix() const { return at::pow(share_, rest_).to(at::kFloat); }
  at::Tensor value_mix() const { return (at::pow(share_, rest_) + 0.3 * depth_).to(at::kFloat); }
  at::Tensor gate_mix() const { return at::pow(share_, 0.5 * rest_).to(at::kFloat); }

  // Logarithms of the rates, from -5 to 3, later for the deeper layers.
  at::Tensor time_decay() const {
    const int64_t width = share_.size(0);
    const at::Tensor channel =
        at::arange(width, share_.options()) / static_cast<double>(std::max<int64_t>(width - 1, 1));
    return (-5 + 8 * at::pow(channel, 0.7 + 1.3 * depth_)).to(at::kFloat);
  }
  // log 0.3 and a zigzag of half a unit.
  at::Tensor bonus() const {
    const at::Tensor zigzag = at::arange(1, share_.size(0) + 1, share_.options()).remainder(3) - 1;
    return (std::log(0.3) + 0.5 * zigzag).to(at::kFloat);
  }

 private:
  at::Tensor share_;  // channel / C
  double depth_;      // 0 in the first layer, 1 in the last
  double rest_;       // 1 in the first layer, 1 / depth in the last
};

}  // namespace headloom
