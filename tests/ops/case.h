// One small call of composed attention, and its mixes.
#pragma once

#include "naive.h"

namespace headloom::test {

using ops::ComposedAttentionOptions;
using ops::HeadMix;

constexpr int64_t B = 2, T = 5, S = 8, H = 6, D = 3, E = 2, R = 2;

struct Case {
  Tensor q = at::randn({B, T, H, D}, kDouble);
  Tensor k = at::randn({B, S, H, D}, kDouble);
  Tensor v = at::randn({B, S, H, E}, kDouble);
  ComposedAttentionOptions o;

  Tensor run() const { return ops::composed_attention(q, k, v, o); }
  Tensor naive() const { return test::Naive(q, k, v, o).run(); }
  // Everything that carries a gradient.
  std::vector<Tensor*> reals() {
    std::vector<Tensor*> all = {&q, &k, &v, &o.pre_conv, &o.post_conv, &o.bias};
    for (HeadMix* m : {&o.pre, &o.post}) {
      for (Tensor* t : {&m->static_matrix, &m->q_down, &m->q_up, &m->q_gate, &m->k_down, &m->k_up,
                        &m->k_gate}) {
        all.push_back(t);
      }
    }
    std::erase_if(all, [](Tensor* t) { return !t->defined(); });
    return all;
  }
};

inline Tensor real(at::IntArrayRef sizes) { return at::randn(sizes, kDouble) * 0.5; }

inline void query_wise(HeadMix& m, int64_t heads = H) {
  m.q_down = real({B, T, R, heads});
  m.q_up = real({B, T, R, heads});
}
inline void key_wise(HeadMix& m, int64_t heads = H) {
  m.k_down = real({B, S, R, heads});
  m.k_up = real({B, S, R, heads});
}
inline void everything(HeadMix& m, int64_t groups) {
  m.groups = groups;
  m.static_matrix = groups == 1 ? real({H, H}) : real({groups, H / groups, H / groups});
  query_wise(m);
  key_wise(m);
  m.q_gate = real({B, T, H});
  m.k_gate = real({B, S, H});
}
inline void grouped_heads(Case& c, int64_t keys, int64_t values) {
  c.k = at::randn({B, S, keys, D}, kDouble);
  c.v = at::randn({B, S, values, E}, kDouble);
}

}  // namespace headloom::test
