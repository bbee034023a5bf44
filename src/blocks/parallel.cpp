// The parallel block of GPT-J (Wang & Komatsuzaki 2021) and GPT-NeoX:
// x + mixer(norm x) + channel(norm' x), one norm or two.
#include "blocks/block.h"

namespace headloom {
namespace {

class Parallel final : public Block {
 public:
  Parallel(const BlockParts& parts, int64_t norms) : dropout_(parts.dropout) {
    norm_ = register_module("norm", std::make_shared<Norm>(parts.shape.norm, parts.shape.width));
    mixer_ = register_module("mixer", parts.mixer);
    if (!parts.channel) return;
    channel_ = register_module("channel", parts.channel);
    if (norms == 2) {
      channel_norm_ = register_module("channel_norm",
                                      std::make_shared<Norm>(parts.shape.norm, parts.shape.width));
    }
  }

  Tensor forward(const Tensor& x, const MixerContext& context) override {
    const Tensor normed = norm_->forward(x);
    Tensor y = mixer_->run(normed, context);
    if (channel_)
      y = y + channel_->forward(channel_norm_ ? channel_norm_->forward(x) : normed, context);
    if (dropout_ > 0) y = at::dropout(y, dropout_, is_training());
    return x + y;
  }

 private:
  const double dropout_;
  std::shared_ptr<Norm> norm_, channel_norm_;
  std::shared_ptr<TokenMixer> mixer_;
  std::shared_ptr<ChannelMixer> channel_;
};

struct ParallelSpec final : BlockSpec {
  int64_t norms = 1;

  std::string type() const override { return "parallel"; }
  void fields(Fields& f) override {
    f.field("norms", norms, "one norm for both branches, or one each",
            between(int64_t{1}, int64_t{2}));
  }
  std::shared_ptr<Block> build(const BlockParts& parts) const override {
    return std::make_shared<Parallel>(parts, norms);
  }
};

}  // namespace

BlockEntry parallel_block() {
  return {"parallel", "token and channel mixer side by side on the same input",
          "Wang & Komatsuzaki 2021",
          [] { return std::shared_ptr<BlockSpec>(std::make_shared<ParallelSpec>()); }};
}

}  // namespace headloom
