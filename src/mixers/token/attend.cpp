#include "mixers/token/attend.h"

#include "ops/composed_attention/int8.h"

namespace headloom {
namespace {

// The `budget` columns with the largest weight in the newest query's row, ascending: [B, budget].
Tensor heaviest(const Tensor& q, const Tensor& k, const ops::ComposedAttentionOptions& options,
                const Tensor& padding_mask, int64_t budget) {
  const int64_t last = q.size(1) - 1;
  ops::ComposedAttentionOptions o = options;
  // Everything kept stands before the newest query; what its window does not reach, o.mask hides.
  o.causal = false;
  const auto newest = [&](Tensor& t, int64_t dim) {
    if (t.defined() && t.size(dim) > 1) t = t.narrow(dim, last, 1);
  };
  for (Tensor* t : {&o.pre.q_down, &o.pre.q_up, &o.pre.q_gate}) newest(*t, 1);
  newest(o.bias, 2);
  newest(o.mask, 2);
  o.post = {};
  Tensor weight =
      ops::composed_attention_weights(q.narrow(1, last, 1), k, o).to(at::kFloat).mean(1).squeeze(1);
  // Columns before a sequence's first go first.
  if (padding_mask.defined()) {
    weight = weight.masked_fill(padding_mask.squeeze(1).squeeze(1).logical_not(), -1);
  }
  const Tensor chosen = std::get<1>(weight.topk(budget, -1, /*largest=*/true, /*sorted=*/false));
  return std::get<0>(chosen.sort(-1));
}

// The first columns of each sequence and the newest, `budget` together and ascending: [budget], or
// [B, budget] where sequences begin at different ones.
Tensor ends(const Positions& columns, int64_t budget) {
  const int64_t sinks = CachePolicy::kSinks, all = columns.longest;
  const auto index = at::TensorOptions().dtype(at::kLong);
  const Tensor newest = at::arange(all - budget, all, index), first = at::arange(sinks, index);
  if (!columns.left_padding.defined())
    return at::cat({first, newest.narrow(0, sinks, budget - sinks)});
  const Tensor padding = columns.left_padding.unsqueeze(1);
  // A sequence of no more than the budget keeps all of its own.
  const Tensor begin = at::minimum(padding + first, newest.narrow(0, 0, sinks).unsqueeze(0));
  return at::cat({begin, newest.narrow(0, sinks, budget - sinks).expand({padding.size(0), -1})}, 1);
}

// What of the cache stays when a piece has been read.
struct CachePlan {
  std::optional<int64_t> newest;  // columns; absent: all
  // Beyond the budget columns are chosen among all: the first and the newest, whose positions count
  // anew ("sinks"), or those with the largest weights, which leave gaps ("tova").
  bool renumbers = false, has_gaps = false;

