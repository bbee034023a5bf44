// Dynamically composable multi-head attention (Xiao et al. 2024, eq. 7 and figure 2): score maps
// and attention weights are composed across heads with weights computed from the query's and the
// key's token.
//
// The dynamic weights come from up to four sides, in the order pre-query, pre-key, post-query,
// post-key (dynamic_weights.h).
#include "core/sizes.h"
#include "mixers/token/attention.h"
#include "mixers/token/dynamic_weights.h"

namespace headloom {
namespace {

struct DcmhaOptions {
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
    f.field("rank", rank, "rank of the dynamic projections", size_from(1));
    f.field("groups", groups, "head groups composed independently", size_from(1));
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

class Dcmha final : public Attention {
 public:
  Dcmha(const DcmhaOptions& options, const LayerShape& shape)
      : Attention(options.attention, AttentionSizes::plain(options.attention, shape), shape),
        keep_skip_(options.static_mix == "add") {
    if (options.attention.heads % options.groups != 0) {
      usage_error("dcmha: groups is ", options.groups,
                  ", expected a divisor of heads = ", options.attention.heads, ".");
    }
    if (options.static_mix != "off" && !options.pre && !options.post) {
      usage_error("dcmha: static is \"", options.static_mix,
                  "\", expected \"off\" where both pre and post are false.");
    }
    const int64_t heads = sizes_.maps, groups = shape.share("groups", options.groups);
    const bool cut = shape.processes() > 1;
    for (const bool post : {false, true}) {
      if (!(post ? options.post : options.pre)) continue;
      if (options.query_wise) sides_.push_back({post, false});
      if (options.key_wise) sides_.push_back({post, true});
    }
    net_.sides = static_cast<int64_t>(sides_.size());
    net_.heads = heads;
    net_.groups = groups;
    net_.rank = options.rank;
    net_.initialize(shape.width, options.projection, options.gate);
    if (net_.w1) {
      register_module("w1", net_.w1);
      parameter("w2", net_.w2, net_.w2);
      if (cut) {
        net_.w1->cut_outputs(net_.segments(net_.w1->weight.size(0)));
        this->cut("w2", {.dim = 1, .segments = {groups}});
      }
    }
    if (net_.gate) {
      register_module("gate", net_.gate);
      if (cut) net_.gate->cut_outputs(net_.segments(net_.gate->weight.size(0)));
    }
    if (options.static_mix == "off") return;
    const auto matrix = [&] {
      const Tensor identity = identity_mix(heads, groups);
      const Tensor m = at::zeros_like(cut ? grouped(identity) : identity);
      // Xavier normal: fan in and fan out are both H / g.
      const int64_t fan = heads / groups;
      return keep_skip_ ? m : normal(m.sizes(), std::sqrt(1 / static_cast<double>(fan)));
    };
    const auto learned = [&](const char* name, Tensor& slot) {
      parameter(name, slot, matrix());
      if (cut) this->cut(name, {.dim = 0, .segments = {groups}});
    };
    if (options.pre) learned("pre_static", pre_static_);
    if (options.post) learned("post_static", post_static_);
  }

  std::vector<Cost> own_costs(int64_t length) const override {
    std::vector<Cost> out = Attention::own_costs(length);
    const auto add = [&](const char* part, const std::string& formula, int64_t parameters,
                         double products) {
      if (products == 0) return;
      out.push_back({.part = part,
                     .formula = formula,
                     .parameters = parameters,
                     .flops_per_token = 2 * products,
                     .mechanism = true});
    };
    const auto number = [](const Tensor& t) { return t.defined() ? t.numel() : int64_t{0}; };
    const auto weights = [&](const auto& map) { return map ? map->weight.numel() : int64_t{0}; };
    const auto real = [](int64_t n) { return static_cast<double>(n); };
    const std::string sides = str(", s = ", net_.sides);
    const int64_t projection = weights(net_.w1) + number(net_.w2);
    add("dynamic projections", "2 s 2 R H (C + 2 R H / g)" + sides, projection, real(projection));
    add("gates", "2 s C H" + sides, weights(net_.gate), real(weights(net_.gate)));
    const int64_t fixed = number(pre_static_) + number(post_static_);
    add("static composition", "2 K H H / g, before and after", fixed,
        mean_keys(length) * real(fixed));
    add("dynamic composition", "2 s K H (2 R + 1)" + sides, 0,
        mean_keys(length) * real(net_.sides * net_.values_per_token()));
    return out;
  }

 protected:
  // Composition weights are kept in low-rank form.
  int64_t values_per_key() const override {
    int64_t key_sides = 0;
    for (const Side& side : sides_) key_sides += side.key ? 1 : 0;
    return Attention::values_per_key() + key_sides * net_.values_per_token();
  }

  void compose(const Tensor& x, const Tensor& memory, ops::ComposedAttentionOptions& o) override {
    std::vector<DynamicWeights> weights;
    if (x.is_same(memory)) {
      weights = net_(x, 0, net_.sides);
    } else {
      for (int64_t i = 0; i < net_.sides; ++i) {
        const Tensor& of = sides_[i].key ? memory : x;
        weights.push_back(of.defined() ? net_(of, i, 1)[0] : DynamicWeights());
      }
    }
    for (int64_t i = 0; i < net_.sides; ++i) {
      ops::HeadMix& mix = sides_[i].post ? o.post : o.pre;
      const bool key = sides_[i].key;
      (key ? mix.k_down : mix.q_down) = weights[i].down;
      (key ? mix.k_up : mix.q_up) = weights[i].up;
      (key ? mix.k_gate : mix.q_gate) = weights[i].gate;
    }
    const auto fixed = [&](const Tensor& learned) {
      const Tensor matrix = ungrouped(learned);
      if (!keep_skip_ || !matrix.defined()) return matrix;
      return matrix + identity_mix(net_.heads, net_.groups, matrix.options().requires_grad(false));
    };
    o.pre.static_matrix = fixed(pre_static_);
    o.post.static_matrix = fixed(post_static_);
    o.pre.groups = o.post.groups = net_.groups;
  }

 private:
  const bool keep_skip_;
  DynamicWeightNetworks net_;
  std::vector<Side> sides_;          // those switched on, in the order above
  Tensor pre_static_, post_static_;  // [H, H] or [g, n, n]
};

}  // namespace

TokenMixerEntry dcmha_mixer() {
  return token_mixer<Dcmha, DcmhaOptions>(
      "dcmha", "heads composed with weights computed from query and key tokens", "Xiao et al. 2024",
      {.cross_attention = true, .tensor_parallel = true});
}

}  // namespace headloom
