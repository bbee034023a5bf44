// Performer (Choromanski et al. 2021): attention whose softmax is a product of positive random
// features (FAVOR+), so that its sums over the keys are running sums and no map is needed.
//
//   q, k, v   = x Wq, x Wk, x Wv                          H heads of size D
//   phi(z)    = exp(w_i z' - |z'|^2 / 2 - c) + eps        z' = z D^-1/4, rows w_i of W [m, D]
//   y_t       = sum_s (phi(q_t) phi(k_s)) v_s / sum_s phi(q_t) phi(k_s)      then Wo
//
// E[phi(q) phi(k)] = exp(q k D^-1/2) but for eps and c. The rows of W are drawn from N(0, 1), made
// orthogonal in blocks of D with their lengths kept, and drawn again now and then in training. The
// kernel "relu" has phi(z) = relu(w_i z') + eps instead.
//
// c is the authors' stabiliser: for a query the largest of its w_i z', for keys the largest of all
// keys that the query sees. It cancels but for what eps is relative to. In a causal layer it is
// therefore a running maximum, and what the sums hold shrinks wherever the maximum grows: the decay
// of a gated linear attention. eps itself must not shrink with them. It stands in a row of its own:
//
//   phi(q_t) phi(k_s) = sum_i phi_i(q_t) e^(w_i k_s' - |k_s'|^2 / 2 - c_t) + eps sum_i phi_i(q_t)
//
// A column of ones beside the values makes the denominator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/OpMathType.h>

#include <array>
#include <limits>
#include <random>

#include "core/sizes.h"
#include "mixers/mixer.h"
#include "mixers/padding.h"
#include "mixers/recording.h"
#include "mixers/token/value_maps.h"
#include "ops/documents.h"
#include "ops/gated_linear_attention/op.h"

namespace headloom {
namespace {

struct PerformerOptions {
  int64_t heads = 8;
  std::optional<int64_t> features;
  std::string kernel = "softmax";
  std::optional<double> eps;
  bool orthogonal = true;
  int64_t redraw = 1000;

