#include "ops/documents.h"
#include "ops/retention/declaration.h"

namespace headloom::ops {
namespace {

// gamma^0 .. gamma^last, [H, last + 1]; in double, since gamma is close to 1.
Tensor powers(const Tensor& gamma, int64_t last, at::ScalarType type) {
  const auto options = gamma.options().dtype(at::kDouble).requires_grad(false);
  return at::pow(gamma.to(at::kDouble).unsqueeze(-1), at::arange(last + 1, options)).to(type);
}

// A stretch of the sequence and what is known at its start. `run` counts the documents begun since
// the first position.
struct Stretch {
  Tensor q, k, v;    // [B, H, T, D], [B, H, T, D], [B, H, T, E]
  Tensor run;        // [B, T], undefined: all one document
  Tensor state;      // [B, H, D, E], undefined: zero
  Tensor state_run;  // [B, 1], the document the state belongs to; undefined with `run`

  Stretch part(int64_t from, int64_t length) const {
    Stretch s = *this;
    for (Tensor* t : {&s.q, &s.k, &s.v}) *t = t->narrow(2, from, length);
    if (run.defined()) s.run = run.narrow(1, from, length);
    return s;
  }
};

struct Step {
  Tensor output;  // [B, H, T, E]
  Tensor state;   // [B, H, D, E]
};

// T = chunks * size positions: inside a chunk the parallel form, from chunk to chunk the state. One
// chunk is the parallel form.
Step chunkwise(const Stretch& s, const Tensor& gamma, int64_t chunks, int64_t size) {
  const auto type = s.q.scalar_type();
  const auto cut = [&](const Tensor& t) { return t.unflatten(2, {chunks, size}).contiguous(); };
  const Tensor q = cut(s.q), k = cut(s.k), v = cut(s.v);  // [B, H, N, size, ...]
  const Tensor decay = powers(gamma, size, type);         // [H, size + 1]
  const Tensor position = at::arange(size, q.options().dtype(at::kLong).requires_grad(false));
  const Tensor distance = position.unsqueeze(1) - position.unsqueeze(0);
  // These broadcast to [B, H, N, size, size], [B, H, N, size, 1] twice and [B, H, N, 1, 1].
  Tensor inside = decay.index_select(1, distance.clamp_min(0).flatten())
                      .unflatten(1, {size, size})
                      .tril()
                      .unsqueeze(1);
  Tensor from_state = decay.narrow(1, 1, size).unsqueeze(1).unsqueeze(-1);
  Tensor to_state = decay.narrow(1, 0, size).flip(1).unsqueeze(1).unsqueeze(-1);
  Tensor carry = decay.select(1, size).view({1, -1, 1, 1, 1});
  if (s.run.defined()) {
    const Tensor run = s.run.unflatten(1, {chunks, size});                           // [B, N, size]
    const Tensor last = run.select(2, size - 1);                                     // [B, N]
    const Tensor before = at::cat({s.state_run, last.narrow(1, 0, chunks - 1)}, 1);  // [B, N]
    const auto same = [&](const Tensor& a, const Tensor& b) {
      return a.eq(b).to(type).unsqueeze(1);
    };
    inside = inside * same(run.unsqueeze(-1), run.unsqueeze(-2));
    from_state = from_state * same(run, before.unsqueeze(-1)).unsqueeze(-1);
    to_state = to_state * same(run, last.unsqueeze(-1)).unsqueeze(-1);
    carry = carry * same(last, before).unsqueeze(-1).unsqueeze(-1);
  }

  // unbind and stack: the backward of N selections would add up N tensors of the whole size.
  const std::vector<Tensor> added =
      at::matmul((k * to_state).transpose(-1, -2), v).unbind(2);  // N of [B, H, D, E]
  const std::vector<Tensor> kept = carry.unbind(2);               // N, or 1 for all
  std::vector<Tensor> before;
  Tensor state = s.state;
  for (int64_t i = 0; i < chunks; ++i) {
    before.push_back(state.defined() ? state : at::zeros_like(added[0]));
    const Tensor& keep = kept.size() == 1 ? kept[0] : kept[i];
    state = state.defined() ? at::addcmul(added[i], state, keep) : added[i];
  }

  const auto flat = [](const Tensor& t) { return t.flatten(0, 2); };
  const Tensor scores = flat(at::matmul(q, k.transpose(-1, -2)) * inside);
  const Tensor own = at::bmm(scores, flat(v));
  const bool nothing_before = chunks == 1 && !s.state.defined();
  const Tensor output =
      nothing_before ? own : at::baddbmm(own, flat(q * from_state), flat(at::stack(before, 2)));
  return {output.view(v.sizes()).flatten(2, 3), state};
}

Step recurrent(const Stretch& s, const Tensor& gamma) {
  const int64_t length = s.q.size(2);
  const auto type = s.q.scalar_type();
  Tensor carry = gamma.to(type).view({1, -1, 1, 1, 1});  // broadcasts to [B, H, T, 1, 1]
  if (s.run.defined()) {
    const Tensor before = at::cat({s.state_run, s.run.narrow(1, 0, length - 1)}, 1);
    carry = carry * s.run.eq(before).to(type).view({-1, 1, length, 1, 1});
  }
  const std::vector<Tensor> q = s.q.unbind(2), k = s.k.unbind(2), v = s.v.unbind(2);
  const std::vector<Tensor> kept = carry.unbind(2);  // T, or 1 for all
  std::vector<Tensor> outputs;
  Tensor state = s.state;
  for (int64_t t = 0; t < length; ++t) {
    const Tensor added = k[t].unsqueeze(-1) * v[t].unsqueeze(-2);
    const Tensor& keep = kept.size() == 1 ? kept[0] : kept[t];
    state = state.defined() ? at::addcmul(added, state, keep) : added;
    outputs.push_back(at::matmul(q[t].unsqueeze(-2), state).squeeze(-2));
  }
  return {at::stack(outputs, 2), state};
}

}  // namespace

std::tuple<Tensor, Tensor> Retention::reference(const Arguments& a) {
  const auto& [q, k, v, gamma, o] = a;
  const auto wide = at::toOpMathType(q.scalar_type());
  const auto heads_first = [&](const Tensor& t) { return t.to(wide).transpose(1, 2); };
  Stretch all = {heads_first(q), heads_first(k), heads_first(v), {}, o.state, {}};
  const int64_t length = q.sym_size(1).guard_int(__FILE__, __LINE__);
  if (o.documents.defined()) {
    all.state_run = at::zeros({o.documents.size(0), 1}, o.documents.options());
    all.run = at::cat({all.state_run, id_changes(o.documents).to(at::kLong)}, 1).cumsum(1);
  }
  Step result;
  if (o.form == "recurrent") {
    result = recurrent(all, gamma);
  } else {
    const int64_t size = o.form == "parallel" ? length : std::min(o.chunk, length);
    const int64_t whole = length / size * size;
    if (whole == length) {
      result = chunkwise(all, gamma, length / size, size);
    } else {
      // The rest is a shorter chunk, not a padded one: padding would let the state decay on.
      result = chunkwise(all.part(0, whole), gamma, whole / size, size);
      Stretch rest = all.part(whole, length - whole);
      rest.state = result.state;
      if (all.run.defined()) rest.state_run = all.run.narrow(1, whole - 1, 1);
      const Step end = chunkwise(rest, gamma, 1, length - whole);
      result = {at::cat({result.output, end.output}, 2), end.state};
    }
  }
  return {result.output.transpose(1, 2).to(q.scalar_type()), result.state};
}

}  // namespace headloom::ops
