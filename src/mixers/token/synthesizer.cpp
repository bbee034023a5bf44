// Synthesizer (Tay et al. 2021): attention whose scores are made without comparing queries to keys.
//
//   y = concat_h softmax(S_h) v_h Wo,     S [H, T, L], L the longest sequence (model.max_length)
//
//   dense              S_h[t] = relu(x_t W1_h + b1) W2 + b2             W1_h [C, D], W2 [D, L]
//   random             S_h    = R_h                                     R [H, L, L]
//   factorized_dense   S_h[t, i b + j] = A_h[t, i] B_h[t, j]            a b >= L, A and B as dense
//   factorized_random  S_h    = R1_h R2_h^T                             R1, R2 [H, L, k]
//   dot_product        S_h    = q_h k_h^T D^-1/2
//
// Several of them make a mixture, S = sum_i alpha_i S_i with alpha = softmax(mixture). W2 serves
// all heads, as in the authors' code. A shorter sequence uses the first rows and columns. Positions
// count from the beginning of a document.
#include <algorithm>

#include "core/sizes.h"
#include "mixers/mixer.h"
#include "mixers/token/attention_maps.h"
#include "ops/section.h"

namespace headloom {
namespace {

struct SynthesizerOptions {
  int64_t heads = 8;
  std::vector<std::string> scores = {"dense"};
  int64_t rank = 8;
  bool fixed = false;

  void fields(Fields& f) {
    f.field("heads", heads, "heads", size_from(1));
    f.field("scores", scores, "how scores are made; several: their learned mixture",
            {"dense", "random", "factorized_dense", "factorized_random", "dot_product"});
    f.field("rank", rank, "factorized_random: k, rank of a head's scores", size_from(1));
    f.field("fixed", fixed, "random, factorized_random: scores stay as they were drawn");
  }

