// The decoder-only language model.
#pragma once

#include "model/autoregressive.h"

namespace headloom {

class Decoder final : public AutoregressiveModel {
 public:
  explicit Decoder(const ModelConfig& config);

  // Reads tokens, lengths and documents.
  Tensor hidden(const ModelInput& input) override;
  Tensor logits(const Tensor& hidden) const override { return head_.forward(hidden); }
  ScoreLoss loss(const Tensor& hidden, const Tensor& targets) const override {
    return head_.loss(hidden, targets);
  }
  std::vector<Cost> own_costs(int64_t) const override { return head_.costs(); }
  using Model::forward;
  Tensor forward(const Tensor& tokens, const MixerContext& context = {}) {
    return logits(
        hidden({.tokens = tokens, .lengths = context.lengths, .documents = context.documents}));
  }
  const Layers& decoder_layers() const override { return layers_; }

 private:
  const Embedding& decoder_embedding() const override { return embedding_; }
  TokenHead& head() override { return head_; }
  void read_source(const Source& source, std::vector<LayerState>& states) const override;

  Embedding embedding_;
  Layers layers_;
  TokenHead head_;
};

}  // namespace headloom
