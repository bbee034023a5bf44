#include "model/model.h"

#include "mixers/without_memory.h"
#include "model/auto_encoder.h"
#include "model/check.h"
#include "model/decoder.h"
#include "model/describe.h"
#include "model/encoder.h"
#include "model/encoder_decoder.h"
#include "model/vit.h"

namespace headloom {
namespace {

template <typename Kind>
std::shared_ptr<Model> make(const ModelConfig& config) {
  return std::make_shared<Kind>(config);
}

struct Kind {
  const char* name;
  std::shared_ptr<Model> (*make)(const ModelConfig&);
};

// Throws UsageError for a layer without one of its parts.
void check_parts(const char* key, const std::vector<LayerConfig>& layers) {
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerConfig& layer = layers[i];
    const char* const missing = !layer.mixer ? "mixer" : !layer.channel ? "channel" : "block";
    if (layer.mixer && layer.channel && layer.block) continue;
    usage_error("model.", key, "[", i, "].", missing, " is null, expected what to build.");
  }
}

constexpr Kind kKinds[] = {{"decoder", make<Decoder>},
                           {"encoder", make<Encoder>},
                           {"encoder_decoder", make<EncoderDecoder>},
                           {"vit", make<Vit>},
                           {"auto_encoder", make<AutoEncoder>}};

}  // namespace

std::vector<int64_t> Model::balanced() const {
  std::vector<int64_t> places;
  for (const Layers* layers : stacks_) {
    for (size_t i = 0; i < layers->all().size(); ++i) {
      const auto& channel = layers->all()[i].channel;
      if (channel && channel->balances()) {
        places.push_back(layers->first() + static_cast<int64_t>(i));
      }
    }
  }
  return places;
}

void Model::balance(const std::map<int64_t, Tensor>& load) const {
  for (const Layers* layers : stacks_) {
    for (size_t i = 0; i < layers->all().size(); ++i) {
      const auto found = load.find(layers->first() + static_cast<int64_t>(i));
      const auto& channel = layers->all()[i].channel;
      if (found != load.end() && channel) channel->balance(found->second);
    }
  }
}

void Model::redraw(int64_t step, uint64_t seed) const {
  for (const Layers* layers : stacks_) {
    for (size_t i = 0; i < layers->all().size(); ++i) {
      layers->all()[i].mixer->redraw(step, seed, layers->first() + static_cast<int64_t>(i));
    }
  }
}

const std::vector<std::string>& model_kinds() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> out;
    for (const Kind& kind : kKinds) out.push_back(kind.name);
    return out;
  }();
  return names;
}

MixerContext ModelInput::context() const {
  MixerContext out;
  out.lengths = lengths;
  out.documents = documents;
  out.auxiliary = auxiliary;
  out.activation_checkpointing = activation_checkpointing;
  out.recording = recording;
  return out;
}

ScoreLoss Model::loss(const Tensor& hidden, const Tensor& targets) const {
  return loss_of_scores(logits(hidden), targets);
}

Tensor Model::forward(const ModelInput& input) {
  check_input(*this, input);
  return logits(hidden(input));
}

std::shared_ptr<Model> build_model(const ModelConfig& config) {
  check_parts("layer", config.layers);
  check_parts("encoder_layer", config.encoder_layers);
  check_fields(config, "model");
  if (!WithoutMemory::on()) check_weights_fit(*build_without_memory(config), "the model");
  for (const Kind& kind : kKinds) {
    if (config.kind == kind.name) return kind.make(config);
  }
  usage_error("'model.kind' is \"", config.kind, "\", expected one of ", join(model_kinds()), ".");
}

}  // namespace headloom