  void fields(Fields& f) {
    f.field("heads", heads, "heads", size_from(1));
    f.field("features", features,
            "random features of a head; absent: D ln D, rounded, of heads of size D", size_from(1));
    f.field("kernel", kernel,
            "of the features: softmax approximates softmax attention, relu does not",
            {"softmax", "relu"});
    // Much smaller, and in float32 their products would not keep a denominator from being 0.
    f.field("eps", eps, "added to each feature; absent: 1e-4 (softmax), 1e-3 (relu)",
            between(1e-9, 1.0));
    f.field("orthogonal", orthogonal, "rows of a block of D features are orthogonal");
    f.field("redraw", redraw, "training steps after which features are drawn again; 0: never",
            at_least(0));
  }
};

// W [features, dim], float32, from torch's default generator where none is given.
Tensor random_features(int64_t features, int64_t dim, bool orthogonal,
                       const std::optional<at::Generator>& generator) {
  if (WithoutValues::on()) return at::empty({features, dim});
  const auto gaussian = [&](at::IntArrayRef sizes) {
    return at::empty(sizes, at::kDouble).normal_(0, 1, generator);
  };
  const Tensor independent = gaussian({features, dim});
  if (!orthogonal) return independent.to(at::kFloat);
  const int64_t blocks = (features - 1) / dim + 1;
  const auto [q, r] = at::linalg_qr(gaussian({blocks, dim, dim}));
  // Signs that make Q uniform among the orthogonal matrices.
  const Tensor directions = q * r.diagonal(0, -2, -1).sign().unsqueeze(-2);
  const Tensor lengths = at::linalg_vector_norm(independent, 2, at::IntArrayRef{-1}, true);
  return (directions.flatten(0, 1).narrow(0, 0, features) * lengths).to(at::kFloat);
}

// The largest of t [B, T, H] up to each position, within its document.
Tensor running_maximum(const Tensor& t, const Tensor& documents) {
  if (!documents.defined()) return std::get<0>(at::cummax(t, 1));
  const int64_t length = t.size(1);
  const Tensor begins = ops::id_changes(documents);
  const Tensor run = at::constant_pad_nd(begins.to(at::kLong).cumsum(1), {1, 0}).unsqueeze(-1);
  // After each round the largest of twice as many positions.
  Tensor out = t;
  for (int64_t step = 1; step < length; step *= 2) {
    const int64_t rest = length - step;
    const auto early = [&](const Tensor& a) { return a.narrow(1, 0, rest); };
    const auto late = [&](const Tensor& a) { return a.narrow(1, step, rest); };
    const Tensor seen = at::where(early(run).eq(late(run)), early(out), late(out));
    out = at::cat({out.narrow(1, 0, step), at::maximum(late(out), seen)}, 1);
  }
  return out;
}

// Of all positions of the document, or of the sequence [B, 1, H].
Tensor whole_maximum(const Tensor& t, const Tensor& documents) {
  if (!documents.defined()) return t.amax(1, /*keepdim=*/true);
  return at::maximum(running_maximum(t, documents),
                     running_maximum(t.flip(1), documents.flip(1)).flip(1));
}

class Performer final : public TokenMixer {
 public:
  Performer(const PerformerOptions& options, const LayerShape& shape)
      : options_(options),
        causal_(shape.causal),
        softmax_(options.kernel == "softmax"),
        eps_(options.eps.value_or(softmax_ ? 1e-4 : 1e-3)) {
    const int64_t dim = shape.head_dim("performer", options.heads);
    if (shape.position.type == "alibi") {
      usage_error(
          "performer: there are no scores for alibi to add to, expected another "
          "model.position.type.");
    }
    const int64_t width = shape.width;
    // Rows: q, k, v.
    qkv_ = register_module("qkv",
                           std::make_shared<Linear>(width, 3 * width, shape.bias, shape.init_std));
    output_ = register_module(
        "output", std::make_shared<Linear>(width, width, shape.bias, shape.output_std()));
    const auto size = static_cast<double>(dim);
    const int64_t features =
        options.features.value_or(std::max<int64_t>(std::llround(size * std::log(size)), 1));
    buffer("features", features_, random_features(features, dim, options.orthogonal, {}));
    if (shape.position.type == "rope") rotary_.emplace(shape.position, dim);
  }

  Tensor compute(const Tensor& x, const MixerContext& context) override {
    const Heads h = project(x, {}, context.documents);
    Tensor real;  // [B, T, 1, 1]
    if (!causal_ && context.lengths.defined()) {
      real = real_positions(context.lengths, x.sym_size(1)).unsqueeze(-1).unsqueeze(-1);
    }
    const Mapped f = mapped(h, real);
    const auto averages = [&](const Tensor& v) {
      return divided(causal_ ? scan(f, v, context.documents, nullptr)
                             : both_ways(f, v, real, context.documents));
    };
    if (context.recording != nullptr && context.recording->wants("weights.composed")) {
      context.recording->put("weights.composed",
                             averages(values_of_positions(h.v)).transpose(1, 2));
    }
    return joined(averages(h.v));
  }

  Tensor compute_next(const Tensor& x, MixerState& state, const MixerContext&) override {
    const Heads h = project(x, state.position, {});
    return joined(divided(scan(mapped(h, {}), h.v, {}, &state)));
  }

  void redraw(int64_t step, uint64_t seed, int64_t layer) override {
    if (options_.redraw == 0 || step % options_.redraw != 0) return;
    const auto low = [](uint64_t word) { return static_cast<uint32_t>(word); };
    const auto count = static_cast<uint64_t>(step);
    std::seed_seq key{low(seed), low(seed >> 32), low(count), low(count >> 32),
                      low(static_cast<uint64_t>(layer))};
    std::array<uint32_t, 2> words;
    key.generate(words.begin(), words.end());
    const at::Generator generator =
        at::detail::createCPUGenerator(uint64_t{words[0]} << 32 | words[1]);
    at::NoGradGuard no_grad;
    features_.copy_(
        random_features(features_.size(0), features_.size(1), options_.orthogonal, generator));
  }

