// The fused kernels against the reference in float64: outputs and every gradient, with memory that
// a kernel fails to write poisoned with NaN, and most of it again with the kernels of lesser
// instruction sets.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <string>
#include <vector>

#include "fused.h"
#include "ops/composed_attention/op.h"
#include "testing/instruction_sets.h"
#include "testing/poison.h"
#include "testing/strided.h"

namespace headloom::ops::composed_attention_fused_test {
namespace {

using at::Tensor;
using test::Poison;

struct Case {
  std::string name = "";
  int64_t B = 1, T = 63, S = 0, H = 8, D = 16, E = 0, Gk = 0, Gv = 0;
  // Ranks (0: no such branch) and gates of both mixes; static [H, m] where m > 0, in groups.
  int64_t q_rank = 2, k_rank = 2, pre_static = 0, post_static = 0, groups = 1;
  bool q_gate = true, k_gate = true, pre = true, post = true;
  bool causal = true, strided = false;
  int64_t window = 0;
  // Kernels [H, c_q, c_k] or, with conv_heads > 1, [H, conv_heads, c_q, c_k]; 0 queries: no
  // convolution.
  int64_t pre_queries = 0, post_queries = 0, conv_keys = 5, conv_heads = 1;
  std::string padding = "both", conv_mask = "double";
  std::string mask = "";           // "lengths", "documents", "scattered documents", "mask", "bias"
  std::vector<int64_t> bias = {};  // the shape of a bias, which takes part in the backward
};

struct Problem {
  std::vector<Tensor> leaves;  // q, k, v, then what the mixes hold
  ComposedAttentionOptions options;
  bool apart = false;  // rows of the leaves and of the cotangent lie apart
};

std::vector<Tensor*> leaves_of(ComposedAttentionOptions& o) {
  std::vector<Tensor*> out;
  for (HeadMix* m : {&o.pre, &o.post}) {
    for (Tensor* t :
         {&m->static_matrix, &m->q_down, &m->q_up, &m->q_gate, &m->k_down, &m->k_up, &m->k_gate}) {
      if (t->defined()) out.push_back(t);
    }
  }
  for (Tensor* t : {&o.pre_conv, &o.post_conv, &o.bias}) {
    if (t->defined()) out.push_back(t);
  }
  return out;
}

Problem make(Case c, at::ScalarType type) {
  at::manual_seed(7);
  if (c.S == 0) c.S = c.T;
  if (c.E == 0) c.E = c.D;
  if (c.Gk == 0) c.Gk = c.H;
  const auto options = at::TensorOptions().dtype(type);
  const auto random = [&](at::IntArrayRef shape, double scale) {
    std::vector<int64_t> wide(shape.begin(), shape.end());
    if (c.strided) wide.back() *= 2;
    Tensor t = at::randn(wide, options) * scale;
    return c.strided ? t.slice(-1, 0, wide.back(), 2) : t;
  };
  Problem p;
  ComposedAttentionOptions& o = p.options;
  int64_t maps = c.H;
  const auto mix = [&](HeadMix& m, int64_t out) {
    m.groups = c.groups;
    if (out > 0) {
      const int64_t g = c.groups;
      m.static_matrix = g > 1 ? random({g, maps / g, maps / g}, 0.5) : random({maps, out}, 0.5);
    }
    if (out > 0 && out != maps) {
      maps = out;
      return;
    }
    if (c.q_rank > 0) {
      m.q_down = random({c.B, c.T, c.q_rank, maps}, 0.3);
      m.q_up = random({c.B, c.T, c.q_rank, maps}, 0.3);
    }
    if (c.k_rank > 0) {
      m.k_down = random({c.B, c.S, c.k_rank, maps}, 0.3);
      m.k_up = random({c.B, c.S, c.k_rank, maps}, 0.3);
    }
    if (c.q_gate) m.q_gate = random({c.B, c.T, maps}, 0.3);
    if (c.k_gate) m.k_gate = random({c.B, c.S, maps}, 0.3);
  };
  const auto conv = [&](int64_t queries) {
    if (queries == 0) return Tensor();
    if (c.conv_heads == 1) return random({maps, queries, c.conv_keys}, 0.3);
    return random({maps, c.conv_heads, queries, c.conv_keys}, 0.2);
  };
  o.conv_padding = c.padding;
  o.conv_mask = c.conv_mask;
  o.pre_conv = conv(c.pre_queries);
  if (c.pre) mix(o.pre, c.pre_static);
  o.post_conv = conv(c.post_queries);
  if (c.post) mix(o.post, c.post_static);
  if (c.Gv == 0) c.Gv = maps;
  p.leaves = {random({c.B, c.T, c.H, c.D}, 1), random({c.B, c.S, c.Gk, c.D}, 1),
              random({c.B, c.S, c.Gv, c.E}, 1)};
  if (c.mask == "bias") c.bias = {c.H, 1, c.S};
  if (!c.bias.empty()) o.bias = random(c.bias, 1);
  for (Tensor* t : leaves_of(o)) p.leaves.push_back(*t);
  o.causal = c.causal;
  if (c.window > 0) o.window = c.window;
  if (c.mask == "lengths") o.lengths = at::arange(c.B, at::kLong) * (c.S / 2);
  if (c.mask == "documents") {
    o.documents = at::arange(c.S, at::kLong).div(19, "floor").expand({c.B, c.S});
  }
  if (c.mask == "scattered documents") o.documents = at::randint(3, {c.B, c.S}, at::kLong);
  if (c.mask == "mask") o.mask = at::rand({c.B, 1, c.T, c.S}).gt(0.7);
  return p;
}

// Output and gradients under a fixed random cotangent.
std::vector<Tensor> evaluate(Problem p, const std::string& backend, at::ScalarType type) {
  const auto laid_out = [&](const Tensor& t) {
    return p.apart ? test::rows_apart(t, type) : t.to(type);
  };
  std::vector<Tensor> leaves;
  for (const Tensor& t : p.leaves) leaves.push_back(laid_out(t).detach().requires_grad_());
  size_t i = 3;
  for (Tensor* t : leaves_of(p.options)) *t = leaves[i++];
  p.options.backend = backend;
  Tensor out = composed_attention(leaves[0], leaves[1], leaves[2], p.options);
  at::manual_seed(11);
  const Tensor cotangent = at::randn(out.sizes(), at::TensorOptions().dtype(p.leaves[0].dtype()));
  std::vector<Tensor> all{out.detach()};
  for (Tensor& g : torch::autograd::grad({out}, leaves, {laid_out(cotangent)})) all.push_back(g);
  return all;
}

test::Evaluate evaluation(const Problem& p) {
  return [p](const char* backend, at::ScalarType type) { return evaluate(p, backend, type); };
}

// Relative to the largest element. What is a sum of terms near 1 that cancel (the scores' gradient
// where there is one key) errs by their rounding.
double distance(const Tensor& a, const Tensor& b) {
  return (a.to(at::kDouble) - b).abs().max().item<double>() /
         std::max(b.abs().max().item<double>(), 0.1);
}

void expect_close(const Case& c, at::ScalarType type, double tolerance) {
  SCOPED_TRACE(c.name);
  const Problem p = make(c, type);
  const auto expected = evaluate(p, "reference", at::kDouble);
  std::vector<Tensor> got;
  {
    Poison poison;
    got = evaluate(p, "fused", type);
  }
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].sizes(), expected[i].sizes());
    const double error = distance(got[i], expected[i]);
    // The negation also catches NaN.
    EXPECT_FALSE(!(error < (i == 0 ? tolerance : 4 * tolerance)))
        << "result " << i << " of " << got.size() << " (0 output, 1.. gradients): error " << error;
  }
}

