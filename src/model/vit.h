// The vision transformer (Dosovitskiy et al. 2020): an image as a sequence of patches.
#pragma once

#include "model/embeddings_and_heads.h"
#include "model/model.h"

namespace headloom {

class Vit final : public Model {
 public:
  explicit Vit(const ModelConfig& config);

  // Reads images. Returns the pooled [B, C]. Throws UsageError for images of another size.
  Tensor hidden(const ModelInput& input) override;
  Tensor logits(const Tensor& hidden) const override { return label_.forward(hidden); }
  std::vector<Cost> own_costs(int64_t length) const override;

 private:
  const int64_t length_;  // patches, and the class token where the pool is "first"
  std::shared_ptr<Linear> patch_;
  Tensor class_token_;  // [C]
  Tensor positions_;    // [length, C], learned
  std::shared_ptr<Norm> embedding_norm_;
  Layers layers_;
  LabelHead label_;
};

// Images [B, channels, H, W] -> [B, H W / p^2, channels p^2]: the patches row by row, each as
// channels, rows, columns, so that a linear map of them is the convolution of stride p.
Tensor image_patches(const Tensor& images, int64_t patch);

// Two-dimensional sinusoidal positions of a grid (Chen et al. 2021, Beyer et al. 2022), row by row:
// sin x, cos x, sin y, cos y, a quarter of the width each, frequencies 10000^(-i / (C/4 - 1)).
// [rows columns, C].
Tensor sinusoidal_grid(int64_t rows, int64_t columns, int64_t width,
                       const at::TensorOptions& options);

}  // namespace headloom