  std::vector<Cost> own_costs(int64_t) const override {
    const auto width = static_cast<double>(output_->weight.size(0));
    const auto features = static_cast<double>(features_.size(0));
    const auto sums = static_cast<double>(rows()) * (width + static_cast<double>(options_.heads));
    return {linear_cost("projections", "8 C C", {qkv_, output_}),
            {.part = "features", .formula = "4 M C", .flops_per_token = 4 * features * width},
            {.part = "sums over the keys",
             .formula = str(causal_ ? "5" : "4", " H ", softmax_ ? "(M + 1)" : "M", " (D + 1)"),
             .flops_per_token = (causal_ ? 5 : 4) * sums}};
  }

  double own_state_bytes(int64_t) const override {
    const int64_t width = output_->weight.size(0), heads = options_.heads;
    return 4.0 * static_cast<double>(rows() * (width + heads) + (softmax_ ? heads : 0));
  }

 private:
  struct Heads {
    Tensor qk;  // [B, T, 2 H, D], rotated: queries, then keys
    Tensor v;   // [B, T, H, D]
  };
  // What keys and queries become before c of the keys is known. Of the kernel "relu" its features.
  struct Mapped {
    Tensor q;        // [B, T, H, rows()]
    Tensor k;        // [B, T, H, M]; softmax: the exponents
    Tensor largest;  // softmax: [B, T, H] of each key's w_i k'; minus infinity for padding
  };

  // Rows of a head's sums: the features and, with softmax, eps's row.
  int64_t rows() const { return features_.size(0) + (softmax_ ? 1 : 0); }

  Heads project(const Tensor& x, const Positions& seen, const Tensor& documents) {
    const int64_t heads = options_.heads;
    const auto parts =
        qkv_->forward(x).unflatten(-1, {3 * heads, -1}).split_with_sizes({2 * heads, heads}, 2);
    Heads h{.qk = parts[0], .v = parts[1]};
    if (!rotary_) return h;
    // Random features of turned vectors depend on where both stand, not on their distance alone.
    h.qk = documents.defined() ? rotary_->apply_at(h.qk, places_in_documents(documents))
                               : rotary_->apply(h.qk, seen);
    return h;
  }

  Mapped mapped(const Heads& h, const Tensor& real) const {
    // Exponents keep their precision under autocast.
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto wide = at::toOpMathType(h.qk.scalar_type());
    const double scale = std::pow(static_cast<double>(features_.size(1)), -0.25);
    const int64_t heads = options_.heads;
    const Tensor qk = h.qk.to(wide) * scale;
    const Tensor on = at::matmul(qk, features_.to(wide).t());  // [B, T, 2 H, M]
    if (!softmax_) {
      const auto parts = (at::relu(on) + eps_).split(heads, 2);
      return {.q = parts[0], .k = parts[1], .largest = {}};
    }
    const auto most = on.amax(-1, true).split(heads, 2);
    const auto exponents = at::sub(on, qk.square().sum(-1, true), 0.5).split(heads, 2);
    const Tensor of_q = (exponents[0] - most[0]).exp() + eps_;
    Tensor largest = most[1].squeeze(-1);
    if (real.defined()) {
      largest = at::where(real.squeeze(-1), largest,
                          at::full({}, -std::numeric_limits<double>::infinity(), qk.options()));
    }
    return {
        .q = at::cat({of_q, eps_ * of_q.sum(-1, true)}, -1), .k = exponents[1], .largest = largest};
  }

  // The keys' rows [B, T, H, rows()], given c [B, T or 1, H]. Padding has no part in any sum.
  Tensor keys(const Mapped& f, const Tensor& c, const Tensor& real) const {
    const auto kept = [&](const Tensor& t, double otherwise) {
      return real.defined() ? at::where(real, t, at::full({}, otherwise, t.options())) : t;
    };
    if (!softmax_) return kept(f.k, 0);
    const Tensor rows = kept(f.k - c.unsqueeze(-1), -std::numeric_limits<double>::infinity()).exp();
    if (!real.defined()) return with_one_more(rows, 1);
    return at::cat({rows, kept(at::ones_like(f.largest).unsqueeze(-1), 0)}, -1);
  }

