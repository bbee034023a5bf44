#include "model/encoder_decoder.h"

namespace headloom {
namespace {

// Registers the table in the model and returns it.
const Tensor& new_table(Module& model, Tensor& table, const ModelConfig& config) {
  require(config.vocabulary.has_value(), "model.vocabulary is not set and no task gives it.");
  model.parameter("embedding", table,
                  normal({*config.vocabulary, config.width}, config.embedding_std()));
  return table;
}

}  // namespace

EncoderDecoder::EncoderDecoder(const ModelConfig& config)
    : AutoregressiveModel(config),
      encoder_(register_module("encoder", std::make_shared<Module>())),
      decoder_(register_module("decoder", std::make_shared<Module>())),
      target_embedding_(*decoder_, config_, new_table(*this, table_, config), config.max_length,
                        "model.max_length"),
      source_embedding_(*encoder_, config_, table_, config.max_source_length,
                        "model.max_source_length"),
      encoder_layers_(
          *encoder_, config_,
          {.part = "encoder",
           .key = config.encoder_layers.empty() ? "layer" : "encoder_layer",
           .list = config.encoder_layers.empty() ? config.layers : config.encoder_layers,
           .depth = config.encoder_depth.value_or(config.depth),
           .max_length = config.source_length(),
           .causal = false}),
      decoder_layers_(*decoder_, config_,
                      {.part = "decoder",
                       .list = config.layers,
                       .depth = config.depth,
                       .first = config.encoder_depth.value_or(config.depth),
                       .max_length = config.length(),
                       .memory_length = config.source_length()}),
      head_(*this, config_, table_) {
  stacks_ = {&encoder_layers_, &decoder_layers_};
}

Tensor EncoderDecoder::encode(const ModelInput& input) const {
  if (!input.source.defined()) {
    usage_error("an encoder-decoder needs a source, but got none.");
  }
  MixerContext context = input.context();
  context.lengths = input.source_lengths;
  context.documents = Tensor();
  return encoder_layers_.forward(source_embedding_.forward(input.source, {}, is_training()),
                                 context);
}

Tensor EncoderDecoder::hidden(const ModelInput& input) {
  MixerContext context = input.context();
  context.documents = Tensor();
  context.memory = encode(input);
  context.memory_lengths = input.source_lengths;
  return decoder_layers_.forward(target_embedding_.forward(input.tokens, {}, is_training()),
                                 context);
}

void EncoderDecoder::read_source(const Source& source, std::vector<LayerState>& states) const {
  at::NoGradGuard no_grad;
  const Tensor memory = encode({.source = source.tokens, .source_lengths = source.lengths});
  const auto& layers = decoder_layers_.all();
  for (size_t i = 0; i < layers.size(); ++i) {
    states[i].cross = layers[i].cross->build_cross_cache(memory, source.lengths);
  }
}

}  // namespace headloom
