// The range of options that are sizes.
#pragma once

#include "core/fields.h"

namespace headloom {

// Products of a few sizes stay within int64, and nothing that fits a machine is as large.
constexpr int64_t kLargestSize = int64_t{1} << 30;
// Every layer is a module of its own, with or without weights.
constexpr int64_t kMostLayers = 10'000;

// Of widths, lengths, counts of heads: what tensors are made of.
inline Range<int64_t> size_from(int64_t low) { return {.low = low, .high = kLargestSize}; }

}  // namespace headloom
