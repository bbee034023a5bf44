// Multi-scale retention (Sun et al. 2023, RetNet): H heads that forget at rates of their own.
//
//   q, k = rotated(x Wq), rotated(x Wk) D^-1/2       D = C / H
//   o_h  = retention(q_h, k_h, v_h; gamma_h),        gamma_h = 1 - 2^(-5-h), values of size E
//   y    = (SiLU(x Wg) * concat_h(RMSNorm(o_h))) Wo  no scale in the norm, eps 1e-6
//
// The published code also divides row n by sqrt(sum_m gamma^(n-m)): a positive factor that the norm
// removes, up to its eps. Here, as D^-1/2, it is left out of the rows and eps is raised instead,
// which is the same. Its second factor, max(|row sum|, 1), depends on how the row is computed;
// float32 sums do not need it.
#include "core/sizes.h"
#include "mixers/mixer.h"
#include "mixers/position_table.h"
#include "mixers/recording.h"
#include "mixers/token/value_maps.h"
#include "ops/gated_norm/op.h"
#include "ops/retention/op.h"

namespace headloom {
namespace {

struct RetentionOptions {
  int64_t heads = 8;
  double value_factor = 2;
  int64_t chunk = 64;

  void fields(Fields& f) {
    f.field("heads", heads, "heads, each with its own decay", size_from(1));
    f.field("value_factor", value_factor, "width of the values / width of the keys",
            Range<double>{.low = 0, .high = 1024, .open_low = true});
    f.field("chunk", chunk, "positions computed at once: cost only", size_from(1));
  }
};

class Retention final : public TokenMixer {
 public:
  Retention(const RetentionOptions& options, const LayerShape& shape)
      : options_(options),
        rotary_(rotary(options, shape)),
        heads_(shape.share("heads", options.heads)),
        first_(shape.rank() * heads_),
        keys_(shape.width / shape.processes()) {
    const int64_t width = shape.width;
    values_ = std::llround(options.value_factor * static_cast<double>(width));
    if (values_ < 1 || values_ % options.heads != 0) {
      usage_error("retention: value_factor is ", options.value_factor, ", which makes ", values_,
                  " values at width ", width, ", expected a multiple of heads = ", options.heads,
                  ".");
    }
    values_ /= shape.processes();
    // Rows: q, k, v.
    qkv_ = register_module(
        "qkv", std::make_shared<Linear>(width, 2 * keys_ + values_, shape.bias, shape.init_std));
    gate_ = register_module("gate",
                            std::make_shared<Linear>(width, values_, shape.bias, shape.init_std));
    output_ = register_module(
        "output", std::make_shared<Linear>(values_, width, shape.bias, shape.output_std()));
    // As published: Xavier uniform with gain 2^-2.5, the output's with gain 1.
    const auto xavier = [](const Tensor& weight, double gain) {
      draw_uniform(weight,
                   gain * std::sqrt(6.0 / static_cast<double>(weight.size(0) + weight.size(1))));
    };
    const double gain = std::exp2(-2.5);
    xavier(qkv_->weight.narrow(0, 0, keys_), gain);
    xavier(qkv_->weight.narrow(0, keys_, keys_), gain);
    xavier(qkv_->weight.narrow(0, 2 * keys_, values_), gain);
    xavier(gate_->weight, gain);
    xavier(output_->weight, 1);
    if (shape.processes() == 1) return;
    qkv_->cut_outputs({keys_, keys_, values_});
    gate_->cut_outputs({values_});
    output_->cut_inputs(shape.processes());
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    if (context_parallel() != nullptr) {
      const Positions before = context_parallel()->before(x.size(0), x.size(1));
      return std::get<0>(mixed(x, {}, before, {}));
    }
    return std::get<0>(mixed(x, {}, {}, context));
  }

  Tensor compute_next(const Tensor& x, MixerState& state, const MixerContext& context) override {
    Tensor& before = state.recurrent["retention"];
    auto [y, after] = mixed(x, before, state.position, context);
    before = after;
    return y;
  }

  std::vector<Cost> own_costs(int64_t length) const override {
    const auto heads = static_cast<double>(heads_);
    const double dim = static_cast<double>(keys_) / heads;
    const double values = static_cast<double>(values_) / heads;
    const double keys = static_cast<double>(std::min(options_.chunk, length) + 1) / 2;
    return {
        linear_cost("projections", "2 C H (2 D + 3 E)", {qkv_, gate_, output_}),
        {.part = "retention",
         .formula = "2 H (K (D + E) + 2 D E), K = (chunk + 1) / 2",
         .flops_per_token = 2 * heads * (keys * (dim + values) + 2 * dim * values)},
        {.part = "head norm and gate", .formula = "6 H E", .flops_per_token = 6 * heads * values}};
  }

  double own_state_bytes(int64_t) const override {
    return 4.0 * static_cast<double>(keys_ / heads_ * values_);
  }

