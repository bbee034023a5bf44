// Building mixers from option text, setting their parameters, and what they refuse.
#pragma once

#include <map>
#include <string>

#include "mixers/mixer.h"
#include "testing/compare.h"
#include "testing/errors.h"

namespace headloom::test {

// A layer of a model of four.
inline LayerShape shape_of(int64_t width, int64_t layer = 0) {
  return {.width = width, .layer = layer, .depth = 4};
}

// A token mixer by registry name; `options` is TOML, one option a line.
inline std::shared_ptr<TokenMixer> mixer(const std::string& name, const std::string& options,
                                         const LayerShape& shape) {
  const auto spec = make_spec(token_mixers(), "token mixer", name);
  read_fields(parse_toml(options, "test"), *spec, name);
  return spec->build(shape);
}

inline std::shared_ptr<ChannelMixer> channel_mixer(const std::string& name,
                                                   const std::string& options,
                                                   const LayerShape& shape) {
  const auto spec = make_spec(channel_mixers(), "channel mixer", name);
  read_fields(parse_toml(options, "test"), *spec, name);
  return spec->build(shape);
}

// And buffers.
inline std::map<std::string, Tensor> parameters(const torch::nn::Module& module) {
  const auto named = named_tensors(module);
  return {named.begin(), named.end()};
}

inline void set(torch::nn::Module& module, const std::string& name, const Tensor& value) {
  Tensor parameter = parameters(module).at(name);
  ASSERT_EQ(parameter.sizes(), value.sizes()) << name;
  at::NoGradGuard no_grad;
  parameter.copy_(value);
}

// Moves parameters that start as the identity, at zero or at one, so that every part works.
inline void add_noise(torch::nn::Module& module, double scale) {
  at::NoGradGuard no_grad;
  for (Tensor p : module.parameters()) p.add_(at::randn_like(p) * scale);
}

// What a token mixer says that refuses its options, its layer or a memory.
inline std::string refusal_of(const std::string& name, const std::string& options,
                              const LayerShape& shape) {
  return message_of<UsageError>([&] {
    MixerContext context;
    context.memory = at::zeros({1, 3, shape.width});
    mixer(name, options, shape)->forward(at::zeros({1, 3, shape.width}), context);
  });
}

}  // namespace headloom::test
