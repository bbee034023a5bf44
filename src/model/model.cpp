#include "model/model.h"

#include "model/decoder.h"
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

constexpr Kind kKinds[] = {{"decoder", make<Decoder>},
                           {"encoder", make<Encoder>},
                           {"encoder_decoder", make<EncoderDecoder>},
                           {"vit", make<Vit>}};

}  // namespace

const std::vector<std::string>& model_kinds() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> out;
    for (const Kind& kind : kKinds) out.push_back(kind.name);
    return out;
  }();
  return names;
}

std::shared_ptr<Model> build_model(const ModelConfig& config) {
  for (const Kind& kind : kKinds) {
    if (config.kind == kind.name) return kind.make(config);
  }
  usage_error("'model.kind' is \"", config.kind, "\", expected one of ", join(model_kinds()), ".");
}

}  // namespace headloom
