// NaN and infinity in any input of any fused operator, forward and backward.
//
// The rule (docs/composed_attention.md, "What is not finite"): an output that the definition keeps
// finite is the same in the kernel; an output that depends on the poisoned number and is not finite
// in the definition is not finite in the kernel. In between, where the definition multiplies NaN by
// a weight of 0, a kernel may have either. Infinity may come out as NaN. A number in a parameter
// that is read at every position, and the gradient of such a parameter, may be NaN further than in
// the definition. And x (a + b), as the kernels of a mix have it, may be infinite where x a + x b
// is NaN.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ops/aft/op.h"
#include "ops/causal_conv1d/op.h"
#include "ops/composed_attention/op.h"
#include "ops/dynamic_weights/op.h"
#include "ops/gated_linear_attention/op.h"
#include "ops/gated_norm/op.h"
#include "ops/linear/op.h"
#include "ops/linear_cross_entropy/op.h"
#include "ops/moe/op.h"
#include "ops/positionwise/op.h"
#include "ops/retention/op.h"
#include "ops/selective_scan/op.h"
#include "ops/token_shift/op.h"
#include "ops/wkv/op.h"
#include "testing/compare.h"
#include "testing/instruction_sets.h"
#include "testing/poison.h"

namespace headloom::nonfinite_test {
namespace {

using namespace test;
using Tensors = std::vector<Tensor>;

enum class Bad { kNaN, kPayload, kInfinity, kNegativeInfinity };
constexpr Bad kAll[] = {Bad::kNaN, Bad::kPayload, Bad::kInfinity, Bad::kNegativeInfinity};
const char* name_of(Bad bad) {
  constexpr const char* names[] = {"NaN", "NaN with a payload", "inf", "-inf"};
  return names[static_cast<int>(bad)];
}

struct Subject {
  std::string name = "";
  // In float64, rounded to bfloat16. The first `narrow` take the type that is tested, the others
  // are float32 beside it.
  Tensors inputs = {};
  size_t narrow = 0;
  std::function<Tensors(const Tensors& x, const std::string& backend)> run = {};
  bool backward = true;
  std::vector<std::pair<size_t, Bad>> refused = {};  // inputs, and what is refused in them
  std::vector<size_t> everywhere = {};               // parameters read at every position
  double tolerance = 2e-4;                           // of float32
  bool adds_weights = false;  // gradients may know infinity where the definition has NaN
};

void put(const Tensor& t, int64_t index, Bad bad) {
  const double inf = std::numeric_limits<double>::infinity();
  if (bad == Bad::kPayload && t.scalar_type() == at::kFloat) {
    t.data_ptr<float>()[index] = std::bit_cast<float>(0x7fffffffu);  // as damaged memory has it
    return;
  }
  if (bad == Bad::kPayload && t.scalar_type() == at::kBFloat16) {
    t.data_ptr<at::BFloat16>()[index].x = 0x7fff;
    return;
  }
  t.view({-1})[index].fill_(bad == Bad::kInfinity           ? inf
                            : bad == Bad::kNegativeInfinity ? -inf
                                                            : std::nan(""));
}

struct Run {
  const Subject& subject;
  const Tensors& cotangents;  // float64; empty without a backward

