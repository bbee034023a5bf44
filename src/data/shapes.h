// Small pictures of shapes, made up on the fly.
#pragma once

#include <string>
#include <vector>

#include "data/random.h"

namespace headloom::data {

// The shapes that draw_shape knows: "circle", "square", ...
const std::vector<std::string>& shape_names();

// A picture of shape number `shape` on a dark background: [size, size, 3] bytes. Its bright colour,
// size, place and rotation (up to 30 degrees to either side) are drawn from `random`. `noise` is
// the standard deviation of what is added to every byte, as a share of 255.
std::vector<uint8_t> draw_shape(int64_t shape, int64_t size, double noise, Random& random);

}  // namespace headloom::data