std::vector<Case> mixes() {
  std::vector<Case> cases{
      {.name = "all branches"},
      {.name = "before only", .post = false},
      {.name = "after only", .pre = false},
      {.name = "query side", .k_rank = 0, .k_gate = false},
      {.name = "key side", .q_rank = 0, .q_gate = false},
      {.name = "gates", .q_rank = 0, .k_rank = 0},
      {.name = "query gate", .q_rank = 0, .k_rank = 0, .k_gate = false},
      {.name = "key gate", .q_rank = 0, .k_rank = 0, .q_gate = false},
      {.name = "projections", .q_gate = false, .k_gate = false},
      {.name = "unequal ranks", .q_rank = 1, .k_rank = 3},
      {.name = "low rank and key gate", .k_rank = 0},
      {.name = "key low rank and query gate", .q_rank = 0},
      {.name = "static and dynamic", .pre_static = 8, .post_static = 8},
      {.name = "groups", .pre_static = 8, .post_static = 8, .groups = 4},
      {.name = "groups without static", .groups = 2},
      {.name = "nothing", .pre = false, .post = false},
  };
  for (int64_t rank : {1, 3, 4}) {
    cases.push_back({.name = "rank " + std::to_string(rank), .q_rank = rank, .k_rank = rank});
  }
  for (Case c : {Case{.name = "talking heads", .pre_static = 8, .post_static = 8},
                 Case{.name = "rectangular", .pre_static = 12, .post_static = 5},
                 Case{.name = "differential", .E = 32, .Gk = 4, .post_static = 4, .pre = false}}) {
    c.q_rank = c.k_rank = 0;
    c.q_gate = c.k_gate = false;
    cases.push_back(c);
  }
  return cases;
}

