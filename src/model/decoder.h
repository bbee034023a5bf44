// The decoder-only language model.
#pragma once

#include "model/autoregressive.h"

namespace headloom {

class Decoder final : public AutoregressiveModel {
 public:
  explicit Decoder(const ModelConfig& config);

  // From now on holds the weights of linear maps as bfloat16 or int8 (symmetric, a scale for each
  // output; Dettmers et al. 2022): those of mixers, channel mixers and the head. Embeddings, norms,
  // routers, the experts of a mixture and what a mixer does not multiply as a linear map stay. It
  // is not trained again.
  void narrow_weights(at::ScalarType type);

  // Reads tokens, lengths and documents.
  Tensor hidden(const ModelInput& input) override;
  Tensor logits(const Tensor& hidden) const override { return head_.forward(hidden); }
  std::vector<Cost> own_costs(int64_t) const override { return head_.costs(); }
  using Model::forward;
  Tensor forward(const Tensor& tokens, const MixerContext& context = {}) {
    return logits(
        hidden({.tokens = tokens, .lengths = context.lengths, .documents = context.documents}));
  }
  const Layers& decoder_layers() const override { return layers_; }

 private:
  const Embedding& decoder_embedding() const override { return embedding_; }
  void read_source(const Source& source, std::vector<LayerState>& states) const override;

  Embedding embedding_;
  const Layers layers_;
  TokenHead head_;
};

}  // namespace headloom
