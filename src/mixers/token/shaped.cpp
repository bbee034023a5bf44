// Shaped attention (Noci et al. 2023; He & Hofmann 2024, Simplifying Transformer Blocks): maps that
// start as the identity, so that a block needs no skip around them.
//
//   A' = beta softmax(q k^T D^-1/2) + alpha I - gamma U      a head; U[t, s] = 1 / (keys t sees)
//   y  = concat_h A'_h v_h                                   no output projection
//
// alpha, beta, gamma [H] start at 1 and W_q at 0, where softmax is U. q and k have biases. The
// values are the heads of x itself; in layer 0 those of x (g_r Wv + g_s I), with Wv = 0 and
// g_r = g_s = 1 at the start. The maps are not held: the softmax term is the operator's, the
// identity's is v, the last a running mean of v.
#include "core/sizes.h"
#include "mixers/padding.h"
#include "mixers/recording.h"
#include "mixers/token/attend.h"
#include "mixers/token/attention_maps.h"
#include "ops/documents.h"

namespace headloom {
namespace {

struct ShapedOptions {
  int64_t heads = 8;

  void fields(Fields& f) { f.field("heads", heads, "heads", size_from(1)); }
};

class Shaped final : public TokenMixer {
 public:
  Shaped(const ShapedOptions& options, const LayerShape& shape) : options_(options), shape_(shape) {
    const int64_t width = shape.width, dim = shape.head_dim("shaped", options.heads);
    // Rows: q, k.
    qk_ = register_module(
        "qk", std::make_shared<Linear>(width, 2 * width, /*with_bias=*/true, shape.init_std));
    {
      at::NoGradGuard no_grad;
      qk_->weight.narrow(0, 0, width).zero_();
    }
    const auto ones = [](int64_t size) { return at::ones({size}); };
    parameter("identity_gain", alpha_, ones(options.heads));
    parameter("map_gain", beta_, ones(options.heads));
    parameter("uniform_gain", gamma_, ones(options.heads));
    if (shape.layer == 0) {
      value_ = register_module("value", std::make_shared<Linear>(width, width, false, 0.0));
      parameter("value_gain", value_gain_, ones(1));
      parameter("value_skip_gain", value_skip_gain_, ones(1));
    }
    if (shape.position.type == "rope") rotary_.emplace(shape.position, dim);
  }

  bool keeps_input() const override { return true; }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    auto [q, k, v] = project(x);
    if (rotary_) {
      q = rotary_->apply(q);
      k = rotary_->apply(k);
    }
    ops::ComposedAttentionOptions o;
    o.causal = shape_.causal;
    o.lengths = context.lengths;
    o.documents = context.documents;
    if (alibi()) o.bias = alibi_bias(options_.heads, q.sym_size(1), k.sym_size(1), q.options());
    const Tensor attended = shown_attention(q, k, v, o, context);
    if (context.recording != nullptr && context.recording->wants("weights.composed")) {
      context.recording->put("weights.composed", shaped_maps(q, k, o));
    }
    return shape(attended, v, mean_seen(v, context));
  }

  // What is forgotten under a policy leaves the softmax alone: the mean is of all that was seen.
  MixerState initial_state(const CachePolicy& policy) const override {
    return {.policy = policy.checked()};
  }
  Tensor compute_next(const Tensor& x, MixerState& state, const MixerContext& context) override {
    const auto [q, k, v] = project(x);
    const Tensor mean = next_mean(v, state);
    AttendOptions how{.rotary = rotary_ ? &*rotary_ : nullptr};
    if (alibi()) {
      how.bias = [&, &q = q](const Tensor& distance) {
        return alibi_bias(options_.heads, distance, q.options());
      };
    }
    const Tensor attended = attend(q, k, v, {}, how, state, context);
    return shape(attended, newest_of(v, context), newest_of(mean, context));
  }

  std::vector<Cost> own_costs(int64_t length) const override {
    const auto width = static_cast<double>(shape_.width);
    const double keys =
        shape_.causal ? (static_cast<double>(length) + 1) / 2 : static_cast<double>(length);
    std::vector<Cost> out = {
        linear_cost("projections", "4 C C", {qk_}),
        {.part = "maps", .formula = "4 K C", .flops_per_token = 4 * keys * width},
        {.part = "identity and mean",
         .formula = "7 C",
         .parameters = 3 * options_.heads,
         .flops_per_token = 7 * width,
         .mechanism = true}};
    if (value_) {
      out.push_back(
          {.part = "values of layer 0",
           .formula = "2 C C + 3 C",
           .parameters = value_->weight.numel() + 2,
           .flops_per_token = 2.0 * static_cast<double>(value_->weight.numel()) + 3 * width});
    }
    return out;
  }

  double own_state_bytes(int64_t length) const override {
    return 4.0 * static_cast<double>((2 * length + 1) * shape_.width);
  }

 private:
  struct Heads {
    Tensor q, k, v;  // [B, T, H, D]; not rotated
  };

  Heads project(const Tensor& x) {
    const auto split = [&](const Tensor& t) { return t.unflatten(-1, {options_.heads, -1}); };
    const std::vector<Tensor> both = qk_->forward(x).chunk(2, -1);
    const Tensor q = split(both[0]), k = split(both[1]);
    const Tensor v = value_ ? value_->forward(x) * value_gain_ + x * value_skip_gain_ : x;
    return {.q = q, .k = k, .v = split(v.to(q.scalar_type()))};
  }

