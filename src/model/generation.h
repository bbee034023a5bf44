// Writing on from a prompt.
#pragma once

#include "model/autoregressive.h"
#include "model/sampling.h"

namespace headloom {

// Most positions of a text that mean something to the model: the length it was built for, or the
// largest int64 where it was built for none, where no state grows, and under a cache policy that
// keeps the newest alone.
int64_t most_positions(const AutoregressiveModel& model, const CachePolicy& policy = {});
// Of a text that is going to have `length` positions, those to make room for ahead
// (DecoderState::reserve): no more than means something to the model, or where anything does, no
// more than a state that does not grow fills.
int64_t positions_to_expect(const AutoregressiveModel& model, const CachePolicy& policy,
                            int64_t length);

struct ContinuationOptions {
  SamplingOptions sampling = {};
  uint64_t seed = 0;    // sample i of a prompt draws with seed + i
  int64_t samples = 1;  // texts from each prompt
  CachePolicy cache = {};
  // Tokens that each text will be written at most, where that is known: there is room for them from
  // the start. 0: not known.
  int64_t tokens = 0;
  // What an encoder-decoder reads, of at least one token each: one for each prompt.
  std::vector<std::vector<int64_t>> sources = {};
};

// Texts that go on from prompts of any lengths, side by side, a token of each at a time. What a
// text becomes depends on its own prompt, source and seed, not on the others.
//
// A text that outgrows the length the model was built for is read anew from its newer part, half as
// long: beyond, positions mean nothing to the model. Models built for no length go on, and so do
// those whose state does not grow and what attends to no more than the length: under a cache policy
// of "window" or "sinks".
class Continuation {
 public:
  // Reads the prompts, of at least one token each, and goes on from each with options.samples
  // texts, those of the first prompt first. Throws UsageError where the model cannot forget as the
  // policy says.
  Continuation(AutoregressiveModel& model, const std::vector<std::vector<int64_t>>& prompts,
               const ContinuationOptions& options);
  // The next token of each text, [texts] int64.
  Tensor next();

  const DecoderState& state() const { return state_; }
  // Positions behind which a text is read anew; the largest int64 where there are none.
  int64_t most() const { return window_; }

 private:
  // Of some texts.
  struct Reading {
    DecoderState state;
    Tensor logits;  // [texts, vocabulary], of what comes next
  };
  // Texts `which`, `samples` of which have one source, from nothing, as much of their newer part as
  // the model is built for.
  Reading read(const std::vector<int64_t>& which, int64_t samples);
  Tensor logits_of(const Tensor& tokens, DecoderState& state);

  AutoregressiveModel& model_;
  const SamplingOptions sampling_;
  const CachePolicy policy_;
  const int64_t samples_;
  const int64_t window_;  // most positions a text's state may see
  int64_t left_;          // tokens that will still be written; 0 or less: not known
  DecoderState begun_;    // before the first token, a row a source where there are some
  std::vector<at::Generator> generators_;
  std::vector<std::vector<int64_t>> texts_;  // the prompts and what was written
  Tensor logits_;                            // [texts, vocabulary], of what comes next
  DecoderState state_;
};

}  // namespace headloom
