// Embeddings and heads: tokens to vectors, vectors to scores of tokens or of classes.
//
// Like Layers, each registers its parameters in the model that owns it.
#pragma once

#include "mixers/dropout.h"
#include "model/config.h"

namespace headloom {

// Token embedding, positions, segments, norm, linear map and dropout.
class Embedding {
 public:
  // `table` is another embedding's to share, or undefined: then there is one of its own.
  Embedding(Module& owner, const ModelConfig& config, const Tensor& table,
            std::optional<int64_t> max_length, const char* max_length_key);
  // tokens [B, T] int64, segments [B, T] int64 or undefined -> [B, T, C]; the tokens follow the
  // positions `seen`. Throws Error for a sequence longer than learned positions.
  Tensor forward(const Tensor& tokens, const Tensor& segments, bool training,
                 const Positions& seen = {}) const;

  const Tensor& table() const { return table_; }  // [vocabulary, C]

 private:
  const ModelConfig& config_;
  const char* max_length_key_;
  Tensor table_, positions_, segments_;  // positions [max_length, C], segments [n, C]
  std::shared_ptr<Norm> norm_;
  std::shared_ptr<Linear> projection_;
};

// Of positions and their targets.
struct ScoreLoss {
  Tensor sum;   // scalar, float32 or wider: the summed cross-entropy
  Tensor best;  // [N] int64: the likeliest of each
};
// Of scores [N, classes] and targets [N] int64, of which -100 counts for nothing.
ScoreLoss loss_of_scores(const Tensor& scores, const Tensor& targets);

// Scores of the vocabulary: the embedding transposed, or weights of its own.
class TokenHead {
 public:
  TokenHead(Module& owner, const ModelConfig& config, const Tensor& table);
  Tensor forward(const Tensor& hidden) const;
  // loss_of_scores(forward(hidden), targets), hidden [N, C], without all scores in memory.
  ScoreLoss loss(const Tensor& hidden, const Tensor& targets) const;
  std::vector<Cost> costs() const;
  // As Linear::convert(). A tied table is copied first: the embedding keeps its own.
  void convert(at::ScalarType type);

 private:
  Tensor transformed(const Tensor& hidden) const;

  const ModelConfig& config_;
  Tensor table_, bias_;
  Tensor scale_;                       // where the table is quantized, as ops::linear takes it
  std::shared_ptr<Linear> transform_;  // BERT's: norm(GELU(dense(x)))
  std::shared_ptr<Norm> transform_norm_;
  std::shared_ptr<Linear> output_;  // null when tied
};

// Scores of each position: of its classes or, of a span, of the answer's begin and end there.
class PositionHead {
 public:
  PositionHead(Module& owner, const ModelConfig& config);
  // The dropout before the classifier; of a span there is none, as in BERT.
  Tensor drop(const Tensor& x, bool training) const {
    return dropout_ > 0 ? batch_dropout(x, dropout_, training) : x;
  }
  // [..., C] -> [..., classes], or [..., 2].
  Tensor forward(const Tensor& hidden) const { return linear_->forward(hidden); }
  Cost cost() const;

 private:
  bool span_;
  double dropout_;
  std::shared_ptr<Linear> linear_;
};

// One class for a whole input: pooling, BERT's pooler, classifier.
class LabelHead {
 public:
  LabelHead(Module& owner, const ModelConfig& config);
  // x [B, T, C], lengths [B] or undefined -> [B, C]: the first position or the mean of the real
  // ones.
  Tensor pool(const Tensor& x, const Tensor& lengths, bool training) const;
  // [B, C] -> [B, classes].
  Tensor forward(const Tensor& pooled) const { return classifier_->forward(pooled); }
  std::vector<Cost> costs(int64_t length) const;

 private:
  const ModelConfig& config_;
  std::shared_ptr<Linear> pooler_, classifier_;  // pooler null where there is none
};

// Sinusoidal positions (Vaswani et al. 2017): sin on even, cos on odd columns; of positions [...]
// -> [..., C].
Tensor sinusoidal(const Tensor& positions, int64_t width, const at::TensorOptions& options);

}  // namespace headloom
