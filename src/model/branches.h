// How large the outputs of token mixers are beside the residual stream that they are added to, at
// the start of training.
#pragma once

#include "model/model.h"

namespace headloom {

// Of one layer.
struct BranchScale {
  std::string part;     // "encoder" or "decoder" where a model has both
  int64_t layer = 0;    // within its part
  std::string mixer;    // its type
  double output = 0;    // root mean square of what the token mixer puts out
  double residual = 0;  // and of the residual stream, the input of the layer's block
  double ratio() const { return output / residual; }
};

// Every layer of `config` with newly drawn weights, measured on a batch of kBranchSequences random
// inputs of `length` positions (at most kBranchPositions). The weights and the batch are the same
// at each call. Absent where the model has more than kMostBranchParameters parameters or does not
// fit this process: then it is not built.
std::optional<std::vector<BranchScale>> measured_branches(const ModelConfig& config,
                                                          int64_t length);
constexpr int64_t kBranchSequences = 4, kBranchPositions = 256;
constexpr int64_t kMostBranchParameters = 150'000'000;

// ModelConfig::equal_init. Multiplies the output projection of a newly built mixer by one number,
// so that its output on random positions of unit size has the root mean square that multi-head
// attention (one head, no positions, of the same initialisation) has on them. One measured
// rescaling of a layer is the way of Mishkin & Matas 2015 (LSUV). Does nothing where weights are
// not drawn. Throws UsageError beginning with `place` for a mixer without an output projection.
void equalize(TokenMixer& mixer, const LayerShape& shape, const std::string& place);

}  // namespace headloom
