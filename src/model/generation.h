// Writing on from a prompt.
#pragma once

#include "model/decoder.h"
#include "model/sampling.h"

namespace headloom {

// Texts that go on from one prompt, side by side, a token of each at a time. What a sample becomes
// depends on its own seed, not on how many there are.
//
// A text that outgrows the length the model was built for is read anew from its newer part, half as
// long: beyond, positions mean nothing to the model. Models whose state does not grow go on.
class Continuation {
 public:
  // Reads the prompt, at least one token. Sample i draws with seed + i.
  Continuation(Decoder& model, const std::vector<int64_t>& prompt, const SamplingOptions& sampling,
               uint64_t seed, int64_t samples = 1);
  // The next token of each sample, [samples] int64.
  Tensor next();

  const DecoderState& state() const { return state_; }

 private:
  // The newest `count` tokens.
  void read(int64_t count);

  Decoder& model_;
  const SamplingOptions sampling_;
  std::vector<at::Generator> generators_;
  int64_t window_;  // most positions the state may see
  Tensor tokens_;   // [samples, n] int64: the prompt and what was written
  Tensor logits_;   // [samples, vocabulary], of what comes next
  DecoderState state_;
};

}  // namespace headloom
