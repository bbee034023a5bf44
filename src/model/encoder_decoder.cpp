#include "model/encoder_decoder.h"

namespace headloom {
namespace {

// The table stands in the model, for both sides and the output.
Tensor shared_table(torch::nn::Module& model, const ModelConfig& config) {
  require(config.vocabulary.has_value(), "model.vocabulary is not set and no task gives it.");
  return model.register_parameter(
      "embedding", normal({*config.vocabulary, config.width}, config.embedding_std()));
}

}  // namespace

EncoderDecoder::EncoderDecoder(const ModelConfig& config)
    : Model(config),
      encoder_(register_module("encoder", std::make_shared<torch::nn::Module>())),
      decoder_(register_module("decoder", std::make_shared<torch::nn::Module>())),
      target_embedding_(*decoder_, config_, shared_table(*this, config), config.max_length,
                        "model.max_length"),
      source_embedding_(*encoder_, config_, target_embedding_.table(), config.max_source_length,
                        "model.max_source_length"),
      encoder_layers_(
          *encoder_, config_,
          {.part = "encoder",
           .key = config.encoder_layers.empty() ? "layer" : "encoder_layer",
           .list = config.encoder_layers.empty() ? config.layers : config.encoder_layers,
           .depth = config.encoder_depth.value_or(config.depth),
           .max_length = config.max_source_length.value_or(256),
           .causal = false}),
      decoder_layers_(*decoder_, config_,
                      {.part = "decoder",
                       .list = config.layers,
                       .depth = config.depth,
                       .max_length = config.max_length.value_or(256),
                       .memory_length = config.max_source_length.value_or(256)}),
      head_(*this, config_, target_embedding_.table()) {
  stacks_ = {&encoder_layers_, &decoder_layers_};
}

Tensor EncoderDecoder::encode(const ModelInput& input) {
  require(input.source.defined(), "an encoder-decoder needs a source, but got none.");
  MixerContext context;
  context.observed = input.observed;
  context.lengths = input.source_lengths;
  return encoder_layers_.forward(source_embedding_.forward(input.source, {}, is_training()),
                                 context);
}

Tensor EncoderDecoder::decode(const Tensor& memory, const ModelInput& input) {
  MixerContext context;
  context.observed = input.observed;
  context.lengths = input.lengths;
  context.memory = memory;
  context.memory_lengths = input.source_lengths;
  return decoder_layers_.forward(target_embedding_.forward(input.tokens, {}, is_training()),
                                 context);
}

Tensor EncoderDecoder::hidden(const ModelInput& input) { return decode(encode(input), input); }

}  // namespace headloom
