// Building mixers from option text, and setting their parameters.
#pragma once

#include <map>
#include <string>

#include "mixers/mixer.h"
#include "testing/compare.h"

namespace headloom::test {

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

}  // namespace headloom::test
