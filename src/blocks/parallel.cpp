// The parallel block of GPT-J (Wang & Komatsuzaki 2021) and GPT-NeoX:
// x + mixer(norm x) + channel(norm' x), one norm or two.
#include "blocks/block.h"
#include "mixers/dropout.h"

namespace headloom {
namespace {

class Parallel final : public Block {
 public:
  Parallel(const BlockParts& parts, int64_t norms) : dropout_(parts.dropout) {
    const LayerShape& shape = parts.shape;
    const auto norm = [&](const char* name) {
      return register_module(name, std::make_shared<Norm>(shape.norm, shape.width, shape.norm_eps));
    };
    norm_ = norm("norm");
    mixer_ = register_module("mixer", parts.mixer);
    if (parts.cross) {
      cross_ = register_module("cross", parts.cross);
      cross_norm_ = norms == 2 ? norm("cross_norm") : norm_;
    }
    if (parts.channel) {
      channel_ = register_module("channel", parts.channel);
      channel_norm_ = norms == 2 ? norm("channel_norm") : norm_;
    }
  }

  Tensor forward(const Tensor& x, const MixerContext& context) override {
    const MixerContext own = without_memory(context);
    const Tensor normed = norm_->forward(x), kept = newest_of(x, context);
    const auto input = [&](const std::shared_ptr<Norm>& norm) {
      return norm == norm_ ? newest_of(normed, context) : norm->forward(kept);
    };
    const auto dropped = [&](const Tensor& y) {
      return dropout_ > 0 ? batch_dropout(y, dropout_, is_training()) : y;
    };
    Tensor y = dropped(mixer_->run(normed, own));
    if (cross_) y = y + dropped(cross_->run_cross(input(cross_norm_), context));
    if (channel_) y = y + dropped(channel_->run(input(channel_norm_), own));
    return kept + y;
  }

 private:
  const double dropout_;
  std::shared_ptr<Norm> norm_, cross_norm_, channel_norm_;  // the last two may be the first
  std::shared_ptr<TokenMixer> mixer_, cross_;
  std::shared_ptr<ChannelMixer> channel_;
};

struct ParallelSpec final : BlockSpec {
  int64_t norms = 1;

  void fields(Fields& f) override {
    f.field("norms", norms, "one norm for all branches, or one each",
            between(int64_t{1}, int64_t{2}));
    BlockSpec::fields(f);
  }
  std::shared_ptr<Block> build(const BlockParts& parts) const override {
    return std::make_shared<Parallel>(parts, norms);
  }
};

}  // namespace

BlockEntry parallel_block() {
  return {"parallel",
          "token and channel mixer side by side on the same input",
          "Wang & Komatsuzaki 2021",
          {.cross_attention = true},
          []() -> std::shared_ptr<BlockSpec> { return std::make_shared<ParallelSpec>(); }};
}

}  // namespace headloom