  bool alibi() const { return shape_.position.type == "alibi"; }

  // The softmax term, the identity's and the mean's, all [B, T, H, D].
  Tensor shape(const Tensor& attended, const Tensor& own, const Tensor& mean) const {
    const auto gain = [&](const Tensor& g) { return g.unsqueeze(-1).to(own.scalar_type()); };
    Tensor y = at::addcmul(own * gain(alpha_), attended, gain(beta_));
    y = at::addcmul(y, mean.to(own.scalar_type()), gain(gamma_), -1);
    return y.flatten(-2);
  }

  // A' [B, H, T, S]. Scores of 0 give U.
  Tensor shaped_maps(const Tensor& q, const Tensor& k, ops::ComposedAttentionOptions o) const {
    const auto gain = [](const Tensor& g) { return g.view({-1, 1, 1}); };
    const Tensor attended = ops::composed_attention_weights(q, k, o);
    o.bias = Tensor();
    const Tensor uniform = ops::composed_attention_weights(at::zeros_like(q), k, o);
    const Tensor identity = at::eye(q.size(1), q.options());
    return attended * gain(beta_) + identity * gain(alpha_) - uniform * gain(gamma_);
  }

  static Tensor wide(const Tensor& v) {
    return v.scalar_type() == at::kDouble ? v : v.to(at::kFloat);
  }

  // U v: the mean of the values that each position sees, [B, T or 1, H, D].
  Tensor mean_seen(const Tensor& v, const MixerContext& context) const {
    const c10::SymInt length = v.sym_size(1);
    const auto index = at::TensorOptions().dtype(at::kLong).device(v.device());
    const Tensor place = at::arange(c10::Scalar(length), index);
    Tensor values = wide(v);
    // A causal position sees no padding; without causality its values count as 0.
    const bool padded = context.lengths.defined() && !shape_.causal;
    if (padded) {
      const Tensor real = real_positions(context.lengths, length).unsqueeze(-1).unsqueeze(-1);
      values = at::where(real, values, at::zeros({}, values.options()));
    }
    if (!context.documents.defined()) {
      if (shape_.causal) {
        return values.cumsum(1) / (place + 1).to(values.scalar_type()).view({1, -1, 1, 1});
      }
      const Tensor sum = values.sum(1, /*keepdim=*/true);
      if (!padded) return sum / c10::Scalar(length);
      return sum / context.lengths.clamp_min(1).view({-1, 1, 1, 1}).to(values.scalar_type());
    }
    // Each document is a run of equal ids; a position sees [first, last), by sums up to both ends.
    const Tensor border = ops::id_changes(context.documents);
    const Tensor begins = at::constant_pad_nd(border, {1, 0}, true);
    const Tensor first = std::get<0>(at::cummax(at::where(begins, place, at::zeros({}, index)), 1));
    Tensor last = (place + 1).expand_as(first);
    if (!shape_.causal) {
      const Tensor ends = at::constant_pad_nd(border, {0, 1}, true);
      const Tensor stop = at::where(ends, place + 1, at::full({}, c10::Scalar(length), index));
      last = std::get<0>(at::cummin(stop.flip(1), 1)).flip(1);
      if (padded) last = at::maximum(first, at::minimum(last, context.lengths.unsqueeze(1)));
    }
    const Tensor sums = at::constant_pad_nd(values.cumsum(1), {0, 0, 0, 0, 1, 0});
    const auto up_to = [&](const Tensor& end) {
      return sums.gather(1, end.unsqueeze(-1).unsqueeze(-1).expand_as(values));
    };
    const Tensor count = (last - first).clamp_min(1).unsqueeze(-1).unsqueeze(-1);
    return (up_to(last) - up_to(first)) / count.to(values.scalar_type());
  }

  // The same of the next positions in decoding. One position of a small model takes as long as its
  // operators take to call, so there are no more of them than it needs.
  Tensor next_mean(const Tensor& v, MixerState& state) const {
    Tensor& before = state.recurrent["sum_of_values"];
    const int64_t length = v.size(1);
    const bool one = length == 1 && before.defined();
    Tensor sums = one ? wide(v) : wide(v).cumsum(1);
    if (before.defined()) sums = sums + before.unsqueeze(1);
    before = sums.select(1, length - 1);
    if (!one) before = before.clone();  // or it would keep the sums of all positions
    if (one && !state.position.left_padding.defined()) {
      return sums / static_cast<double>(state.position.longest + 1);
    }
    const Tensor seen = state.position.position_ids(length, v.device()) + 1;
    return sums / seen.to(sums.scalar_type()).unsqueeze(-1).unsqueeze(-1);
  }

  const ShapedOptions options_;
  const LayerShape shape_;
  std::shared_ptr<Linear> qk_, value_;                          // value_ in layer 0 only
  Tensor alpha_, beta_, gamma_, value_gain_, value_skip_gain_;  // [H], [H], [H], [1], [1]
  std::optional<Rotary> rotary_;
};

}  // namespace

TokenMixerEntry shaped_mixer() {
  return token_mixer<Shaped, ShapedOptions>(
      "shaped", "attention that starts as the identity, of its own input; for simplified blocks",
      "He & Hofmann 2024; Noci et al. 2023");
}

}  // namespace headloom
