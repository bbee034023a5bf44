#include "mixers/token/attend.h"

namespace headloom {
namespace {

// The `budget` columns with the largest weight in the newest query's row, ascending: [B, budget].
Tensor heaviest(const Tensor& q, const Tensor& k, const ops::ComposedAttentionOptions& options,
                const Tensor& present, int64_t budget) {
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
  if (present.defined())
    weight = weight.masked_fill(present.squeeze(1).squeeze(1).logical_not(), -1);
  const Tensor chosen = std::get<1>(weight.topk(budget, -1, /*largest=*/true, /*sorted=*/false));
  return std::get<0>(chosen.sort(-1));
}

// The first columns of each sequence and the newest, `budget` together and ascending: [budget], or
// [B, budget] where sequences begin at different ones.
Tensor ends(const Positions& columns, int64_t budget) {
  const int64_t sinks = CachePolicy::kSinks, all = columns.longest;
  const auto index = at::TensorOptions().dtype(at::kLong);
  const Tensor newest = at::arange(all - budget, all, index), first = at::arange(sinks, index);
  if (!columns.late.defined()) return at::cat({first, newest.narrow(0, sinks, budget - sinks)});
  const Tensor late = columns.late.unsqueeze(1);
  // A sequence of no more than the budget keeps all of its own.
  const Tensor begin = at::minimum(late + first, newest.narrow(0, 0, sinks).unsqueeze(0));
  return at::cat({begin, newest.narrow(0, sinks, budget - sinks).expand({late.size(0), -1})}, 1);
}

// Queries before a row whose rows a convolution reads.
int64_t reach(const Tensor& kernel) { return kernel.defined() ? kernel.size(-2) - 1 : 0; }

std::vector<Tensor*> key_weights(ops::ComposedAttentionOptions& o) {
  return {&o.pre.k_down, &o.pre.k_up, &o.pre.k_gate, &o.post.k_down, &o.post.k_up, &o.post.k_gate};
}

std::vector<Tensor*> query_weights(ops::ComposedAttentionOptions& o) {
  return {&o.pre.q_down, &o.pre.q_up, &o.pre.q_gate, &o.post.q_down, &o.post.q_up, &o.post.q_gate};
}

// Which of the newest `queries` are a sequence's own, as rows of a mask: those before its first
// count as outside for the convolutions.
Tensor own_queries(const Tensor& present, int64_t queries) {
  return present.narrow(-1, present.size(-1) - queries, queries).transpose(-1, -2);
}

}  // namespace

Tensor attend(Tensor q, Tensor k, Tensor v, ops::ComposedAttentionOptions o,
              const AttendOptions& how, MixerState& state, const MixerContext& context) {
  const int64_t added = q.size(1);
  const CachePolicy& policy = state.policy;
  const int64_t earlier = reach(o.pre_conv) + reach(o.post_conv);
  std::optional<int64_t> keys_kept;
  if (how.window) keys_kept = keys_in_reach(*how.window, earlier);
  // A budget that the window does not use up takes nothing away.
  const bool evicts = policy.evicts() && (!keys_kept || *keys_kept > policy.budget);
  if (evicts && policy.type == "window") keys_kept = policy.budget;
  const bool recounted = evicts && policy.type == "sinks";
  const bool gaps = evicts && policy.type == "tova";

  if (how.rotary != nullptr && !recounted) how.rotary->apply(q, k, state.position);
  // With gaps, distances are no longer those between columns.
  Tensor positions;
  if (gaps && (how.window || how.bias)) {
    positions = state.position.next(added).expand({k.size(0), added});
  }
  std::vector<Tensor*> of_keys = key_weights(o), of_queries = query_weights(o);
  of_keys.insert(of_keys.begin(), {&k, &v});
  of_keys.push_back(&positions);
  of_queries.insert(of_queries.begin(), &q);
  state.rows.resize(of_keys.size() + of_queries.size());
  auto rows = state.rows.begin();
  const auto keep = [&](const std::vector<Tensor*>& tensors, std::optional<int64_t> newest,
                        std::optional<int64_t> most) {
    for (Tensor* t : tensors) {
      rows->expect(state.position.room, most);
      if (newest != 0) *t = rows->append(*t);
      if (newest) rows->keep_last(*newest);
      ++rows;
    }
  };
  if (recounted || gaps) {
    keep(of_keys, {}, policy.budget);
  } else {
    keep(of_keys, keys_kept, keys_kept);
  }
  keep(of_queries, earlier, earlier);
  state.position += added;

  const int64_t columns = k.size(1), queries = q.size(1);
  const Tensor present = context.present.defined()
                             ? context.present.narrow(-1, state.position.longest - columns, columns)
                             : state.position.present(columns);
  const Positions own = state.position.newest(columns);  // in columns of the state
  if (how.rotary != nullptr && recounted) {
    q = how.rotary->apply(q, {columns - added, own.late});
    k = how.rotary->apply(k, {0, own.late});
  }
  // One query sees all that is kept; the newest of several see more than the older ones.
  o.causal = queries > 1;
  if (how.window && columns > *how.window && !positions.defined()) o.window = how.window;
  o.mask = present;
  if (present.defined() && queries > added) {
    o.mask = present.logical_and(own_queries(present, queries));
  }
  if (positions.defined()) {
    const Tensor distance =
        positions.narrow(1, columns - queries, queries).unsqueeze(-1) - positions.unsqueeze(1);
    if (how.window) {
      const Tensor near = distance.lt(*how.window).unsqueeze(1);
      o.mask = o.mask.defined() ? o.mask.logical_and(near) : near;
    }
    if (how.bias) o.bias = how.bias(distance.abs());
  } else if (how.bias) {
    const auto index = at::TensorOptions().dtype(at::kLong).device(q.device());
    const Tensor place = at::arange(columns, index);
    o.bias = how.bias(
        (place.narrow(0, columns - queries, queries).unsqueeze(1) - place).abs().unsqueeze(0));
  }
  Tensor out = ops::composed_attention(q, k, v, o);
  if (queries > added) out = out.narrow(1, queries - added, added);
  if (columns > policy.budget && (recounted || gaps)) {
    const Tensor chosen =
        gaps ? heaviest(q, k, o, present, policy.budget) : ends(own, policy.budget);
    for (size_t i = 0; i < of_keys.size(); ++i) state.rows[i].keep(chosen);
  }
  return out;
}

MixerState memory_state(const Tensor& k, const Tensor& v, const ops::ComposedAttentionOptions& o,
                        const Tensor& lengths) {
  ops::ComposedAttentionOptions composed = o;
  MixerState state{.tensors = {lengths, k, v}};
  for (const Tensor* t : key_weights(composed)) state.tensors.push_back(*t);
  // A part of a projection's output would keep all of it.
  for (Tensor& t : state.tensors) t = t.defined() ? t.contiguous() : t;
  state.rows.resize(1 + query_weights(composed).size());
  return state;
}

Tensor attend_memory(Tensor q, ops::ComposedAttentionOptions o, MixerState& state) {
  const int64_t added = q.size(1), earlier = reach(o.pre_conv) + reach(o.post_conv);
  const std::vector<Tensor*> weights = key_weights(o);
  for (size_t i = 0; i < weights.size(); ++i) *weights[i] = state.tensors[3 + i];
  std::vector<Tensor*> of_queries = query_weights(o);
  of_queries.insert(of_queries.begin(), &q);
  if (earlier > 0) {
    for (size_t i = 0; i < of_queries.size(); ++i) {
      Rows& rows = state.rows[i];
      *of_queries[i] = rows.append(*of_queries[i]);
      rows.keep_last(earlier);
    }
  }
  state.position += added;
  const int64_t queries = q.size(1);
  o.causal = false;
  o.lengths = state.tensors[0];
  const Tensor present = queries > added ? state.position.present(queries) : Tensor();
  if (present.defined()) o.mask = own_queries(present, queries);
  return ops::composed_attention(q, state.tensors[1], state.tensors[2], o)
      .narrow(1, queries - added, added);
}

}  // namespace headloom
