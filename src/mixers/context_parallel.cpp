#include "mixers/context_parallel.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace headloom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int64_t pointer(const ContextParallel& among) { return reinterpret_cast<int64_t>(&among); }
const ContextParallel& context_parallel(AutogradContext* context) {
  return *reinterpret_cast<const ContextParallel*>(context->saved_data["among"].toInt());
}

struct GatherChunks : torch::autograd::Function<GatherChunks> {
  static Tensor forward(AutogradContext* context, const Tensor& own, const ContextParallel* among) {
    context->saved_data["among"] = pointer(*among);
    const std::vector<Tensor> all = among->gather(own.detach().contiguous());
    const int64_t batch = own.size(0) / 2;
    std::vector<Tensor> chunks;
    for (const Tensor& rows : all) chunks.push_back(rows.narrow(0, 0, batch));
    for (size_t r = all.size(); r-- > 0;) chunks.push_back(all[r].narrow(0, batch, batch));
    return at::stack(chunks);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const ContextParallel& among = context_parallel(context);
    const auto wide = gradients[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const Tensor sum = gradients[0].to(wide, /*non_blocking=*/false, /*copy=*/true).contiguous();
    among.sum(sum);
    return {own_chunks(sum, among).to(gradients[0].scalar_type()), Tensor()};
  }
};

// Of the queries of one chunk and the keys and values of one chunk, [B, L, heads, D] each. The
// attention of ATen has [B, heads, L, D] and knows no groups of query heads.
struct ChunkPair {
  Tensor q, k, v;
  bool causal;  // the chunk itself; otherwise all keys are before the queries

  ChunkPair(const Tensor& queries, const Tensor& keys, const Tensor& values, bool own)
      : q(queries.transpose(1, 2)),
        k(for_queries(keys, queries.size(2))),
        v(for_queries(values, queries.size(2))),
        causal(own) {}

  static Tensor for_queries(const Tensor& t, int64_t heads) {
    const Tensor by_head = t.transpose(1, 2);
    return heads == t.size(2) ? by_head : by_head.repeat_interleave(heads / t.size(2), 1);
  }
  // The sum over the query heads that read each of `groups` heads: [B, H, L, D] -> [B, L, G, D].
  static Tensor of_groups(const Tensor& t, int64_t groups) {
    const Tensor sum =
        t.size(1) == groups ? t : t.unflatten(1, {groups, t.size(1) / groups}).sum(2);
    return sum.transpose(1, 2);
  }
};

// Visits the pairs of this process's query chunks and process `from`'s key chunks of which the
// queries see keys: f(row of queries' chunk, row of keys' chunk, whether they are the same chunk),
// where a row is 0 for the earlier one.
template <typename F>
void each_pair(const ContextParallel& among, int64_t from, const F& f) {
  const int64_t last = 2 * among.size - 1;
  for (const auto& [query_row, query] : {std::pair<int64_t, int64_t>(0, among.rank),
                                         std::pair<int64_t, int64_t>(1, last - among.rank)}) {
    for (const auto& [key_row, key] :
         {std::pair<int64_t, int64_t>(0, from), std::pair<int64_t, int64_t>(1, last - from)}) {
      if (key <= query) f(query_row, key_row, key == query);
    }
  }
}

// Rows [B, ...] of a chunk, 0 the earlier one, among [2 B, ...].
Tensor rows_of_chunk(const Tensor& rows, int64_t which) {
  const int64_t batch = rows.size(0) / 2;
  return rows.narrow(0, which * batch, batch);
}

// Keys and values on their way round the ring: [2, 2 B, L, G, D].
class Ring {
 public:
  Ring(const Tensor& keys, const Tensor& values, const ContextParallel& among)
      : among_(among), present_(at::stack({keys, values})), from_(among.rank) {}

  // The process whose keys and values are here.
  int64_t from() const { return from_; }
  Tensor keys() const { return present_[0]; }
  Tensor values() const { return present_[1]; }
  // While f() reads what is here, the next arrives.
  template <typename F>
  void read(bool last, const F& f) {
    if (last) return f();
    const Tensor next = at::empty_like(present_);
    const auto wait = among_.start_shift(present_, next);
    f();
    wait();
    present_ = next;
    from_ = (from_ + among_.size - 1) % among_.size;
  }

