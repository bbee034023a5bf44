// Choosing the next token.
#pragma once

#include <ATen/core/Generator.h>

#include "mixers/nn.h"
#include "model/sampling_options.h"

namespace headloom {

// Throws UsageError naming the option that is out of range.
void check_sampling(const SamplingOptions& options);

// One token for each row of logits [B, V]. seen: [B, n] int64, the tokens that the repetition
// penalty is for; undefined or ignored where that is 1. Each row draws from its own generator, so
// that what a sequence becomes does not depend on its neighbours. -> [B] int64. The options are
// trusted.
Tensor sample(const Tensor& logits, const Tensor& seen, const SamplingOptions& options,
              std::vector<at::Generator>& generators);

}  // namespace headloom
