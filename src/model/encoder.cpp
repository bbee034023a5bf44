#include "model/encoder.h"

namespace headloom {

Encoder::Encoder(const ModelConfig& config)
    : Model(config),
      embedding_(*this, config_, {}, config.max_length, "model.max_length"),
      layers_(*this, config_,
              {.list = config.layers,
               .depth = config.depth,
               .max_length = config.length(),
               .causal = false}) {
  stacks_ = {&layers_};
  const std::string head = config.head.value_or("tokens");
  if (head == "tokens") {
    tokens_.emplace(*this, config_, embedding_.table());
  } else if (head == "label") {
    label_.emplace(*this, config_);
  } else {
    position_.emplace(*this, config_);
  }
}

Tensor Encoder::hidden(const ModelInput& input) {
  const Tensor x = layers_.forward(embedding_.forward(input.tokens, input.segments, is_training()),
                                   input.context());
  if (label_) return label_->pool(x, input.lengths, is_training());
  return position_ ? position_->drop(x, is_training()) : x;
}

Tensor Encoder::logits(const Tensor& hidden) const {
  if (label_) return label_->forward(hidden);
  return position_ ? position_->forward(hidden) : tokens_->forward(hidden);
}

std::vector<Cost> Encoder::own_costs(int64_t length) const {
  std::vector<Cost> out = tokens_  ? tokens_->costs()
                          : label_ ? label_->costs(length)
                                   : std::vector{position_->cost()};
  if (!tokens_) {
    out.push_back({.part = "embedding", .formula = "-", .parameters = embedding_.table().numel()});
  }
  if (config_.embedding_projection) {
    const int64_t weights = config_.width * config_.width;
    out.push_back({.part = "embedding projection",
                   .formula = "2 C C",
                   .parameters = weights + config_.width,
                   .flops_per_token = 2.0 * static_cast<double>(weights)});
  }
  return out;
}

}  // namespace headloom
