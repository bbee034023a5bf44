// Mixture of experts (DeepSeekMoE, Dai et al. 2024; options of DeepSeek-V2 and V3, 2024): many
// small SwiGLU experts of which each token chooses a few, beside shared ones that see every token.
//
//   s   = softmax(x Wg) over the routed experts, in float32       or sigmoid(x Wg)
//   y   = shared(x) + sum over the chosen i of g_i expert_i(x)    g_i = s_i
//   add alpha sum_i f_i P_i to the loss                           the balance loss
//
// with f_i = routed / (active tokens) (tokens that chose i) and P_i the mean of s_i, the scores of
// a token taken as shares. The shared experts are one SwiGLU of their joint width.
//
// With bias_speed = u the choice is by s_i + b_i, and each optimiser step moves b_i by
// u sign(mean load - load of i), the load being that of the whole step (DeepSeek-V3,
// section 2.1.2). b is a buffer: no gradient reaches it.
#include <ATen/autocast_mode.h>

#include "core/sizes.h"
#include "mixers/mixer.h"
#include "mixers/padding.h"
#include "mixers/recording.h"
#include "ops/moe/op.h"
#include "ops/positionwise/op.h"

namespace headloom {
namespace {

struct MoeOptions {
  std::optional<int64_t> hidden;
  int64_t routed = 64, shared = 2, active = 6;
  std::string scores = "softmax";
  bool renormalise = false;
  double scaling = 1;
  double balance = 0.001;
  std::optional<double> bias_speed;
  int64_t groups = 1, active_groups = 1;

  void fields(Fields& f) {
    f.field("hidden", hidden,
            "hidden units of an expert; absent: 8/3 width shared out to the experts that see a "
            "token, rounded up to 8",
            size_from(1));
    f.field("routed", routed, "experts to choose from", size_from(1));
    f.field("shared", shared, "experts that see every token", size_from(0));
    f.field("active", active, "routed experts that a token chooses", size_from(1));
    f.field("scores", scores, "from the gate's output to scores", {"softmax", "sigmoid"});
    f.field("renormalise", renormalise, "the chosen experts' weights are made to add up to 1");
    f.field("scaling", scaling, "factor of the chosen experts' weights", positive());
    f.field("balance", balance, "alpha, factor of the balance loss", at_least(0.0));
    f.field("bias_speed", bias_speed,
            "each optimiser step moves a bias, which counts for the choice only, by this much "
            "towards equal load; absent: no bias",
            at_least(0.0));
    f.field("groups", groups, "groups of experts, for a choice limited to some of them",
            size_from(1));
    f.field("active_groups", active_groups, "groups that a token may choose from", size_from(1));
  }

  int64_t hidden_at(int64_t width) const {
    const int64_t usual = (8 * width / (3 * (active + shared)) + 7) / 8 * 8;
    return std::max<int64_t>(hidden.value_or(usual), 1);
  }

  // Throws UsageError for options that contradict each other.
  void check() const {
    if (active > routed) {
      usage_error("moe: active is ", active, ", expected at most routed = ", routed, ".");
    }
    if (routed % groups != 0) {
      usage_error("moe: groups is ", groups, ", expected a divisor of routed = ", routed, ".");
    }
    if (active_groups > groups) {
      usage_error("moe: active_groups is ", active_groups, ", expected at most groups = ", groups,
                  ".");
    }
    if (active > active_groups * (routed / groups)) {
      usage_error("moe: active is ", active, ", expected at most the ",
                  active_groups * (routed / groups), " experts of ", active_groups, " of ", groups,
                  " groups.");
    }
  }
};

class Moe final : public ChannelMixer {
 public:
  Moe(const MoeOptions& options, const LayerShape& shape)
      : options_(options), processes_(shape.processes()) {
    options.check();
    const int64_t width = shape.width;
    hidden_ = shape.share("hidden", options.hidden_at(width));
    gate_ = register_module("gate",
                            std::make_shared<Linear>(width, options.routed, false, shape.init_std));
    gate_->may_narrow = false;  // a choice has no small error
    parameter("up", up_, normal({options.routed, 2 * hidden_, width}, shape.init_std));
    parameter("down", down_, normal({options.routed, width, hidden_}, shape.output_std()));
    if (options.shared > 0) {
      shared_up_ = register_module(
          "shared_up",
          std::make_shared<Linear>(width, 2 * options.shared * hidden_, false, shape.init_std));
      shared_down_ = register_module(
          "shared_down",
          std::make_shared<Linear>(options.shared * hidden_, width, false, shape.output_std()));
    }
    if (options.bias_speed) buffer("choice_bias", choice_bias_, at::zeros({options.routed}));
    if (processes_ == 1) return;
    // Every process has some units of each expert, and the whole gate.
    cut("up", {.dim = 1, .segments = {hidden_, hidden_}});
    cut("down", {.dim = 2, .segments = {hidden_}});
    if (!shared_up_) return;
    shared_up_->cut_outputs({options.shared * hidden_, options.shared * hidden_});
    shared_down_->cut_inputs(processes_);
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    const Tensor tokens = x.flatten(0, -2);
    const Tensor scores = score(tokens);
    const Tensor choice = choose(scores);
    Tensor weight = scores.gather(1, choice);
    if (options_.renormalise) weight = weight / (weight.sum(1, true) + 1e-20);
    if (options_.scaling != 1) weight = weight * options_.scaling;
    if (context.auxiliary != nullptr) observe(x, scores, choice, context);
    if (context.recording != nullptr) {
      const auto of_position = [&](const Tensor& t) {
        return t.unflatten_symint(0, x.sym_sizes().slice(0, 2));
      };
      context.recording->put("experts", of_position(choice));
      context.recording->put("expert_weights", of_position(weight));
      context.recording->put("expert_scores", of_position(scores));
    }
    Tensor y = ops::moe(tokens, up_, down_, choice, weight).view_symint(x.sym_sizes());
    if (!shared_up_) return y;
    return y + shared_down_->forward(ops::swiglu(shared_up_->forward(x)));
  }

