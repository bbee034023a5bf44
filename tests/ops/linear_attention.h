// What retention and gated linear attention are tested with alike: the loop over the formula, the
// gradients of the reference, and the cases and gradients of the kernels.
#pragma once

#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/autograd.h>

#include "testing/compare.h"
#include "testing/strided.h"

namespace headloom::test {

// S_t = decay S_{t-1} + k_t^T v_t, o_t = q_t S_t, number by number in double; decay(b, t, h, d) is
// of row d of the state. `o` has the state before and the documents.
template <typename Options, typename Decay>
std::tuple<Tensor, Tensor> linear_attention_loop(const Tensor& queries, const Tensor& keys,
                                                 const Tensor& values, const Options& o,
                                                 const Decay& decay) {
  const int64_t dim = queries.size(3), width = values.size(3);
  const Tensor before = o.state, documents = o.documents;
  const Tensor out = at::zeros_like(values);
  const Tensor state = before.defined()
                           ? before.clone().contiguous()
                           : at::zeros({queries.size(0), queries.size(2), dim, width}, kDouble);
  const auto q = queries.accessor<double, 4>(), k = keys.accessor<double, 4>(),
             v = values.accessor<double, 4>();
  auto y = out.accessor<double, 4>(), s = state.accessor<double, 4>();
  for (int64_t b = 0; b < queries.size(0); ++b) {
    for (int64_t t = 0; t < queries.size(1); ++t) {
      const bool anew = t > 0 && documents.defined() &&
                        documents[b][t].item<int64_t>() != documents[b][t - 1].item<int64_t>();
      for (int64_t h = 0; h < queries.size(2); ++h) {
        for (int64_t d = 0; d < dim; ++d) {
          for (int64_t e = 0; e < width; ++e) {
            s[b][h][d][e] =
                (anew ? 0 : decay(b, t, h, d) * s[b][h][d][e]) + k[b][t][h][d] * v[b][t][h][e];
            y[b][t][h][e] += q[b][t][h][d] * s[b][h][d][e];
          }
        }
      }
    }
  }
  return {out, state};
}

// That the gradients of q, k, v, the decay and the state agree with differences in every form. A
// Call is made of B, T, H, D and E, and run() gives the output and the last state.
template <typename Call>
void expect_gradients_of_forms_agree(std::initializer_list<const char*> forms,
                                     Tensor Call::* decay) {
  for (const char* form : forms) {
    for (const bool packed : {false, true}) {
      Call c(2, 19, 2, 3, 4);
      c.o.form = form;
      c.o.chunk = 8;
      c.o.state = at::randn({2, 2, 3, 4}, kDouble);
      if (packed) c.o.documents = at::arange(19, kLong).div(6, "floor").expand({2, 19});
      const Tensor wo = at::randn_like(c.v), ws = at::randn_like(c.o.state);
      const std::vector<Tensor> leaves = {c.q, c.k, c.v, c.*decay, c.o.state};
      for (Tensor t : leaves) t.requires_grad_(true);
      EXPECT_TRUE(gradients_agree(
          [&] {
            const auto [o, s] = c.run();
            return (o * wo).sum() + (s * ws).sum();
          },
          leaves))
          << form << packed;
    }
  }
}

// A Case has B, T, H, D and E, whether there is a `state` before the sequence, whether the rows of
// inputs and cotangents lie apart (`strided`), whether the gradient of the `last_state` is wanted,
// and how many positions a `document` has, 0 for one document.
template <typename Case>
std::vector<Case> linear_attention_cases() {
  std::vector<Case> out = {
      {.name = "odd", .B = 3, .T = 70, .H = 5, .D = 9, .E = 33},
      {.name = "narrow values", .T = 70, .D = 40, .E = 1},
      {.name = "one", .T = 70, .H = 1, .D = 1, .E = 1},
      {.name = "state", .B = 2, .T = 100, .state = true},
      {.name = "state of one chunk", .T = 5, .state = true},
      {.name = "last state unused", .T = 100, .state = true, .last_state = false},
      {.name = "strided", .B = 2, .T = 100, .strided = true},
  };
  for (const int64_t document : {1, 5, 64, 90}) {
    for (const bool state : {false, true}) {
      out.push_back({.name = "documents of " + std::to_string(document) + (state ? ", state" : ""),
                     .B = 2,
                     .T = 200,
                     .state = state,
                     .document = document});
    }
  }
  return out;
}

// q, k and v.
template <typename Case>
std::vector<Tensor> random_qkv(const Case& c, at::ScalarType type) {
  const auto random = [&](int64_t width) { return at::randn({c.B, c.T, c.H, width}).to(type); };
  return {random(c.D), random(c.D), random(c.E)};
}

// Ids [B, T]; undefined for one document.
template <typename Case>
Tensor document_ids(const Case& c) {
  if (c.document == 0) return {};
  const Tensor ids = at::arange(c.T, kLong).div(c.document, "floor").repeat({c.B, 1});
  // Uneven ones, and a change at the second position, in the last element of the batch.
  ids[-1] = (at::rand({c.T}) < 1.0 / static_cast<double>(c.document))
                .to(at::kLong)
                .cumsum(0)
                .remainder(2);
  if (c.T > 2) ids[-1][0] = 2;
  return ids;
}

// `inputs` as leaves: the first `count` in `type`, those after them in the type of states.
inline std::vector<Tensor> leaves_of(const std::vector<Tensor>& inputs, size_t count,
                                     at::ScalarType type, bool strided) {
  std::vector<Tensor> leaves;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::ScalarType to = i < count ? type : at::toOpMathType(type);
    const Tensor t = strided ? rows_apart(inputs[i], to) : inputs[i].to(to).detach();
    leaves.push_back(t.requires_grad_());
  }
  return leaves;
}

// The output, the last state and the gradients of `leaves` under fixed random cotangents, which are
// rounded to `given`, the type of the problem. Without last_state no gradient reaches the state.
template <typename Case>
std::vector<Tensor> output_and_gradients(const Tensor& out, const Tensor& state,
                                         const std::vector<Tensor>& leaves, at::ScalarType given,
                                         const Case& c) {
  const auto laid_out = [&](const Tensor& t, at::ScalarType type) {
    return c.strided ? rows_apart(t, type) : t.to(type);
  };
  at::manual_seed(11);
  const Tensor to_out = at::randn(out.sizes()).to(given), to_state = at::randn(state.sizes());
  std::vector<Tensor> all = {out.detach(), state.detach()};
  std::vector<Tensor> outputs = {out}, cotangents = {laid_out(to_out, out.scalar_type())};
  if (c.last_state) {
    outputs.push_back(state);
    cotangents.push_back(laid_out(to_state, state.scalar_type()));
  }
  for (Tensor& g : torch::autograd::grad(outputs, leaves, cotangents)) all.push_back(g);
  return all;
}

}  // namespace headloom::test
