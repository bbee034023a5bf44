// The decoder-only language model.
#pragma once

#include "model/config.h"

namespace headloom {

class Decoder : public torch::nn::Module {
 public:
  // `config.vocabulary` must be set. Weights are drawn from torch's default generator. Throws
  // UsageError for options that do not fit each other.
  explicit Decoder(const ModelConfig& config);

  // tokens [B, T] int64 -> the last layer's normed output [B, T, C].
  Tensor hidden(const Tensor& tokens, const MixerContext& context = {});
  // [..., C] -> [..., vocabulary].
  Tensor logits(const Tensor& hidden) const;
  Tensor forward(const Tensor& tokens, const MixerContext& context = {}) {
    return logits(hidden(tokens, context));
  }

  const ModelConfig& config() const { return config_; }
  const std::vector<std::shared_ptr<TokenMixer>>& mixers() const { return mixers_; }
  const std::vector<std::shared_ptr<ChannelMixer>>& channels() const { return channels_; }

 private:
  ModelConfig config_;
  Tensor embedding_;  // [vocabulary, C]
  Tensor positions_;  // [max_length, C], learned
  std::vector<std::shared_ptr<Block>> blocks_;
  std::vector<std::shared_ptr<TokenMixer>> mixers_;
  std::vector<std::shared_ptr<ChannelMixer>> channels_;
  std::shared_ptr<Norm> norm_;
  std::shared_ptr<Linear> head_;  // absent when tied
};

}  // namespace headloom
