// The attention-free transformer (Zhai et al. 2021): every channel an average of its own over the
// positions, weighted by keys and by learned position biases w.
//
//   q, k, v = x Wq, x Wk, x Wv
//   y_t = (sigmoid(q_t) * sum_s e^{k_s + w[t,s]} v_s / sum_s e^{k_s + w[t,s]}) Wo
#include "core/sizes.h"
#include "mixers/mixer.h"
#include "mixers/recording.h"
#include "mixers/token/value_maps.h"
#include "ops/aft/op.h"

namespace headloom {
namespace {

struct AftOptions {
  std::string form = "local";
  int64_t local_window = 32;
  int64_t heads = 8;
  int64_t factor = 0;

  void fields(Fields& f) {
    f.field("form", form, "where w is learned: nowhere, near, for all pairs, or by distance",
            {"simple", "local", "full", "conv"});
    f.renamed("reach", "local_window");
    f.field("local_window", local_window, "local, conv: w is learned for distances below it",
            size_from(1));
    f.field("heads", heads, "conv: groups of channels with a w each", size_from(1));
    f.field("factor", factor, "full: rank of w = u v^T; 0: every pair by itself", size_from(0));
  }
};

constexpr double kBiasStd = 0.01;

class Aft final : public TokenMixer {
 public:
  Aft(const AftOptions& options, const LayerShape& shape)
      : options_(options), causal_(shape.causal), longest_(shape.max_length) {
    const int64_t width = shape.width;
    if (options.factor > 0 && options.form != "full") {
      usage_error("aft: factor is ", options.factor, ", expected 0 in the form \"", options.form,
                  "\": it is the rank of \"full\".");
    }
    // Rows: q, k, v.
    qkv_ = register_module("qkv",
                           std::make_shared<Linear>(width, 3 * width, shape.bias, shape.init_std));
    output_ = register_module(
        "output", std::make_shared<Linear>(width, width, shape.bias, shape.output_std()));
    const auto learned = [&](const char* name, Tensor& slot, int64_t rows, int64_t columns) {
      // Biases, whatever their shape.
      parameter(name, slot, at::empty({rows, columns}).normal_(0, kBiasStd), {.decay = false});
    };
    const int64_t distances = causal_ ? options.local_window : 2 * options.local_window - 1;
    if (options.form == "local") learned("bias", bias_, longest_, distances);
    if (options.form == "conv") {
      shape.head_dim("aft", options.heads);  // throws where heads do not divide the width
      learned("bias", bias_, options.heads, distances);
    }
    if (options.form == "full" && options.factor == 0) learned("bias", bias_, longest_, longest_);
    if (options.form == "full" && options.factor > 0) {
      learned("bias_u", u_, longest_, options.factor);
      learned("bias_v", v_, longest_, options.factor);
    }
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    ops::AftOptions o;
    o.lengths = context.lengths;
    o.documents = context.documents;
    return std::get<0>(mixed(x, o, context));
  }

  bool stateful() const override {
    return causal_ && (options_.form == "simple" || options_.form == "local");
  }
  std::optional<int64_t> longest() const override {
    return bounded() ? std::optional(longest_) : std::nullopt;
  }
  Tensor compute_next(const Tensor& x, MixerState& state, const MixerContext& context) override {
    Tensor& sums = state.recurrent["aft"];
    const auto next = [&](const Tensor& piece, const Tensor& before, int64_t seen) {
      ops::AftOptions o;
      o.state = before;
      o.offset = seen;
      return mixed(piece, o, context);
    };
    Tensor y;
    if (bounded() && state.position.left_padding.defined()) {
      // The operator's biases belong to one position a column.
      std::vector<Tensor> ys, states;
      for (int64_t b = 0; b < x.size(0); ++b) {
        const auto [own, after] =
            next(x.narrow(0, b, 1), sums.narrow(0, b, 1), state.position.of(b));
        ys.push_back(own);
        states.push_back(after);
      }
      y = at::cat(ys);
      sums = at::cat(states);
    } else {
      std::tie(y, sums) = next(x, sums, state.position.longest);
    }
    return y;
  }

  std::vector<Cost> own_costs(int64_t length) const override {
    const auto width = static_cast<double>(output_->weight.size(0));
    int64_t biases = 0;
    for (const Tensor* t : {&bias_, &u_, &v_}) biases += t->defined() ? t->numel() : 0;
    // Positions a weight of its own is applied to, for both sums.
    const auto n = static_cast<double>(length);
    double pairs = 1;
    std::string formula = "8 C";
    if (options_.form == "full") {
      pairs = causal_ ? (n + 1) / 2 : n;
      formula = causal_ ? "4 C (T + 1) / 2 + 8 C" : "4 C T + 8 C";
    } else if (options_.form != "simple") {
      pairs = std::min(
          n, static_cast<double>(causal_ ? options_.local_window : 2 * options_.local_window - 1));
      formula = "4 C K + 8 C, K the biases in the window";
    } else {
      pairs = 0;
    }
    double own = 0;  // of w itself, once a sequence
    if (u_.defined()) {
      own = 2 * n * static_cast<double>(options_.factor);
      formula += " + 2 T R";
    }
    return {linear_cost("projections", "8 C^2", {qkv_, output_}),
            {.part = "aft " + options_.form,
             .formula = formula,
             .parameters = biases,
             .flops_per_token = (4 * pairs + 8) * width + own}};
  }

  double own_state_bytes(int64_t) const override {
    if (!stateful()) return 0;
    const int64_t near = options_.form == "local" ? options_.local_window - 1 : 0;
    return 4.0 * static_cast<double>((3 + 2 * near) * output_->weight.size(0));
  }

 private:
  // Whether the biases belong to positions.
  bool bounded() const { return options_.form == "local" || options_.form == "full"; }

  // The output that the context wants and the sums after x.
  std::tuple<Tensor, Tensor> mixed(const Tensor& x, ops::AftOptions& o,
                                   const MixerContext& context) const {
    const c10::SymInt last = o.offset + x.sym_size(1);
    if (bounded() && last > longest_) {
      usage_error("aft: form \"", options_.form, "\" has biases for ", longest_,
                  " positions (model.max_length), but the sequence has ", last, ".");
    }
    o.form = options_.form;
    o.causal = causal_;
    o.bias = bias_;
    if (u_.defined()) o.bias = at::matmul(u_, v_.t());
    const auto parts = qkv_->forward(x).chunk(3, -1);
    if (context.recording != nullptr && context.recording->wants("weights.composed")) {
      // The averages before the gate, which is 1/2 everywhere at q = 0.
      context.recording->put("weights.composed", mean_channel_map(parts[2], [&](const Tensor& v) {
                               return 2 * std::get<0>(ops::aft(at::zeros_like(v), parts[1], v, o));
                             }));
    }
    const auto [y, state] = ops::aft(parts[0], parts[1], parts[2], o);
    return {output_->forward(newest_of(y, context)), state};
  }

  const AftOptions options_;
  const bool causal_;
  const int64_t longest_;
  Tensor bias_;   // local [L, K], conv [H, K], full [L, L]
  Tensor u_, v_;  // full, factorised: [L, R]
  std::shared_ptr<Linear> qkv_, output_;
};

}  // namespace

TokenMixerEntry aft_mixer() {
  return token_mixer<Aft, AftOptions>(
      "aft", "attention-free: averages a channel at a time, with learned position biases",
      "Zhai et al. 2021");
}

}  // namespace headloom