  std::vector<Cost> costs() const override {
    const int64_t routed = up_.numel() + down_.numel();
    const int64_t working = routed / options_.routed * options_.active;
    std::vector<Cost> costs = {{.part = "routed experts",
                                .formula = "6 C I active",
                                .parameters = routed,
                                .flops_per_token = 2.0 * static_cast<double>(working),
                                .idle_parameters = routed - working},
                               linear_cost("gate of the experts", "2 C routed", {gate_})};
    if (shared_up_) {
      costs.push_back(linear_cost("shared experts", "6 C I shared", {shared_up_, shared_down_}));
    }
    return costs;
  }

  bool balances() const override { return choice_bias_.defined(); }
  void balance(const Tensor& load) override {
    if (!choice_bias_.defined()) return;
    at::NoGradGuard no_grad;
    const Tensor counts = load.to(at::kDouble);
    choice_bias_.add_(at::sign(counts.mean() - counts), *options_.bias_speed);
  }

 private:
  // [N, routed], float32 or wider whatever x is and autocast wants.
  Tensor score(const Tensor& x) const {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto wide = at::promote_types(x.scalar_type(), at::kFloat);
    const Tensor logits = at::linear(x.to(wide), gate_->weight.to(wide));
    return options_.scores == "softmax" ? at::softmax(logits, -1) : at::sigmoid(logits);
  }

  // [N, active].
  Tensor choose(const Tensor& all_scores) const {
    Tensor scores = all_scores.detach();
    if (choice_bias_.defined()) scores = scores + choice_bias_;
    if (options_.active_groups < options_.groups) {
      // A group is as good as its best expert; with sigmoid scores, as its best two (V3).
      const int64_t size = options_.routed / options_.groups;
      const Tensor grouped = scores.unflatten(1, {options_.groups, size});
      const int64_t best = options_.scores == "softmax" ? 1 : std::min<int64_t>(2, size);
      const Tensor value = std::get<0>(grouped.topk(best, -1)).sum(-1);  // [N, groups]
      const Tensor open = std::get<1>(value.topk(options_.active_groups, -1));
      const Tensor closed = at::ones_like(value).scatter(1, open, 0).to(at::kBool);
      scores = grouped.masked_fill(closed.unsqueeze(-1), -std::numeric_limits<double>::infinity())
                   .flatten(1);
    }
    return std::get<1>(scores.topk(options_.active, -1));
  }

  // Adds the balance loss and the load. Padding is no token that experts could be balanced by.
  void observe(const Tensor& x, const Tensor& scores, const Tensor& choice,
               const MixerContext& context) const {
    AuxiliaryOutputs& auxiliary = *context.auxiliary;
    Tensor real;  // [B T]; undefined: all
    if (context.lengths.defined()) {
      real = real_positions(context.lengths, x.sym_size(1)).flatten();
    }
    const Tensor once =
        real.defined() ? real.to(at::kLong).unsqueeze(1).expand_as(choice) : at::ones_like(choice);
    // bincount() would give a compiler a size that it cannot know.
    const Tensor counts = at::zeros({options_.routed}, choice.options())
                              .scatter_add(0, choice.flatten(), once.flatten());
    Tensor& sum = auxiliary.load[context.layer];
    sum = sum.defined() ? sum + counts : counts;
    if (options_.balance > 0) {
      // f and the number of tokens are of what all processes pass at once, whose losses then have
      // the loss of all as their mean. The pieces of a step that follow one another each have their
      // own.
      Tensor of_all = counts;
      Tensor processes = at::ones({1}, counts.options());
      if (auxiliary.sum_counts) {
        const Tensor summed = auxiliary.sum_counts(at::cat({counts, processes}));
        of_all = summed.narrow(0, 0, options_.routed);
        processes = summed.narrow(0, options_.routed, 1);
      }
      const Tensor choices = of_all.sum().clamp_min(1).to(scores.scalar_type());
      const Tensor tokens = choices / static_cast<double>(options_.active) / processes;
      Tensor shares =
          options_.scores == "softmax" ? scores : scores / (scores.sum(1, true) + 1e-20);
      if (real.defined()) shares = shares.masked_fill(~real.unsqueeze(1), 0);
      Tensor loss = (of_all / choices * (shares.sum(0) / tokens)).sum() *
                    (options_.balance * static_cast<double>(options_.routed));
      if (processes_ > 1) {  // whose gradients of the gate and of x add up
        const Tensor own = loss / static_cast<double>(processes_);
        loss = own + (loss - own).detach();
      }
      auxiliary.loss = auxiliary.loss.defined() ? auxiliary.loss + loss : loss;
    }
  }

  const MoeOptions options_;
  const int64_t processes_;
  int64_t hidden_;  // of this process
  std::shared_ptr<Linear> gate_, shared_up_, shared_down_;
  Tensor up_, down_;    // [routed, 2I, C] with the gate's rows first, [routed, C, I]
  Tensor choice_bias_;  // [routed], a buffer
};

}  // namespace

ChannelMixerEntry moe_channel() {
  return channel_mixer<Moe, MoeOptions>(
      "moe", "small SwiGLU experts of which each token chooses a few, and shared ones",
      "Dai et al. 2024 (DeepSeekMoE)", {.tensor_parallel = true});
}

}  // namespace headloom
