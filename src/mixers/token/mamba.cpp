// Mamba (Gu & Dao 2023): a selective state space after a short convolution, gated. No attention,
// no positions; a block of it needs no channel mixer.
//
//   x', z  = x Win                                    each of size I = `expand` C
//   u      = SiLU(conv(x'))                           depthwise, causal, with bias
//   dt, B, C = u Wx                                   of size R, N, N
//   h_t    = exp(dt_t A) h_{t-1} + dt_t B_t u_t,      dt = softplus(dt Wdt + bias), A = -exp(A_log)
//   y      = ((C_t . h_t + D u_t) * SiLU(z_t)) Wout
//
// Starts as in the authors' code: A_log = log(1..N) in each channel, D = 1, the bias of dt such
// that its softplus is log-uniform in [1e-3, 1e-1], Wdt uniform within R^-1/2, filters within
// W^-1/2. Win, Wx and Wout are uniform within 1 / sqrt(their inputs), Wout divided by sqrt(depth)
// as well. With the N(0, 0.02) of other mixers the output, to which three maps and a gate
// contribute, would start 20 times smaller at a width of 64.
#include <ATen/OpMathType.h>

#include "core/sizes.h"
#include "mixers/mixer.h"
#include "mixers/recording.h"
#include "mixers/token/value_maps.h"
#include "ops/causal_conv1d/op.h"
#include "ops/linear/op.h"
#include "ops/selective_scan/op.h"

namespace headloom {
namespace {

struct MambaOptions {
  int64_t expand = 2, d_state = 16, d_conv = 4;
  std::optional<int64_t> dt_rank;

  void fields(Fields& f) {
    f.field("expand", expand, "inner width / width", size_from(1));
    f.renamed("states", "d_state");
    f.field("d_state", d_state, "numbers of state a channel", size_from(1));
    f.renamed("taps", "d_conv");
    f.field("d_conv", d_conv, "positions the convolution reaches over", size_from(1));
    f.renamed("rank", "dt_rank");
    f.field("dt_rank", dt_rank, "rank of the step's projection; width / 16, rounded up, by default",
            size_from(1));
  }
};

class Mamba final : public TokenMixer {
 public:
  Mamba(const MambaOptions& options, const LayerShape& shape)
      : inner_(options.expand * shape.width),
        d_state_(options.d_state),
        dt_rank_(options.dt_rank.value_or((shape.width + 15) / 16)) {
    const auto map = [&](const char* name, int64_t in, int64_t out, bool bias, double scale = 1) {
      auto linear = register_module(name, std::make_shared<Linear>(in, out, bias, 0));
      draw_uniform(linear->weight, scale / std::sqrt(static_cast<double>(in)));
      return linear;
    };
    input_ = map("input", shape.width, 2 * inner_, shape.bias);
    const double bound = 1 / std::sqrt(static_cast<double>(options.d_conv));
    parameter("conv", conv_, at::empty({inner_, options.d_conv}).uniform_(-bound, bound));
    parameter("conv_bias", conv_bias_, at::empty({inner_}).uniform_(-bound, bound));
    select_ = map("select", inner_, dt_rank_ + 2 * d_state_, false);
    step_ = map("step", dt_rank_, inner_, true);
    {
      at::NoGradGuard no_grad;
      const Tensor dt =
          at::exp(at::empty({inner_}).uniform_(std::log(1e-3), std::log(1e-1))).clamp_min(1e-4);
      step_->bias.copy_(dt + at::log(-at::expm1(-dt)));  // softplus of it is dt
    }
    // The authors exempt both from weight decay.
    parameter("A_log", A_log_,
              at::log(at::arange(1, d_state_ + 1).to(at::kFloat)).expand({inner_, -1}).contiguous(),
              {.decay = false});
    parameter("D", D_, at::ones({inner_}), {.decay = false});
    output_ = map("output", inner_, shape.width, shape.bias,
                  1 / std::sqrt(static_cast<double>(shape.depth)));
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    Tensor rows, h;
    return mixed(x, rows, h, context);
  }

  Tensor compute_next(const Tensor& x, MixerState& state, const MixerContext& context) override {
    return mixed(x, state.recurrent["conv"], state.recurrent["ssm"], context);
  }

