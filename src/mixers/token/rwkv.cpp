// RWKV's time mixing, version 4 (Peng et al. 2023): an average of all values so far, whose weights
// fade at a rate of the channel's own.
//
//   k, v, r = Wk x^k, Wv x^v, Wr x^r         x^i = mu^i * x_t + (1 - mu^i) * x_{t-1}
//   y = (sigmoid(r) * wkv(k, v; w, u)) Wo,   w = exp(time_decay)
//
// time_decay, bonus u and the proportions mu start as published, by depth and channel.
#include <ATen/OpMathType.h>

#include "mixers/mixer.h"
#include "mixers/recording.h"
#include "mixers/rwkv_start.h"
#include "mixers/token/value_maps.h"
#include "ops/token_shift/op.h"
#include "ops/wkv/op.h"

namespace headloom {
namespace {

class Rwkv final : public TokenMixer {
 public:
  explicit Rwkv(const LayerShape& shape) {
    const int64_t width = shape.width;
    const RwkvStart start(shape);
    // The authors exempt these from weight decay: 0 is no neutral value of any of them.
    const ParameterTraits kept{.decay = false};
    // Rows: of keys, values, receptance.
    parameter("mix", mix_, at::stack({start.key_mix(), start.value_mix(), start.gate_mix()}), kept);
    // Channels are heads of size 1.
    const int64_t own = shape.share("width", width), first = shape.rank() * own;
    parameter("time_decay", time_decay_, start.time_decay().narrow(0, first, own).clone(), kept);
    parameter("bonus", bonus_, start.bonus().narrow(0, first, own).clone(), kept);
    const auto map = [&](const char* name, int64_t in, int64_t out, double std) {
      return register_module(name, std::make_shared<Linear>(in, out, shape.bias, std));
    };
    key_ = map("key", width, own, shape.init_std);
    value_ = map("value", width, own, shape.init_std);
    receptance_ = map("receptance", width, own, shape.init_std);
    output_ = map("output", own, width, shape.output_std());
    if (shape.processes() == 1) return;
    for (const char* name : {"time_decay", "bonus"}) cut(name, {.dim = 0, .segments = {own}});
    for (const auto& linear : {key_, value_, receptance_}) linear->cut_outputs({own});
    output_->cut_inputs(shape.processes());
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    return std::get<0>(mixed(x, {}, {}, context));
  }

  Tensor compute_next(const Tensor& x, MixerState& state, const MixerContext& context) override {
    Tensor &last = state.recurrent["shift"], &sums = state.recurrent["wkv"];
    Tensor y;
    std::tie(y, sums) = mixed(x, last, sums, context);
    last = x.select(1, x.size(1) - 1).clone();
    return y;
  }

  std::vector<Cost> own_costs(int64_t) const override {
    const auto width = static_cast<double>(time_decay_.size(0));
    return {linear_cost("projections", "8 C^2", {key_, value_, receptance_, output_}),
            {.part = "token shift",
             .formula = "9 C",
             .parameters = mix_.numel(),
             .flops_per_token = 9 * width},
            {.part = "wkv",
             .formula = "16 C",
             .parameters = time_decay_.numel() + bonus_.numel(),
             .flops_per_token = 16 * width}};
  }

  double own_state_bytes(int64_t) const override {
    return 4.0 * 4 * static_cast<double>(time_decay_.size(0));
  }

 private:
  // The y that the context wants and the sums after x, given what was before it: its last position
  // [B, C] and the sums.
  std::tuple<Tensor, Tensor> mixed(const Tensor& x, const Tensor& last, const Tensor& sums,
                                   const MixerContext& context) const {
    const Tensor& documents = context.documents;
    Recording* const recording = context.recording;
    ops::TokenShiftOptions shift;
    shift.last = last;
    shift.documents = documents;
    const std::vector<Tensor> parts = ops::token_shift(x, mix_, shift);
    ops::WkvOptions o;
    o.receptance = receptance_->forward(parts[2]);
    o.state = sums;
    o.documents = documents;
    // In bfloat16 the rates of slow channels would be rounded.
    const Tensor rates = time_decay_.to(at::toOpMathType(x.scalar_type())).exp();
    const Tensor k = key_->forward(parts[0]);
    if (recording != nullptr) {
      // The factors by which each channel's sums fade a position [C], and its averages before the
      // receptance.
      recording->put("decay", rates.neg().exp());
      if (recording->wants("weights.composed")) {
        ops::WkvOptions plain;
        plain.documents = documents;
        recording->put("weights.composed", mean_channel_map(k, [&](const Tensor& v) {
                         return std::get<0>(ops::wkv(k, v, rates, bonus_, plain));
                       }));
      }
    }
    const auto [y, end] = ops::wkv(k, value_->forward(parts[1]), rates, bonus_, o);
    return {output_->forward(newest_of(y, context)), end};
  }

  Tensor mix_;                 // [3, C]
  Tensor time_decay_, bonus_;  // [C]; the operator's rate is exp(time_decay)
  std::shared_ptr<Linear> key_, value_, receptance_, output_;
};

}  // namespace

TokenMixerEntry rwkv_mixer() {
  return token_mixer<Rwkv>(
      "rwkv", "fading averages of the values, a rate a channel, linear in the length",
      "Peng et al. 2023 (RWKV-4)", {.bidirectional = false, .tensor_parallel = true});
}

}  // namespace headloom
