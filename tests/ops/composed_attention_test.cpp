// The operator against loops over its formula, gradients against differences, and its error
// sentences. Everything runs in double, which the plain reference computes.
#include "case.h"
#include "testing/autocast.h"

namespace headloom::composed_attention_test {
namespace {

using namespace test;

struct Term {
  const char* name;
  void (*apply)(Case&);
};
std::ostream& operator<<(std::ostream& out, const Term& term) { return out << term.name; }

const Term kTerms[] = {
    {"plain", [](Case&) {}},
    {"plain_scale", [](Case& c) { c.o.scale = 0.3; }},
    {"plain_bias", [](Case& c) { c.o.bias = real({1, H, T, S}); }},
    {"plain_bias_row", [](Case& c) { c.o.bias = real({T, S}); }},
    {"plain_grouped", [](Case& c) { grouped_heads(c, 2, 2); }},
    {"plain_grouped_unequal", [](Case& c) { grouped_heads(c, 3, 1); }},
    {"static_pre", [](Case& c) { c.o.pre.static_matrix = real({H, H}); }},
    {"static_post", [](Case& c) { c.o.post.static_matrix = real({H, H}); }},
    {"static_groups",
     [](Case& c) {
       c.o.pre.groups = 3;
       c.o.pre.static_matrix = real({3, 2, 2});
       c.o.post.groups = 2;
       c.o.post.static_matrix = real({2, 3, 3});
     }},
    {"static_three_dimensions_one_group",
     [](Case& c) { c.o.post.static_matrix = real({1, H, H}); }},
    {"rectangular_pre",
     [](Case& c) {
       grouped_heads(c, 3, 2);
       c.o.pre.static_matrix = real({H, 4});
     }},
    {"rectangular_post",
     [](Case& c) {
       grouped_heads(c, 2, 3);
       c.o.post.static_matrix = real({H, 3});
     }},
    {"rectangular_both",
     [](Case& c) {
       grouped_heads(c, 6, 5);
       c.o.pre.static_matrix = real({H, 4});
       c.o.post.static_matrix = real({4, 10});
       c.o.post_conv = real({4, 2, 3});
     }},
    {"rectangular_pre_then_dynamic",
     [](Case& c) {
       c.v = at::randn({B, S, 2, E}, kDouble);
       c.o.pre.static_matrix = real({H, 4});
       query_wise(c.o.post, 4);
       key_wise(c.o.post, 4);
     }},
    {"query_pre", [](Case& c) { query_wise(c.o.pre); }},
    {"query_post", [](Case& c) { query_wise(c.o.post); }},
    {"key_pre", [](Case& c) { key_wise(c.o.pre); }},
    {"key_post", [](Case& c) { key_wise(c.o.post); }},
    {"query_gate_pre", [](Case& c) { c.o.pre.q_gate = real({B, T, H}); }},
    {"query_gate_post", [](Case& c) { c.o.post.q_gate = real({B, T, H}); }},
    {"key_gate_pre", [](Case& c) { c.o.pre.k_gate = real({B, S, H}); }},
    {"key_gate_post", [](Case& c) { c.o.post.k_gate = real({B, S, H}); }},
    {"compose",
     [](Case& c) {
       everything(c.o.pre, 1);
       everything(c.o.post, 1);
     }},
    {"compose_groups",
     [](Case& c) {
       grouped_heads(c, 2, 3);
       everything(c.o.pre, 2);
       everything(c.o.post, 3);
     }},
    {"conv_pre", [](Case& c) { c.o.pre_conv = real({H, 3, 5}); }},
    {"conv_pre_left",
     [](Case& c) {
       c.o.pre_conv = real({H, 2, 4});
       c.o.conv_padding = "left";
     }},
    {"conv_pre_right",
     [](Case& c) {
       c.o.pre_conv = real({H, 2, 4});
       c.o.conv_padding = "right";
     }},
    {"conv_pre_exact",
     [](Case& c) {
       c.o.pre_conv = real({H, 3, 5});
       c.o.conv_mask = "exact";
     }},
    {"conv_pre_exact_left",
     [](Case& c) {
       c.o.pre_conv = real({H, 3, 4});
       c.o.conv_mask = "exact";
       c.o.conv_padding = "left";
     }},
    {"conv_pre_larger_than_map", [](Case& c) { c.o.pre_conv = real({H, 7, 19}); }},
    {"conv_post", [](Case& c) { c.o.post_conv = real({H, 3, 5}); }},
    {"conv_post_left",
     [](Case& c) {
       c.o.post_conv = real({H, 3, 2});
       c.o.conv_padding = "left";
     }},
    {"conv_post_right",
     [](Case& c) {
       c.o.post_conv = real({H, 3, 2});
       c.o.conv_padding = "right";
     }},
    {"conv_heads",
     [](Case& c) {
       grouped_heads(c, 3, 3);
       c.o.pre_conv = real({H, 2, 2, 3});
       c.o.post_conv = real({H, 3, 3, 5});
     }},
    {"conv_heads_exact",
     [](Case& c) {
       c.o.pre_conv = real({H, 3, 2, 3});
       c.o.conv_mask = "exact";
     }},
    {"all",
     [](Case& c) {
       grouped_heads(c, 3, 2);
       c.o.bias = real({B, 1, T, S});
       c.o.pre_conv = real({H, 2, 3});
       everything(c.o.pre, 1);
       c.o.post_conv = real({H, 2, 3, 3});
       everything(c.o.post, 2);
     }},
};

const Term kMasks[] = {
    {"causal", [](Case&) {}},
    {"all_visible", [](Case& c) { c.o.causal = false; }},
    {"window", [](Case& c) { c.o.window = 3; }},
    {"window_one", [](Case& c) { c.o.window = 1; }},
    {"window_around",
     [](Case& c) {
       c.o.causal = false;
       c.o.window = 2;
     }},
    {"lengths", [](Case& c) { c.o.lengths = at::tensor({5, 8}, kLong); }},
    {"no_key", [](Case& c) { c.o.lengths = at::tensor({0, 2}, kLong); }},
    {"documents",
     [](Case& c) {
       c.o.documents = at::tensor({7, 7, 7, 7, 9, 9, 9, 7, 1, 1, 2, 2, 2, 2, 2, 2}, kLong);
       c.o.documents = c.o.documents.view({B, S});
     }},
    {"mask",
     [](Case& c) {
       c.o.mask = at::rand({B, 1, T, S}) > 0.4;
       c.o.mask[0][0][2].fill_(false);  // a row with no visible key
     }},
    {"mask_of_keys",
     [](Case& c) {
       c.o.causal = false;
       c.o.mask = at::rand({S}) > 0.3;
     }},
    {"every_mask",
     [](Case& c) {
       c.o.window = 6;
       c.o.lengths = at::tensor({7, 8}, kLong);
       c.o.documents = (at::arange(B * S, kLong) / 5).to(at::kLong).view({B, S});
       c.o.mask = at::rand({1, 1, T, S}) > 0.2;
     }},
};

class ComposedAttentionTerm : public ::testing::TestWithParam<Term> {};

TEST_P(ComposedAttentionTerm, FollowsTheFormulaUnderEveryMask) {
  at::manual_seed(1);
  for (const Term& mask : kMasks) {
    Case c;
    GetParam().apply(c);
    mask.apply(c);
    EXPECT_TRUE(test::close(c.run(), c.naive(), 1e-12)) << mask.name;
  }
}

TEST_P(ComposedAttentionTerm, GradientsAgreeWithDifferences) {
  at::manual_seed(2);
  for (const size_t mask : {0, 6, 10}) {  // causal, no_key, every_mask
    Case c;
    GetParam().apply(c);
    kMasks[mask].apply(c);
    std::vector<Tensor> inputs;
    for (Tensor* t : c.reals()) inputs.push_back(*t = test::leaf(*t));
    const Tensor cotangent = at::randn_like(c.naive());
    EXPECT_TRUE(test::gradients_agree([&] { return (c.run() * cotangent).sum(); }, inputs, 1e-5))
        << kMasks[mask].name;
  }
}

TEST_P(ComposedAttentionTerm, FloatAndBfloat16AgreeWithDouble) {
  at::manual_seed(3);
  for (const auto& [type, tolerance] :
       {std::pair(at::kFloat, 1e-5), std::pair(at::kBFloat16, 0.06)}) {
    Case c;
    GetParam().apply(c);
    // What bfloat16 can hold, so that only the computation differs.
    for (Tensor* t : c.reals()) *t = t->to(at::kBFloat16).to(at::kDouble);
    const Tensor expected = c.run();
    for (Tensor* t : c.reals()) *t = t->to(type);
    const Tensor out = c.run();
    EXPECT_EQ(out.scalar_type(), type);
    EXPECT_TRUE(test::close(out, expected, tolerance)) << type;
  }
}

INSTANTIATE_TEST_SUITE_P(, ComposedAttentionTerm, ::testing::ValuesIn(kTerms),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(ComposedAttention, LengthsThatAreNotMultiplesOfAnything) {
  at::manual_seed(4);
  for (const auto& [queries, keys] : {std::pair(1, 1), {1, 63}, {63, 63}, {9, 4}}) {
    for (const bool causal : {true, false}) {
      Case c;
      c.q = at::randn({1, queries, H, 5}, kDouble);
      c.k = at::randn({1, keys, 2, 5}, kDouble);
      c.v = at::randn({1, keys, 3, 7}, kDouble);
      c.o.causal = causal;
      c.o.pre_conv = real({H, 6, 11});
      c.o.post.static_matrix = real({H, 9});
      EXPECT_TRUE(test::close(c.run(), c.naive(), 1e-12)) << queries << " " << keys;
    }
  }
}

TEST(ComposedAttention, PlainIsScaledDotProductAttention) {
  at::manual_seed(5);
  const Tensor q = at::randn({2, 33, 4, 16}), k = at::randn({2, 33, 4, 16}),
               v = at::randn({2, 33, 4, 16});
  const Tensor expected = at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2),
                                                           v.transpose(1, 2), {}, 0.0, true)
                              .transpose(1, 2);
  EXPECT_TRUE(test::close(ops::composed_attention(q, k, v, {}), expected, 1e-5));
  ComposedAttentionOptions o;
  o.backend = "reference";
  EXPECT_TRUE(at::equal(ops::composed_attention(q, k, v, o), expected));
}

TEST(ComposedAttention, NeutralWeightsChangeNothing) {
  at::manual_seed(6);
  Case c;
  const Tensor expected = c.run();
  c.o.window = S;
  EXPECT_TRUE(test::close(c.run(), expected, 1e-12));
  c.o.pre.static_matrix = c.o.post.static_matrix = at::eye(H, kDouble);
  c.o.pre.q_gate = at::zeros({B, T, H}, kDouble);
  c.o.post.k_down = c.o.post.k_up = at::zeros({B, S, R, H}, kDouble);
  c.o.pre_conv = at::zeros({H, 3, 5}, kDouble);
  c.o.pre_conv.select(2, 2).select(1, 2).fill_(1);
  c.o.post_conv = c.o.pre_conv;
  EXPECT_TRUE(test::close(c.run(), expected, 1e-12));
}

TEST(ComposedAttention, StridedViewsAreRead) {
  at::manual_seed(7);
  Case c;
  everything(c.o.pre, 1);
  everything(c.o.post, 1);
  const Tensor expected = c.run();
  for (Tensor* t : c.reals()) {
    // The same values, every second element of a larger block.
    *t = at::stack({*t, at::full_like(*t, 1e9)}, -1).select(-1, 0);
    ASSERT_FALSE(t->is_contiguous());
  }
  EXPECT_TRUE(test::close(c.run(), expected, 1e-12));
}

TEST(ComposedAttention, AutocastComputesInBfloat16) {
  at::manual_seed(8);
  Case c;
  everything(c.o.pre, 1);
  for (Tensor* t : c.reals()) *t = t->to(at::kFloat);
  const Tensor expected = c.run();
  const Tensor out = under_autocast([&] { return c.run(); });
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(test::close(out, expected, 0.06));
}

}  // namespace
}  // namespace headloom::composed_attention_test