std::vector<Case> shapes() {
  std::vector<Case> cases;
  for (int64_t T : {1, 2, 64, 65, 1000}) {
    cases.push_back({.name = "T " + std::to_string(T), .T = T, .H = 6, .D = 20});
  }
  for (Case c :
       {Case{.name = "odd", .B = 3, .T = 70, .S = 131, .H = 5, .D = 9, .E = 33},
        Case{.name = "decode", .B = 2, .T = 3, .S = 300},
        Case{.name = "decode one", .T = 1, .S = 1000, .H = 6, .D = 20},
        Case{.name = "decode window", .B = 3, .T = 8, .S = 700, .window = 70},
        Case{.name = "decode lengths", .B = 3, .T = 5, .S = 300, .mask = "lengths"},
        Case{.name = "decode static", .T = 20, .S = 300, .pre_static = 8, .post_static = 8},
        Case{.name = "decode shared keys", .T = 2, .S = 300, .Gk = 2, .Gv = 4, .strided = true},
        Case{.name = "more queries than keys", .B = 2, .T = 131, .S = 70},
        Case{.name = "not causal", .T = 70, .S = 200, .causal = false},
        Case{.name = "window", .T = 300, .window = 70},
        Case{.name = "window, not causal", .T = 300, .causal = false, .window = 33},
        Case{.name = "window of one", .T = 100, .window = 1},
        Case{.name = "lengths", .B = 3, .T = 150, .mask = "lengths"},
        Case{.name = "lengths, not causal", .B = 3, .T = 50, .causal = false, .mask = "lengths"},
        Case{.name = "documents", .B = 2, .T = 150, .mask = "documents"},
        Case{.name = "mask", .B = 2, .T = 150, .mask = "mask"},
        Case{.name = "bias", .B = 2, .T = 150, .mask = "bias"},
        Case{.name = "shared keys", .B = 2, .T = 100, .Gk = 2, .Gv = 4},
        Case{.name = "strided", .B = 2, .T = 100, .strided = true},
        Case{.name = "one head", .T = 100, .H = 1},
        Case{.name = "many heads", .T = 70, .H = 64, .D = 8},
        Case{.name = "large heads", .T = 70, .H = 2, .D = 256}}) {
    cases.push_back(c);
  }
  return cases;
}

std::vector<Case> convolutions() {
  std::vector<Case> cases{
      {.name = "before softmax", .T = 100, .pre_queries = 6, .conv_keys = 11},
      {.name = "after softmax", .T = 100, .post_queries = 6, .conv_keys = 11},
      {.name = "both", .B = 3, .T = 100, .pre_queries = 3, .post_queries = 6},
      {.name = "nothing mixed",
       .T = 100,
       .pre = false,
       .post = false,
       .pre_queries = 6,
       .post_queries = 2},
      {.name = "mixed before", .T = 100, .post = false, .pre_queries = 6, .post_queries = 2},
      {.name = "mixed after", .T = 100, .pre = false, .pre_queries = 6, .post_queries = 2},
      {.name = "static",
       .T = 70,
       .pre_static = 8,
       .post_static = 8,
       .pre_queries = 2,
       .post_queries = 2},
      {.name = "head groups", .T = 70, .pre_queries = 2, .post_queries = 3, .conv_heads = 4},
      {.name = "left",
       .T = 70,
       .pre_queries = 4,
       .post_queries = 4,
       .conv_keys = 16,
       .padding = "left"},
      {.name = "right",
       .T = 70,
       .pre_queries = 4,
       .post_queries = 4,
       .conv_keys = 16,
       .padding = "right"},
      {.name = "window", .T = 200, .window = 70, .pre_queries = 6, .post_queries = 6},
      {.name = "not causal",
       .T = 70,
       .S = 150,
       .causal = false,
       .pre_queries = 6,
       .post_queries = 6},
      {.name = "lengths", .B = 3, .T = 90, .pre_queries = 6, .post_queries = 6, .mask = "lengths"},
      {.name = "mask", .T = 90, .pre_queries = 6, .post_queries = 6, .mask = "mask"},
      {.name = "more queries than keys", .T = 131, .S = 70, .pre_queries = 6, .post_queries = 6},
      {.name = "decode", .T = 5, .S = 150, .pre_queries = 6, .post_queries = 6},
      {.name = "longest",
       .T = 65,
       .H = 3,
       .D = 9,
       .pre_queries = 8,
       .post_queries = 8,
       .conv_keys = 33},
  };
  for (const char* padding : {"both", "left", "right"}) {
    cases.push_back({.name = std::string("exact ") + padding,
                     .T = 100,
                     .pre_queries = 6,
                     .post_queries = 2,
                     .conv_keys = 11,
                     .padding = padding,
                     .conv_mask = "exact"});
  }
  cases.push_back(
      {.name = "exact, window", .T = 200, .window = 70, .pre_queries = 6, .conv_mask = "exact"});
  for (const char* mask : {"documents", "scattered documents"}) {
    for (const char* conv_mask : {"double", "exact"}) {
      Case c{.name = std::string(conv_mask) + ", " + mask,
             .B = 2,
             .T = 100,
             .pre_queries = 6,
             .post_queries = 3,
             .conv_mask = conv_mask,
             .mask = mask};
      cases.push_back(c);
      c.name += ", one query";
      c.pre_queries = 1;
      c.post_queries = 0;
      cases.push_back(c);
      c = {.name = std::string(conv_mask) + ", head groups, S > T, " + mask,
           .T = 70,
           .S = 90,
           .pre_queries = 3,
           .post_queries = 2,
           .conv_heads = 4,
           .conv_mask = conv_mask,
           .mask = mask};
      cases.push_back(c);
    }
  }
  return cases;
}

