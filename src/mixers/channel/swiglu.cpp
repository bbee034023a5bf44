// SwiGLU (Shazeer 2020): W2 (SiLU(W1 x) * W3 x), optionally with the grouped gate of DCFormer's
// published models: softmax(Wm x) over m groups of hidden units scales each group.
#include "core/sizes.h"
#include "mixers/mixer.h"
#include "mixers/recording.h"
#include "ops/positionwise/op.h"

namespace headloom {
namespace {

struct SwigluOptions {
  std::optional<int64_t> hidden;
  std::optional<int64_t> gate_groups;

  void fields(Fields& f) {
    f.field("hidden", hidden, "hidden units; absent: 8/3 width, rounded up to 8", size_from(1));
    f.field("gate_groups", gate_groups,
            "groups of hidden units scaled by a softmax gate; absent: no gate", size_from(2));
  }
  // 8/3 C keeps the parameters of a 4 C two-layer network; multiples of 8 suit the vector units.
  int64_t hidden_at(int64_t width) const { return hidden.value_or((8 * width / 3 + 7) / 8 * 8); }
  int64_t hidden_multiple() const { return gate_groups.value_or(1); }
};

class SwiGlu final : public ChannelMixer {
 public:
  SwiGlu(const SwigluOptions& options, const LayerShape& shape) {
    const int64_t all = options.hidden_at(shape.width);
    const int64_t hidden = shape.share("hidden", all);
    // Rows 0..I of `up` are W1 (through SiLU), rows I..2I are W3.
    up_ = register_module(
        "up", std::make_shared<Linear>(shape.width, 2 * hidden, shape.bias, shape.init_std));
    down_ = register_module(
        "down", std::make_shared<Linear>(hidden, shape.width, shape.bias, shape.output_std()));
    if (options.gate_groups) {
      if (all % *options.gate_groups != 0) {
        usage_error("swiglu: gate_groups is ", *options.gate_groups,
                    ", expected a divisor of hidden = ", all, ".");
      }
      groups_ = shape.share("gate_groups", *options.gate_groups);
      first_group_ = shape.rank() * groups_;
      gate_ = register_module("gate", std::make_shared<Linear>(shape.width, *options.gate_groups,
                                                               false, shape.init_std));
    }
    if (shape.processes() == 1) return;
    up_->cut_outputs({hidden, hidden});
    down_->cut_inputs(shape.processes());
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    Tensor h = ops::swiglu(up_->forward(x));
    if (gate_) {
      const Tensor weights = at::softmax(gate_->forward(x), -1);
      h = (h.unflatten(-1, {groups_, -1}) * weights.narrow(-1, first_group_, groups_).unsqueeze(-1))
              .flatten(-2);
    }
    if (context.recording != nullptr) {
      context.recording->put("units", h);
      context.recording->put("unit_values", down_->weight);
    }
    return down_->forward(h);
  }

  std::vector<Cost> costs() const override {
    return {linear_cost("swiglu", gate_ ? "6 C I + 2 C m" : "6 C I", {up_, down_, gate_})};
  }

 private:
  int64_t groups_ = 0, first_group_ = 0;  // of the gate, of this process
  std::shared_ptr<Linear> up_, down_, gate_;
};

}  // namespace

ChannelMixerEntry swiglu_channel() {
  return channel_mixer<SwiGlu, SwigluOptions>("swiglu", "gated feed-forward network with SiLU",
                                              "Shazeer 2020; Xiao et al. 2024",
                                              {.tensor_parallel = true});
}

}  // namespace headloom
