// Generation: sequences of tokens that continue prompts. `headloom generate` and Python's
// generate() use it; the server has a loop of its own.
#pragma once

#include <algorithm>

#include "model/autoregressive.h"
#include "model/sampling.h"

namespace headloom {

// The longest sequence that the model can read: the length it was built for. It is the largest
// int64 if the model was built for no length, if its decoding state does not grow, or if the cache
// policy keeps only the newest positions.
int64_t most_positions(const AutoregressiveModel& model, const CachePolicy& policy = {});
// How many tokens of a text that is longer than the model's length may be read in one call, so that
// attention reaches no further than that length. It is the largest int64 where the cache policy
// does not lift the limit of most_positions().
int64_t most_at_once(const AutoregressiveModel& model, const CachePolicy& policy);
// The capacity to reserve (DecoderState::reserve) for a sequence that will have `length` positions.
// It is at most most_positions() and at most twice the model's length; longer sequences make the
// cache grow.
int64_t positions_to_expect(const AutoregressiveModel& model, const CachePolicy& policy,
                            int64_t length);

struct GenerationOptions {
  SamplingOptions sampling = {};
  uint64_t seed = 0;    // sample i of a prompt draws with seed + i
  int64_t samples = 1;  // sequences from each prompt
  CachePolicy cache = {};
  // The largest number of new tokens of a sequence, for which memory is reserved; 0: not known.
  int64_t tokens = 0;
  // The sources of an encoder-decoder, one for each prompt, of at least one token each.
  std::vector<std::vector<int64_t>> sources = {};
};

// A batch of sequences that grow by one token at a time. Prompts may have different lengths. A
// sequence depends on its own prompt, source and seed, and not on the others in the batch.
//
// A sequence that becomes longer than most_positions() is read again from its newer half, because
// the model was not trained on later positions.
class Generation {
 public:
  // Prefill: reads the prompts, of at least one token each. Each gives options.samples sequences,
  // those of the first prompt first. Throws UsageError for an option that is out of range, and if
  // the model does not support the cache policy.
  Generation(AutoregressiveModel& model, const std::vector<std::vector<int64_t>>& prompts,
             const GenerationOptions& options);
  // The next token of each sequence, [sequences] int64.
  Tensor next();

  const DecoderState& state() const { return state_; }
  // most_positions() of the model and the cache policy.
  int64_t most() const { return window_; }
  // So many of its newest tokens are read of a text that has more than most().
  int64_t newest() const { return std::max<int64_t>(window_ / 2, 1); }

 private:
  struct Reading {
    DecoderState state;
    Tensor logits;  // [sequences, vocabulary] of the next token
  };
  // Reads the sequences `which` from an empty state, or their newer part where they are too long;
  // most_at_once() tokens at a time where they are longer than the model.
  // `samples` neighbours have one source.
  Reading read(const std::vector<int64_t>& which, int64_t samples);
  Tensor logits_of(const Tensor& tokens, DecoderState& state);

  AutoregressiveModel& model_;
  const SamplingOptions sampling_;
  const CachePolicy policy_;
  const int64_t samples_;
  const int64_t window_;  // most positions that a sequence's state may see
  int64_t left_;          // new tokens still to come at most; 0 or less: not known
  DecoderState begun_;    // before the first token; one row for each source, if there are sources
  std::vector<at::Generator> generators_;
  std::vector<std::vector<int64_t>> texts_;  // the prompts and their new tokens
  Tensor logits_;                            // [sequences, vocabulary] of the next token
  DecoderState state_;
};

}  // namespace headloom
