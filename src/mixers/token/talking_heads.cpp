// Talking-heads attention (Shazeer et al. 2020; the static compositions of DCMHA, Xiao et al. 2024,
// table 9): one learned matrix mixes the score maps before softmax, one the weights after it.
//
// Three numbers of heads: h_k score maps, h softmax maps, h_v value heads, h_k -> h -> h_v.
#include "core/sizes.h"
#include "mixers/token/attention.h"

namespace headloom {
namespace {

struct TalkingHeadsOptions {
  AttentionOptions attention;
  bool pre = true;
  bool post = true;
  std::optional<int64_t> key_heads;
  std::optional<int64_t> value_heads;

  void fields(Fields& f) {
    attention.fields(f);
    f.field("pre", pre, "mix the scores before softmax");
    f.field("post", post, "mix the weights after softmax");
    f.field("key_heads", key_heads, "score maps before the first mix; absent: heads", size_from(1));
    f.field("value_heads", value_heads, "maps after the second mix; absent: heads", size_from(1));
  }
};

int64_t divide(int64_t width, int64_t heads, const char* key) {
  if (width % heads != 0) {
    usage_error("talking_heads: ", key, " is ", heads,
                ", expected a divisor of the model's width = ", width, " (or set head_dim).");
  }
  return width / heads;
}

AttentionSizes sizes_of(const TalkingHeadsOptions& o, const LayerShape& shape) {
  const int64_t heads = o.attention.heads;
  const int64_t maps = o.key_heads.value_or(heads);
  const int64_t outputs = o.value_heads.value_or(heads);
  if (!o.pre && maps != heads) {
    usage_error("talking_heads: key_heads is ", maps, ", expected heads = ", heads,
                " where pre is off.");
  }
  if (!o.post && outputs != heads) {
    usage_error("talking_heads: value_heads is ", outputs, ", expected heads = ", heads,
                " where post is off.");
  }
  const int64_t keys = o.attention.kv_heads.value_or(maps);
  const int64_t values = o.attention.kv_heads.value_or(outputs);
  if (maps % keys != 0 || outputs % values != 0) {
    usage_error("talking_heads: kv_heads is ", keys, ", expected a divisor of key_heads = ", maps,
                " and value_heads = ", outputs, ".");
  }
  const std::optional<int64_t> dim = o.attention.head_dim;
  return {
      .maps = maps,
      .keys = keys,
      .values = values,
      .outputs = outputs,
      .head_dim = dim ? *dim : divide(shape.width, maps, o.key_heads ? "key_heads" : "heads"),
      .v_dim = dim ? *dim : divide(shape.width, outputs, o.value_heads ? "value_heads" : "heads")};
}

// [from, to]: the identity where from = to; otherwise every output map starts as the mean of the
// input maps on its share of the head axis (a copy where there are more outputs than inputs).
Tensor resampling(int64_t from, int64_t to) {
  const Tensor i = at::arange(from, at::kDouble).unsqueeze(1) / from;
  const Tensor j = at::arange(to, at::kDouble).unsqueeze(0) / to;
  const Tensor end =
      at::minimum(i + 1.0 / static_cast<double>(from), j + 1.0 / static_cast<double>(to));
  return ((end - at::maximum(i, j)).clamp_min(0) * to).to(at::kFloat);
}

class TalkingHeads final : public Attention {
 public:
  TalkingHeads(const TalkingHeadsOptions& options, const LayerShape& shape)
      : Attention(options.attention, sizes_of(options, shape), shape) {
    const int64_t heads = options.attention.heads;
    // The noise breaks the symmetry between heads that start as copies.
    const auto start = [&](int64_t from, int64_t to) {
      return resampling(from, to) + at::empty({from, to}).normal_(0, shape.init_std);
    };
    // Decayed, the scores and the weights themselves would shrink.
    if (options.pre) parameter("pre_mix", pre_, start(sizes_.maps, heads), {.decay = false});
    if (options.post) {
      parameter("post_mix", post_, start(heads, sizes_.outputs), {.decay = false});
    }
  }

  std::vector<Cost> own_costs(int64_t length) const override {
    std::vector<Cost> out = Attention::own_costs(length);
    const int64_t weights =
        (pre_.defined() ? pre_.numel() : 0) + (post_.defined() ? post_.numel() : 0);
    out.push_back({.part = "head mixing",
                   .formula = "2 K (h_k h + h h_v)",
                   .parameters = weights,
                   .flops_per_token = 2 * mean_keys(length) * static_cast<double>(weights),
                   .mechanism = true});
    return out;
  }

 protected:
  void compose(const Tensor&, const Tensor&, ops::ComposedAttentionOptions& o) override {
    o.pre.static_matrix = pre_;
    o.post.static_matrix = post_;
  }

 private:
  Tensor pre_, post_;  // [h_k, h], [h, h_v]
};

}  // namespace

TokenMixerEntry talking_heads_mixer() {
  return token_mixer<TalkingHeads, TalkingHeadsOptions>(
      "talking_heads", "learned static mixing of heads before and after softmax",
      "Shazeer et al. 2020", {.cross_attention = true});
}

}  // namespace headloom
