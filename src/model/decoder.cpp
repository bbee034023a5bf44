#include "model/decoder.h"

namespace headloom {
namespace {

// Sinusoidal positions (Vaswani et al. 2017): sin on even, cos on odd columns. [T, C].
Tensor sinusoidal(int64_t length, int64_t width, const at::TensorOptions& options) {
  const auto real = options.dtype(at::kDouble);
  const Tensor frequency =
      at::pow(10000.0, at::arange(0, width, 2, real) * (-1.0 / static_cast<double>(width)));
  const Tensor angle = at::arange(length, real).unsqueeze(1) * frequency.unsqueeze(0);
  return at::stack({angle.sin(), angle.cos()}, -1).flatten(1).narrow(1, 0, width).to(options);
}

// What `spec` builds; its errors say which layer they are about.
template <typename Built>
std::shared_ptr<Built> built(const Spec<Built>& spec, const LayerShape& shape,
                             const std::string& place) {
  try {
    return spec.build(shape);
  } catch (const UsageError& error) {
    usage_error(place, " (", spec.type(), "): ", error.what());
  }
}

}  // namespace

Decoder::Decoder(const ModelConfig& config) : config_(config) {
  require(config.vocabulary.has_value(), "model.vocabulary is not set and no task gives it.");
  embedding_ = register_parameter(
      "embedding", at::empty({*config.vocabulary, config.width}).normal_(0, config.init_std));
  if (config.position.type == "learned") {
    require(config.max_length.has_value(), "model.max_length is not set and no task gives it.");
    positions_ = register_parameter(
        "positions", at::empty({*config.max_length, config.width}).normal_(0, config.init_std));
  }
  for (int64_t i = 0; i < config.depth; ++i) {
    const LayerConfig& layer = config.layers[static_cast<size_t>(i) % config.layers.size()];
    const LayerShape shape = config.shape(i);
    const std::string place = str("model.layer[", static_cast<size_t>(i) % config.layers.size());
    mixers_.push_back(built(*layer.mixer, shape, place + "].mixer"));
    channels_.push_back(built(*layer.channel, shape, place + "].channel"));
    blocks_.push_back(layer.block->build({.shape = shape,
                                          .mixer = mixers_.back(),
                                          .channel = channels_.back(),
                                          .dropout = config.dropout}));
    register_module("layer" + std::to_string(i), blocks_.back());
  }
  norm_ = register_module("norm", std::make_shared<Norm>(config.norm, config.width));
  if (!config.tied) {
    head_ = register_module(
        "head", std::make_shared<Linear>(config.width, *config.vocabulary, false, config.init_std));
  }
}

Tensor Decoder::hidden(const Tensor& tokens, const MixerContext& context) {
  Tensor x = at::embedding(embedding_, tokens);
  const int64_t length = tokens.size(1);
  if (positions_.defined()) {
    require(length <= positions_.size(0), "the model has ", positions_.size(0),
            " learned positions (model.max_length), but the sequence has ", length, " tokens.");
    x = x + positions_.narrow(0, 0, length);
  } else if (config_.position.type == "sinusoidal") {
    x = x + sinusoidal(length, config_.width, x.options());
  }
  if (config_.dropout > 0) x = at::dropout(x, config_.dropout, is_training());
  for (const auto& block : blocks_) x = block->forward(x, context);
  return norm_->forward(x);
}

Tensor Decoder::logits(const Tensor& hidden) const {
  return head_ ? head_->forward(hidden) : at::linear(hidden, embedding_);
}

}  // namespace headloom
