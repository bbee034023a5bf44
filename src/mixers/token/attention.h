// What every mixer of the composed-attention family shares: projections to heads, QK-norm,
// positions, windows, and the call of the operator.
#pragma once

#include "mixers/mixer.h"
#include "ops/composed_attention/op.h"

namespace headloom {

struct AttentionOptions {
  int64_t heads = 8;
  std::optional<int64_t> kv_heads;  // heads when absent
  std::optional<int64_t> head_dim;  // C / heads when absent
  std::optional<int64_t> window;
  bool qk_norm = false, qkv_bias = false;

  void fields(Fields& f);
};

// Sizes of the projections. Plain attention has maps = heads, keys = values = kv_heads, v_dim =
// head_dim.
struct AttentionSizes {
  int64_t maps;      // H: query heads, score maps
  int64_t keys;      // Gk
  int64_t values;    // Gv
  int64_t outputs;   // H': maps that read values
  int64_t head_dim;  // D
  int64_t v_dim;     // E

  // Throws UsageError where `options` do not fit `shape`.
  static AttentionSizes plain(const AttentionOptions& options, const LayerShape& shape);
  int64_t qkv_width() const { return maps * head_dim + keys * head_dim + values * v_dim; }
  int64_t output_width() const { return outputs * v_dim; }
};

// The static matrix of a HeadMix that leaves the maps as they are: [H, H], or [g, H/g, H/g] with
// g > 1 groups.
Tensor identity_mix(int64_t heads, int64_t groups, const at::TensorOptions& options = {});

// Such a matrix with a dimension of groups, also where there is one group: tensor parallelism cuts
// that dimension.
Tensor grouped(const Tensor& matrix);
// The same as a HeadMix takes it.
Tensor ungrouped(const Tensor& matrix);

// 0.8 - 0.6 exp(-0.3 layer), layers from 0: Differential Transformer's starting lambda.
double lambda_init(int64_t layer);

// Base of the family. forward(x) = output(finish(composed_attention(order_maps(q), k, v,
// compose(x)))).
class Attention : public TokenMixer {
 public:
  Attention(const AttentionOptions& options, const AttentionSizes& sizes, const LayerShape& shape);
  Tensor compute(const Tensor& x, const MixerContext& context) override;
  std::vector<Cost> own_costs(int64_t length) const override;
  double own_state_bytes(int64_t length) const override;
  // Forgets as any policy says, but where compose() sets a convolution: there initial_state() must
  // refuse.
  MixerState initial_state(const CachePolicy& policy) const override {
    return {.policy = policy.checked()};
  }
  Tensor compute_next(const Tensor& x, MixerState& state, const MixerContext& context) override;
  std::optional<HeadProjections> head_projections() const override;
  MixerState build_cross_cache(const Tensor& memory, const Tensor& lengths) override;
  Tensor extend_cross(const Tensor& x, MixerState& state) override;

 protected:
  // Adds to the operator's options what the mechanism composes; x is the queries' input, memory the
  // keys' (the same tensor in self-attention). Of one that is undefined nothing is computed.
  virtual void compose(const Tensor& x, const Tensor& memory,
                       ops::ComposedAttentionOptions& options);
  // Query maps (or what else is per map along `dim`) in the order in which the operator maps them
  // to key heads.
  virtual Tensor order_maps(const Tensor& t, int64_t dim) const {
    (void)dim;
    return t;
  }
  // Works on the heads' outputs [B, T, H', E] before they are concatenated.
  virtual Tensor finish(const Tensor& o) { return o; }
  // What a state keeps of a key, and how many queries before the next that convolutions reach back
  // to.
  virtual int64_t values_per_key() const;
  virtual int64_t earlier_queries() const { return 0; }
  // Mean number of keys a query sees at `length`.
  double mean_keys(int64_t length) const;
  // The FLOPs of plain attention in the operator at `length`: scores and values.
  Cost map_cost(int64_t length) const;

  const AttentionOptions options_;
  const AttentionSizes sizes_;
  const LayerShape shape_;

 private:
  struct Heads {
    Tensor q, k, v;  // [B, T, H, D], [B, S, Gk, D], [B, S, Gv, E]; not rotated
  };
  // x's queries, memory's keys and values, as in compose().
  Heads project(const Tensor& x, const Tensor& memory);
  // The same of self-attention without a gradient, in an operator a part: decoding's steps are
  // short, and their operators many.
  Heads project_step(const Tensor& x);
  // Which of order_maps()'s maps is map h; undefined: h itself.
  Tensor own_order() const;
  // With QK-norm, where it is on.
  Heads normed(Heads h) const;

  std::shared_ptr<Linear> qkv_, output_;
  Tensor q_scale_, k_scale_;  // [D], QK-norm
  std::optional<Rotary> rotary_;
};

}  // namespace headloom
