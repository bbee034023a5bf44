// A step of decoding, for timings.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "bench/timing.h"
#include "model/decoder.h"
#include "model/sampling.h"
#include "train/device.h"

namespace headloom::bench {

// The next token of each of `batch` texts after `context` tokens, again and again: every call
// continues the same state.
class DecodeStep {
 public:
  // "" or the type that holds the weights.
  DecodeStep(std::shared_ptr<Decoder> model, int64_t context, const std::string& dtype = "",
             const CachePolicy& policy = {}, int64_t batch = 1)
      : model_(std::move(model)), dtype_(dtype), state_(model_->initial_state(policy)) {
    model_->eval();
    const c10::InferenceMode inference;
    const Autocast autocast(dtype_);
    const int64_t vocabulary = *model_->config().vocabulary;
    state_.reserve(context);
    constexpr int64_t kPiece = 2048;
    for (int64_t seen = 0; seen < context - 1; seen += kPiece) {
      const int64_t n = std::min(kPiece, context - 1 - seen);
      model_->extend(at::randint(0, vocabulary, {1, n}, at::kLong), state_, 1);
    }
    token_ = at::randint(0, vocabulary, {batch, 1}, at::kLong);
    one_.push_back(state_.alias());
    if (batch > 1) state_ = state_.select(at::zeros({batch}, at::kLong));
  }

  void operator()() {
    const c10::InferenceMode inference;
    const Autocast autocast(dtype_);
    DecoderState state = state_.alias();
    const Tensor hidden = model_->extend(token_, state);
    chosen_ = sample(model_->logits(hidden.select(1, -1)), {}, greedy_, generators_);
  }

  // One text leaves, and another of the same length, which was read by itself, joins.
  void change() {
    const c10::InferenceMode inference;
    std::vector<int64_t> who(static_cast<size_t>(token_.size(0) - 1));
    std::iota(who.begin(), who.end(), 0);
    who[0] = static_cast<int64_t>(who.size());
    DecoderState state = state_.alias();
    state.keep(who);
    state.add(one_);
  }

  double state_bytes() const { return static_cast<double>(state_.bytes()); }

 private:
  const std::shared_ptr<Decoder> model_;
  const std::string dtype_;
  DecoderState state_;             // of the batch
  std::vector<DecoderState> one_;  // of one text by itself
  Tensor token_, chosen_;
  const SamplingOptions greedy_{.temperature = 0};
  std::vector<at::Generator> generators_;
};

// As many tokens in a row as show the pace of a text, not that of a model whose turn comes once.
constexpr int kTokensInARow = 8;

template <typename Step>
void tokens_in_a_row(Step& step) {
  for (int i = 0; i < kTokensInARow; ++i) step();
}

// Pairs of such rows.
template <typename A, typename B>
Paired time_tokens(A& a, B& b, double seconds) {
  return time_pairs([&] { tokens_in_a_row(a); }, [&] { tokens_in_a_row(b); }, seconds,
                    /*least=*/15);
}

}  // namespace headloom::bench
