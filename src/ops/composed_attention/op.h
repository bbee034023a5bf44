// Composed attention: attention whose maps are convolved and mixed across heads.
//
//   A  = scale * q k^T + bias              map h reads key head floor(h Gk / H)
//   A  = Conv_pre(A)                       optional, Multi-Token Attention (Golovneva et al. 2025)
//   A  = Mix_pre(A)                        optional, DCMHA (Xiao et al. 2024) eq. 7; H -> H1 maps
//   P  = softmax over s of (A, -inf where invisible); a row with no visible key gives 0
//   P  = Conv_post(P), 0 where invisible   optional
//   P  = Mix_post(P)                       optional; H1 -> H' maps
//   o[h'] = sum_s P[h', t, s] v[floor(h' Gv / H'), s]
//
// Layout legend: b batch, t query position, s key position, h query head (score map), d size of q
// and k, e size of v, r rank. T queries stand at the end of S keys: query t is at position t + S -
// T.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace headloom::ops {

// Compose, for one pair (t, s), maps h -> h' (DCMHA eq. 7). Every tensor is optional; all branches
// read the same x.
//
//   y[h'] = sum_h x[h] M[h, h']                            static_matrix; absent means the skip
//   x[h']
//         + sum_r (sum_h x[h] qd[t,r,h]) qu[t,r,h'] + x[h'] qg[t,h']
//         + sum_r (sum_h x[h] kd[s,r,h]) ku[s,r,h'] + x[h'] kg[s,h']
//
// With groups = g all sums over h stay inside one of g equal runs of heads.
struct HeadMix {
  // [H, H'] or, with groups, [g, H/g, H/g]; rectangular admits no other term
  at::Tensor static_matrix = {};
  at::Tensor q_down = {}, q_up = {};  // [B, T, R, H], both or neither
  at::Tensor q_gate = {};             // [B, T, H]
  at::Tensor k_down = {}, k_up = {};  // [B, S, R, H], both or neither
  at::Tensor k_gate = {};             // [B, S, H]
  int64_t groups = 1;

  bool defined() const {
    return static_matrix.defined() || q_down.defined() || q_up.defined() || q_gate.defined() ||
           k_down.defined() || k_up.defined() || k_gate.defined();
  }
};

struct ComposedAttentionOptions {
  HeadMix pre = {}, post = {};
  // Cross-correlation over (query, key) with kernel [H, c_q, c_k], or [H, c_h, c_q, c_k] over
  // groups of c_h heads. Query padding is on the past side: tap c_q - 1 is the current query. Rows
  // of queries in other documents are outside.
  at::Tensor pre_conv = {}, post_conv = {};
  std::string conv_padding = "both";  // keys: "both" (c_k odd), "left" (only earlier) or "right"
  // "double": what is invisible from its own row counts as 0. "exact": before softmax the row of an
  // earlier query keeps the keys up to the current query.
  std::string conv_mask = "double";
  at::Tensor bias = {};                // finite, broadcasts to [B, H, T, S]
  bool causal = true;                  // key s visible to query t when s <= t + S - T
  // The last `window` keys including the query's own; without `causal` those less than that many
  // positions away on either side.
  std::optional<int64_t> window = {};
  at::Tensor lengths = {};             // [B] int64: keys s < lengths[b] are visible
  at::Tensor documents = {};         // [B, S] int64 ids: a query sees only keys of its own document
  at::Tensor mask = {};              // boolean, broadcasts to [B, 1, T, S]; true is visible
  std::optional<double> scale = {};  // D^-0.5 when absent
  // "reference", "fused"; absent: the best that supports the case
  std::optional<std::string> backend = {};
};

// q [B,T,H,D], k [B,S,Gk,D], v [B,S,Gv,E] -> [B,T,H',E], through the dispatcher
// (torch.ops.headloom.composed_attention). Throws c10::ValueError naming the argument on a bad
// shape. Fused kernels where they support the case, the reference for the rest.
at::Tensor composed_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const ComposedAttentionOptions& options);

// The definition, in plain ATen: any floating dtype and device, differentiable any number of times.
// Holds whole maps. Arguments are trusted.
at::Tensor composed_attention_maps(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const ComposedAttentionOptions& options);

// The maps after softmax, before anything that follows it: [B, H1, T, S].
at::Tensor composed_attention_weights(const at::Tensor& q, const at::Tensor& k,
                                      const ComposedAttentionOptions& options);

// composed_attention_maps, by at::scaled_dot_product_attention where nothing is composed.
at::Tensor composed_attention_reference(const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v,
                                        const ComposedAttentionOptions& options);

// Nothing but masks: what scaled_dot_product_attention computes.
bool is_plain(const ComposedAttentionOptions& options);

}  // namespace headloom::ops
