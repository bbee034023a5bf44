// A block joins a token mixer and a channel mixer with norms, skips and dropout.
#pragma once

#include "mixers/mixer.h"

namespace headloom {

class Block : public torch::nn::Module {
 public:
  // x [B, T, C] -> [B, T, C].
  virtual Tensor forward(const Tensor& x, const MixerContext& context) = 0;
};

struct BlockParts {
  LayerShape shape;
  std::shared_ptr<TokenMixer> mixer;
  std::shared_ptr<ChannelMixer> channel;  // may be null
  double dropout = 0;                     // of each branch's output
};

struct BlockSpec {
  virtual ~BlockSpec() = default;
  virtual std::string type() const = 0;
  virtual void fields(Fields& f) = 0;
  virtual std::shared_ptr<Block> build(const BlockParts& parts) const = 0;
};
using BlockEntry = Entry<BlockSpec>;

const std::vector<BlockEntry>& blocks();

}  // namespace headloom
