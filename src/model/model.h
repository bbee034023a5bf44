// What every kind of model is: inputs to hidden states to scores.
#pragma once

#include <array>

#include "model/embeddings_and_heads.h"
#include "model/layers.h"
#include "model/row_gradients.h"

namespace headloom {

// What a model is given. Each kind reads its own part; the rest stays undefined.
struct ModelInput {
  Tensor tokens = {};          // [B, T] int64
  Tensor lengths = {};         // [B] int64: tokens beyond are padding; undefined: none is
  Tensor documents = {};       // [B, T] int64: attention stays inside a document
  Tensor segments = {};        // [B, T] int64: kinds of segment embeddings; undefined: all 0
  Tensor source = {};          // [B, S] int64
  Tensor source_lengths = {};  // [B] int64, as lengths
  Tensor images = {};          // [B, channels, height, width]
  AuxiliaryOutputs* auxiliary = nullptr;  // training: what layers leave beside their output
  Recording* recording = nullptr;         // what layers show of their inside
  // Training: layers keep only their inputs, and the backward computes them again.
  bool activation_checkpointing = false;

  // All of them, defined or not.
  std::array<Tensor*, 7> tensors() {
    return {&tokens, &lengths, &documents, &segments, &source, &source_lengths, &images};
  }
  // What layers see of it.
  MixerContext context() const;
};

class Model : public Module {
 public:
  explicit Model(const ModelConfig& config) : config_(config) {}

  // What scores are computed from: [B, T, C] a position, or [B, C] an input as a whole.
  virtual Tensor hidden(const ModelInput& input) = 0;
  // [..., C] -> [..., vocabulary or classes].
  virtual Tensor logits(const Tensor& hidden) const = 0;
  // Of logits(hidden), hidden [N, C], with targets [N] int64, of which -100 counts for nothing.
  // Where the scores are of a vocabulary, not all of them are in memory at once.
  virtual ScoreLoss loss(const Tensor& hidden, const Tensor& targets) const;
  // loss_of(hidden(input)), a function that calls loss(): together, because the two gradients of a
  // tied table are then joined.
  template <typename LossOf>
  auto loss_of_input(const ModelInput& input, LossOf&& loss_of) {
    const RowsBesideScores rows(config_.tied);
    return loss_of(hidden(input));
  }
  // Throws UsageError naming the input that does not fit.
  Tensor forward(const ModelInput& input);
  std::string what() const override { return "model"; }

  const ModelConfig& config() const { return config_; }
  // The runs of layers it is made of, for costs and for losses that mixers add.
  const std::vector<Layers*>& stacks() const { return stacks_; }
  // The layers that balance() changes, by their place among all, ascending.
  std::vector<int64_t> balanced() const;
  // After each optimiser step: ChannelMixer::balance() of every layer that `load`
  // (AuxiliaryOutputs::load of the whole step) has.
  void balance(const std::map<int64_t, Tensor>& load) const;
  // After each optimiser step: TokenMixer::redraw() of every layer.
  void redraw(int64_t step, uint64_t seed) const;
  // Costs, per position of a sequence of `length`, of what stands before and after the layers.
  // Norms and position embeddings are not counted.
  virtual std::vector<Cost> own_costs(int64_t length) const = 0;

 protected:
  ModelConfig config_;
  std::vector<Layers*> stacks_;
};

// The model of config.kind. The sizes that come from the data must be set (ModelConfig::complete).
// Weights are drawn from torch's default generator. Throws UsageError for options that do not fit
// each other.
std::shared_ptr<Model> build_model(const ModelConfig& config);

}  // namespace headloom
