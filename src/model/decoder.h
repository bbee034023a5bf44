// The decoder-only language model.
#pragma once

#include "model/ends.h"
#include "model/model.h"

namespace headloom {

class Decoder final : public Model {
 public:
  explicit Decoder(const ModelConfig& config);

  // Reads tokens, lengths and documents.
  Tensor hidden(const ModelInput& input) override;
  Tensor logits(const Tensor& hidden) const override { return head_.forward(hidden); }
  std::vector<Cost> own_costs(int64_t) const override { return head_.costs(); }
  using Model::forward;
  Tensor forward(const Tensor& tokens, const MixerContext& context = {}) {
    return logits(
        hidden({.tokens = tokens, .lengths = context.lengths, .documents = context.documents}));
  }

 private:
  const Embedding embedding_;
  const Layers layers_;
  const TokenHead head_;
};

}  // namespace headloom