std::vector<Case> biases() {
  std::vector<Case> cases;
  const int64_t B = 3, T = 70, S = 131, H = 8;
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{B, H, T, S}, {1, H, T, S}, {H, T, 1}, {B, 1, 1, S}, {S}, {1}}) {
    cases.push_back({.name = "bias", .B = B, .T = T, .S = S, .bias = shape});
    cases.push_back({.name = "bias, convolutions",
                     .B = B,
                     .T = T,
                     .S = S,
                     .pre_queries = 3,
                     .post_queries = 2,
                     .bias = shape});
  }
  cases.push_back({.name = "bias alone", .T = T, .pre = false, .post = false, .bias = {T, T}});
  return cases;
}

TEST(ComposedAttentionFused, BiasHasAGradient) {
  for (const Case& c : biases()) {
    SCOPED_TRACE(c.bias.size());
    expect_close(c, at::kFloat, 2e-5);
  }
  const Problem p = make({.name = "bfloat16", .T = 70, .bias = {8, 70, 70}}, at::kBFloat16);
  test::expect_errs_like_rounding(evaluation(p), 5e-3);
}

// Where each of several threads has whole batch elements, all of them add to every part of a bias
// that the elements share.
TEST(ComposedAttentionFused, ThreadsShareTheGradientOfABias) {
  const int before = at::get_num_threads();
  const Problem p =
      make({.B = 4, .T = 100, .pre = false, .post = false, .bias = {8, 100, 100}}, at::kFloat);
  const auto expected = evaluate(p, "reference", at::kDouble);
  at::set_num_threads(2);
  for (int run = 0; run < 30; ++run) {  // one may happen to be right although they meet
    const auto got = evaluate(p, "fused", at::kFloat);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_LT(distance(got[i], expected[i]), 8e-5) << "run " << run << ", result " << i;
    }
  }
  at::set_num_threads(before);
}

// The sum of squares of every gradient, differentiated again.
std::vector<Tensor> second_gradients(Problem p, bool fused, at::ScalarType type) {
  std::vector<Tensor> leaves;
  for (const Tensor& t : p.leaves) leaves.push_back(t.to(type).detach().requires_grad_());
  size_t i = 3;
  for (Tensor* t : leaves_of(p.options)) *t = leaves[i++];
  p.options.backend = "fused";
  const auto& attention = fused ? composed_attention : composed_attention_maps;
  const Tensor out = attention(leaves[0], leaves[1], leaves[2], p.options);
  Tensor sum;
  for (const Tensor& g :
       torch::autograd::grad({out.square().sum()}, leaves, {}, std::nullopt, true)) {
    sum = sum.defined() ? sum + g.square().sum() : g.square().sum();
  }
  return torch::autograd::grad({sum}, leaves);
}

TEST(ComposedAttentionFused, GradientsHaveGradients) {
  for (const Case& c : {Case{.name = "mixes", .T = 20, .S = 31},
                        Case{.name = "convolution, bias", .T = 20, .pre_queries = 3, .bias = {20}},
                        Case{.name = "nothing", .T = 20, .pre = false, .post = false}}) {
    SCOPED_TRACE(c.name);
    const Problem p = make(c, at::kFloat);
    const auto expected = second_gradients(p, false, at::kDouble);
    const auto got = second_gradients(p, true, at::kFloat);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_LT(distance(got[i], expected[i]), 1e-3) << i;
  }
}

