// Attention over keys and values in int8: against composed attention in double over what they stand
// for, the error of quantizing, values that are not finite, and any number of threads.
#include "ops/composed_attention/int8.h"

#include "fused.h"
#include "testing/autocast.h"
#include "testing/compare.h"
#include "testing/instruction_sets.h"
#include "testing/poison.h"

namespace headloom::int8_attention_test {
namespace {

using namespace test;

TEST(Int8Attention, QuantizingErrsByHalfAScale) {
  at::manual_seed(1);
  for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    // A part of a projection, [2, 5, 3, 20] in rows of 100.
    const Tensor t = at::randn({2, 5, 100}).to(type).narrow(2, 8, 60).unflatten(2, {3, 20});
    t[1][2][0].zero_();
    const auto [values, scale] = ops::quantized_heads(t);
    ASSERT_EQ(values.scalar_type(), at::kChar);
    ASSERT_EQ(values.sizes(), t.sizes());
    ASSERT_EQ(scale.sizes(), t.sizes().slice(0, 3));
    EXPECT_TRUE(values.is_contiguous());
    const Tensor off = ops::dequantized_heads(values, scale, at::kFloat) - t.to(at::kFloat);
    EXPECT_TRUE(off.abs().le(scale.unsqueeze(-1) * 0.50001).all().item<bool>());
    EXPECT_TRUE(at::equal(values.abs().amax(-1).eq(127), scale.gt(0)));
    EXPECT_EQ(scale[1][2][0].item<float>(), 0);
  }
}

TEST(Int8Attention, WhatIsNotFiniteStaysSo) {
  const Tensor t = at::randn({1, 3, 2, 8});
  t[0][1][0][3] = std::numeric_limits<float>::infinity();
  t[0][2][1][5] = std::numeric_limits<float>::quiet_NaN();
  const auto [values, scale] = ops::quantized_heads(t);
  const Tensor wide = ops::dequantized_heads(values, scale, at::kFloat);
  EXPECT_TRUE(at::equal(wide.isnan().all(-1), t.isfinite().all(-1).logical_not()));
  const Tensor q = at::randn({1, 1, 2, 8});
  const Tensor out = ops::composed_attention_int8(q, values, values, scale, scale, {});
  EXPECT_TRUE(out.isnan().all().item<bool>());
}

// Queries that autocast turns into float16 are none of the kernel's.
TEST(Int8Attention, AutocastToFloat16) {
  at::manual_seed(2);
  const auto [k, k_scale] = ops::quantized_heads(at::randn({1, 40, 2, 16}));
  const auto [v, v_scale] = ops::quantized_heads(at::randn({1, 40, 2, 16}));
  const Tensor q = at::randn({1, 1, 2, 16});
  const Tensor expected = ops::composed_attention_int8(q, k, v, k_scale, v_scale, {});
  const CpuAutocast autocast;
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  const Tensor got = ops::composed_attention_int8(q, k, v, k_scale, v_scale, {});
  EXPECT_TRUE(close(got, expected, 5e-3));
}

struct Int8Case {
  int64_t batch, queries, keys, heads, key_heads, value_heads, size, value_size;
  std::string what;  // of mix, window, lengths, mask, bias
};

ops::ComposedAttentionOptions options_of(const Int8Case& c) {
  ops::ComposedAttentionOptions o;
  const auto has = [&](const char* word) { return c.what.find(word) != std::string::npos; };
  if (has("mix")) {
    o.pre.static_matrix = at::randn({c.heads, c.heads}, kDouble);
    o.pre.k_gate = at::randn({c.batch, c.keys, c.heads}, kDouble);
    o.post.static_matrix = at::randn({c.heads, c.heads}, kDouble);
  }
  if (has("window")) o.window = 9;
  if (has("lengths")) o.lengths = at::arange(c.batch, kLong) * 7 + c.keys / 2;
  if (has("mask")) o.mask = at::rand({c.batch, 1, 1, c.keys}).gt(0.3);
  if (has("bias")) o.bias = at::randn({1, c.heads, c.queries, c.keys}, kDouble);
  return o;
}

void cast(ops::ComposedAttentionOptions& o, at::ScalarType type) {
  for (Tensor* t : {&o.pre.static_matrix, &o.pre.k_gate, &o.post.static_matrix, &o.bias}) {
    if (t->defined()) *t = t->to(type);
  }
}

TEST(Int8Attention, IsAttentionOverWhatTheyStandFor) {
  at::manual_seed(2);
  for (const Int8Case& c :
       std::vector<Int8Case>{{1, 1, 1, 2, 2, 2, 8, 8, ""},
                             {2, 1, 63, 6, 6, 6, 20, 20, ""},
                             {2, 1, 64, 6, 2, 3, 20, 24, ""},
                             {3, 1, 65, 4, 1, 4, 64, 64, "mask"},
                             {1, 1, 1000, 12, 12, 12, 64, 64, ""},
                             {2, 3, 200, 6, 3, 6, 33, 17, "lengths"},
                             {2, 5, 131, 4, 4, 2, 16, 80, "window"},
                             {1, 16, 300, 3, 3, 3, 32, 32, "bias"},
                             {2, 1, 190, 6, 6, 6, 20, 20, "mix"},
                             {2, 2, 70, 6, 6, 6, 20, 20, "mix mask"},
                             {2, 40, 90, 4, 2, 4, 20, 20, ""}}) {  // dequantized first
    SCOPED_TRACE(::testing::Message() << "T " << c.queries << " S " << c.keys << " " << c.what);
    const Tensor q = at::randn({c.batch, c.queries, c.heads, c.size}, kDouble);
    // In memory for more positions, as a cache has it.
    const auto cached = [&](int64_t heads, int64_t size) {
      const auto [values, scale] =
          ops::quantized_heads(at::randn({c.batch, c.keys + 3, heads, size}, kDouble));
      return std::pair(values.narrow(1, 2, c.keys), scale.narrow(1, 2, c.keys));
    };
    const auto [k, k_scale] = cached(c.key_heads, c.size);
    const auto [v, v_scale] = cached(c.value_heads, c.value_size);
    const ops::ComposedAttentionOptions o = options_of(c);
    const Tensor wide_k = ops::dequantized_heads(k, k_scale, at::kDouble);
    const Tensor wide_v = ops::dequantized_heads(v, v_scale, at::kDouble);
    const Tensor expected = ops::composed_attention_maps(q, wide_k, wide_v, o);
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      ops::ComposedAttentionOptions narrow = o;
      cast(narrow, type);
      const Tensor plain =
          ops::composed_attention_maps(q.to(type), wide_k.to(type), wide_v.to(type), narrow);
      Poison poison;
      const Tensor got = ops::composed_attention_int8(q.to(type), k, v, k_scale, v_scale, narrow);
      ASSERT_EQ(got.scalar_type(), type);
      EXPECT_TRUE(errs_like_rounding(got, plain, expected, 1e-6)) << type;
      if (type == at::kFloat) {
        EXPECT_TRUE(close(got, expected, 1e-5));
      }
    }
  }
}