 private:
  const ContextParallel& among_;
  Tensor present_;
  int64_t from_;
};

// The softmax over keys that come in parts is put together by the parts' log-sum-exps, as in
// FlashAttention (Dao et al. 2022); the backward needs only that of all keys together.
struct RingAttention : torch::autograd::Function<RingAttention> {
  static Tensor forward(AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v,
                        const ContextParallel* among) {
    const auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const std::vector<int64_t> by_head = {q.size(0), q.size(2), q.size(1)};  // [2 B, H, L]
    Tensor out =
        at::zeros({by_head[0], by_head[1], by_head[2], v.size(3)}, q.options().dtype(wide));
    Tensor sum = at::full(by_head, -std::numeric_limits<double>::infinity(), out.options());
    Ring ring(k.detach(), v.detach(), *among);
    for (int64_t step = 0; step < among->size; ++step) {
      ring.read(step + 1 == among->size, [&] {
        each_pair(*among, ring.from(), [&](int64_t queries, int64_t keys, bool own) {
          const ChunkPair pair(rows_of_chunk(q.detach(), queries), rows_of_chunk(ring.keys(), keys),
                               rows_of_chunk(ring.values(), keys), own);
          const auto [part, part_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
              pair.q, pair.k, pair.v, /*dropout_p=*/0, pair.causal);
          const Tensor into = rows_of_chunk(out, queries);
          Tensor into_sum = rows_of_chunk(sum, queries);
          const Tensor before = into_sum.clone();
          at::logaddexp_out(into_sum, before, part_sum.to(wide));
          into.mul_((before - into_sum).exp_().unsqueeze(-1));
          into.addcmul_(part.to(wide), (part_sum.to(wide) - into_sum).exp_().unsqueeze(-1));
        });
      });
    }
    out = out.to(q.scalar_type());
    context->saved_data["among"] = pointer(*among);
    context->save_for_backward({q, k, v, out, sum});
    return out.transpose(1, 2);
  }

  // The gradients of keys and values follow them round, one step later, and come home.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const ContextParallel& among = context_parallel(context);
    const variable_list saved = context->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &out = saved[3], &sum = saved[4];
    const Tensor grad = gradients[0].transpose(1, 2).to(out.scalar_type());
    const auto wide = at::TensorOptions(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    const Tensor grad_q = at::zeros(q.sizes(), wide);
    Ring ring(k, saved[2], among);
    Tensor collected;  // of the keys and values that are here, from the processes before this one
    std::function<void()> arrives;
    for (int64_t step = 0; step < among.size; ++step) {
      Tensor added = at::zeros({2, k.size(0), k.size(1), k.size(2), k.size(3)}, wide);
      ring.read(step + 1 == among.size, [&] {
        each_pair(among, ring.from(), [&](int64_t queries, int64_t keys, bool own) {
          const ChunkPair pair(rows_of_chunk(q, queries), rows_of_chunk(ring.keys(), keys),
                               rows_of_chunk(ring.values(), keys), own);
          const auto [of_q, of_k, of_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
              rows_of_chunk(grad, queries), pair.q, pair.k, pair.v, rows_of_chunk(out, queries),
              rows_of_chunk(sum, queries), /*dropout_p=*/0, pair.causal);
          rows_of_chunk(grad_q, queries).add_(of_q.transpose(1, 2));
          rows_of_chunk(added[0], keys).add_(ChunkPair::of_groups(of_k, k.size(2)));
          rows_of_chunk(added[1], keys).add_(ChunkPair::of_groups(of_v, k.size(2)));
        });
      });
      if (arrives) {
        arrives();
        added.add_(collected);
      }
      collected = at::empty_like(added);
      // `added` stays alive with the function that waits.
      arrives = [wait = among.start_shift(added, collected), added] { wait(); };
    }
    arrives();
    return {grad_q.to(q.scalar_type()), collected[0].to(k.scalar_type()),
            collected[1].to(k.scalar_type()), Tensor()};
  }
};

}  // namespace

Tensor ContextParallel::rows_of(const Tensor& whole) const {
  const int64_t length = whole.size(1) / (2 * size);
  return at::cat({whole.narrow(1, early_chunk() * length, length),
                  whole.narrow(1, late_chunk() * length, length)});
}

Positions ContextParallel::before(int64_t rows, int64_t length) const {
  // A row that has seen less counts as padded on the left.
  const Tensor padding = at::zeros({rows}, at::kLong);
  padding.narrow(0, 0, rows / 2).fill_((late_chunk() - early_chunk()) * length);
  return {.longest = late_chunk() * length, .left_padding = padding};
}

Tensor gather_chunks(const Tensor& own, const ContextParallel& among) {
  return GatherChunks::apply(own, &among);
}

Tensor own_chunks(const Tensor& all, const ContextParallel& among) {
  return at::cat({all[among.early_chunk()], all[among.late_chunk()]});
}

Tensor chunk_before(const Tensor& own, const ContextParallel& among) {
  const Tensor all = gather_chunks(own, among), none = at::zeros_like(all.narrow(0, 0, 1));
  return own_chunks(at::cat({none, all.narrow(0, 0, all.size(0) - 1)}), among);
}

Tensor state_before(const Tensor& added, const Tensor& decay, const ContextParallel& among) {
  const Tensor all = gather_chunks(added, among);
  const bool same = decay.size(0) == 1;
  const Tensor decays = same ? Tensor() : gather_chunks(decay, among);
  std::vector<Tensor> states = {at::zeros_like(all[0])};
  for (int64_t i = 0; i + 1 < all.size(0); ++i) {
    states.push_back((same ? decay : decays[i]) * states.back() + all[i]);
  }
  return own_chunks(at::stack(states), among);
}

Tensor ring_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                      const ContextParallel& among) {
  return RingAttention::apply(q, k, v, &among);
}

}  // namespace headloom
