// The encoder-only model: every position sees every other (Devlin et al. 2019).
#pragma once

#include "model/embeddings_and_heads.h"
#include "model/model.h"

namespace headloom {

class Encoder final : public Model {
 public:
  explicit Encoder(const ModelConfig& config);

  // Reads tokens, lengths, documents and segments. The pooled [B, C] where config.head is "label",
  // else [B, T, C].
  Tensor hidden(const ModelInput& input) override;
  // Of a span [B, T, 2]: how well the answer begins and ends there. Nothing is masked in it.
  Tensor logits(const Tensor& hidden) const override;
  ScoreLoss loss(const Tensor& hidden, const Tensor& targets) const override {
    return tokens_ ? tokens_->loss(hidden, targets) : Model::loss(hidden, targets);
  }
  std::vector<Cost> own_costs(int64_t length) const override;

 private:
  Embedding embedding_;
  Layers layers_;
  std::optional<TokenHead> tokens_;  // one of the three
  std::optional<LabelHead> label_;
  std::optional<PositionHead> position_;  // tags and spans
};

}  // namespace headloom