// Results are those of the kernels, bit for bit, where these take the case without being asked.
TEST(ComposedAttentionFused, NothingComposedIsFusedWhereThatIsFaster) {
  struct Choice {
    int64_t T, S, Gk;
    bool fused;
  };
  for (const Choice& c : {Choice{1, 64, 8, true},
                          {16, 2000, 8, true},
                          {20, 2000, 8, false},
                          {64, 64, 8, true},
                          Choice{4, 900, 2, true},
                          {5, 900, 2, false}}) {
    const Problem p =
        make({.T = c.T, .S = c.S, .Gk = c.Gk, .pre = false, .post = false}, at::kFloat);
    ComposedAttentionOptions o = p.options;
    const Tensor chosen = composed_attention(p.leaves[0], p.leaves[1], p.leaves[2], o);
    o.backend = c.fused ? "fused" : "reference";
    EXPECT_TRUE(at::equal(chosen, composed_attention(p.leaves[0], p.leaves[1], p.leaves[2], o)))
        << c.T << " queries, " << c.Gk << " key heads";
  }
}

TEST(ComposedAttentionFused, ConvolutionsMatchTheReference) {
  for (const Case& c : convolutions()) expect_close(c, at::kFloat, 2e-5);
}

TEST(ComposedAttentionFused, EveryMixMatchesTheReference) {
  for (const Case& c : mixes()) expect_close(c, at::kFloat, 2e-5);
}

TEST(ComposedAttentionFused, OddShapesAndMasksMatchTheReference) {
  for (const Case& c : shapes()) expect_close(c, at::kFloat, 2e-5);
}

TEST(ComposedAttentionFused, RowsMayLieApart) {
  for (const Case& c :
       {Case{.name = "mixes", .B = 2, .T = 70, .S = 90, .H = 6, .D = 20, .Gk = 3, .Gv = 2},
        Case{.name = "nothing composed", .B = 2, .T = 70, .pre = false, .post = false},
        Case{.name = "convolutions, bias", .T = 40, .pre_queries = 3, .bias = {8, 40, 40}},
        Case{.name = "few queries", .B = 2, .T = 3, .S = 100},
        Case{.name = "one query", .T = 1, .S = 100, .pre = false, .post = false}}) {
    SCOPED_TRACE(c.name);
    Problem p = make(c, at::kFloat);
    const test::Evaluate adjacent = evaluation(p);
    p.apart = true;
    test::expect_same_with_rows_apart(adjacent, evaluation(p));
  }
}

// Maps that nothing joins are computed one by one.
TEST(ComposedAttentionFused, OddShapesAndMasksMatchTheReferenceWithoutMixes) {
  std::vector<Case> cases = shapes();
  for (int64_t size : {1, 8, 16, 33}) {
    cases.push_back({.name = "heads of " + std::to_string(size), .B = 3, .T = 70, .D = size});
  }
  cases.push_back({.name = "scattered documents", .B = 2, .T = 150, .mask = "scattered documents"});
  for (Case& c : cases) {
    c.pre = c.post = false;
    expect_close(c, at::kFloat, 2e-5);
    if (c.T <= 150) expect_close(c, at::kBFloat16, 1.5e-2);
  }
}

// A low-precision kernel may err at most twice as much as the plain low-precision computation.
TEST(ComposedAttentionFused, BFloat16ErrsLikeItsRounding) {
  for (const Case& c :
       {Case{.name = "bfloat16", .T = 150},
        Case{.name = "bfloat16 odd", .B = 3, .T = 37, .S = 71, .H = 5, .D = 9, .E = 33},
        Case{.name = "bfloat16 shared keys, window", .T = 100, .Gk = 2, .Gv = 4, .window = 40},
        Case{.name = "bfloat16 convolutions", .T = 75, .pre_queries = 6, .post_queries = 3},
        Case{.name = "bfloat16 decode", .B = 2, .T = 4, .S = 300},
        Case{.name = "bfloat16 strided", .T = 50, .strided = true}}) {
    SCOPED_TRACE(c.name);
    test::expect_errs_like_rounding(evaluation(make(c, at::kBFloat16)), 5e-3);
  }
}

