// The encoder-decoder (Vaswani et al. 2017): a decoder whose layers also read an encoded source.
#pragma once

#include "model/autoregressive.h"

namespace headloom {

class EncoderDecoder final : public AutoregressiveModel {
 public:
  explicit EncoderDecoder(const ModelConfig& config);

  // Reads source, source_lengths, tokens and lengths. [B, T, C].
  Tensor hidden(const ModelInput& input) override;
  Tensor logits(const Tensor& hidden) const override { return head_.forward(hidden); }
  ScoreLoss loss(const Tensor& hidden, const Tensor& targets) const override {
    return head_.loss(hidden, targets);
  }
  std::vector<Cost> own_costs(int64_t) const override { return head_.costs(); }
  const Layers& decoder_layers() const override { return decoder_layers_; }

 private:
  const Embedding& decoder_embedding() const override { return target_embedding_; }
  TokenHead& head() override { return head_; }
  void read_source(const Source& source, std::vector<LayerState>& states) const override;
  // The memory [B, S, C]. Throws UsageError where there is no source.
  Tensor encode(const ModelInput& input) const;

  std::shared_ptr<Module> encoder_, decoder_;  // own the parameters of each side
  Tensor table_;                               // of both embeddings and the output
  Embedding target_embedding_, source_embedding_;
  Layers encoder_layers_, decoder_layers_;
  TokenHead head_;
};

}  // namespace headloom
