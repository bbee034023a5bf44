// Choosing the next token.
#pragma once

#include <ATen/core/Generator.h>

#include "mixers/nn.h"

namespace headloom {

struct SamplingOptions {
  double temperature = 0.8;  // 0: always the likeliest
  int64_t top_k = 0;         // 0: no limit
  double top_p = 1.0;        // smallest set of likeliest tokens with this much probability
};

// logits [V] -> a token.
int64_t sample(const Tensor& logits, const SamplingOptions& options, at::Generator& generator);

}  // namespace headloom