// Where mixes multiply pairs of maps and of ranks, an odd last one has no neighbour.
TEST(ComposedAttentionFused, BFloat16MixesOfOddSizesErrLikeTheirRounding) {
  const Case odd{.B = 2, .T = 37, .S = 70, .H = 9, .D = 9};
  const auto check = [&](const char* name, const auto& change) {
    Case c = odd;
    c.name = name;
    change(c);
    expect_close(c, at::kBFloat16, 1.5e-2);
  };
  for (const int64_t groups : {1, 3, 9}) {
    check("ranks 1 and 3", [&](Case& c) {
      c.groups = groups;
      c.q_rank = 1;
      c.k_rank = 3;
    });
    check("ranks 3 and 1, strided", [&](Case& c) {
      c.groups = groups;
      c.q_rank = 3;
      c.k_rank = 1;
      c.strided = true;
    });
  }
  check("static and dynamic", [](Case& c) {
    c.groups = 3;
    c.pre_static = c.post_static = 9;
    c.q_rank = c.k_rank = 3;
  });
  check("query side", [](Case& c) {
    c.q_rank = 3;
    c.k_rank = 0;
    c.k_gate = false;
  });
  check("key side", [](Case& c) {
    c.q_rank = 0;
    c.q_gate = false;
    c.k_rank = 3;
  });
  check("gates", [](Case& c) { c.q_rank = c.k_rank = 0; });
  check("rank 4", [](Case& c) { c.q_rank = c.k_rank = 4; });
}

// Against one thread: the reference's many small operations would wait for each other.
TEST(ComposedAttentionFused, AnyNumberOfThreads) {
  const int before = at::get_num_threads();
  for (const Case& c :
       {Case{.name = "tiles", .T = 300}, Case{.name = "elements", .B = 4, .T = 70},
        Case{.name = "decode", .T = 3, .S = 500},
        // The outputs of the threads' own softmaxes are joined.
        Case{.name = "decode, nothing composed",
             .T = 1,
             .S = 1000,
             .H = 12,
             .D = 64,
             .pre = false,
             .post = false},
        Case{.name = "decode, mixed before", .T = 3, .S = 1000, .H = 12, .D = 64, .post = false},
        Case{.name = "convolutions, bias",
             .B = 2,
             .T = 100,
             .pre_queries = 3,
             .post_queries = 2,
             .bias = {8, 100, 100}}}) {
    const Problem p = make(c, at::kFloat);
    at::set_num_threads(1);
    const auto expected = evaluate(p, "fused", at::kFloat);
    for (const int threads : {2, 3}) {
      SCOPED_TRACE(c.name + ", threads: " + std::to_string(threads));
      at::set_num_threads(threads);
      const auto got = evaluate(p, "fused", at::kFloat);
      for (size_t i = 0; i < got.size(); ++i) EXPECT_LT(distance(got[i], expected[i]), 2e-5) << i;
    }
  }
  at::set_num_threads(before);
}

std::vector<Case> few_queries() {
  std::vector<Case> cases;
  for (const int64_t T : {1, 2, 3, 5, 8}) {
    for (const int64_t S : {1, 63, 64, 65, 1000}) {
      if (S < T) continue;
      const std::string name = std::to_string(T) + " queries, " + std::to_string(S) + " keys";
      cases.push_back({.name = name, .T = T, .S = S, .H = 6, .D = 20, .E = 36, .Gk = 3, .Gv = 2});
      cases.push_back({.name = name + ", nothing composed",
                       .B = 2,
                       .T = T,
                       .S = S,
                       .H = 6,
                       .D = 80,
                       .pre = false,
                       .post = false});
    }
    const Case many{.B = 3, .T = T, .S = 300, .H = 6, .D = 20};
    const auto add = [&](const char* name, const auto& change) {
      Case c = many;
      c.name = std::to_string(T) + " queries, " + name;
      change(c);
      cases.push_back(c);
    };
    add("window", [](Case& c) { c.window = 70; });
    add("window, not causal", [](Case& c) {
      c.causal = false;
      c.window = 33;
    });
    add("lengths", [](Case& c) { c.mask = "lengths"; });
    add("documents", [](Case& c) { c.mask = "documents"; });
    add("mask", [](Case& c) { c.mask = "mask"; });
    add("bias", [](Case& c) { c.mask = "bias"; });
    add("strided bias", [](Case& c) { c.bias = {6, 1, 1}; });
    add("static", [](Case& c) { c.pre_static = c.post_static = 6; });
    add("groups", [](Case& c) {
      c.pre_static = c.post_static = 6;
      c.groups = 3;
    });
    add("rectangular", [](Case& c) {
      c.pre_static = 12;
      c.post_static = 5;
      c.q_rank = c.k_rank = 0;
      c.q_gate = c.k_gate = false;
    });
    add("unequal ranks", [](Case& c) {
      c.q_rank = 1;
      c.k_rank = 3;
      c.k_gate = false;
    });
    add("64 heads", [](Case& c) {
      c.H = 64;
      c.D = 8;
    });
  }
  return cases;
}

