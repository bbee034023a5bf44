#include "model/generation.h"

#include <ATen/CPUGeneratorImpl.h>

#include <limits>

namespace headloom {
namespace {

bool state_grows(const Decoder& model) {
  for (const auto& layer : model.stacks()[0]->all()) {
    if (layer.mixer->state_bytes_per_token() > 0) return true;
  }
  return model.config().position.type == "learned";
}

}  // namespace

Continuation::Continuation(Decoder& model, const std::vector<int64_t>& prompt,
                           const SamplingOptions& sampling, uint64_t seed, int64_t samples)
    : model_(model),
      sampling_(sampling),
      window_(state_grows(model) ? model.config().max_length.value_or(256)
                                 : std::numeric_limits<int64_t>::max()) {
  require(!prompt.empty(), "a text cannot begin with nothing: the prompt is empty.");
  for (int64_t i = 0; i < samples; ++i) {
    generators_.push_back(
        at::make_generator<at::CPUGeneratorImpl>(seed + static_cast<uint64_t>(i)));
  }
  tokens_ = at::tensor(at::IntArrayRef(prompt), at::kLong).unsqueeze(0);
  read(tokens_.size(1));
  const Tensor rows = at::zeros({samples}, at::kLong);
  tokens_ = tokens_.index_select(0, rows);
  logits_ = logits_.index_select(0, rows);
  if (samples > 1) state_ = state_.select(rows);
}

Tensor Continuation::next() {
  const Tensor chosen = sample(logits_, tokens_, sampling_, generators_);
  tokens_ = at::cat({tokens_, chosen.unsqueeze(1)}, 1);
  read(1);
  return chosen;
}

void Continuation::read(int64_t count) {
  const int64_t length = tokens_.size(1);
  if (state_.position + count > window_) {
    state_ = {};
    count = std::min(length, std::max<int64_t>(window_ / 2, 1));
  }
  const Tensor hidden = model_.extend(tokens_.narrow(1, length - count, count), state_);
  logits_ = model_.logits(hidden.select(1, -1));
}

}  // namespace headloom
