// Dynamically composable multi-head attention (Xiao et al. 2024, eq. 7 and figure 2): score maps
// and attention weights are composed across heads with weights computed from the query's and the
// key's token.
//
// The dynamic weights come from up to four "sides", in the order pre-query, pre-key, post-query,
// post-key. With R the rank, n = H / g the heads of a group and I = 2 n R, each side and group has
//
//   hidden = GELU(x W1), W1 [C, I]              (exact GELU)
//   down, up = split(hidden W2), W2 [I, 2 R n]  (first R rows of n heads: down; last R: up)
//   down = down / sqrt(mean over the n heads of down^2 + 1e-6)
//   gate = tanh(x Wg), Wg [C, H]
//
// All sides' weights are stored together so that one product each computes them.
#include "mixers/token/attention.h"

namespace headloom {
namespace {

struct Options {
  AttentionOptions attention;
  int64_t rank = 2;
  int64_t groups = 1;
  bool pre = true;
  bool post = true;
  bool query_wise = true;
  bool key_wise = true;
  bool projection = true;
  bool gate = true;
  std::string static_mix = "off";

  void fields(Fields& f) {
    attention.fields(f);
    f.field("rank", rank, "rank of the dynamic projections", at_least(1));
    f.field("groups", groups, "head groups composed independently", at_least(1));
    f.field("pre", pre, "compose the scores before softmax");
    f.field("post", post, "compose the weights after softmax");
    f.field("query_wise", query_wise, "branches computed from the query's token");
    f.field("key_wise", key_wise, "branches computed from the key's token");
    f.field("projection", projection, "low-rank branches");
    f.field("gate", gate, "gating branches");
    f.field("static", static_mix,
            "learned static matrix: none, in place of the skip, or added to it (from zero)",
            {"off", "replace", "add"});
  }
};

struct Side {
  bool post, key;
};

// What one side contributes to the operator: [B, L, R, H] twice and [B, L, H].
struct Dynamic {
  Tensor down, up, gate;
};

class Dcmha final : public Attention {
 public:
  Dcmha(const Options& options, const LayerShape& shape)
      : Attention(options.attention, AttentionSizes::plain(options.attention, shape), shape),
        own_(options),
        heads_(options.attention.heads),
        inside_(heads_ / options.groups) {
    const int64_t groups = options.groups, rank = options.rank, width = shape.width;
    if (heads_ % groups != 0) {
      usage_error("dcmha: groups is ", groups, ", expected a divisor of heads = ", heads_, ".");
    }
    for (const bool post : {false, true}) {
      if (!(post ? options.post : options.pre)) continue;
      if (options.query_wise) sides_.push_back({post, false});
      if (options.key_wise) sides_.push_back({post, true});
    }
    const auto sides = static_cast<int64_t>(sides_.size());
    const auto normal = [](at::IntArrayRef size, double std) {
      return at::empty(size).normal_(0, std);
    };
    const auto xavier = [](double in, double out) { return std::sqrt(2 / (in + out)); };
    const auto c = static_cast<double>(width), n = static_cast<double>(inside_),
               r = static_cast<double>(rank);
    if (options.projection && sides > 0) {
      const int64_t hidden = 2 * inside_ * rank;
      parameter("w1", w1_,
                normal({width, sides * groups * hidden}, xavier(c, static_cast<double>(hidden))));
      parameter("w2", w2_,
                normal({sides, groups, hidden, 2 * rank * inside_},
                       0.02 / (std::sqrt(2 * n * r) * (n + r))));
    }
    if (options.gate && sides > 0) {
      parameter("gate", gate_, normal({width, sides * heads_}, 0.05 * xavier(c, n)));
    }
    if (options.static_mix == "off") return;
    const auto matrix = [&] {
      const Tensor identity = identity_mix(heads_, groups);
      return options.static_mix == "add" ? at::zeros_like(identity)
                                         : normal(identity.sizes(), xavier(n, n));
    };
    if (options.pre) parameter("pre_static", pre_static_, matrix());
    if (options.post) parameter("post_static", post_static_, matrix());
  }

  std::vector<Cost> costs(int64_t length) const override {
    std::vector<Cost> out = Attention::costs(length);
    const auto number = [](const Tensor& t) { return t.defined() ? t.numel() : int64_t{0}; };
    const auto flops = [](int64_t products) { return 2 * static_cast<double>(products); };
    const int64_t projection = number(w1_) + number(w2_);
    if (projection > 0) {
      out.push_back({.part = "dynamic projections",
                     .formula = str("2 s 2 R H (C + 2 R H / g), s = ", sides_.size()),
                     .parameters = projection,
                     .flops_per_token = flops(projection),
                     .mechanism = true});
    }
    if (gate_.defined()) {
      out.push_back({.part = "gates",
                     .formula = str("2 s C H, s = ", sides_.size()),
                     .parameters = number(gate_),
                     .flops_per_token = flops(number(gate_)),
                     .mechanism = true});
    }
    const int64_t fixed = number(pre_static_) + number(post_static_);
    if (fixed > 0) {
      out.push_back({.part = "static composition",
                     .formula = "2 K H H / g for pre and post each",
                     .parameters = fixed,
                     .flops_per_token = mean_keys(length) * flops(fixed),
                     .mechanism = true});
    }
    if (!sides_.empty() && (own_.projection || own_.gate)) {
      const int64_t per_side =
          heads_ * ((own_.projection ? 2 * own_.rank : 0) + (own_.gate ? 1 : 0));
      out.push_back({.part = "dynamic composition",
                     .formula = str("2 s K H (2 R + 1), s = ", sides_.size()),
                     .flops_per_token =
                         mean_keys(length) * flops(static_cast<int64_t>(sides_.size()) * per_side),
                     .mechanism = true});
    }
    return out;
  }