TEST(ComposedAttentionFused, FewQueriesMatchTheReference) {
  for (const Case& c : few_queries()) expect_close(c, at::kFloat, 2e-5);
}

// The error of the output is at most twice that of the plain computation in bfloat16.
TEST(ComposedAttentionFused, FewQueriesErrLessThanPlainBFloat16) {
  for (const Case& c : few_queries()) {
    SCOPED_TRACE(c.name);
    Problem p = make(c, at::kBFloat16);
    const Tensor expected = evaluate(p, "reference", at::kDouble)[0];
    const double plain = distance(evaluate(p, "reference", at::kBFloat16)[0], expected);
    Poison poison;
    p.options.backend = "fused";
    const Tensor got = composed_attention(p.leaves[0], p.leaves[1], p.leaves[2], p.options);
    EXPECT_FALSE(!(distance(got, expected) <= 2 * plain));
  }
}

// A cache is a part of a larger buffer, [B, capacity, G, D]: nothing after its end is read, nor
// what no query sees.
TEST(ComposedAttentionFused, FewQueriesReadNothingPastTheCache) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    for (const int64_t T : {1, 3}) {
      for (const int64_t S : {1, 63, 64, 65, 150}) {
        SCOPED_TRACE(S);
        if (S < T) continue;
        Problem p = make({.B = 2, .T = T, .S = S, .H = 6, .D = 20, .Gk = 3, .Gv = 2}, type);
        p.options.backend = "fused";
        const auto run = [&] {
          return composed_attention(p.leaves[0], p.leaves[1], p.leaves[2], p.options);
        };
        const Tensor expected = run();
        ComposedAttentionOptions& o = p.options;
        for (Tensor* t : {&p.leaves[1], &p.leaves[2], &o.pre.k_down, &o.pre.k_up, &o.pre.k_gate,
                          &o.post.k_down, &o.post.k_up, &o.post.k_gate}) {
          std::vector<int64_t> sizes = t->sizes().vec();
          sizes[1] += 70;
          const Tensor room = at::full(sizes, NAN, t->options());
          room.narrow(1, 0, S).copy_(*t);
          *t = room.narrow(1, 0, S);
        }
        EXPECT_TRUE(at::equal(run(), expected));
      }
    }
  }
}

// L comes from the forward. Where this reads few queries' keys in place, its mixes must round as
// those of the backward do, because the backward's weights are exp(A - L).
TEST(ComposedAttentionFused, FewQueriesHaveBFloat16GradientsOfLargeScores) {
  for (const auto& [T, S] : {std::pair<int64_t, int64_t>{8, 8}, {1, 64}, {8, 64}}) {
    Problem p = make({.T = T, .S = S, .D = 64}, at::kBFloat16);
    p.leaves[0] = p.leaves[0] * 10;
    const auto expected = evaluate(p, "reference", at::kDouble);
    const auto plain = evaluate(p, "reference", at::kBFloat16);
    const auto got = evaluate(p, "fused", at::kBFloat16);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_LE(distance(got[i], expected[i]), 2 * distance(plain[i], expected[i]) + 1e-2) << i;
    }
  }
}

TEST(ComposedAttentionFused, LargeScoresStayFinite) {
  Case c{.name = "large", .T = 130};
  Problem p = make(c, at::kFloat);
  p.leaves[0] = p.leaves[0] * 300;
  const auto got = evaluate(p, "fused", at::kFloat);
  for (const Tensor& t : got) EXPECT_TRUE(at::isfinite(t).all().item<bool>());
  EXPECT_LT(distance(got[0], evaluate(p, "reference", at::kDouble)[0]), 1e-3);
}

// A score of -inf stays one under ranks alone, whose terms all have its sign: a gate that is not
// there is not a product with 0.
TEST(ComposedAttentionFused, HiddenScoresStayHiddenWithoutGates) {
  for (const Case& c :
       {Case{.name = "ranks", .q_gate = false, .k_gate = false},
        Case{.name = "ranks and static", .pre_static = 8, .q_gate = false, .k_gate = false}}) {
    SCOPED_TRACE(c.name);
    Problem p = make(c, at::kFloat);
    for (Tensor& leaf : p.leaves) leaf = leaf.abs();
    p.leaves[1].select(1, 3).fill_(-std::numeric_limits<float>::infinity());
    const Tensor expected = evaluate(p, "reference", at::kDouble)[0];
    const Tensor got = evaluate(p, "fused", at::kFloat)[0];
    EXPECT_TRUE(at::equal(got.isnan(), expected.isnan()));
    EXPECT_FALSE(expected.isnan().all().item<bool>());
  }
}

