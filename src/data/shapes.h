// Small pictures of shapes, made up on the fly.
#pragma once

#include <string>
#include <vector>

#include "data/random.h"

namespace headloom::data {

// The shapes that draw_shape knows: "circle", "square", ...
const std::vector<std::string>& shape_names();

// A picture of shape number `shape` in a bright colour, a size, a place and a turn (up to 30
// degrees to either side) by lot before a dark background: [size, size, 3] bytes. `noise` is the
// spread of what is added to every byte, as a share of 255.
std::vector<uint8_t> draw_shape(int64_t shape, int64_t size, double noise, Random& random);

}  // namespace headloom::data