  // Outputs and then gradients, in float64.
  Tensors operator()(at::ScalarType type, const std::string& backend,
                     const std::function<void(Tensors&)>& change) const {
    Tensors all;
    for (size_t i = 0; i < subject.inputs.size() + cotangents.size(); ++i) {
      const bool input = i < subject.inputs.size();
      const Tensor& t = input ? subject.inputs[i] : cotangents[i - subject.inputs.size()];
      const bool wide = input && i >= subject.narrow && type != at::kDouble;
      all.push_back(t.to(wide ? at::kFloat : type, /*non_blocking=*/false, /*copy=*/true));
    }
    change(all);
    Tensors leaves(all.begin(), all.begin() + static_cast<int64_t>(subject.inputs.size()));
    for (Tensor& t : leaves) t.requires_grad_(subject.backward);
    Tensors out = subject.run(leaves, backend);
    Tensors found;
    for (const Tensor& t : out) found.push_back(t.detach().to(at::kDouble));
    if (!subject.backward) return found;
    Tensors reached, cotangent;
    for (size_t i = 0; i < out.size(); ++i) {
      if (!out[i].requires_grad()) continue;
      reached.push_back(out[i]);
      cotangent.push_back(all[subject.inputs.size() + i].to(out[i].scalar_type()));
    }
    const auto grads = torch::autograd::grad(reached, leaves, cotangent, std::nullopt, false, true);
    for (size_t i = 0; i < leaves.size(); ++i) {
      found.push_back((grads[i].defined() ? grads[i] : at::zeros_like(leaves[i])).to(at::kDouble));
    }
    return found;
  }
};

// The rule at the head of this file; `moved` is `clean` with the number changed to another finite
// one, `expected` with the bad one.
::testing::AssertionResult passes_on(const Tensor& got, const Tensor& expected, const Tensor& clean,
                                     const Tensor& moved, double tolerance, bool further,
                                     bool weaker) {
  if (got.numel() == 0) return ::testing::AssertionSuccess();
  const Tensor finite = expected.isfinite();
  const Tensor kept = expected.masked_fill(finite.logical_not(), 0);
  const double size = std::max(1.0, kept.abs().max().item<double>());
  Tensor wrong = (got - kept).abs().le(tolerance * size).logical_not().logical_and(finite);
  if (further) wrong = wrong.logical_and(got.isfinite());
  const double scale = std::max(1.0, clean.abs().max().item<double>());
  const Tensor depends = (moved - clean).abs().gt(1e-10 * scale);
  Tensor lost = got.isfinite().logical_and(finite.logical_not()).logical_and(depends);
  if (weaker) lost = at::zeros_like(lost);
  const auto count = [](const Tensor& t) { return t.sum().item<int64_t>(); };
  if (count(wrong) + count(lost) == 0) return ::testing::AssertionSuccess();
  auto result = ::testing::AssertionFailure();
  for (const auto& [which, what] : {std::pair(wrong,
                                              "the definition keeps finite and the kernel "
                                              "does not keep or changes"),
                                    std::pair(lost, "is not finite, but the kernel's is")}) {
    if (count(which) == 0) continue;
    const int64_t at = which.reshape({-1}).nonzero()[0].item<int64_t>();
    result << count(which) << " of " << got.numel() << " " << got.sizes() << " " << what
           << ", the first at " << at << ": " << got.reshape({-1})[at].item<double>()
           << ", expected " << expected.reshape({-1})[at].item<double>() << "; ";
  }
  return result;
}

void check(const Subject& s) {
  at::manual_seed(3);
  Tensors cotangents;
  if (s.backward) {
    for (const Tensor& t : s.run(s.inputs, "reference")) {
      cotangents.push_back(at::randn(t.sizes()).to(at::kBFloat16).to(at::kDouble));
    }
  }
  const Run run{s, cotangents};
  const Tensors clean = run(at::kDouble, "reference", [](Tensors&) {});
  const size_t outputs = clean.size() - (s.backward ? s.inputs.size() : 0);
  const auto is_everywhere = [&](size_t i) {
    return std::count(s.everywhere.begin(), s.everywhere.end(), i) > 0;
  };
  for (size_t i = 0; i < s.inputs.size() + cotangents.size(); ++i) {
    const bool input = i < s.inputs.size();
    const int64_t numel = (input ? s.inputs[i] : cotangents[i - s.inputs.size()]).numel();
    for (const bool first : {true, false}) {
      const int64_t index = first ? 0 : numel * 5 / 8;
      if (index >= numel) continue;
      const Tensors moved =
          run(at::kDouble, "reference", [&](Tensors& all) { all[i].view({-1})[index] += 0.5; });
      Tensors expected;
      for (const Bad bad : kAll) {
        if (std::count(s.refused.begin(), s.refused.end(), std::pair(i, bad)) > 0) continue;
        // At the first position what is special there: a poisoned past, and no weight at all.
        if (first && bad != Bad::kNaN && bad != Bad::kNegativeInfinity) continue;
        const auto change = [&](Tensors& all) { put(all[i], index, bad); };
        if (bad != Bad::kPayload) expected = run(at::kDouble, "reference", change);
        for (const auto type : {at::kFloat, at::kBFloat16}) {
          if (first && type == at::kBFloat16) continue;
          const Poison poison;
          const Tensors got = run(type, "fused", change);
          ASSERT_EQ(got.size(), expected.size());
          for (size_t j = 0; j < got.size(); ++j) {
            const bool further = is_everywhere(i) || (j >= outputs && is_everywhere(j - outputs));
            const bool weaker = s.adds_weights && j >= outputs &&
                                (bad == Bad::kInfinity || bad == Bad::kNegativeInfinity);
            EXPECT_TRUE(passes_on(got[j], expected[j], clean[j], moved[j],
                                  type == at::kFloat ? s.tolerance : 0.05, further, weaker))
                << s.name << ", " << type << ": " << name_of(bad) << " in "
                << (input ? "input " : "cotangent ") << (input ? i : i - s.inputs.size()) << " at "
                << index << ", seen in " << (j < outputs ? "output " : "gradient ")
                << (j < outputs ? j : j - outputs);
          }
        }
      }
    }
  }
}

Tensor real(at::IntArrayRef sizes, double scale = 1) {
  return (at::randn(sizes) * scale).to(at::kBFloat16).to(at::kDouble);
}

// --- composed_attention ---

struct AttentionCase {
  std::string name;
  int64_t T = 70, S = 70, heads = 4, key_heads = 4;
  bool pre = false, post = false, pre_conv = false, post_conv = false;
  std::function<void(ops::ComposedAttentionOptions&)> change = [](auto&) {};
  bool bias = false;
};

Subject attention(const AttentionCase& c) {
  const int64_t B = 2, D = 8, R = 2, H = c.heads;
  at::manual_seed(5);
  Subject s{.name = "composed_attention " + c.name};
  s.inputs = {real({B, c.T, H, D}), real({B, c.S, c.key_heads, D}), real({B, c.S, c.key_heads, D})};
  for (const bool mixed : {c.pre, c.post}) {
    if (!mixed) continue;
    for (const Tensor& t : {real({H, H}, 0.5), real({B, c.T, R, H}, 0.5), real({B, c.T, R, H}, 0.5),
                            real({B, c.T, H}, 0.5), real({B, c.S, R, H}, 0.5),
                            real({B, c.S, R, H}, 0.5), real({B, c.S, H}, 0.5)}) {
      s.inputs.push_back(t);
    }
  }
  for (const bool convolved : {c.pre_conv, c.post_conv}) {
    if (!convolved) continue;
    s.everywhere.push_back(s.inputs.size());
    s.inputs.push_back(real({H, 2, 3}, 0.5));
  }
  if (c.bias) s.inputs.push_back(real({H, c.T, c.S}));
  s.narrow = s.inputs.size();
  s.adds_weights = c.pre || c.post;
  s.run = [c](const Tensors& x, const std::string& backend) -> Tensors {
    ops::ComposedAttentionOptions o;
    size_t next = 3;
    const auto take = [&](ops::HeadMix& m) {
      for (Tensor* t :
           {&m.static_matrix, &m.q_down, &m.q_up, &m.q_gate, &m.k_down, &m.k_up, &m.k_gate}) {
        *t = x[next++];
      }
    };
    if (c.pre) take(o.pre);
    if (c.post) take(o.post);
    if (c.pre_conv) o.pre_conv = x[next++];
    if (c.post_conv) o.post_conv = x[next++];
    if (c.bias) o.bias = x[next++];
    c.change(o);
    // Not scaled_dot_product_attention, which is the reference where nothing is composed.
    if (backend == "reference") return {ops::composed_attention_maps(x[0], x[1], x[2], o)};
    o.backend = backend;
    return {ops::composed_attention(x[0], x[1], x[2], o)};
  };
  return s;
}

TEST(NonFinite, PassesThroughComposedAttention) {
  using Options = ops::ComposedAttentionOptions;
  const std::vector<AttentionCase> cases = {
      {.name = "plain"},
      {.name = "not causal", .S = 90, .change = [](Options& o) { o.causal = false; }},
      {.name = "few queries", .T = 2, .S = 150, .key_heads = 2},
      {.name = "one key", .T = 1, .S = 1},
      {.name = "some queries", .T = 20, .S = 300},
      {.name = "mixed", .pre = true, .post = true},
      {.name = "few queries, mixed", .T = 2, .S = 150, .key_heads = 2, .pre = true, .post = true},
      {.name = "few queries, mixed before", .T = 1, .S = 150, .pre = true},
      {.name = "convolved", .pre_conv = true, .post_conv = true},
      {.name = "convolved before, exact",
       .pre = true,
       .pre_conv = true,
       .change = [](Options& o) { o.conv_mask = "exact"; }},
      {.name = "convolved to the right",
       .post_conv = true,
       .change =
           [](Options& o) {
             o.window = 1;
             o.conv_padding = "right";
           }},
      {.name = "convolved, mixed, window",
       .T = 40,
       .S = 100,
       .pre = true,
       .post = true,
       .pre_conv = true,
       .post_conv = true,
       .change = [](Options& o) { o.window = 7; }},
      {.name = "window", .change = [](Options& o) { o.window = 9; }},
      {.name = "lengths",
       .change =
           [](Options& o) {
             o.causal = false;
             o.lengths = at::tensor({40, 0}, kLong);
           }},
      {.name = "documents",
       .post = true,
       .post_conv = true,
       .change =
           [](Options& o) {
             o.documents = at::arange(70, kLong).div(30, "floor").expand({2, 70});
           }},
      {.name = "mask",
       .change =
           [](Options& o) {
             o.mask = at::arange(70 * 70, kLong).remainder(7).lt(4).view({1, 1, 70, 70});
           }},
      {.name = "bias", .bias = true},
  };
  for (const AttentionCase& c : cases) check(attention(c));
}

// --- Recurrences ---

Subject wkv(const std::string& name, bool more, double keys) {
  const int64_t B = 2, T = 40, C = 11;
  at::manual_seed(6);
  Subject s{.name = "wkv " + name};
  s.inputs = {real({B, T, C}, keys), real({B, T, C})};
  if (more) s.inputs.push_back(real({B, T, C}));
  s.narrow = s.inputs.size();
  s.inputs.push_back(at::exp(at::linspace(-4, 1, C, kDouble)));
  s.inputs.push_back(real({C}));
  s.refused = {{s.narrow, Bad::kNegativeInfinity}};
  if (more) {
    s.inputs.push_back(at::stack({at::randn({B, C}), at::rand({B, C}) + 0.5, at::randn({B, C})}, 1)
                           .to(at::kDouble));
  }
  s.tolerance = 1e-3;
  s.run = [=](const Tensors& x, const std::string& backend) -> Tensors {
    ops::WkvOptions o;
    o.backend = backend;
    const size_t rates = more ? 3 : 2;
    if (more) {
      o.receptance = x[2];
      o.state = x[5];
      o.documents = at::arange(T, kLong).div(30, "floor").expand({B, T});
    }
    const auto [out, state] = ops::wkv(x[0], x[1], x[rates], x[rates + 1], o);
    // As sums, since m is a constant to gradients; m itself beside them.
    return {out, state.narrow(1, 0, 2), state.narrow(1, 2, 1).detach()};
  };
  return s;
}

TEST(NonFinite, PassesThroughWkv) {
  check(wkv("alone", false, 1));
  check(wkv("with gate, state and documents", true, 1));
  check(wkv("far apart", false, 50));
  check(wkv("far apart, with gate, state and documents", true, 50));
}

Subject aft(const std::string& form, bool causal, bool more, double keys) {
  const int64_t B = 2, T = 40, C = 12, W = 5;
  at::manual_seed(7);
  Subject s{.name = "aft " + form + (causal ? ", causal" : "") + (more ? ", more" : "") +
                    (keys > 1 ? ", far apart" : "")};
  s.inputs = {real({B, T, C}), real({B, T, C}, keys), real({B, T, C})};
  s.narrow = 3;
  const int64_t columns = causal ? W : 2 * W - 1;
  if (form != "simple") {
    s.everywhere = {3};
    s.inputs.push_back(form == "full"    ? real({T, T}, 0.5)
                       : form == "local" ? real({T + 3, columns}, 0.5)
                                         : real({3, columns}, 0.5));
  }
  const bool stateful = causal && (form == "simple" || form == "local");
  const size_t state_at = s.inputs.size();
  if (more && stateful) {
    const int64_t ring = form == "local" ? W - 1 : 0;
    s.inputs.push_back(
        at::cat({at::randn({B, 1, C}), at::rand({B, 1, C}) + 0.5, at::randn({B, 1 + 2 * ring, C})},
                1)
            .to(at::kDouble));
  }
  s.tolerance = 1e-3;
  s.run = [=](const Tensors& x, const std::string& backend) -> Tensors {
    ops::AftOptions o;
    o.form = form;
    o.causal = causal;
    // Where there are no kernels of its own, what runs by itself.
    if (backend == "reference" || causal) o.backend = backend;
    if (form != "simple") o.bias = x[3];
    if (more && stateful) {
      o.state = x[state_at];
      o.offset = form == "local" ? 3 : 0;
    }
    if (more && causal) {
      o.documents = at::arange(T, kLong).div(30, "floor").expand({B, T});
    }
    if (more && !causal) o.lengths = at::tensor({25, 0}, kLong);
    const auto [out, state] = ops::aft(x[0], x[1], x[2], o);
    if (!stateful) return {out};
    const int64_t rows = state.size(1);
    return {out, state.narrow(1, 0, 2), state.narrow(1, 2, 1).detach(),
            state.narrow(1, 3, rows - 3)};
  };
  return s;
}

TEST(NonFinite, PassesThroughAft) {
  for (const char* form : {"simple", "local", "full", "conv"}) {
    for (const double keys : {1.0, 50.0}) {
      check(aft(form, true, false, keys));
      check(aft(form, true, true, keys));
    }
    check(aft(form, false, false, 1));
    check(aft(form, false, true, 1));
  }
}

TEST(NonFinite, PassesThroughRetention) {
  const int64_t B = 2, T = 70, H = 2, D = 5, E = 7;
  for (const bool more : {false, true}) {
    at::manual_seed(8);
    Subject s{.name = more ? "retention with state and documents" : "retention"};
    s.inputs = {real({B, T, H, D}), real({B, T, H, D}), real({B, T, H, E})};
    s.narrow = 3;
    if (more) s.inputs.push_back(real({B, H, D, E}));
    s.run = [=](const Tensors& x, const std::string& backend) -> Tensors {
      ops::RetentionOptions o;
      o.backend = backend;
      o.chunk = 16;
      if (more) {
        o.state = x[3];
        o.documents = at::arange(T, kLong).div(50, "floor").expand({B, T});
      }
      const auto [out, state] =
          ops::retention(x[0], x[1], x[2], at::tensor({0.9, 0.99}, kDouble), o);
      return {out, state};
    };
    check(s);
  }
  // The decay itself, of which only the reference has a gradient.
  Subject s{.name = "retention's gamma"};
  s.inputs = {at::tensor({0.9, 0.99}, kDouble)};
  s.backward = false;
  s.refused = {{0, Bad::kInfinity}, {0, Bad::kNegativeInfinity}};
  const Tensor q = real({B, T, H, D}), v = real({B, T, H, E});
  s.run = [=](const Tensors& x, const std::string& backend) -> Tensors {
    ops::RetentionOptions o;
    o.backend = backend;
    const auto type = backend == "reference" ? at::kDouble : at::kFloat;
    const auto [out, state] = ops::retention(q.to(type), q.to(type), v.to(type), x[0], o);
    return {out, state};
  };
  check(s);
}

TEST(NonFinite, PassesThroughGatedLinearAttention) {
  const int64_t B = 2, T = 70, H = 2, D = 5, E = 7;
  for (const bool more : {false, true}) {
    at::manual_seed(14);
    Subject s{.name = more ? "gated_linear_attention with state and documents"
                           : "gated_linear_attention"};
    s.inputs = {real({B, T, H, D}), real({B, T, H, D}), real({B, T, H, E}),
                at::log_sigmoid(real({B, T, H, D})).to(at::kBFloat16).to(at::kDouble)};
    s.narrow = 4;
    if (more) s.inputs.push_back(real({B, H, D, E}));
    s.run = [=](const Tensors& x, const std::string& backend) -> Tensors {
      ops::GatedLinearAttentionOptions o;
      o.backend = backend;
      o.form = "recurrent";
      if (more) {
        o.state = x[4];
        o.documents = at::arange(T, kLong).div(50, "floor").expand({B, T});
      }
      const auto [out, state] = ops::gated_linear_attention(x[0], x[1], x[2], x[3], o);
      return {out, state};
    };
    check(s);
  }
}

TEST(NonFinite, PassesThroughSelectiveScan) {
  const int64_t B = 2, L = 40, C = 6, N = 3;
  for (const bool more : {false, true}) {
    at::manual_seed(9);
    Subject s{.name = more ? "selective_scan with everything" : "selective_scan"};
    s.inputs = {real({B, L, C}), real({B, L, C}, 0.3)};
    s.inputs.push_back(more ? real({B, L, N}) : real({C, N}));
    s.inputs.push_back(more ? real({B, L, N}) : real({C, N}));
    if (more) s.inputs.push_back(real({B, L, C}));
    s.narrow = s.inputs.size();
    s.inputs.push_back(-at::rand({C, N}).to(at::kDouble) - 0.1);
    if (more) {
      for (const Tensor& t : {real({C}), real({C}), real({B, C, N})}) s.inputs.push_back(t);
    }
    s.tolerance = 1e-3;
    s.run = [=](const Tensors& x, const std::string& backend) -> Tensors {
      ops::SelectiveScanOptions o;
      o.backend = backend;
      if (more) {
        o.z = x[4];
        o.D = x[6];
        o.delta_bias = x[7];
        o.delta_softplus = true;
        o.state = x[8];
        o.documents = at::arange(L, kLong).div(30, "floor").expand({B, L});
      }
      const auto [out, state] = ops::selective_scan(x[0], x[1], x[more ? 5 : 4], x[2], x[3], o);
      return {out, state};
    };
    check(s);
  }
}

TEST(NonFinite, PassesThroughConvolutionAndShift) {
  const int64_t B = 2, L = 40, C = 11;
  at::manual_seed(10);
  Subject s{.name = "causal_conv1d", .inputs = {real({B, L, C}), real({B, 3, C})}, .narrow = 2};
  s.inputs.push_back(real({C, 4}));
  s.inputs.push_back(real({C}));
  s.run = [](const Tensors& x, const std::string& backend) -> Tensors {
    ops::CausalConv1dOptions o;
    o.bias = x[3];
    o.silu = true;
    o.state = x[1];
    o.backend = backend;
    const auto [out, state] = ops::causal_conv1d(x[0], x[2], o);
    return {out, state};
  };
  check(s);

  Subject shift{.name = "token_shift", .inputs = {real({B, L, C}), real({B, C})}, .narrow = 2};
  shift.inputs.push_back(real({2, C}));
  shift.run = [=](const Tensors& x, const std::string& backend) -> Tensors {
    ops::TokenShiftOptions o;
    o.last = x[1];
    o.documents = at::arange(L, kLong).div(30, "floor").expand({B, L});
    o.backend = backend;
    return ops::token_shift(x[0], x[2], o);
  };
  check(shift);
}

TEST(NonFinite, PassesThroughWhatIsPositionwise) {
  const int64_t B = 2, T = 5, E = 21;
  at::manual_seed(11);
  Subject norm{.name = "rms_norm", .inputs = {real({B, T, E}), real({E})}, .narrow = 2};
  norm.run = [](const Tensors& x, const std::string& backend) -> Tensors {
    return {ops::rms_norm(x[0], x[1], 1e-6, backend)};
  };
  check(norm);

  Subject gate{.name = "swiglu", .inputs = {real({B, T, 2 * E})}, .narrow = 1};
  gate.run = [](const Tensors& x, const std::string& backend) -> Tensors {
    return {ops::swiglu(x[0], backend)};
  };
  check(gate);

  Subject bend{.name = "gelu_tanh", .inputs = {real({B, T, E})}, .narrow = 1};
  bend.run = [](const Tensors& x, const std::string& backend) -> Tensors {
    return {ops::gelu_tanh(x[0], backend)};
  };
  check(bend);

  Subject gated{.name = "gated_norm", .inputs = {real({B, T, E}), real({B, T, E})}, .narrow = 2};
  gated.run = [](const Tensors& x, const std::string& backend) -> Tensors {
    return {ops::gated_norm(x[0], x[1], at::full({}, 1e-6, at::kFloat), backend)};
  };
  check(gated);

  for (const bool interleaved : {false, true}) {
    Subject turn{.name = "rotary", .inputs = {real({B, T, 2, 22})}, .narrow = 1};
    const Tensor angle = at::rand({T, 10}, kDouble);
    turn.run = [=](const Tensors& x, const std::string& backend) -> Tensors {
      const auto type = x[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
      return {ops::rotary(x[0], angle.cos().to(type), angle.sin().to(type), interleaved, backend)};
    };
    check(turn);
  }
}

TEST(NonFinite, PassesThroughExpertsAndWeightNetworks) {
  const int64_t N = 9, C = 6, I = 10, experts = 3;
  at::manual_seed(12);
  Subject moe{.name = "moe",
              .inputs = {real({N, C}), real({experts, 2 * I, C}), real({experts, C, I})},
              .narrow = 3};
  moe.inputs.push_back(at::rand({N, 2}, kDouble));
  const Tensor choice = at::arange(2 * N, kLong).remainder(experts).view({N, 2});
  moe.run = [=](const Tensors& x, const std::string& backend) -> Tensors {
    return {ops::moe(x[0], x[1], x[2], choice, x[3], backend)};
  };
  check(moe);

  Subject weights{.name = "dynamic_weights", .inputs = {real({1, 3, 2 * 1 * 24})}, .narrow = 1};
  weights.inputs.push_back(real({2, 1, 24, 2 * 2 * 6}));
  weights.backward = false;
  weights.run = [](const Tensors& x, const std::string& backend) -> Tensors {
    return ops::dynamic_weights(x[0], x[1], 2, backend);
  };
  check(weights);
}

TEST(NonFinite, PassesThroughLinear) {
  const int64_t in = 83, out = 9;
  at::manual_seed(13);
  const Tensor int8 = at::randint(-127, 128, {out, in}).to(at::kChar);
  const auto [int4, scale] = ops::quantized_int4(at::randn({out, in}));
  for (const int64_t rows : {1, 5}) {
    Subject s{
        .name = "linear", .inputs = {real({rows, in}), real({out, in}), real({out})}, .narrow = 3};
    s.run = [](const Tensors& x, const std::string& backend) -> Tensors {
      return {ops::linear(x[0], x[1], {}, x[2], backend)};
    };
    check(s);
    Subject narrow{.name = "linear int8", .inputs = {real({rows, in}), real({out})}, .narrow = 2};
    narrow.inputs.push_back(at::rand({out}, kDouble) / 127);
    narrow.backward = false;
    narrow.run = [=](const Tensors& x, const std::string& backend) -> Tensors {
      return {ops::linear(x[0], int8, x[2].to(at::kFloat), x[1], backend)};
    };
    check(narrow);
    Subject four{.name = "linear int4", .inputs = {real({rows, in}), real({out})}, .narrow = 2};
    four.backward = false;
    four.run = [&, v = int4, s = scale](const Tensors& x, const std::string& backend) -> Tensors {
      return {ops::linear(x[0], v, s, x[1], backend)};
    };
    check(four);
  }
}

TEST(NonFinite, PassesThroughTheHeadAndItsLoss) {
  const int64_t positions = 7, width = 6, classes = 83;
  at::manual_seed(14);
  Subject s{.name = "linear_cross_entropy",
            .inputs = {real({positions, width}), real({classes, width}), real({classes})},
            .narrow = 3};
  Tensor targets = at::arange(positions, kLong) * 3;
  targets[2] = ops::kIgnoredTarget;
  s.run = [=](const Tensors& x, const std::string& backend) -> Tensors {
    return {std::get<0>(ops::linear_cross_entropy(x[0], x[1], targets, x[2], backend))};
  };
  check(s);
}

TEST(NonFinite, LesserInstructionSetsToo) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets("NonFinite.PassesThrough*"));
}

}  // namespace
}  // namespace headloom::nonfinite_test
