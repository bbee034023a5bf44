// The auto-encoder of MAD's compression task (Poli et al. 2024, appendix B, and the authors' code):
// a whole sequence is kept in one vector.
#pragma once

#include "model/embeddings_and_heads.h"
#include "model/model.h"

namespace headloom {

// The layers are a decoder's, without a norm after them. Of what they give, h [B, T, C], only the
// last position is read: y_t = h_T + p_t with sinusoidal positions p, then
//   norm, linear, GELU, norm, linear, GELU, norm, linear: y_t -> scores of the token at t.
// The linear maps of this multi-layer perceptron are C -> C and, the last, C -> vocabulary; they
// have biases.
class AutoEncoder final : public Model {
 public:
  explicit AutoEncoder(const ModelConfig& config);

  // Reads tokens. [B, T, C]: what the last linear map reads.
  Tensor hidden(const ModelInput& input) override;
  Tensor logits(const Tensor& hidden) const override { return output_->forward(hidden); }
  std::vector<Cost> own_costs(int64_t length) const override;

 private:
  struct Step {
    std::shared_ptr<Norm> norm;
    std::shared_ptr<Linear> linear;
  };

  Embedding embedding_;
  Layers layers_;
  std::vector<Step> steps_;
  std::shared_ptr<Norm> output_norm_;
  std::shared_ptr<Linear> output_;
};

}  // namespace headloom
