// Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
#pragma once

#include "blocks/block.h"

namespace headloom {

// block->forward(x, context), of which only x and context.memory are kept for the backward, which
// computes the rest again: under the same autocast, with the same random numbers, so that dropout
// is the same. The parameters' gradients are added to their grad() there. Auxiliary losses get
// their gradients too, and statistics count once. x must require a gradient; a gradient of the
// gradient is an error.
Tensor checkpointed(const std::shared_ptr<Block>& block, const Tensor& x,
                    const MixerContext& context);

}  // namespace headloom
