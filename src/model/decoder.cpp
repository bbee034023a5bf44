#include "model/decoder.h"

namespace headloom {

Decoder::Decoder(const ModelConfig& config)
    : AutoregressiveModel(config),
      embedding_(*this, config_, {}, config.max_length, "model.max_length"),
      layers_(*this, config_,
              {.list = config.layers, .depth = config.depth, .max_length = config.length()}),
      head_(*this, config_, embedding_.table()) {
  stacks_ = {&layers_};
}

void Decoder::read_source(const Source& source, std::vector<LayerState>&) const {
  if (source.tokens.defined()) usage_error("a decoder reads no source, but got one.");
}

Tensor Decoder::hidden(const ModelInput& input) {
  const Tensor& tokens = input.tokens;
  Positions before;
  if (config_.context_parallel) {
    before = config_.context_parallel->before(tokens.size(0), tokens.size(1));
  }
  return layers_.forward(embedding_.forward(tokens, input.segments, is_training(), before),
                         input.context());
}

}  // namespace headloom