  // These give numerators and denominators, [B, T, H, D + 1].

  // `state`, unless null, is what was before, and becomes what is after.
  Tensor scan(const Mapped& f, const Tensor& v, const Tensor& documents, MixerState* state) const {
    Tensor c, log_decay;
    if (softmax_) {
      const bool single = f.largest.sym_size(1).maybe_as_int() == 1;
      c = single ? f.largest : running_maximum(f.largest, documents);
      Tensor before = c.narrow(1, 0, 1);
      if (state != nullptr) {
        Tensor& kept = state->recurrent["performer.max"];
        if (kept.defined()) {
          before = kept.unsqueeze(1);
          c = at::maximum(c, before);
        }
        kept = c.select(1, -1).clone();
      }
      // Where a document begins, c may fall; nothing is kept there.
      const Tensor earlier =
          single ? before : at::cat({before, c.narrow_symint(1, 0, c.sym_size(1) - 1)}, 1);
      const Tensor shrunk = (earlier - c).clamp_max(0).unsqueeze(-1);
      log_decay = with_one_more(shrunk.expand_as(f.k), 0);
    } else {
      log_decay = at::zeros_like(f.k);
    }
    const auto type = v.scalar_type();
    Tensor before;
    if (state != nullptr) before = state->recurrent["performer"];
    const auto [sums, after] =
        ops::gated_linear_attention(f.q.to(type), keys(f, c, {}).to(type), with_one_more(v, 1),
                                    log_decay, {.state = before, .documents = documents});
    if (state != nullptr) state->recurrent["performer"] = after;
    return sums;
  }

  Tensor both_ways(const Mapped& f, Tensor v, const Tensor& real, const Tensor& documents) const {
    // Padding may hold anything, so it is replaced rather than multiplied by 0.
    if (real.defined()) v = at::where(real, v, at::zeros({}, v.options()));
    v = with_one_more(v, 1);
    const Tensor c = softmax_ ? whole_maximum(f.largest, documents) : Tensor();
    const Tensor q = f.q.to(v.scalar_type()), k = keys(f, c, real).to(v.scalar_type());
    if (!documents.defined()) {
      const auto heads_first = [](const Tensor& t) { return t.transpose(1, 2); };
      const Tensor sums = at::matmul(heads_first(k).transpose(-1, -2), heads_first(v));
      return at::matmul(heads_first(q), sums).transpose(1, 2);
    }
    // Each position is in both sums, the one from the first position and the one from the last.
    const Tensor nothing = at::zeros_like(f.q);
    const auto to_each = [&](const Tensor& a, const Tensor& b, const Tensor& d, const Tensor& ids) {
      return std::get<0>(
          ops::gated_linear_attention(a, b, d, nothing, {.state = {}, .documents = ids}));
    };
    const Tensor later = to_each(q.flip(1), k.flip(1), v.flip(1), documents.flip(1)).flip(1);
    return to_each(q, k, v, documents) + later - (q * k).sum(-1, true) * v;
  }

  static Tensor with_one_more(const Tensor& t, double value) {
    return at::constant_pad_nd(t, {0, 1}, value);
  }

  static Tensor divided(const Tensor& sums) {
    // A sequence of no length has sums of 0.
    const Tensor all = sums.narrow(-1, -1, 1).clamp_min(std::numeric_limits<float>::min());
    return sums.slice(-1, 0, -1) / all;
  }

  Tensor joined(const Tensor& averages) const { return output_->forward(averages.flatten(-2)); }

  const PerformerOptions options_;
  const bool causal_, softmax_;
  const double eps_;
  Tensor features_;  // W [M, D], a buffer
  std::shared_ptr<Linear> qkv_, output_;
  std::optional<Rotary> rotary_;
};

}  // namespace

TokenMixerEntry performer_mixer() {
  return token_mixer<Performer, PerformerOptions>(
      "performer", "attention by positive random features, linear in the length",
      "Choromanski et al. 2021");
}

}  // namespace headloom
