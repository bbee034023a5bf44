// The two-layer feed-forward network (Vaswani et al. 2017): W2 f(W1 x).
#include "core/sizes.h"
#include "mixers/mixer.h"
#include "mixers/recording.h"
#include "ops/positionwise/op.h"

namespace headloom {
namespace {

struct MlpOptions {
  std::optional<int64_t> hidden;
  std::string activation = "gelu";
  bool bias = false;

  void fields(Fields& f) {
    f.field("hidden", hidden, "hidden units; absent: 4 width", size_from(1));
    f.field("activation", activation, "between the two maps",
            {"gelu", "gelu_tanh", "relu", "relu2", "softmax"});
    f.field("bias", bias, "biases even where the model has none");
  }
  int64_t hidden_at(int64_t width) const { return hidden.value_or(4 * width); }
};

class Mlp final : public ChannelMixer {
 public:
  Mlp(const MlpOptions& options, const LayerShape& shape) : activation_(options.activation) {
    const int64_t hidden = shape.share("hidden", options.hidden_at(shape.width));
    if (shape.processes() > 1 && activation_ == "softmax") {
      usage_error("mlp: activation is \"softmax\", which reads all hidden units, but the ",
                  shape.processes(), " processes of train.tensor_parallel have some each.");
    }
    const bool bias = options.bias || shape.bias;
    up_ =
        register_module("up", std::make_shared<Linear>(shape.width, hidden, bias, shape.init_std));
    down_ = register_module(
        "down", std::make_shared<Linear>(hidden, shape.width, bias, shape.output_std()));
    if (shape.processes() == 1) return;
    up_->cut_outputs({hidden});
    down_->cut_inputs(shape.processes());
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    const Tensor h = activate(up_->forward(x));
    if (context.recording != nullptr) {
      context.recording->put("units", h);
      context.recording->put("unit_values", down_->weight);
    }
    return down_->forward(h);
  }

  std::vector<Cost> costs() const override { return {linear_cost("mlp", "4 C I", {up_, down_})}; }

 private:
  Tensor activate(const Tensor& h) const {
    if (activation_ == "gelu") return at::gelu(h);
    if (activation_ == "gelu_tanh") return ops::gelu_tanh(h);
    if (activation_ == "relu") return at::relu(h);
    if (activation_ == "relu2") return at::relu(h).square();
    return at::softmax(h, -1);  // the key-value memory view of a feed-forward layer
  }

  const std::string activation_;
  std::shared_ptr<Linear> up_, down_;
};

}  // namespace

ChannelMixerEntry mlp_channel() {
  return channel_mixer<Mlp, MlpOptions>("mlp", "two linear maps with an activation between",
                                        "Vaswani et al. 2017", {.tensor_parallel = true});
}

}  // namespace headloom
