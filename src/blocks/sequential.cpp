// The classic block: token mixer, cross-attention where there is a memory, channel mixer, each with
// a skip. Pre-norm (Xiong et al. 2020) or post-norm (Vaswani et al. 2017).
#include "blocks/block.h"
#include "mixers/dropout.h"

namespace headloom {
namespace {

class Sequential final : public Block {
 public:
  Sequential(const BlockParts& parts, bool post) : post_(post), dropout_(parts.dropout) {
    const LayerShape& shape = parts.shape;
    const auto norm = [&](const char* name) {
      return register_module(name, std::make_shared<Norm>(shape.norm, shape.width, shape.norm_eps));
    };
    mixer_norm_ = norm("mixer_norm");
    mixer_ = register_module("mixer", parts.mixer);
    if (parts.cross) {
      cross_norm_ = norm("cross_norm");
      cross_ = register_module("cross", parts.cross);
    }
    if (parts.channel) {
      channel_norm_ = norm("channel_norm");
      channel_ = register_module("channel", parts.channel);
    }
  }

  Tensor forward(const Tensor& x, const MixerContext& context) override {
    const MixerContext own = without_memory(context);
    const auto branch = [&](const Tensor& in, const Norm& norm, const auto& f) {
      Tensor y = f(post_ ? in : norm.forward(in));
      if (dropout_ > 0) y = batch_dropout(y, dropout_, is_training());
      const Tensor sum = newest_of(in, context) + y;
      return post_ ? norm.forward(sum) : sum;
    };
    Tensor h = branch(x, *mixer_norm_, [&](const Tensor& y) { return mixer_->run(y, own); });
    if (cross_) {
      h = branch(h, *cross_norm_, [&](const Tensor& y) { return cross_->run_cross(y, context); });
    }
    if (!channel_) return h;
    return branch(h, *channel_norm_, [&](const Tensor& y) { return channel_->run(y, own); });
  }

 private:
  const bool post_;
  const double dropout_;
  std::shared_ptr<Norm> mixer_norm_, cross_norm_, channel_norm_;
  std::shared_ptr<TokenMixer> mixer_, cross_;
  std::shared_ptr<ChannelMixer> channel_;
};

struct SequentialSpec final : BlockSpec {
  std::string norm_place = "pre";

  void fields(Fields& f) override {
    f.field("norm_place", norm_place, "norm before each branch or after each sum", {"pre", "post"});
    BlockSpec::fields(f);
  }
  std::shared_ptr<Block> build(const BlockParts& parts) const override {
    return std::make_shared<Sequential>(parts, norm_place == "post");
  }
};

}  // namespace

BlockEntry sequential_block() {
  return {"sequential",
          "token mixer, then channel mixer, each with a norm and a skip",
          "Vaswani et al. 2017; Xiong et al. 2020",
          {.cross_attention = true},
          []() -> std::shared_ptr<BlockSpec> { return std::make_shared<SequentialSpec>(); }};
}

}  // namespace headloom
