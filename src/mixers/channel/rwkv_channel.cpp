// RWKV's channel mixing, version 4 (Peng et al. 2023): a gated squared-ReLU network, each position
// mixed with the one before it.
//
//   y = sigmoid(Wr x^r) * (Wv relu(Wk x^k)^2)     x^i = mu^i * x_t + (1 - mu^i) * x_{t-1}
#include "core/sizes.h"
#include "mixers/mixer.h"
#include "mixers/recording.h"
#include "mixers/rwkv_start.h"
#include "mixers/without_memory.h"
#include "ops/token_shift/op.h"

namespace headloom {
namespace {

struct RwkvChannelOptions {
  std::optional<int64_t> hidden;

  void fields(Fields& f) {
    f.field("hidden", hidden, "hidden units; absent: 4 width", size_from(1));
  }
  int64_t hidden_at(int64_t width) const { return hidden.value_or(4 * width); }
};

class RwkvChannel final : public ChannelMixer {
 public:
  RwkvChannel(const RwkvChannelOptions& options, const LayerShape& shape) {
    const int64_t width = shape.width;
    const int64_t hidden = shape.share("hidden", options.hidden_at(width));
    const Tensor start = RwkvStart(shape).key_mix();
    // Rows: of keys, receptance. The authors decay none of these.
    parameter("mix", mix_, at::stack({start, start}), {.decay = false});
    key_ =
        register_module("key", std::make_shared<Linear>(width, hidden, shape.bias, shape.init_std));
    receptance_ = register_module(
        "receptance", std::make_shared<Linear>(width, width, shape.bias, shape.init_std));
    value_ = register_module(
        "value", std::make_shared<Linear>(hidden, width, shape.bias, shape.output_std()));
    if (shape.processes() == 1) return;
    // The gate multiplies each process's share of the values.
    key_->cut_outputs({hidden});
    value_->cut_inputs(shape.processes());
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    ops::TokenShiftOptions shift;
    shift.documents = context.documents;
    if (context.state != nullptr) {
      Tensor& last = context.state->channel.recurrent["shift"];
      shift.last = last;
      last = x.select(1, x.size(1) - 1).clone();
    }
    const std::vector<Tensor> parts = ops::token_shift(x, mix_, shift);
    const Tensor k = at::relu(key_->forward(parts[0]));
    const Tensor units = k * k;
    if (context.recording != nullptr) {
      context.recording->put("units", units);
      context.recording->put("unit_values", value_->weight);
    }
    return at::sigmoid(receptance_->forward(parts[1])) * value_->forward(units);
  }

  double state_bytes() const override { return 4.0 * static_cast<double>(mix_.size(1)); }

  std::vector<Cost> costs() const override {
    double products = 0;
    for (const auto& linear : {key_, receptance_, value_}) {
      products += static_cast<double>(linear->weight.numel());
    }
    return {{.part = "rwkv_channel",
             .formula = "4 C I + 2 C^2 + 6 C",
             .parameters = static_cast<int64_t>(parameter_count(*this)),
             .flops_per_token = 2 * products + 3 * static_cast<double>(mix_.numel())}};
  }

 private:
  Tensor mix_;  // [2, C]
  std::shared_ptr<Linear> key_, receptance_, value_;
};

}  // namespace

ChannelMixerEntry rwkv_channel_channel() {
  return channel_mixer<RwkvChannel, RwkvChannelOptions>(
      "rwkv_channel", "a gated squared ReLU, mixed with the position before",
      "Peng et al. 2023 (RWKV-4)",
      {.bidirectional = false, .tensor_parallel = true, .context_parallel = false});
}

}  // namespace headloom
