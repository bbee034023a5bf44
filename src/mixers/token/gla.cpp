// Gated linear attention (Yang et al. 2024): H heads whose states forget as the sequence says.
//
//   q, k, v = x Wq, x Wk, x Wv                            per head of sizes D, D, E
//   alpha   = sigmoid(x W1 W2 + b)^(1 / normalizer)       W1 of rank `gate_rank`; a decay a row
//   S_t     = diag(alpha_t) S_{t-1} + k_t^T v_t,          o_t = q_t D^-1/2 S_t
//   y       = (SiLU(x Wg) * concat_h(RMSNorm(o_h) w)) Wo  w [E] for all heads, eps 1e-6
//
// The norm would remove D^-1/2, up to its eps: it is left out of the queries and eps is multiplied
// by D instead, which is the same.
#include <ATen/OpMathType.h>

#include "core/sizes.h"
#include "mixers/mixer.h"
#include "mixers/recording.h"
#include "mixers/token/value_maps.h"
#include "ops/gated_linear_attention/op.h"
#include "ops/gated_norm/op.h"

namespace headloom {
namespace {

struct GlaOptions {
  int64_t heads = 4;
  double expand_k = 0.5, expand_v = 1;
  int64_t gate_rank = 16;
  double gate_normalizer = 16;

  void fields(Fields& f) {
    const Range<double> factor = {.low = 0, .high = 1024, .open_low = true};
    f.field("heads", heads, "heads, each with a state of its own", size_from(1));
    f.field("expand_k", expand_k, "width of the queries and keys / width", factor);
    f.field("expand_v", expand_v, "width of the values / width", factor);
    f.field("gate_rank", gate_rank, "rank of the map to the decays", size_from(1));
    f.field("gate_normalizer", gate_normalizer,
            "the decay is a sigmoid's root of this degree: the larger, the longer is remembered",
            positive());
  }
};

class Gla final : public TokenMixer {
 public:
  Gla(const GlaOptions& options, const LayerShape& shape)
      : heads_(shape.share("heads", options.heads)),
        keys_(inner("expand_k", options.expand_k, "keys", options.heads, shape)),
        values_(inner("expand_v", options.expand_v, "values", options.heads, shape)),
        normalizer_(options.gate_normalizer) {
    const auto map = [&](const char* name, int64_t in, int64_t out, bool bias, double std) {
      return register_module(name, std::make_shared<Linear>(in, out, bias, std));
    };
    const int64_t width = shape.width;
    qkv_ = map("qkv", width, 2 * keys_ + values_, shape.bias, shape.init_std);
    gate_ = map("gate", width, values_, shape.bias, shape.init_std);
    decay_down_ = map("decay_down", width, options.gate_rank, false, shape.init_std);
    decay_up_ = map("decay_up", options.gate_rank, keys_, true, shape.init_std);
    parameter("norm", norm_, at::ones({values_ / heads_}));
    output_ = map("output", values_, width, shape.bias, shape.output_std());
    if (shape.processes() == 1) return;
    qkv_->cut_outputs({keys_, keys_, values_});
    gate_->cut_outputs({values_});
    decay_up_->cut_outputs({keys_});
    output_->cut_inputs(shape.processes());
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    return std::get<0>(mixed(x, {}, context));
  }

  Tensor compute_next(const Tensor& x, MixerState& state, const MixerContext& context) override {
    Tensor& before = state.recurrent["gla"];
    auto [y, after] = mixed(x, before, context);
    before = after;
    return y;
  }

  std::vector<Cost> own_costs(int64_t) const override {
    const auto values = static_cast<double>(values_);
    return {linear_cost("projections", "2 (C H (2 D + 3 E) + R (C + H D))",
                        {qkv_, gate_, decay_down_, decay_up_, output_}),
            {.part = "recurrence",
             .formula = "5 H D E",
             .flops_per_token = 5 * static_cast<double>(head_dim()) * values},
            {.part = "head norm and gate",
             .formula = "7 H E",
             .parameters = norm_.numel(),
             .flops_per_token = 7 * values}};
  }

  double own_state_bytes(int64_t) const override {
    return 4.0 * static_cast<double>(head_dim() * values_);
  }

 private:
  int64_t head_dim() const { return keys_ / heads_; }  // of queries and keys

  // The output that the context wants and the state after x.
  std::tuple<Tensor, Tensor> mixed(const Tensor& x, const Tensor& state,
                                   const MixerContext& context) {
    const auto by_head = [&](const Tensor& t) {
      return t.unflatten(-1, {heads_, -1});
    };
    const std::vector<Tensor> parts =
        qkv_->forward(x).split_with_sizes({keys_, keys_, values_}, -1);
    // In bfloat16 the decays of rows that hardly forget would be rounded.
    const auto wide = at::toOpMathType(x.scalar_type());
    const Tensor log_decay =
        at::log_sigmoid(decay_up_->forward(decay_down_->forward(x)).to(wide)) / normalizer_;
    if (context.recording != nullptr) {
      show(by_head(parts[0]), by_head(parts[1]), by_head(log_decay), context.documents,
           *context.recording);
    }
    const auto [o, last] = ops::gated_linear_attention(
        by_head(parts[0]), by_head(parts[1]), by_head(parts[2]), by_head(log_decay),
        {.state = state, .documents = context.documents});
    const double eps = 1e-6 * static_cast<double>(head_dim());
    const Tensor y =
        ops::gated_norm(newest_of(o, context), by_head(gate_->forward(newest_of(x, context))),
                        at::full({}, eps, x.options().dtype(wide)));
    return {output_->forward((y * norm_.to(y.scalar_type())).flatten(-2)), last};
  }

  // The decays [B, T, H, D] and the maps that the recurrence stands for [B, H, T, S]:
  // sum_d q[t, d] D^-1/2 k[s, d] prod_{s < r <= t} alpha[r, d].
  static void show(const Tensor& q, const Tensor& k, const Tensor& log_decay,
                   const Tensor& documents, Recording& recording) {
    recording.put("decay", log_decay.exp());
    if (!recording.wants("weights.composed")) return;
    const Tensor maps = std::get<0>(ops::gated_linear_attention(
        q, k, values_of_positions(q), log_decay, {.state = {}, .documents = documents}));
    recording.put("weights.composed",
                  maps.transpose(1, 2) / std::sqrt(static_cast<double>(q.size(3))));
  }

  // Keys or values of all of this process's heads.
  static int64_t inner(const char* option, double factor, const char* what, int64_t heads,
                       const LayerShape& shape) {
    const int64_t width = shape.width, size = std::llround(factor * static_cast<double>(width));
    if (size < 1 || size % heads != 0) {
      usage_error("gla: ", option, " is ", factor, ", which makes ", size, " ", what, " at width ",
                  width, ", expected a multiple of heads = ", heads, ".");
    }
    return size / shape.processes();
  }

  const int64_t heads_, keys_, values_;  // H, H D, H E, of this process
  const double normalizer_;
  Tensor norm_;                                    // [E]
  std::shared_ptr<Linear> qkv_, gate_;             // rows of q, k, v; Wg
  std::shared_ptr<Linear> decay_down_, decay_up_;  // W1; W2 and b
  std::shared_ptr<Linear> output_;
};

}  // namespace

TokenMixerEntry gla_mixer() {
  return token_mixer<Gla, GlaOptions>(
      "gla", "linear attention whose states forget as the sequence says, linear in the length",
      "Yang et al. 2024", {.bidirectional = false, .tensor_parallel = true});
}

}  // namespace headloom
