#include "model/decoder.h"

namespace headloom {

Decoder::Decoder(const ModelConfig& config)
    : Model(config),
      embedding_(*this, config_, {}, config.max_length, "model.max_length"),
      layers_(*this, config_,
              {.list = config.layers,
               .depth = config.depth,
               .max_length = config.max_length.value_or(256)}),
      head_(*this, config_, embedding_.table()) {
  stacks_ = {&layers_};
}

int64_t DecoderState::bytes() const {
  int64_t sum = 0;
  for (const LayerState& layer : layers) sum += layer.bytes();
  return sum;
}

DecoderState DecoderState::select(const Tensor& rows) const {
  DecoderState out{.position = position, .layers = {}};
  for (const LayerState& layer : layers) {
    out.layers.push_back({layer.mixer.select(rows), layer.channel.select(rows)});
  }
  return out;
}

Tensor Decoder::extend(const Tensor& tokens, DecoderState& state) {
  at::NoGradGuard no_grad;
  const Tensor x = embedding_.forward(tokens, {}, false, state.position);
  state.layers.resize(layers_.all().size());
  const Tensor y = layers_.forward(x, {}, &state.layers);
  state.position += tokens.size(1);
  return y;
}

Tensor Decoder::hidden(const ModelInput& input) {
  MixerContext context;
  context.observed = input.observed;
  context.lengths = input.lengths;
  context.documents = input.documents;
  return layers_.forward(embedding_.forward(input.tokens, input.segments, is_training()), context);
}

}  // namespace headloom
