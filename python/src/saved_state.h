// A decoding state as lists of plain values and tensors, which Python pickles and copies.
#pragma once

#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "model/autoregressive.h"

namespace headloom::python {

using SavedState =
    std::tuple<std::vector<std::string>, std::vector<int64_t>, std::vector<at::Tensor>>;

// What a Python State holds: what attention is to forget, what was kept, the configuration of the
// model that began it, and the types in which that model computed.
struct HeldState {
  CachePolicy policy = {};
  DecoderState state = {};
  std::string spec = {};
  std::string types = {};
};

// The tensors are copies: a file would otherwise also hold the memory that a cache has taken ahead.
SavedState saved(const HeldState& held);
// With tensors of its own. Throws ValueError where the lists are not what saved() returns.
HeldState restored(const SavedState& from);

}  // namespace headloom::python