 private:
  // The output that the context wants and the state after x, which follows the positions `seen`.
  std::tuple<Tensor, Tensor> mixed(const Tensor& x, const Tensor& state, const Positions& seen,
                                   const MixerContext& context) {
    const Tensor& documents = context.documents;
    const int64_t heads = heads_;
    const std::vector<Tensor> parts = qkv_->forward(x).split_with_sizes({2 * keys_, values_}, -1);
    const auto by_head = [](const Tensor& t, int64_t count) {
      return t.unflatten(-1, {count, -1});
    };
    const std::vector<Tensor> turned =
        rotary_.apply(by_head(parts[0], 2 * heads), seen).split(heads, 2);
    // Beyond the table eps is made for the call, and the decays are there.
    const bool beyond = beyond_table(eps_, seen, x.sym_size(1));
    prepare(beyond ? x.sym_size(1) : rows_needed(seen, x.sym_size(1)), x);
    if (context.recording != nullptr) {
      show(turned[0], turned[1], lost_, documents, *context.recording);
    }
    const Tensor values = by_head(parts[1], heads);
    const Tensor before =
        context_parallel() == nullptr ? state : state_of_others(turned[1], values, lost_);
    const auto [o, last] =
        ops::retention(turned[0], turned[1], values, gamma_,
                       {.state = before, .documents = documents, .chunk = options_.chunk});
    const Tensor y = ops::gated_norm(newest_of(o, context),
                                     by_head(gate_->forward(newest_of(x, context)), heads),
                                     newest_of(eps_of(x.sym_size(1), documents, seen), context));
    return {output_->forward(y.flatten(-2)), last};
  }

  // Makes what depends on heads and positions alone, for `length` positions, where `like` is. To
  // make it again would be twenty small operators in every step of decoding.
  void prepare(const c10::SymInt& length, const Tensor& like) {
    const auto type = like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const auto rows = rows_to_make(eps_, length, type, like.device());
    if (!rows) return;
    c10::InferenceMode normal(false);  // the tables outlive a call in inference mode
    const auto real = like.options().dtype(at::kDouble).requires_grad(false);
    // What a head forgets would become 0 after the head of 2^-1000, which itself forgets nothing in
    // any number of positions.
    lost_ = at::exp2((-5 - at::arange(first_, first_ + heads_, real)).clamp_min(-1000));
    gamma_ = 1 - lost_;
    eps_ = eps_at(at::arange(c10::Scalar(*rows), real)).to(type);
  }

  // eps of the norm at positions `places` [...], in float64: [..., H].
  Tensor eps_at(const Tensor& places) const {
    // gamma is 1 in float64 from head 49 on.
    const Tensor age = places.to(at::kDouble).unsqueeze(-1) + 1;
    const Tensor sums = -at::expm1(age * at::log1p(-lost_)) / lost_;
    return 1e-6 * static_cast<double>(keys_ / heads_) * sums;
  }

  // eps of the norm, [1 or B, T, H], for the positions after those `seen`.
  Tensor eps_of(const c10::SymInt& length, const Tensor& documents, const Positions& seen) const {
    if (!documents.defined() && beyond_table(eps_, seen, length)) {
      return eps_at(seen.position_ids(length, eps_.device())).to(eps_.scalar_type());
    }
    if (!documents.defined() && !seen.left_padding.defined()) {
      return eps_.as_strided_symint({1, length, heads_}, {length * heads_, heads_, 1},
                                    seen.longest * heads_);
    }
    const Tensor place = documents.defined() ? places_in_documents(documents)
                                             : seen.position_ids(length, eps_.device());
    return rows_at(eps_, place);
  }

  // The maps of the parallel form, ((q k^T) D^-1/2) * Dm [B, H, T, S], and gamma [H].
  static void show(const Tensor& q, const Tensor& k, const Tensor& lost, const Tensor& documents,
                   Recording& recording) {
    recording.put("decay", 1 - lost);
    if (!recording.wants("weights.composed")) return;
    const Tensor maps = std::get<0>(
        ops::retention(q, k, values_of_positions(q), 1 - lost, {.documents = documents}));
    recording.put("weights.composed",
                  maps.transpose(1, 2) / std::sqrt(static_cast<double>(q.size(3))));
  }

  // The state before each row of positions that processes share out: keys [B, L, H, D], values [B,
  // L, H, E] -> [B, H, D, E].
  Tensor state_of_others(const Tensor& keys, const Tensor& values, const Tensor& lost) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto wide = keys.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const int64_t length = keys.size(1);
    const Tensor log_gamma = at::log1p(-lost);
    const Tensor left = at::arange(length - 1, -1, -1, lost.options()).unsqueeze(-1) * log_gamma;
    const Tensor weighted = keys.to(wide) * left.exp().to(wide).unsqueeze(-1);
    const Tensor added =
        at::matmul(weighted.permute({0, 2, 3, 1}), values.to(wide).transpose(1, 2));
    const Tensor decay = (static_cast<double>(length) * log_gamma).exp().to(wide);
    return state_before(added, decay.view({1, -1, 1, 1}), *context_parallel());
  }

  static Rotary rotary(const RetentionOptions& options, const LayerShape& shape) {
    if (shape.width % (2 * options.heads) != 0) {
      usage_error("retention: heads is ", options.heads,
                  ", expected heads of an even size at the model's width = ", shape.width, ".");
    }
    return Rotary::retention(shape.width / options.heads);
  }

  const RetentionOptions options_;
  Rotary rotary_;
  // Of the H heads this process has `heads_`, from `first_` on.
  const int64_t heads_, first_;
  const int64_t keys_;  // heads_ D
  int64_t values_;      // heads_ E
  std::shared_ptr<Linear> qkv_, gate_, output_;
  // [H] in float64: what each head forgets a position, 1 - gamma, and gamma. [L, H], grown on
  // demand: eps times sum_m gamma^(n-m) over the positions m <= n, for position n.
  Tensor lost_, gamma_, eps_;
};

}  // namespace

TokenMixerEntry retention_mixer() {
  return token_mixer<Retention, RetentionOptions>(
      "retention", "exponentially decaying attention without softmax, linear in the length",
      "Sun et al. 2023",
      {.bidirectional = false, .tensor_parallel = true, .context_parallel = true});
}

}  // namespace headloom
