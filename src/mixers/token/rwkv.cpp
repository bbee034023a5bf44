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
    parameter("time_decay", time_decay_, start.time_decay(), kept);
    parameter("bonus", bonus_, start.bonus(), kept);
    const auto map = [&](const char* name, double std) {
      return register_module(name, std::make_shared<Linear>(width, width, shape.bias, std));
    };
    key_ = map("key", shape.init_std);
    value_ = map("value", shape.init_std);
    receptance_ = map("receptance", shape.init_std);
    output_ = map("output", shape.output_std());
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    return std::get<0>(mixed(x, {}, {}, context.documents, context.recording));
  }

  Tensor compute_next(const Tensor& x, MixerState& state, const MixerContext&) override {
    Tensor &last = state.recurrent["shift"], &sums = state.recurrent["wkv"];
    Tensor y;
    std::tie(y, sums) = mixed(x, last, sums, {});
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
  // y and the sums after x, given what was before it: its last position [B, C] and the sums.
  std::tuple<Tensor, Tensor> mixed(const Tensor& x, const Tensor& last, const Tensor& sums,
                                   const Tensor& documents, Recording* recording = nullptr) const {
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
    if (recording != nullptr) show(k, rates, documents, *recording);
    const auto [y, end] = ops::wkv(k, value_->forward(parts[1]), rates, bonus_, o);
    return {output_->forward(y), end};
  }

  // The factors by which each channel's sums fade a position [C], and the weights of its average,
  // their mean over the channels [B, 1, T, S].
  void show(const Tensor& k, const Tensor& rates, const Tensor& documents,
            Recording& recording) const {
    recording.put("decay", rates.neg().exp());
    if (!recording.wants("weights.composed")) return;
    const int64_t length = k.size(1);
    const Tensor place = at::arange(length, k.options().dtype(at::kLong).requires_grad(false));
    std::vector<Tensor> rows;
    for (int64_t t = 0; t < length; ++t) {
      const Tensor age = (t - 1 - place.narrow(0, 0, t)).to(rates.scalar_type()).unsqueeze(-1);
      const Tensor bonus = bonus_.to(rates.scalar_type()).unsqueeze(0);
      Tensor logits = k.narrow(1, 0, t + 1) + at::cat({age * rates.neg(), bonus});  // [B, t + 1, C]
      if (documents.defined()) {
        const Tensor other = documents.narrow(1, 0, t + 1).ne(documents.narrow(1, t, 1));
        logits = logits.masked_fill(other.unsqueeze(-1), -std::numeric_limits<double>::infinity());
      }
      rows.push_back(at::constant_pad_nd(at::softmax(logits, 1).mean(-1), {0, length - t - 1}));
    }
    recording.put("weights.composed", at::stack(rows, 1).unsqueeze(1));
  }

  Tensor mix_;                 // [3, C]
  Tensor time_decay_, bonus_;  // [C]; the operator's decay is exp(time_decay)
  std::shared_ptr<Linear> key_, value_, receptance_, output_;
};

}  // namespace

TokenMixerEntry rwkv_mixer() {
  return token_mixer<Rwkv>("rwkv",
                           "fading averages of the values, a rate a channel, linear in the length",
                           "Peng et al. 2023 (RWKV-4)", {.bidirectional = false});
}

}  // namespace headloom