  // The keys' weights are kept in low-rank form.
  double state_bytes_per_token() const override {
    int64_t values = 0;
    for (const Side& side : sides_) {
      if (!side.key) continue;
      values += (own_.projection ? 2 * own_.rank * heads_ : 0) + (own_.gate ? heads_ : 0);
    }
    return Attention::state_bytes_per_token() + 4.0 * static_cast<double>(values);
  }

 protected:
  void compose(const Tensor& x, const Tensor& memory, ops::ComposedAttentionOptions& o) override {
    const auto sides = static_cast<int64_t>(sides_.size());
    std::vector<Dynamic> weights;
    if (x.is_same(memory)) {
      weights = dynamic(x, 0, sides);
    } else {
      for (int64_t i = 0; i < sides; ++i) {
        weights.push_back(dynamic(sides_[i].key ? memory : x, i, 1)[0]);
      }
    }
    for (int64_t i = 0; i < sides; ++i) {
      ops::HeadMix& mix = sides_[i].post ? o.post : o.pre;
      const bool key = sides_[i].key;
      (key ? mix.k_down : mix.q_down) = weights[i].down;
      (key ? mix.k_up : mix.q_up) = weights[i].up;
      (key ? mix.k_gate : mix.q_gate) = weights[i].gate;
    }
    const auto fixed = [&](const Tensor& matrix) {
      if (own_.static_mix != "add" || !matrix.defined()) return matrix;
      return matrix + identity_mix(heads_, own_.groups, matrix.options().requires_grad(false));
    };
    o.pre.static_matrix = fixed(pre_static_);
    o.post.static_matrix = fixed(post_static_);
    o.pre.groups = o.post.groups = own_.groups;
  }

 private:
  // The weights of sides [from, from + count), all computed from x [B, L, C].
  std::vector<Dynamic> dynamic(const Tensor& x, int64_t from, int64_t count) const {
    std::vector<Dynamic> out(count);
    const int64_t batch = x.size(0), length = x.size(1), groups = own_.groups;
    if (w1_.defined() && count > 0) {
      const int64_t hidden = w2_.size(2);
      const Tensor w1 = w1_.narrow(1, from * groups * hidden, count * groups * hidden);
      const Tensor h = at::gelu(at::matmul(x, w1)).view({batch * length, count * groups, hidden});
      const Tensor w = at::bmm(h.transpose(0, 1), w2_.narrow(0, from, count).flatten(0, 1))
                           .view({count, groups, batch, length, 2, own_.rank, inside_});
      const auto halves = w.unbind(4);
      const auto downs = rms_norm(halves[0], 1e-6).unbind(0);
      const auto ups = halves[1].unbind(0);
      // [g, B, L, R, n] -> [B, L, R, H], a view with one group.
      const auto layout = [](const Tensor& t) { return t.permute({1, 2, 3, 0, 4}).flatten(3); };
      for (int64_t i = 0; i < count; ++i) {
        out[i].down = layout(downs[i]);
        out[i].up = layout(ups[i]);
      }
    }
    if (gate_.defined() && count > 0) {
      const Tensor weight = gate_.narrow(1, from * heads_, count * heads_);
      const auto gates = at::tanh(at::matmul(x, weight)).chunk(count, -1);
      for (int64_t i = 0; i < count; ++i) out[i].gate = gates[i];
    }
    return out;
  }

  const Options own_;
  const int64_t heads_, inside_;     // H, n = H / g
  std::vector<Side> sides_;          // those switched on, in the order above
  Tensor w1_;                        // [C, sides g I]
  Tensor w2_;                        // [sides, g, I, 2 R n]
  Tensor gate_;                      // [C, sides H]
  Tensor pre_static_, post_static_;  // [H, H] or [g, n, n]
};

struct DcmhaSpec final : TokenMixerSpec {
  Options options;

  std::string type() const override { return "dcmha"; }
  void fields(Fields& f) override { options.fields(f); }
  std::shared_ptr<TokenMixer> build(const LayerShape& shape) const override {
    return std::make_shared<Dcmha>(options, shape);
  }
};

}  // namespace

TokenMixerEntry dcmha_mixer() {
  return {"dcmha", "heads composed with weights computed from query and key tokens",
          "Xiao et al. 2024",
          [] { return std::shared_ptr<TokenMixerSpec>(std::make_shared<DcmhaSpec>()); }};
}

}  // namespace headloom
