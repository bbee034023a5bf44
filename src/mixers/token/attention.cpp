#include "mixers/token/attention.h"

#include "core/sizes.h"
#include "mixers/check.h"
#include "mixers/token/attend.h"
#include "mixers/token/attention_maps.h"
#include "ops/linear/op.h"
#include "ops/positionwise/op.h"

namespace headloom {

void AttentionOptions::fields(Fields& f) {
  f.field("heads", heads, "query heads", size_from(1));
  f.field("kv_heads", kv_heads, "key and value heads; absent: as many as heads", size_from(1));
  f.field("head_dim", head_dim, "size of a head; absent: width / heads", size_from(1));
  f.field(
      "window", window,
      "keys a query sees, its own included, on either side where it looks both ways; absent: all",
      at_least(int64_t{1}));
  f.field("qk_norm", qk_norm, "RMS norm of each query and key head before positions");
  f.field("qkv_bias", qkv_bias, "biases of queries, keys and values even where the model has none");
}

AttentionSizes AttentionSizes::plain(const AttentionOptions& o, const LayerShape& shape) {
  const int64_t groups = o.kv_heads.value_or(o.heads);
  if (o.heads % groups != 0) {
    usage_error("kv_heads is ", groups, ", expected a divisor of heads = ", o.heads, ".");
  }
  if (!o.head_dim && shape.width % o.heads != 0) {
    usage_error("heads is ", o.heads, ", expected a divisor of the model's width = ", shape.width,
                " (or set head_dim).");
  }
  const int64_t dim = o.head_dim.value_or(shape.width / o.heads);
  const int64_t heads = shape.share("heads", o.heads), own = shape.share("kv_heads", groups);
  return {.maps = heads,
          .keys = own,
          .values = own,
          .outputs = heads,
          .head_dim = dim,
          .v_dim = dim};
}

Tensor identity_mix(int64_t heads, int64_t groups, const at::TensorOptions& options) {
  const Tensor one = at::eye(heads / groups, options);
  return groups == 1 ? one : one.expand({groups, -1, -1}).contiguous();
}

Tensor grouped(const Tensor& matrix) {
  return matrix.dim() == 2 ? matrix.unsqueeze(0) : matrix;
}

Tensor ungrouped(const Tensor& matrix) {
  return matrix.defined() && matrix.dim() == 3 && matrix.size(0) == 1 ? matrix.squeeze(0) : matrix;
}

double lambda_init(int64_t layer) {
  return 0.8 - 0.6 * std::exp(-0.3 * static_cast<double>(layer));
}

Attention::Attention(const AttentionOptions& options, const AttentionSizes& sizes,
                     const LayerShape& shape)
    : options_(options), sizes_(sizes), shape_(shape) {
  if (shape.cross && options.window) {
    usage_error("window is ", *options.window,
                ", but cross-attention reads the whole source, expected none.");
  }
  if (shape.context_parallel && (options.window || shape.position.type == "alibi")) {
    usage_error(options.window ? str("window is ", *options.window) : "position.type is \"alibi\"",
                ", but 'train.context_parallel' is ", shape.context_parallel->size,
                ", expected none where positions are shared out.");
  }
  qkv_ = register_module("qkv",
                         std::make_shared<Linear>(shape.width, sizes.qkv_width(),
                                                  shape.bias || options.qkv_bias, shape.init_std));
  output_ = register_module("output", std::make_shared<Linear>(sizes.output_width(), shape.width,
                                                               shape.bias, shape.output_std()));
  if (shape.processes() > 1) {
    qkv_->cut_outputs({sizes.maps * sizes.head_dim, sizes.keys * sizes.head_dim,
                       sizes.values * sizes.v_dim});
    output_->cut_inputs(shape.processes());
  }
  if (options.qk_norm) {
    parameter("q_norm", q_scale_, at::ones({sizes.head_dim}));
    parameter("k_norm", k_scale_, at::ones({sizes.head_dim}));
  }
  // Queries and keys of cross-attention are not rotated.
  if (shape.position.type == "rope" && !shape.cross)
    rotary_.emplace(shape.position, sizes.head_dim);
}

void Attention::compose(const Tensor&, const Tensor&, ops::ComposedAttentionOptions&) {}

Attention::Heads Attention::project(const Tensor& x, const Tensor& memory) {
  const int64_t q_width = sizes_.maps * sizes_.head_dim;
  const int64_t k_width = sizes_.keys * sizes_.head_dim;
  const int64_t v_width = sizes_.values * sizes_.v_dim;
  Tensor q, k, v;
  if (x.is_same(memory)) {
    // One split: each narrow's backward would fill and add a whole [B, T, Q + K + V].
    const auto parts = qkv_->forward(x).split_with_sizes({q_width, k_width, v_width}, -1);
    q = parts[0];
    k = parts[1];
    v = parts[2];
  } else {
    if (x.defined()) q = qkv_->outputs(x, 0, q_width);
    if (memory.defined()) {
      const Tensor kv = qkv_->outputs(memory, q_width, k_width + v_width);
      k = kv.narrow(-1, 0, k_width);
      v = kv.narrow(-1, k_width, v_width);
    }
  }
  if (q.defined()) q = q.unflatten(-1, {sizes_.maps, sizes_.head_dim});
  if (k.defined()) {
    k = k.unflatten(-1, {sizes_.keys, sizes_.head_dim});
    v = v.unflatten(-1, {sizes_.values, sizes_.v_dim});
  }
  return normed({.q = q, .k = k, .v = v});
}

Attention::Heads Attention::project_step(const Tensor& x) {
  const Tensor all = qkv_->forward(x);
  const auto part = [&](int64_t from, int64_t heads, int64_t dim) {
    return all.as_strided({all.size(0), all.size(1), heads, dim},
                          {all.stride(0), all.stride(1), dim, 1}, all.storage_offset() + from);
  };
  const int64_t k = sizes_.maps * sizes_.head_dim, v = k + sizes_.keys * sizes_.head_dim;
  return normed({.q = part(0, sizes_.maps, sizes_.head_dim),
                 .k = part(k, sizes_.keys, sizes_.head_dim),
                 .v = part(v, sizes_.values, sizes_.v_dim)});
}

Attention::Heads Attention::normed(Heads h) const {
  if (!options_.qk_norm) return h;
  if (h.q.defined()) h.q = ops::rms_norm(h.q, q_scale_, 1e-6);
  if (h.k.defined()) h.k = ops::rms_norm(h.k, k_scale_, 1e-6);
  return h;
}

Tensor Attention::compute(const Tensor& x, const MixerContext& context) {
  const bool cross = context.memory.defined();
  if (cross && options_.window) {
    usage_error(type(), ": window is ", *options_.window,
                ", but a memory is read as a whole, expected none beside a memory.");
  }
  const Tensor& memory = cross ? context.memory : x;
  Heads h = project(x, memory);
  Positions before;
  if (context_parallel() != nullptr) before = context_parallel()->before(x.size(0), x.size(1));
  if (rotary_ && !cross) {
    h.q = rotary_->apply(h.q, before);
    h.k = rotary_->apply(h.k, before);
  }
  if (context_parallel() != nullptr) {
    return output_->forward(ring_attention(h.q, h.k, h.v, *context_parallel()).flatten(-2));
  }
  ops::ComposedAttentionOptions o;
  o.causal = shape_.causal && !cross;
  o.window = options_.window;
  o.lengths = cross ? context.memory_lengths : context.lengths;
  if (!cross) o.documents = context.documents;
  if (shape_.position.type == "alibi" && !cross) {
    const Tensor all = alibi_bias(shape_.processes() * sizes_.maps, h.q.sym_size(1),
                                  h.k.sym_size(1), h.q.options());
    o.bias = order_maps(all.narrow(1, shape_.rank() * sizes_.maps, sizes_.maps), 1);
  }
  compose(x, memory, o);
  const Tensor heads =
      finish(shown_attention(order_maps(h.q, 2), h.k, h.v, o, context, own_order()));
  return output_->forward(heads.flatten(-2));
}

Tensor Attention::own_order() const {
  const Tensor own = at::arange(sizes_.maps, at::kLong);
  const Tensor order = order_maps(own, 0);
  return order.is_same(own) ? Tensor() : order.argsort();
}

std::optional<HeadProjections> Attention::head_projections() const {
  const auto rows = qkv_->weight.split_with_sizes(
      {sizes_.maps * sizes_.head_dim, sizes_.keys * sizes_.head_dim, sizes_.values * sizes_.v_dim});
  // [heads, C, size], each group's as often as maps read it.
  const auto heads = [](const Tensor& weight, int64_t present, int64_t maps) {
    return weight.unflatten(0, {present, -1}).transpose(1, 2).repeat_interleave(maps / present, 0);
  };
  const Tensor& written = output_->weight;  // [C, H' E]
  const Tensor order = own_order();
  HeadProjections out{.q = heads(rows[0], sizes_.maps, sizes_.maps),
                      .k = heads(rows[1], sizes_.keys, sizes_.maps),
                      .v = heads(rows[2], sizes_.values, sizes_.outputs),
                      .o = written.t().unflatten(0, {sizes_.outputs, sizes_.v_dim})};
  // The operator maps its own order of maps to key heads.
  if (order.defined()) out.k = out.k.index_select(0, order);
  return out;
}

Tensor Attention::compute_next(const Tensor& x, MixerState& state, const MixerContext& context) {
  const Heads h = project_step(x);
  ops::ComposedAttentionOptions o;
  compose(x, x, o);
  AttendOptions how{.rotary = rotary_ ? &*rotary_ : nullptr, .window = options_.window};
  if (shape_.position.type == "alibi") {
    how.bias = [&](const Tensor& distance) {
      return order_maps(alibi_bias(sizes_.maps, distance, h.q.options()), 1);
    };
  }
  const Tensor heads = attend(order_maps(h.q, 2), h.k, h.v, o, how, state, context);
  return output_->forward(finish(heads).flatten(-2));
}

MixerState Attention::build_cross_cache(const Tensor& memory, const Tensor& lengths) {
  check_features(*this, "memory", memory, width());
  if (lengths.defined()) check_lengths(*this, "the memory's lengths", lengths, memory);
  const Heads h = project({}, memory);
  ops::ComposedAttentionOptions o;
  compose({}, memory, o);
  return headloom::build_cross_cache(h.k, h.v, o, lengths);
}

Tensor Attention::extend_cross(const Tensor& x, MixerState& state) {
  const Heads h = project(x, {});
  ops::ComposedAttentionOptions o;
  compose(x, {}, o);
  const Tensor heads = attend_cross(order_maps(h.q, 2), o, state);
  return output_->forward(finish(heads).flatten(-2));
}

double Attention::mean_keys(int64_t length) const {
  const auto t = static_cast<double>(length);
  if (!options_.window || *options_.window >= length) return shape_.causal ? (t + 1) / 2 : t;
  const auto w = static_cast<double>(*options_.window);
  if (shape_.causal) return w - w * (w - 1) / (2 * t);
  return (2 * w - 1) - w * (w - 1) / t;
}

Cost Attention::map_cost(int64_t length) const {
  return {.part = "maps",
          .formula = "2 K (H D + H' E)",
          .flops_per_token =
              2 * mean_keys(length) *
              static_cast<double>(sizes_.maps * sizes_.head_dim + sizes_.outputs * sizes_.v_dim)};
}

std::vector<Cost> Attention::own_costs(int64_t length) const {
  std::vector<Cost> out = {
      linear_cost("projections", "2 C (H D + Gk D + Gv E + H' E)", {qkv_, output_}),
      map_cost(length)};
  if (options_.qk_norm) {
    out.push_back({.part = "QK-norm",
                   .formula = "4 D (H + Gk)",
                   .parameters = 2 * sizes_.head_dim,
                   .flops_per_token =
                       4.0 * static_cast<double>(sizes_.head_dim * (sizes_.maps + sizes_.keys))});
  }
  return out;
}

int64_t Attention::values_per_key() const {
  return sizes_.keys * sizes_.head_dim + sizes_.values * sizes_.v_dim;
}

double Attention::own_state_bytes(int64_t length) const {
  const int64_t earlier = earlier_queries();
  const int64_t keys =
      options_.window ? std::min(length, keys_in_reach(*options_.window, earlier)) : length;
  const int64_t queries = std::min(length, earlier);
  return 4.0 *
         static_cast<double>(keys * values_per_key() + queries * sizes_.maps * sizes_.head_dim);
}

}  // namespace headloom