// Threads share the keys, and the outputs of their own softmaxes are joined.
TEST(Int8Attention, IsTheSameOnAnyNumberOfThreads) {
  at::manual_seed(3);
  const auto k = ops::quantized_heads(at::randn({1, 1000, 12, 64}));
  const auto v = ops::quantized_heads(at::randn({1, 1000, 12, 64}));
  for (const bool mixed : {false, true}) {
    SCOPED_TRACE(mixed ? "mixed before" : "nothing composed");
    const int64_t queries = mixed ? 3 : 1;
    ops::ComposedAttentionOptions o;
    if (mixed) {
      o = options_of({1, queries, 1000, 12, 12, 12, 64, 64, "mix"});
      o.post = ops::HeadMix();
      cast(o, at::kFloat);
    }
    const Tensor q = at::randn({1, queries, 12, 64});
    const Evaluate run = [&](const char*, at::ScalarType type) -> std::vector<Tensor> {
      return {ops::composed_attention_int8(q.to(type), k.first, v.first, k.second, v.second, o)};
    };
    expect_same_on_any_number_of_threads(run, 1e-5);
  }
}

TEST(Int8Attention, LesserInstructionSetsPass) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets("Int8Attention.*"));
}

}  // namespace
}  // namespace headloom::int8_attention_test
