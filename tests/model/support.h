// What the tests of blocks and models share.
#pragma once

#include <map>
#include <string>

#include "model/decoder.h"
#include "testing/compare.h"
#include "testing/errors.h"

namespace headloom::test {

// A [model] table's content, as in a configuration.
inline ModelConfig model_of(const std::string& toml) {
  ModelConfig config;
  read_fields(parse_toml(toml, "model.toml"), config, "model");
  return config;
}

// ", heads = N" inside a mixer's inline table, "" where the mixer has no heads.
inline std::string heads_of(const std::string& mixer, int64_t heads) {
  Lister lister;
  make_spec(token_mixers(), "token mixer", mixer)->fields(lister);
  for (const OptionInfo& o : lister.options()) {
    if (o.key == "heads") return str(", heads = ", heads);
  }
  return "";
}

// Every parameter drawn anew, so that norms and biases do something.
inline void randomize(const torch::nn::Module& module, double scale = 0.5) {
  at::NoGradGuard no_grad;
  for (const Tensor& p : module.parameters()) p.detach().normal_(0, scale);
}

inline std::map<std::string, Tensor> parameters_of(const torch::nn::Module& module) {
  std::map<std::string, Tensor> out;
  for (const auto& item : module.named_parameters()) out[item.key()] = item.value();
  return out;
}

inline Tensor tokens(int64_t batch, int64_t length, int64_t vocabulary) {
  return at::randint(vocabulary, {batch, length}, kLong);
}

// Null where a decoder must refuse a mixer that cannot look back only, or one that is not for its
// block; combinations_test.cpp reads the sentence.
inline std::shared_ptr<Decoder> decoder_if_it_fits(const ModelConfig& config) {
  for (const LayerConfig& layer : config.layers) {
    if (layer.mixer->traits().causal &&
        (layer.block->type() != "simplified" || layer.mixer->type() == "shaped")) {
      continue;
    }
    message_of<UsageError>([&] { Decoder refused(config); });
    return nullptr;
  }
  return std::make_shared<Decoder>(config);
}

// A small decoder in evaluation, of the further keys and the layers in `toml`. Noise moves away
// what starts as zero or the identity, so that every part works. Null for a mixer that cannot look
// back only.
inline std::shared_ptr<Decoder> decoder(const std::string& toml, double noise = 0.05) {
  at::manual_seed(3);
  const auto model = decoder_if_it_fits(
      model_of("width = 48\ndepth = 3\nvocabulary = 70\nmax_length = 40\n" + toml));
  if (!model) return model;
  model->eval();
  at::NoGradGuard no_grad;
  for (Tensor p : model->parameters()) p.add_(at::randn_like(p) * noise);
  return model;
}

}  // namespace headloom::test