  std::vector<Cost> own_costs(int64_t) const override {
    const auto inner = static_cast<double>(inner_);
    return {linear_cost("projections", "2 (3 C I + I (R + 2 N) + R I)",
                        {input_, select_, step_, output_}),
            {.part = "convolution",
             .formula = "(2 W + 4) I",
             .parameters = conv_.numel() + conv_bias_.numel(),
             .flops_per_token = static_cast<double>(2 * conv_.size(1) + 4) * inner},
            {.part = "scan",
             .formula = "(7 N + 8) I",
             .parameters = A_log_.numel() + D_.numel(),
             .flops_per_token = static_cast<double>(7 * d_state_ + 8) * inner}};
  }

  double own_state_bytes(int64_t) const override {
    return 4.0 * static_cast<double>(inner_ * (conv_.size(1) - 1 + d_state_));
  }

 private:
  // The y that the context wants, given what was before x and changed to what x leaves: the last
  // rows of x' [B, W - 1, I] and h [B, I, N].
  Tensor mixed(const Tensor& x, Tensor& rows, Tensor& h, const MixerContext& context) const {
    const Tensor& documents = context.documents;
    Recording* const recording = context.recording;
    const std::vector<Tensor> parts = input_->forward(x).split(inner_, -1);
    const ContextParallel* const among = context_parallel();
    if (among != nullptr) rows = last_rows_before(parts[0], *among);
    Tensor u, y;
    std::tie(u, rows) = ops::causal_conv1d(
        parts[0], conv_,
        {.bias = conv_bias_, .silu = true, .state = rows, .documents = documents, .backend = {}});
    const std::vector<Tensor> selected =
        select_->forward(u).split_with_sizes({dt_rank_, d_state_, d_state_}, -1);
    // In bfloat16 the rates would be rounded.
    const auto wide = at::toOpMathType(x.scalar_type());
    const Tensor dt = ops::linear(selected[0], step_->weight, step_->scale);
    const Tensor A = A_log_.to(wide).exp().neg();
    if (recording != nullptr && recording->wants("decay")) {
      // exp(dt A), [B, T, I, N].
      const Tensor step = at::softplus((dt + step_->bias).to(wide));
      recording->put("decay", (step.unsqueeze(-1) * A).exp());
    }
    ops::SelectiveScanOptions options;
    options.delta_bias = step_->bias;
    options.delta_softplus = true;
    options.documents = documents;
    // How h reads u: without D u_t and the gate.
    const auto scan_alone = [&](const Tensor& values) {
      return ops::selective_scan(values, dt, A, selected[1], selected[2], options);
    };
    if (recording != nullptr && recording->wants("weights.composed")) {
      recording->put("weights.composed", mean_channel_map(u, [&](const Tensor& values) {
                       return std::get<0>(scan_alone(values));
                     }));
    }
    if (among != nullptr) {
      const Tensor steps = at::softplus((dt + step_->bias).to(wide)).sum(1).unsqueeze(-1);
      h = state_before(std::get<1>(scan_alone(u)), (steps * A).exp(), *among);
    }
    options.D = D_;
    options.z = parts[1];
    options.state = h;
    std::tie(y, h) = ops::selective_scan(u, dt, A, selected[1], selected[2], options);
    return output_->forward(newest_of(y, context));
  }

  // The W - 1 rows before each row of positions that processes share out.
  Tensor last_rows_before(const Tensor& x, const ContextParallel& among) const {
    const int64_t reach = conv_.size(1) - 1;
    if (x.size(1) < reach) {
      usage_error("mamba: d_conv is ", conv_.size(1), ", which reaches further back than the ",
                  x.size(1), " positions that a process has in a row, expected longer sequences ",
                  "or fewer processes of train.context_parallel.");
    }
    return reach == 0 ? Tensor() : chunk_before(x.narrow(1, x.size(1) - reach, reach), among);
  }

  int64_t inner_, d_state_, dt_rank_;    // I, N, R
  Tensor conv_, conv_bias_, A_log_, D_;  // [I, W], [I], [I, N], [I]
  std::shared_ptr<Linear> input_;        // x', then z
  std::shared_ptr<Linear> select_;       // dt, B, C
  std::shared_ptr<Linear> step_, output_;
};

}  // namespace

TokenMixerEntry mamba_mixer() {
  return token_mixer<Mamba, MambaOptions>(
      "mamba", "a selective state space after a short convolution, linear in the length",
      "Gu & Dao 2023", {.bidirectional = false, .context_parallel = true});
}

}  // namespace headloom