  void check() const {
    for (size_t i = 0; i < scores.size(); ++i) {
      if (std::find(scores.begin(), scores.begin() + static_cast<std::ptrdiff_t>(i), scores[i]) !=
          scores.begin() + static_cast<std::ptrdiff_t>(i)) {
        usage_error("synthesizer: scores has \"", scores[i], "\" twice, expected each once.");
      }
    }
    if (scores.empty()) usage_error("synthesizer: scores is empty, expected one or more.");
    const bool drawn = std::any_of(scores.begin(), scores.end(), [](const std::string& made) {
      return made == "random" || made == "factorized_random";
    });
    if (fixed && !drawn) {
      usage_error(
          "synthesizer: fixed is true, expected false without random or factorized_random in "
          "scores.");
    }
    if (scores == std::vector<std::string>{"dot_product"}) {
      usage_error(
          "synthesizer: scores is \"dot_product\" alone, which is mha, expected it in a mixture.");
    }
  }
};

// How many positions a state has seen, and which they are in their sequence or document.
struct Places {
  c10::SymInt count = 0;  // S: keys; queries are the last T of them
  Tensor ids = {};        // [B, S] int64; undefined: 0 to S - 1
};

class Synthesizer final : public TokenMixer {
 public:
  Synthesizer(const SynthesizerOptions& options, const LayerShape& shape)
      : options_(options), causal_(shape.causal), longest_(shape.max_length) {
    options.check();
    const int64_t width = shape.width, heads = options.heads;
    const int64_t dim = shape.head_dim("synthesizer", heads);
    if (shape.position.type == "alibi") {
      usage_error(
          "synthesizer: its scores belong to positions already, expected another "
          "model.position.type than alibi.");
    }
    const auto map = [&](const char* name, int64_t in, int64_t out, bool bias, double std) {
      return register_module(name, std::make_shared<Linear>(in, out, bias, std));
    };
    const auto table = [&](const char* name, Tensor& slot, int64_t columns) {
      const Tensor drawn = normal({heads, longest_, columns}, shape.init_std);
      // Biases of positions, whatever their shape.
      options.fixed ? buffer(name, slot, drawn) : parameter(name, slot, drawn, {.decay = false});
    };
    value_ = map("value", width, width, shape.bias, shape.init_std);
    output_ = map("output", width, width, shape.bias, shape.output_std());
    if (has("dense")) {
      dense_hidden_ = map("dense_hidden", width, width, true, shape.init_std);
      dense_ = map("dense", dim, longest_, true, shape.init_std);
    }
    if (has("factorized_dense")) {
      factor_ = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(longest_))));
      const int64_t other = (longest_ - 1) / factor_ + 1;
      factor_hidden_ = map("factor_hidden", width, width, true, shape.init_std);
      factors_ = map("factors", dim, factor_ + other, true, shape.init_std);
    }
    if (has("random")) table("random", random_, longest_);
    if (has("factorized_random")) {
      table("random_rows", random_rows_, options.rank);
      table("random_columns", random_columns_, options.rank);
    }
    if (has("dot_product")) {
      // Rows: q, k.
      qk_ = map("qk", width, 2 * width, shape.bias, shape.init_std);
      if (shape.position.type == "rope") rotary_.emplace(shape.position, dim);
    }
    const auto parts = static_cast<int64_t>(options.scores.size());
    if (parts > 1) parameter("mixture", mixture_, at::zeros({parts}));
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    ops::ComposedAttentionOptions o;
    o.causal = causal_;
    o.lengths = context.lengths;
    o.documents = context.documents;
    Places places{.count = x.sym_size(1)};
    if (context.documents.defined()) places.ids = places_in_documents(context.documents);
    const auto [q, k] = compared(x, {});
    return attend(x, q, k, by_head(value_->forward(x)), places, o, context);
  }

  MixerState initial_state(const CachePolicy& policy) const override {
    if (policy != CachePolicy{}) {
      usage_error(
          "scores its values by their positions, so none can be forgotten or narrowed, but the "
          "cache policy is ",
          policy.text(), policy.dtype.empty() ? "" : " in " + policy.dtype,
          ", expected \"full\" in the model's type.");
    }
    return {};
  }

  Tensor compute_next(const Tensor& x, MixerState& state, const MixerContext& context) override {
    const auto appended = [&](const char* name, const Tensor& t) {
      CacheTensor& kept = state.cache[name];
      kept.reserve(state.position.capacity, {});
      return kept.append(t);
    };
    auto [q, k] = compared(x, state.position);
    if (k.defined()) k = appended("key", k);
    const Tensor v = appended("value", by_head(value_->forward(x)));
    Positions seen = state.position;
    seen += x.size(1);
    Places places{.count = seen.longest};
    if (seen.left_padding.defined()) {
      places.ids =
          Positions{.left_padding = seen.left_padding}.position_ids(seen.longest, x.device());
    }
    ops::ComposedAttentionOptions o;
    o.causal = x.size(1) > 1;
    o.mask = context.padding_mask.defined() ? context.padding_mask
                                            : seen.padding_mask(seen.longest, x.device());
    return attend(x, q, k, v, places, o, context);
  }

  std::optional<int64_t> longest() const override { return longest_; }

  std::vector<Cost> own_costs(int64_t length) const override {
    const auto width = static_cast<double>(output_->weight.size(0));
    const auto heads = static_cast<double>(options_.heads), n = static_cast<double>(length);
    const double keys = causal_ ? (n + 1) / 2 : n;
    std::vector<Cost> out = {
        linear_cost("projections", qk_ ? "8 C C" : "4 C C", {value_, output_, qk_})};
    if (dense_) {
      Cost cost = linear_cost("dense scores", "2 C C + 2 C T", {dense_hidden_, dense_});
      cost.flops_per_token = 2 * width * width + 2 * width * n;
      out.push_back(cost);
    }
    if (factors_) {
      Cost cost =
          linear_cost("factorized dense scores", "2 C C + 2 C (a + b) + H T, a b >= max_length",
                      {factor_hidden_, factors_});
      cost.flops_per_token =
          2 * width * width + 2 * width * static_cast<double>(factors_->weight.size(0)) + heads * n;
      out.push_back(cost);
    }
    const auto learned = [&](const Tensor& t) { return options_.fixed ? 0 : t.numel(); };
    if (random_.defined()) {
      out.push_back({.part = "random scores", .formula = "0", .parameters = learned(random_)});
    }
    if (random_rows_.defined()) {
      out.push_back({.part = "factorized random scores",
                     .formula = "2 H R T",
                     .parameters = learned(random_rows_) + learned(random_columns_),
                     .flops_per_token = 2 * heads * static_cast<double>(options_.rank) * n});
    }
    if (mixture_.defined()) {
      const auto parts = static_cast<double>(mixture_.numel());
      out.push_back({.part = "mixture",
                     .formula = "2 N H T, N kinds of scores",
                     .parameters = mixture_.numel(),
                     .flops_per_token = 2 * parts * heads * n});
    }
    out.push_back({.part = "maps",
                   .formula = qk_ ? "4 K C" : "2 K C",
                   .flops_per_token = (qk_ ? 4 : 2) * keys * width});
    return out;
  }

  double own_state_bytes(int64_t length) const override {
    return 4.0 * static_cast<double>((qk_ ? 2 : 1) * length * output_->weight.size(0));
  }

 private:
  bool has(const char* kind) const {
    return std::find(options_.scores.begin(), options_.scores.end(), kind) != options_.scores.end();
  }

  Tensor by_head(const Tensor& t) const { return t.unflatten(-1, {options_.heads, -1}); }

  // q and k of dot_product [B, T, H, D]; undefined without it.
  std::pair<Tensor, Tensor> compared(const Tensor& x, const Positions& seen) {
    if (!qk_) return {};
    const auto parts = qk_->forward(x).chunk(2, -1);
    Tensor q = by_head(parts[0]), k = by_head(parts[1]);
    if (rotary_) {
      q = rotary_->apply(q, seen);
      k = rotary_->apply(k, seen);
    }
    return {q, k};
  }

  // Rows of a table [H, L, columns] for the last `queries` places: [1 or B, H, T, columns].
  static Tensor rows_of(const Tensor& table, const Places& places, const c10::SymInt& queries) {
    const c10::SymInt from = places.count - queries;
    if (!places.ids.defined()) return ops::section(table, 1, from, queries).unsqueeze(0);
    const Tensor ids = places.ids.narrow_symint(1, from, queries);
    return table.index_select(1, ids.flatten())
        .unflatten_symint(1, ids.sym_sizes())
        .transpose(0, 1);
  }

  // S of all kinds but dot_product for queries x [B, T, C], which are the last of `places`:
  // [1 or B, H, T, S]. `alpha` are the weights of the mixture, if it is one.
  Tensor scores(const Tensor& x, const Places& places, const Tensor& alpha) const {
    const c10::SymInt queries = x.sym_size(1), count = places.count;
    // Columns 0 to count - 1 first: no place is later.
    const auto of = [&](const std::string& kind) {
      if (kind == "dense") {
        const Tensor hidden = at::relu(by_head(dense_hidden_->forward(x)));
        return dense_->outputs(hidden, 0, count).transpose(1, 2);
      }
      if (kind == "random") return rows_of(random_, places, queries).narrow_symint(-1, 0, count);
      if (kind == "factorized_random") {
        const Tensor columns = ops::section(random_columns_, 1, 0, count).transpose(-1, -2);
        return at::matmul(rows_of(random_rows_, places, queries), columns);
      }
      const Tensor both = factors_->forward(at::relu(by_head(factor_hidden_->forward(x))));
      const Tensor a = both.narrow(-1, 0, factor_);
      const Tensor b = both.narrow(-1, factor_, factors_->weight.size(0) - factor_);
      return (a.unsqueeze(-1) * b.unsqueeze(-2))
          .flatten(-2)
          .narrow_symint(-1, 0, count)
          .transpose(1, 2);
    };
    Tensor sum;
    for (size_t i = 0; i < options_.scores.size(); ++i) {
      if (options_.scores[i] == "dot_product") continue;
      Tensor part = of(options_.scores[i]);
      if (alpha.defined()) part = part * alpha.select(0, static_cast<int64_t>(i));
      sum = sum.defined() ? sum + part : part;
    }
    if (!places.ids.defined()) return sum;
    const Tensor columns = places.ids.unsqueeze(1).unsqueeze(1);
    return sum.gather(-1, columns.expand_symint({-1, options_.heads, queries, count}));
  }

  // v [B, S, H, D] under the masks of `o`; q and k as compared() gives them, k of all S keys.
  Tensor attend(const Tensor& x, Tensor q, Tensor k, const Tensor& v, const Places& places,
                ops::ComposedAttentionOptions& o, const MixerContext& context) const {
    if (places.count > longest_) {
      usage_error("synthesizer: the sequence has ", places.count,
                  " positions, but its scores are for ", longest_, " at most (model.max_length).");
    }
    Tensor alpha;
    if (mixture_.defined()) alpha = at::softmax(mixture_, 0);
    o.bias = scores(x, places, alpha).to(v.scalar_type());
    if (q.defined()) {
      const auto which = std::find(options_.scores.begin(), options_.scores.end(), "dot_product");
      q = q * alpha.select(0, which - options_.scores.begin()).to(q.scalar_type());
    } else {
      // Nothing is compared.
      const c10::SymInt batch = x.sym_size(0);
      q = at::zeros_symint({batch, x.sym_size(1), options_.heads, 1}, v.options());
      k = at::zeros_symint({batch, v.sym_size(1), 1, 1}, v.options());
    }
    return output_->forward(shown_attention(q, k, v, o, context).flatten(-2));
  }

  const SynthesizerOptions options_;
  const bool causal_;
  const int64_t longest_;                            // L
  std::shared_ptr<Linear> value_, output_, qk_;      // qk_: dot_product
  std::shared_ptr<Linear> dense_hidden_, dense_;     // W1, W2
  int64_t factor_ = 0;                               // a
  std::shared_ptr<Linear> factor_hidden_, factors_;  // rows: A's, B's
  Tensor random_, random_rows_, random_columns_;     // R, R1, R2
  Tensor mixture_;                                   // [N] where N > 1
  std::optional<Rotary> rotary_;
};

}  // namespace

TokenMixerEntry synthesizer_mixer() {
  return token_mixer<Synthesizer, SynthesizerOptions>(
      "synthesizer", "attention whose scores are learned or made from each query alone",
      "Tay et al. 2021");
}

}  // namespace headloom
