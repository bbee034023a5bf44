// The simplified blocks of He & Hofmann 2024 (Simplifying Transformer Blocks): no skip around the
// token mixer, which starts as the identity instead.
//
//   serial    h = g_a mixer(norm x),  out = g_m h + g_f channel(norm' h)
//   parallel  out = g_a mixer(norm x) + g_f channel(norm x) (+ comb x)
//
// g_a = g_m = 1 and g_f = 0.1 at the start, trainable. Where the model has no norms, the first
// layer keeps its own (RMSNorm). comb is an option, trainable too.
#include "blocks/block.h"
#include "mixers/dropout.h"

namespace headloom {
namespace {

struct SimplifiedOptions {
  std::string form = "serial";
  std::optional<double> comb;
};

class Simplified final : public Block {
 public:
  Simplified(const BlockParts& parts, const SimplifiedOptions& options)
      : serial_(options.form == "serial"), dropout_(parts.dropout) {
    if (!parts.mixer->keeps_input()) {
      usage_error("simplified has no skip around its token mixer, so ", parts.mixer_type,
                  " cannot be in it; expected shaped.");
    }
    if (options.comb && serial_) {
      usage_error("simplified: comb is ", *options.comb,
                  ", expected none where form is \"serial\".");
    }
    const LayerShape& shape = parts.shape;
    const std::string norm = shape.norm == "none" && shape.layer == 0 ? "rms_norm" : shape.norm;
    const auto gain = [&](const char* name, Tensor& slot, double start) {
      parameter(name, slot, at::full({1}, start));
    };
    norm_ = register_module("norm", std::make_shared<Norm>(norm, shape.width, shape.norm_eps));
    mixer_ = register_module("mixer", parts.mixer);
    gain("mixer_gain", mixer_gain_, 1);
    if (serial_) gain("skip_gain", skip_gain_, 1);
    if (options.comb) gain("comb", comb_, *options.comb);
    if (!parts.channel) return;
    if (serial_) {
      channel_norm_ = register_module("channel_norm",
                                      std::make_shared<Norm>(norm, shape.width, shape.norm_eps));
    }
    channel_ = register_module("channel", parts.channel);
    gain("channel_gain", channel_gain_, 0.1);
  }

  Tensor forward(const Tensor& x, const MixerContext& context) override {
    const Tensor normed = norm_->forward(x);
    const Tensor mixed = scaled(mixer_->run(normed, context), mixer_gain_);
    Tensor out = mixed;
    if (serial_) out = scaled(mixed, skip_gain_, /*branch=*/false);
    if (comb_.defined()) {
      out = out + scaled(newest_of(x, context), comb_, /*branch=*/false);
    }
    if (!channel_) return out;
    const Tensor input = serial_ ? channel_norm_->forward(mixed) : newest_of(normed, context);
    return out + scaled(channel_->run(input, context), channel_gain_);
  }

 private:
  Tensor scaled(const Tensor& y, const Tensor& gain, bool branch = true) const {
    const Tensor out = y * gain.to(y.scalar_type());
    return branch && dropout_ > 0 ? batch_dropout(out, dropout_, is_training()) : out;
  }

  const bool serial_;
  const double dropout_;
  std::shared_ptr<Norm> norm_, channel_norm_;
  std::shared_ptr<TokenMixer> mixer_;
  std::shared_ptr<ChannelMixer> channel_;
  Tensor mixer_gain_, skip_gain_, channel_gain_, comb_;  // [1]
};

struct SimplifiedSpec final : BlockSpec {
  SimplifiedOptions options;

  void fields(Fields& f) override {
    f.field("form", options.form, "channel mixer after the token mixer, or beside it",
            {"serial", "parallel"});
    f.field("comb", options.comb,
            "parallel: adds the block's input times a trainable weight that starts so; absent: "
            "not");
    BlockSpec::fields(f);
  }
  std::shared_ptr<Block> build(const BlockParts& parts) const override {
    return std::make_shared<Simplified>(parts, options);
  }
};

}  // namespace

BlockEntry simplified_block() {
  return {"simplified",
          "no skip around attention, which starts as the identity",
          "He & Hofmann 2024",
          {},
          []() -> std::shared_ptr<BlockSpec> { return std::make_shared<SimplifiedSpec>(); }};
}

}  // namespace headloom
