// Linformer (Wang et al. 2020): attention over a fixed number k of projected keys and values.
//
//   K' = E^T K, V' = F^T V along the sequence,   E, F [S, k] learned
//   y = concat_h softmax(q_h K'_h^T D^-1/2) V'_h Wo
//
// S is the length of the model's longest sequence.
//
// Linear in the length: no map is larger than [T, k]. A shorter sequence uses the first rows of E
// and F, so keys and values beyond `lengths` count as 0. E and F are shared as `sharing` says:
// none (each head its own), headwise (all heads of a layer), kv (E = F besides), layerwise (one E
// for all heads, keys, values and layers).
#include "core/sizes.h"
#include "mixers/padding.h"
#include "mixers/recording.h"
#include "mixers/token/attention_maps.h"

namespace headloom {
namespace {

struct LinformerOptions {
  int64_t heads = 8;
  int64_t rank = 64;
  std::string sharing = "headwise";

  void fields(Fields& f) {
    f.field("heads", heads, "heads", size_from(1));
    f.field("rank", rank, "k, projected keys and values that every query sees", size_from(1));
    f.field("sharing", sharing, "which projections along the sequence are one",
            {"none", "headwise", "kv", "layerwise"});
  }
};

class Linformer final : public TokenMixer {
 public:
  Linformer(const LinformerOptions& options, const LayerShape& shape) : options_(options) {
    const int64_t dim = shape.head_dim("linformer", options.heads);
    if (shape.position.type == "alibi") {
      usage_error(
          "linformer: projected keys have no distance for alibi, expected another "
          "model.position.type.");
    }
    qkv_ = register_module(
        "qkv", std::make_shared<Linear>(shape.width, 3 * shape.width, shape.bias, shape.init_std));
    output_ = register_module("output", std::make_shared<Linear>(shape.width, shape.width,
                                                                 shape.bias, shape.output_std()));
    if (shape.position.type == "rope") rotary_.emplace(shape.position, dim);

    // As torch's Xavier uniform of [S, k].
    const double bound = std::sqrt(6.0 / static_cast<double>(shape.max_length + options.rank));
    const auto projection = [&] {
      std::vector<int64_t> sizes = {shape.max_length, options.rank};
      if (options.sharing == "none") sizes.insert(sizes.begin(), options.heads);
      return at::empty(sizes).uniform_(-bound, bound);
    };
    if (options.sharing == "layerwise" && shape.shared) {
      // The first layer of the model has the parameter, the others read it.
      Tensor& shared = (*shape.shared)[str("linformer ", shape.max_length, " ", options.rank)];
      if (shared.defined()) {
        shared_parameter(e_, shared);
      } else {
        parameter("e", e_, projection());
        shared = e_;
      }
    } else {
      parameter("e", e_, projection());
    }
    if (options.sharing == "none" || options.sharing == "headwise") {
      parameter("f", f_, projection());
    }
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    const c10::SymInt length = x.sym_size(1);
    const int64_t longest = e_.size(-2);
    if (length > longest) {
      usage_error("linformer: the sequence has ", length,
                  " positions, but its projections are for ", longest,
                  " at most (model.max_length).");
    }
    const std::vector<Tensor> all = qkv_->forward(x).chunk(3, -1);
    const auto part = [&](size_t index) {
      return all[index].unflatten(-1, {options_.heads, -1});
    };
    Tensor q = part(0), k = part(1), v = part(2);
    if (rotary_) {
      q = rotary_->apply(q);
      k = rotary_->apply(k);
    }
    if (context.lengths.defined()) {
      const Tensor real = real_positions(context.lengths, length);
      // Padding may hold anything, so it is replaced rather than multiplied by 0.
      const auto kept = [&](const Tensor& t) {
        return at::where(real.unsqueeze(-1).unsqueeze(-1), t, at::zeros({}, t.options()));
      };
      k = kept(k);
      v = kept(v);
    }
    ops::ComposedAttentionOptions o;
    o.causal = false;
    const Tensor& of_values = f_.defined() ? f_ : e_;
    k = project(k, e_);
    const Tensor heads = shown_attention(q, k, project(v, of_values), o, context);
    if (context.recording != nullptr && context.recording->wants("weights.composed")) {
      // Of the positions themselves: P F^T.
      const Tensor rows = of_values.narrow_symint(-2, 0, length).transpose(-2, -1);
      context.recording->put("weights.composed",
                             at::matmul(ops::composed_attention_weights(q, k, o), rows));
    }
    return output_->forward(heads.flatten(-2));
  }

  std::optional<HeadProjections> head_projections() const override {
    const auto part = [&](int64_t index) {
      const int64_t width = output_->weight.size(0);
      return qkv_->weight.narrow(0, index * width, width)
          .unflatten(0, {options_.heads, -1})
          .transpose(1, 2);
    };
    return HeadProjections{.q = part(0),
                           .k = part(1),
                           .v = part(2),
                           .o = output_->weight.t().unflatten(0, {options_.heads, -1})};
  }

  std::vector<Cost> own_costs(int64_t) const override {
    const auto rank = static_cast<double>(options_.rank);
    const auto width = static_cast<double>(output_->weight.size(0));
    int64_t own = 0;
    for (const auto& item : named_parameters(/*recurse=*/false)) own += item.value().numel();
    return {linear_cost("projections", "8 C C", {qkv_, output_}),
            {.part = "maps", .formula = "4 k C", .flops_per_token = 4 * rank * width},
            {.part = "projections along the sequence",
             .formula = "4 k C",
             .parameters = own,
             .flops_per_token = 4 * rank * width,
             .mechanism = true}};
  }

  double own_state_bytes(int64_t) const override { return 0; }

 private:
  // keys [B, T, H, D] with weights [S, k] or [H, S, k] -> [B, k, H, D].
  static Tensor project(const Tensor& keys, const Tensor& weights) {
    const Tensor rows = weights.narrow_symint(-2, 0, keys.sym_size(1)).transpose(-2, -1);
    if (weights.dim() == 2) {
      return at::matmul(rows, keys.flatten(-2)).unflatten_symint(-1, keys.sym_sizes().slice(2));
    }
    return at::matmul(rows, keys.transpose(1, 2)).transpose(1, 2);
  }

  const LinformerOptions options_;
  std::shared_ptr<Linear> qkv_, output_;
  Tensor e_, f_;  // [S, k] or [H, S, k]; f_ undefined where it is e_
  std::optional<Rotary> rotary_;
};

}  // namespace

TokenMixerEntry linformer_mixer() {
  return token_mixer<Linformer, LinformerOptions>(
      "linformer", "attention over a fixed number of learned combinations of keys and values",
      "Wang et al. 2020",
      {.causal = false, .documents = false, .stateful = false, .projected_keys = true});
}

}  // namespace headloom