// The log-sum-exp of large scores is rounded, so that all weights of a query are off by one factor.
// Where one of them is nearly 1, its score's gradient is the small difference of large numbers.
TEST(ComposedAttentionFused, LargeScoresHaveGradientsAsInThePlainComputation) {
  for (const Case& c :
       {Case{.name = "by maps", .T = 150, .pre = false, .post = false}, Case{.name = "mixed"},
        Case{.name = "static",
             .q_rank = 0,
             .k_rank = 0,
             .post_static = 8,
             .q_gate = false,
             .k_gate = false,
             .pre = false},
        Case{.name = "few queries", .T = 4, .S = 300}}) {
    SCOPED_TRACE(c.name);
    Problem p = make(c, at::kFloat);
    p.leaves[0] = p.leaves[0] * 20;
    const auto expected = evaluate(p, "reference", at::kDouble);
    const auto plain = evaluate(p, "reference", at::kFloat);
    const auto got = evaluate(p, "fused", at::kFloat);
    for (const size_t i : {1, 2}) {  // of the queries and the keys
      EXPECT_LE(distance(got[i], expected[i]), 2 * distance(plain[i], expected[i]) + 3e-6) << i;
    }
  }
}

// Where a block of keys has larger scores than all before it, by less and by more than the room
// that the kernel leaves above a running maximum. Falling scores never raise it.
TEST(ComposedAttentionFused, RisingScoresMatchTheReference) {
  for (const Case& c :
       {Case{.name = "many queries", .T = 300, .pre = false}, Case{.name = "mixed", .T = 300},
        Case{.name = "few queries", .T = 4, .S = 300, .pre = false}}) {
    for (const double rise : {8.0, 15.0, 17.0, 40.0, -40.0}) {  // of a score from block to block
      SCOPED_TRACE(c.name + ", rise " + std::to_string(rise));
      Problem p = make(c, at::kFloat);
      Tensor &q = p.leaves[0], &k = p.leaves[1];
      const auto size = static_cast<double>(q.size(3));
      q = q * 0.1 + 1;
      const Tensor ramp = at::arange(k.size(1), k.options()).view({1, -1, 1, 1});
      k = k * 0.1 + ramp * (rise / 64 / std::sqrt(size));
      const auto got = evaluate(p, "fused", at::kFloat);
      const auto expected = evaluate(p, "reference", at::kDouble);
      EXPECT_LT(distance(got[0], expected[0]), 5e-5);
      // The backward begins with L, which float32 rounds by 1e-5 where scores are 200.
      for (size_t i = 1; i < got.size(); ++i) {
        EXPECT_LT(distance(got[i], expected[i]), 5e-3) << "gradient " << i;
      }
    }
  }
}

TEST(ComposedAttentionFused, IsDeterministic) {
  const Problem p = make({.name = "twice", .B = 3, .T = 200}, at::kFloat);
  const auto once = evaluate(p, "fused", at::kFloat);
  const auto twice = evaluate(p, "fused", at::kFloat);
  for (size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(at::equal(once[i], twice[i])) << i;
}

TEST(ComposedAttentionFused, LesserInstructionSetsToo) {
  EXPECT_TRUE(test::passes_on_lesser_instruction_sets(
      "ComposedAttentionFused.EveryMixMatchesTheReference:"
      "ComposedAttentionFused.ConvolutionsMatchTheReference:"
      "ComposedAttentionFused.FewQueriesMatchTheReference:"
      "ComposedAttentionFused.RowsMayLieApart:"
      "ComposedAttentionFused.BFloat16ErrsLikeItsRounding"));
}

TEST(ComposedAttentionFused, RefusesWhatItCannotRun) {
  Problem p = make({.name = "rank 5", .q_rank = 5, .k_rank = 5}, at::kFloat);
  const Tensor &q = p.leaves[0], &k = p.leaves[1], &v = p.leaves[2];
  EXPECT_NO_THROW(composed_attention(q, k, v, p.options));
  p.options.backend = "fused";
  try {
    composed_attention(q, k, v, p.options);
    ADD_FAILURE() << "a rank of 5 was not refused";
  } catch (const c10::NotImplementedError& error) {
    EXPECT_NE(error.msg().find("because a low-rank branch has a rank above 4"), std::string::npos);
  }
}

}  // namespace
}  // namespace headloom::ops::composed_attention_fused_test
