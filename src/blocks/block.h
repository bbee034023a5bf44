// A block joins a token mixer and a channel mixer with norms, skips and dropout.
#pragma once

#include "core/sizes.h"
#include "mixers/mixer.h"

namespace headloom {

class Block : public Module {
 public:
  // x [B, T, C] -> [B, T, C], or the newest positions of it that the context wants. context.memory
  // is for the cross mixer alone.
  virtual Tensor forward(const Tensor& x, const MixerContext& context) = 0;
};

struct BlockParts {
  LayerShape shape;
  std::shared_ptr<TokenMixer> mixer;
  std::shared_ptr<ChannelMixer> channel;   // may be null
  std::shared_ptr<TokenMixer> cross = {};  // reads context.memory; null but in an encoder-decoder
  double dropout = 0;                      // of each branch's output
  std::string mixer_type = {};             // its name, for messages
};

struct BlockTraits {
  bool cross_attention = false;  // has a place for BlockParts::cross
};

struct BlockSpec : Options<BlockTraits> {
  int64_t short_conv = 0;  // LayerShape::short_conv of its layer

  void fields(Fields& f) override {
    f.field("short_conv", short_conv,
            "a causal depthwise convolution before the token mixer reaches over so many positions; "
            "0: none",
            size_from(0));
  }
  virtual std::shared_ptr<Block> build(const BlockParts& parts) const = 0;
};
using BlockEntry = Entry<BlockSpec>;

const std::vector<BlockEntry>& blocks();

// What the other mixers of a block see: the context without the memory.
inline MixerContext without_memory(const MixerContext& context) {
  MixerContext own = context;
  own.memory = own.memory_lengths = Tensor();
  return own;
}

}  // namespace headloom