  bool chooses() const { return renumbers || has_gaps; }
};

// `convolved`: earlier queries whose rows convolutions read.
CachePlan plan_of(const CachePolicy& policy, std::optional<int64_t> window, int64_t convolved) {
  CachePlan plan;
  if (window) plan.newest = keys_in_reach(*window, convolved);
  // A budget that the window does not use up takes nothing away.
  if (!policy.evicts() || (plan.newest && *plan.newest <= policy.budget)) return plan;
  if (policy.type == "window") plan.newest = policy.budget;
  plan.renumbers = policy.type == "sinks";
  plan.has_gaps = policy.type == "tova";
  return plan;
}

// Queries before a row whose rows a convolution reads.
int64_t reach(const Tensor& kernel) { return kernel.defined() ? kernel.size(-2) - 1 : 0; }

// A tensor and what the state calls it.
using NamedTensor = std::pair<const char*, Tensor*>;

std::vector<NamedTensor> key_weights(ops::ComposedAttentionOptions& o) {
  return {{"pre.k_down", &o.pre.k_down}, {"pre.k_up", &o.pre.k_up},
          {"pre.k_gate", &o.pre.k_gate}, {"post.k_down", &o.post.k_down},
          {"post.k_up", &o.post.k_up},   {"post.k_gate", &o.post.k_gate}};
}

// With the queries themselves.
std::vector<NamedTensor> query_tensors(Tensor& q, ops::ComposedAttentionOptions& o) {
  return {{"query", &q},
          {"pre.q_down", &o.pre.q_down},
          {"pre.q_up", &o.pre.q_up},
          {"pre.q_gate", &o.pre.q_gate},
          {"post.q_down", &o.post.q_down},
          {"post.q_up", &o.post.q_up},
          {"post.q_gate", &o.post.q_gate}};
}

// Appends each tensor that there is to the state's of its name and replaces it by all that is kept.
// The newest `newest` stay (absent: all), and at most `most` from one piece to the next.
void append(MixerState& state, const std::vector<NamedTensor>& tensors,
            std::optional<int64_t> newest, std::optional<int64_t> most) {
  for (const auto& [name, t] : tensors) {
    if (!t->defined()) continue;
    CacheTensor& kept = state.cache[name];
    kept.reserve(state.position.capacity, most);
    *t = kept.append(*t);
    if (newest) kept.keep_last(*newest);
  }
}

// Which of the newest `queries` are a sequence's own, as rows of a mask: those before its first
// count as outside for the convolutions.
Tensor own_queries(const Tensor& padding_mask, int64_t queries) {
  return padding_mask.narrow(-1, padding_mask.size(-1) - queries, queries).transpose(-1, -2);
}

// What depends on the distance between a query and a key: the bias, and, where columns are missing
// between those kept, the window. `positions` [B, columns] are the columns' own places then, and
// undefined where columns stand next to each other.
void add_distances(ops::ComposedAttentionOptions& o, const AttendOptions& how,
                   const Tensor& positions, int64_t columns, int64_t queries, at::Device device) {
  if (positions.defined()) {
    const Tensor distance =
        positions.narrow(1, columns - queries, queries).unsqueeze(-1) - positions.unsqueeze(1);
    if (how.window) {
      const Tensor near = distance.lt(*how.window).unsqueeze(1);
      o.mask = o.mask.defined() ? o.mask.logical_and(near) : near;
    }
    if (how.bias) o.bias = how.bias(distance.abs());
  } else if (how.bias) {
    const auto index = at::TensorOptions().dtype(at::kLong).device(device);
    const Tensor place = at::arange(columns, index);
    o.bias = how.bias(
        (place.narrow(0, columns - queries, queries).unsqueeze(1) - place).abs().unsqueeze(0));
  }
}

}  // namespace

Tensor attend(Tensor q, Tensor k, Tensor v, ops::ComposedAttentionOptions o,
              const AttendOptions& how, MixerState& state, const MixerContext& context) {
  const int64_t added = q.size(1);
  const CachePolicy& policy = state.policy;
  const int64_t convolved = reach(o.pre_conv) + reach(o.post_conv);
  const CachePlan plan = plan_of(policy, how.window, convolved);

  if (how.rotary != nullptr && !plan.renumbers) how.rotary->apply(q, k, state.position);
  // With gaps, distances are no longer those between columns.
  Tensor positions;
  if (plan.has_gaps && (how.window || how.bias)) {
    positions = state.position.position_ids(added, k.device()).expand({k.size(0), added});
  }
  const auto computed = k.scalar_type();
  Tensor k_scale, v_scale;
  if (policy.dtype == "int8") {
    std::tie(k, k_scale) = ops::quantized_heads(k);
    std::tie(v, v_scale) = ops::quantized_heads(v);
  }
  std::vector<NamedTensor> of_keys = key_weights(o);
  of_keys.insert(of_keys.begin(), {{"key", &k},
                                   {"value", &v},
                                   {"key.scale", &k_scale},
                                   {"value.scale", &v_scale},
                                   {"position", &positions}});
  if (plan.chooses()) {
    append(state, of_keys, {}, policy.budget);
  } else {
    append(state, of_keys, plan.newest, plan.newest);
  }
  if (convolved > 0) append(state, query_tensors(q, o), convolved, convolved);
  Positions seen = state.position;
  seen += added;
  // Convolutions read queries that are not wanted themselves.
  if (convolved == 0 && context.newest) {
    for (const auto& [name, t] : query_tensors(q, o)) {
      if (t->defined()) *t = newest_of(*t, context);
    }
  }

  const int64_t columns = k.size(1), queries = q.size(1);
  const Tensor padding_mask = context.padding_mask.defined()
                                  ? context.padding_mask.narrow(-1, seen.longest - columns, columns)
                                  : seen.padding_mask(columns, q.device());
  const Positions own = seen.newest(columns);  // in columns of the state
  // Keys that are turned anew at every step are needed in full.
  const bool in_int8 = k_scale.defined() && !(plan.renumbers && how.rotary != nullptr);
  if (k_scale.defined() && !in_int8) {
    k = ops::dequantized_heads(k, k_scale, computed);
    v = ops::dequantized_heads(v, v_scale, computed);
  }
  if (how.rotary != nullptr && plan.renumbers) {
    q = how.rotary->apply(q, {columns - queries, own.left_padding});
    k = how.rotary->apply(k, {0, own.left_padding});
  }
  // One query sees all that is kept; the newest of several see more than the older ones.
  o.causal = queries > 1;
  if (how.window && columns > *how.window && !positions.defined()) o.window = how.window;
  o.mask = padding_mask;
  if (padding_mask.defined() && queries > added) {
    o.mask = padding_mask.logical_and(own_queries(padding_mask, queries));
  }
  add_distances(o, how, positions, columns, queries, q.device());
  Tensor out = in_int8 ? ops::composed_attention_int8(q, k, v, k_scale, v_scale, o)
                       : ops::composed_attention(q, k, v, o);
  if (queries > added) out = out.narrow(1, queries - added, added);
  if (columns > policy.budget && plan.chooses()) {
    const auto of_newest = [&] {
      const Tensor keys = in_int8 ? ops::dequantized_heads(k, k_scale, computed) : k;
      return heaviest(q, keys, o, padding_mask, policy.budget);
    };
    const Tensor chosen = plan.has_gaps ? of_newest() : ends(own, policy.budget).to(k.device());
    for (const auto& [name, t] : of_keys) {
      if (t->defined()) state.cache.at(name).keep(chosen);
    }
  }
  return out;
}

MixerState build_cross_cache(const Tensor& k, const Tensor& v,
                             const ops::ComposedAttentionOptions& o, const Tensor& lengths) {
  ops::ComposedAttentionOptions composed = o;
  MixerState state{.recurrent = {{"key", k}, {"value", v}, {"lengths", lengths}}};
  for (const auto& [name, t] : key_weights(composed)) state.recurrent[name] = *t;
  // A part of a projection's output would keep all of it.
  for (auto& [name, t] : state.recurrent) t = t.defined() ? t.contiguous() : t;
  return state;
}

Tensor attend_cross(Tensor q, ops::ComposedAttentionOptions o, MixerState& state) {
  const int64_t added = q.size(1), convolved = reach(o.pre_conv) + reach(o.post_conv);
  require(state.recurrent.contains("lengths"),
          "cross-attention has no memory to read: the state is not of build_cross_cache().");
  for (const auto& [name, t] : key_weights(o)) *t = state.recurrent.at(name);
  if (convolved > 0) append(state, query_tensors(q, o), convolved, convolved);
  Positions seen = state.position;
  seen += added;
  const int64_t queries = q.size(1);
  o.causal = false;
  o.lengths = state.recurrent.at("lengths");
  const Tensor padding_mask = queries > added ? seen.padding_mask(queries, q.device()) : Tensor();
  if (padding_mask.defined()) o.mask = own_queries(padding_mask, queries);
  return ops::composed_attention(q, state.recurrent.at("key"), state.recurrent.at("value"), o)
      .narrow(1, queries - added, added);
}

}  // namespace headloom
