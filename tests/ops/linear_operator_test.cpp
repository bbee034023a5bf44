// The linear map against its formula number by number, the kernels and their gradients against the
// reference with memory that a kernel fails to write poisoned with NaN, int8 against ATen's
// product, the layout and the errors of four bits, and what is refused.
#include "ops/linear/op.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "ops/product/product.h"
#include "testing/autocast.h"
#include "testing/compare.h"
#include "testing/errors.h"
#include "testing/instruction_sets.h"
#include "testing/poison.h"

namespace headloom::linear_operator_test {
namespace {

using namespace test;

struct Call {
  Tensor x, weight, bias;  // double
};

std::vector<Call> calls() {
  at::manual_seed(3);
  std::vector<Call> out;
  for (const auto& [rows, in, outputs] :
       {std::tuple(1, 1, 1), {1, 63, 5},    {2, 64, 7},     {3, 17, 64},    {4, 100, 33},
        {5, 3, 130},         {7, 129, 6},   {8, 256, 96},   {16, 1000, 12}, {0, 8, 4},
        {2, 0, 3},           {2, 8, 0},     {1, 300, 2000}, {17, 40, 30},   {100, 129, 65},
        {63, 1000, 1},       {33, 300, 70}, {64, 257, 9},   {6, 258, 11},   {3, 1000, 35},
        {20, 320, 9},        {6, 4100, 3},  {33, 320, 70},  {64, 544, 9},   {23, 256, 131},
        {1000, 20, 50},      {40, 0, 3},    {40, 8, 0}}) {
    out.push_back({.x = at::randn({rows, in}, kDouble),
                   .weight = at::randn({outputs, in}, kDouble),
                   .bias = {}});
    if (out.size() % 2 == 0) out.back().bias = at::randn({outputs}, kDouble);
  }
  out.push_back({.x = at::randn({2, 3, 40}, kDouble).transpose(0, 1),
                 .weight = at::randn({40, 9}, kDouble).t(),
                 .bias = {}});
  return out;
}

Tensor run(const Call& c, const char* backend, at::ScalarType type) {
  const auto cast = [&](const Tensor& t) { return t.defined() ? t.to(type) : t; };
  return ops::linear(cast(c.x), cast(c.weight), {}, cast(c.bias), backend);
}

TEST(LinearOperator, ReferenceIsItsFormula) {
  const Call c = {.x = at::randn({3, 17}, kDouble),
                  .weight = at::randn({5, 17}, kDouble),
                  .bias = at::randn({5}, kDouble)};
  const Tensor y = ops::linear(c.x, c.weight, {}, c.bias);
  const auto [values, scale] = ops::quantized_int8(c.weight);
  const Tensor narrow = ops::linear(c.x, values, scale, c.bias, "reference");
  for (int64_t m = 0; m < 3; ++m) {
    for (int64_t o = 0; o < 5; ++o) {
      double sum = 0, whole = 0;
      for (int64_t i = 0; i < 17; ++i) {
        sum += c.x[m][i].item<double>() * c.weight[o][i].item<double>();
        whole += c.x[m][i].item<double>() * static_cast<double>(values[o][i].item<int8_t>());
      }
      const double bias = c.bias[o].item<double>();
      EXPECT_NEAR(y[m][o].item<double>(), sum + bias, 1e-12);
      EXPECT_NEAR(narrow[m][o].item<double>(), scale[o].item<double>() * whole + bias, 1e-12);
    }
  }
}

TEST(LinearOperator, FusedMatchesTheReference) {
  for (const Call& c : calls()) {
    const Tensor expected = run(c, "reference", at::kDouble);
    Poison poison;
    const Tensor got = run(c, "fused", at::kFloat);
    ASSERT_EQ(got.sizes(), expected.sizes());
    EXPECT_TRUE(close(got, expected, 2e-6)) << c.x.sizes() << " " << c.weight.sizes();
  }
}

// A low-precision kernel may err at most twice as much as the plain low-precision computation.
TEST(LinearOperator, BFloat16ErrsLikeItsRounding) {
  for (const Call& c : calls()) {
    const Tensor exact = run(c, "reference", at::kDouble);
    const Tensor plain = run(c, "reference", at::kBFloat16);
    Poison poison;
    const Tensor got = run(c, "fused", at::kBFloat16);
    ASSERT_EQ(got.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(errs_like_rounding(got, plain, exact, 1e-6))
        << c.x.sizes() << " " << c.weight.sizes();
  }
}

TEST(LinearOperator, FusedGradientsMatchTheReference) {
  for (const Call& c : calls()) {
    const Tensor pull = at::randn_like(run(c, "reference", at::kDouble));
    const auto gradients = [&](const char* backend, at::ScalarType type) {
      const Tensor x = leaf(c.x.to(type)), weight = leaf(c.weight.to(type));
      const Tensor bias = c.bias.defined() ? leaf(c.bias.to(type)) : c.bias;
      const Tensor y = ops::linear(x, weight, {}, bias, backend);
      Poison poison;
      y.backward(pull.to(type));
      std::vector<Tensor> out{x.grad(), weight.grad()};
      if (bias.defined()) out.push_back(bias.grad());
      return out;
    };
    const auto exact = gradients("reference", at::kDouble);
    const auto plain = gradients("reference", at::kBFloat16);
    const auto wide = gradients("fused", at::kFloat), narrow = gradients("fused", at::kBFloat16);
    for (size_t i = 0; i < exact.size(); ++i) {
      EXPECT_TRUE(close(wide[i], exact[i], 2e-6)) << c.x.sizes() << " " << c.weight.sizes() << i;
      EXPECT_TRUE(errs_like_rounding(narrow[i], plain[i], exact[i], 1e-6))
          << c.x.sizes() << " " << c.weight.sizes() << i;
    }
  }
}

// Float32 weights of a bfloat16 x are rounded where they are multiplied, and their gradient is
// float32.
TEST(LinearOperator, RoundsFloat32WeightsInPassing) {
  for (const Call& c : calls()) {
    const Tensor pull = at::randn_like(run(c, "reference", at::kDouble)).to(at::kBFloat16);
    const Tensor rounded = c.weight.to(at::kBFloat16);
    const auto found = [&](const char* backend, const Tensor& given, at::ScalarType type) {
      const Tensor x = leaf(c.x.to(at::kBFloat16).to(type)), weight = leaf(given);
      Poison poison;
      const Tensor y = ops::linear(x, weight, {}, {}, backend);
      y.backward(pull.to(type));
      return std::vector<Tensor>{y.detach(), x.grad(), weight.grad()};
    };
    const auto exact = found("reference", rounded.to(at::kDouble), at::kDouble);
    const auto plain = found("reference", rounded, at::kBFloat16);
    const auto got = found("fused", c.weight.to(at::kFloat), at::kBFloat16);
    ASSERT_EQ(got[0].scalar_type(), at::kBFloat16);
    ASSERT_EQ(got[2].scalar_type(), at::kFloat);
    for (size_t i = 0; i < exact.size(); ++i) {
      EXPECT_TRUE(errs_like_rounding(got[i], plain[i], exact[i], 1e-6))
          << c.x.sizes() << " " << c.weight.sizes() << i;
    }
  }
}

TEST(LinearOperator, AutocastMultipliesInBFloat16) {
  at::manual_seed(8);
  for (const int64_t rows : {3, 40}) {
    const Tensor x = at::randn({rows, 70}), bias = at::randn({30});
    const Tensor weight = leaf(at::randn({30, 70}));
    const Tensor narrow = leaf(weight.detach().to(at::kBFloat16));
    const Tensor plain = ops::linear(x.to(at::kBFloat16), narrow, {}, bias.to(at::kBFloat16));
    plain.sum().backward();
    const Tensor got = under_autocast([&] { return ops::linear(x, weight, {}, bias); });
    got.sum().backward();
    EXPECT_TRUE(got.equal(plain));
    EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(close(weight.grad(), narrow.grad(), 1e-2));
  }
}

TEST(LinearOperator, HasASecondGradient) {
  at::manual_seed(8);
  const auto second = [&](const char* backend) {
    at::manual_seed(9);
    const Tensor x = leaf(at::randn({20, 6})), weight = leaf(at::randn({5, 6}));
    const Tensor y = ops::linear(x, weight, {}, {}, backend).pow(3).sum();
    const auto first = torch::autograd::grad({y}, {x, weight}, {}, true, /*create_graph=*/true);
    (first[0].square().sum() + first[1].square().sum()).backward();
    return std::vector<Tensor>{x.grad(), weight.grad()};
  };
  const auto fused = second("fused"), expected = second("reference");
  for (size_t i = 0; i < fused.size(); ++i) EXPECT_TRUE(close(fused[i], expected[i], 1e-5));
}

TEST(LinearOperator, Int8IsExactInItsWeights) {
  for (const Call& c : calls()) {
    if (c.weight.size(1) == 0) continue;
    const auto [values, scale] = ops::quantized_int8(c.weight);
    ASSERT_EQ(values.scalar_type(), at::kChar);
    EXPECT_TRUE((c.weight - values * scale.unsqueeze(1))
                    .abs()
                    .le(scale.unsqueeze(1) * 0.50001)
                    .all()
                    .item<bool>());
    const Tensor expected = ops::linear(c.x, values, scale, c.bias, "reference");
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      const auto cast = [&, t = type](const Tensor& x) { return x.defined() ? x.to(t) : x; };
      const Tensor plain = ops::linear(cast(c.x), values, scale, cast(c.bias), "reference");
      Poison poison;
      const Tensor got = ops::linear(cast(c.x), values, scale, cast(c.bias), "fused");
      ASSERT_EQ(got.scalar_type(), type);
      EXPECT_TRUE(errs_like_rounding(got, plain, expected, 2e-6))
          << c.x.sizes() << " " << c.weight.sizes();
    }
  }
}

TEST(LinearOperator, Int8AgreesWithATen) {
  at::manual_seed(4);
  const Tensor x = at::randn({5, 64}), weight = at::randn({48, 64});
  const auto [values, scale] = ops::quantized_int8(weight);
  EXPECT_TRUE(
      close(ops::linear(x, values, scale), at::_weight_int8pack_mm(x, values, scale), 2e-6));
}

// A sum of 66,000 before its scale is beyond the largest float16, and a scale of 1e-8 below the
// smallest.
TEST(LinearOperator, Int8MayBeMultipliedInFloat16) {
  const Tensor x = at::full({2, 520}, 1.0, at::kHalf), values = at::full({3, 520}, 127, at::kChar);
  const Tensor scale = at::tensor({1e-3, 1e-8, 0.1}, at::kFloat);
  for (const char* backend : {"", "reference"}) {
    const Tensor y = ops::linear(x, values, scale, {},
                                 *backend ? std::optional<std::string>(backend) : std::nullopt);
    EXPECT_EQ(y.scalar_type(), at::kHalf);
    const Tensor off = y[1].to(kDouble) / at::tensor({66.04, 6.604e-4, 6604.}, kDouble) - 1;
    EXPECT_TRUE(off.abs().lt(1e-3).all().item<bool>()) << off;
  }
}

// The layout written out: byte 8 n h + 8 g + j of a block of n groups holds two elements of group
// g.
TEST(LinearOperator, Int4LiesAsItSays) {
  at::manual_seed(5);
  for (const int64_t in : {1, 31, 32, 70, 256, 300, 544}) {
    const Tensor weight = at::randn({3, in});
    const auto [values, scale] = ops::quantized_int4(weight);
    const int64_t groups = (in + 31) / 32;
    ASSERT_EQ(values.scalar_type(), at::kByte);
    ASSERT_EQ(scale.scalar_type(), at::kBFloat16);
    ASSERT_EQ(values.sizes(), at::IntArrayRef({3, 16 * groups}));
    ASSERT_EQ(scale.sizes(), at::IntArrayRef({3, groups}));
    const Tensor wide = ops::dequantized_int4(values, scale, in);
    for (int64_t o = 0; o < 3; ++o) {
      for (int64_t i = 0; i < in; ++i) {
        const int64_t group = i / 32, e = i % 32, before = group / 8 * 8;
        const int64_t n = std::min<int64_t>(8, groups - before);
        const int64_t at = 16 * before + 8 * n * (e % 16 / 8) + 8 * (group - before) + e % 8;
        const int byte = values[o][at].item<uint8_t>();
        const int code = (e < 16 ? byte & 15 : byte >> 4) - 8;
        const float s = scale[o][group].item<float>();
        EXPECT_EQ(wide[o][i].item<float>(), s * static_cast<float>(code)) << o << " " << i;
      }
    }
  }
}

// No group errs more than with the scale that makes its value furthest from 0 exactly -8 of it,
// which is wrong by half a scale, or a whole one at the other end.
TEST(LinearOperator, Int4ErrsWithinItsBound) {
  at::manual_seed(6);
  const Tensor weight = at::randn({40, 32 * 7}) * at::rand({40, 1}).exp();
  const auto [values, scale] = ops::quantized_int4(weight);
  const Tensor groups = weight.view({40, 7, 32});
  const Tensor off =
      (ops::dequantized_int4(values, scale, 32 * 7) - weight).view({40, 7, 32}).square().sum(-1);
  const Tensor place = groups.abs().argmax(-1, /*keepdim=*/true);
  const Tensor plain = (groups.gather(-1, place) / -8).to(at::kBFloat16).to(at::kFloat);
  const Tensor rounded = plain * (groups / plain).round().clamp(-8, 7);
  EXPECT_TRUE(off.le((rounded - groups).square().sum(-1) * 1.0001).all().item<bool>());
  EXPECT_LT(relative_error(ops::dequantized_int4(values, scale, 32 * 7), weight), 0.2);
  const double rms = std::sqrt((off.sum() / weight.square().sum()).item<double>());
  EXPECT_LT(rms, 0.085);  // of normal weights; 0.097 with the largest at 7, 0.086 with it at -8
  // What a scale can represent is kept.
  const Tensor whole = at::randint(-8, 8, {5, 64}).to(at::kFloat);
  whole.select(1, 0).fill_(-8);
  whole.select(1, 32).fill_(-8);
  const auto [codes, ones] = ops::quantized_int4(whole * 0.25);
  EXPECT_TRUE(at::equal(ops::dequantized_int4(codes, ones, 64), whole * 0.25));
}

// Against the product with what the weights stand for. Float32 keeps its precision although the
// product is in integers; bfloat16 may err at most twice as much as the plain computation.
TEST(LinearOperator, Int4IsExactInItsWeights) {
  for (const Call& c : calls()) {
    if (c.weight.size(1) == 0) continue;
    const auto [values, scale] = ops::quantized_int4(c.weight);
    const Tensor wide = ops::dequantized_int4(values, scale, c.weight.size(1)).to(at::kDouble);
    const Call held{.x = c.x, .weight = wide, .bias = c.bias};
    const Tensor expected = run(held, "reference", at::kDouble);
    EXPECT_TRUE(close(ops::linear(c.x, values, scale, c.bias, "reference"), expected, 1e-12));
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      const auto cast = [&, t = type](const Tensor& x) { return x.defined() ? x.to(t) : x; };
      const Tensor plain = ops::linear(cast(c.x), values, scale, cast(c.bias), "reference");
      Poison poison;
      const Tensor got = ops::linear(cast(c.x), values, scale, cast(c.bias), "fused");
      ASSERT_EQ(got.scalar_type(), type);
      EXPECT_TRUE(errs_like_rounding(got, plain, expected, 2e-6))
          << c.x.sizes() << " " << c.weight.sizes() << " " << type;
      if (type == at::kFloat) {
        EXPECT_TRUE(close(got, expected, 2e-6)) << c.x.sizes();
      }
    }
  }
}

// One large value among small ones, rows of nothing and of next to nothing.
TEST(LinearOperator, Int4KeepsWhatFloatKeeps) {
  at::manual_seed(7);
  const Tensor weight = at::randn({9, 300}, kDouble);
  const auto [values, scale] = ops::quantized_int4(weight);
  const Tensor wide = ops::dequantized_int4(values, scale, 300).to(at::kDouble);
  Tensor x = at::randn({5, 300}, kDouble);
  x[0][40] = 1e6;
  x[1].zero_();
  x[2] *= 1e-30;
  x[3] *= 1e30;
  const Tensor expected = at::linear(x, wide);
  const Tensor got = ops::linear(x.to(at::kFloat), values, scale);
  for (int64_t m = 0; m < 5; ++m) EXPECT_TRUE(close(got[m], expected[m], 2e-6)) << m;
}

TEST(LinearOperator, Int4TakesManyRows) {
  at::manual_seed(8);
  const Tensor weight = at::randn({33, 70}), x = at::randn({2, 40, 70}, kDouble);
  const auto [values, scale] = ops::quantized_int4(weight);
  const Tensor bias = at::randn({33}, kDouble);
  const Tensor wide = ops::dequantized_int4(values, scale, 70);
  const Tensor expected = at::linear(x, wide.to(at::kDouble), bias);
  Poison poison;
  const Tensor got = ops::linear(x.to(at::kFloat), values, scale, bias.to(at::kFloat), "fused");
  EXPECT_TRUE(close(got, expected, 2e-6));
  const auto low = [](const Tensor& t) { return t.to(at::kBFloat16); };
  EXPECT_TRUE(errs_like_rounding(ops::linear(low(x), values, scale, low(bias), "fused"),
                                 at::linear(low(x), low(wide), low(bias)), expected, 1e-6));
}

// The ways to hold a weight [O, I]: values, scale, and what they stand for in float64.
struct HeldWeight {
  const char* name;
  Tensor values, scale, wide;
};
std::vector<HeldWeight> held_weights(const Tensor& weight) {
  const auto [int8, of_int8] = ops::quantized_int8(weight);
  const auto [int4, of_int4] = ops::quantized_int4(weight);
  const Tensor low = weight.to(at::kBFloat16);
  return {{"int8", int8, of_int8, int8.to(kDouble) * of_int8.to(kDouble).unsqueeze(1)},
          {"int4", int4, of_int4, ops::dequantized_int4(int4, of_int4, weight.size(1)).to(kDouble)},
          {"bfloat16", low, {}, low.to(kDouble)}};
}

// A large value that meets weights of 0 leaves what the small ones give, in few rows and in many.
TEST(LinearOperator, BFloat16KeepsSmallValuesBesideALargeOne) {
  at::manual_seed(10);
  Tensor weight = at::randn({50, 256});
  weight.select(1, 5).zero_();
  for (const auto& [name, values, scale, wide] : held_weights(weight)) {
    for (const int64_t rows : {1, 3, 64}) {
      for (const double large : {30.0, 100.0, 300.0, 3000.0, 1e5, 1e9}) {
        Tensor x = at::randn({rows, 256}, kDouble);
        x.select(1, 5).fill_(large);
        const Tensor low = x.to(at::kBFloat16);
        const Tensor expected = at::linear(low.to(at::kDouble), wide);
        const Tensor plain = ops::linear(low, values, scale, {}, "reference");
        EXPECT_TRUE(
            errs_like_rounding(ops::linear(low, values, scale, {}, "fused"), plain, expected, 1e-6))
            << name << ", " << rows << " rows, " << large;
      }
    }
  }
}

// The same for a large weight that meets a value of 0, or that only a few outputs have.
TEST(LinearOperator, BFloat16KeepsSmallWeightsBesideALargeOne) {
  at::manual_seed(14);
  for (const int64_t outputs : {50, 3}) {
    for (const double large : {10.0, 30.0, 60.0, 100.0, 3000.0, 1e9, 1e30}) {
      Tensor weight = at::randn({50, 300}), x = at::randn({40, 300}).to(at::kBFloat16);
      weight.narrow(0, 7, std::min<int64_t>(outputs, 43)).select(1, 290).fill_(large);
      x.select(1, 290).zero_();
      weight = weight.to(at::kBFloat16);
      const Tensor bias = at::randn({50}).to(at::kBFloat16);
      const Tensor expected = at::linear(x.to(kDouble), weight.to(kDouble), bias.to(kDouble));
      const Tensor plain = ops::linear(x, weight, {}, bias, "reference");
      Poison poison;
      const Tensor got = ops::linear(x, weight, {}, bias, "fused");
      EXPECT_TRUE(errs_like_rounding(got, plain, expected, 1e-6)) << outputs << ", " << large;
    }
  }
}

// The largest sums there are: every product of a group has the same sign, and all values are as
// large as they come beside one another, or half of them are.
TEST(LinearOperator, ManyRowsOfBFloat16DoNotOverflow) {
  for (const double rest : {1.0, 0.0625, 0.06, 1e-3, 0.0}) {
    for (const int64_t large : {1, 8, 32, 63, 64, 65, 128}) {
      for (const double sign : {1.0, -1.0}) {
        Tensor x = at::full({40, 384}, rest, kDouble);
        x.view({40, 3, 128}).narrow(2, 0, large).fill_(1);
        x = (x * sign).to(at::kBFloat16);
        const Tensor weight = at::ones({50, 384}).to(at::kBFloat16);
        const Tensor expected = at::linear(x.to(kDouble), weight.to(kDouble));
        const Tensor plain = ops::linear(x, weight, {}, {}, "reference");
        EXPECT_TRUE(
            errs_like_rounding(ops::linear(x, weight, {}, {}, "fused"), plain, expected, 1e-3))
            << rest << ", " << large << ", " << sign;
      }
    }
  }
}

// Values near the largest and the smallest there are, whose products are neither (instructions for
// bfloat16 take products below 1e-38 for 0).
TEST(LinearOperator, ManyRowsOfBFloat16MayBeOfAnySize) {
  at::manual_seed(16);
  for (const auto& [of_x, of_weight] :
       {std::pair(3e36, 1e-3), {3e38, 1e-10}, {1e-3, 3e36}, {1e-18, 1e-18}, {1e-24, 1e-12}}) {
    const Tensor x = (at::randn({40, 256}, kDouble).sign() * of_x).to(at::kBFloat16);
    const Tensor weight = (at::randn({50, 256}, kDouble).sign() * of_weight).to(at::kBFloat16);
    const Tensor expected = at::linear(x.to(kDouble), weight.to(kDouble));
    const Tensor plain = ops::linear(x, weight, {}, {}, "reference");
    EXPECT_TRUE(errs_like_rounding(ops::linear(x, weight, {}, {}, "fused"), plain, expected, 1e-40))
        << of_x << ", " << of_weight;
  }
}

// Where the largest inputs of a group meet weights of 0, as in a model that was pruned.
TEST(LinearOperator, ManyRowsOfBFloat16MeetPrunedWeights) {
  at::manual_seed(17);
  for (const int64_t large : {100, 110}) {
    for (const double small : {1e-2, 1e-3, 1e-5}) {
      Tensor x = at::randn({40, 128}, kDouble), weight = at::randn({50, 128}, kDouble);
      x.narrow(1, large, 128 - large) *= small;
      weight.narrow(1, 0, large).zero_();
      x = x.to(at::kBFloat16);
      weight = weight.to(at::kBFloat16);
      const Tensor expected = at::linear(x.to(kDouble), weight.to(kDouble));
      const Tensor plain = ops::linear(x, weight, {}, {}, "reference");
      EXPECT_TRUE(
          errs_like_rounding(ops::linear(x, weight, {}, {}, "fused"), plain, expected, 1e-12))
          << large << ", " << small;
    }
  }
}

// Groups of four bits whose scales are far apart, not finite, 0 or negative, in few outputs and in
// most; the large ones meet values of 0, so that results come from the small ones.
TEST(LinearOperator, ManyRowsOfBFloat16TakeAnyScaleOfInt4) {
  at::manual_seed(18);
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t in : {300, 70}) {
    const Tensor x = at::randn({40, in}).to(at::kBFloat16);
    x.narrow(1, 32, 32).zero_();
    const Tensor bias = at::randn({50}).to(at::kBFloat16);
    const auto [values, scales] = ops::quantized_int4(at::randn({50, in}));
    for (const int64_t outputs : {2, 30}) {
      for (const float factor : {-1.0f, 4.0f, 7.0f, 10.0f, 17.0f, 1e3f, 1e-3f, 0.0f, 1e37f, 1e-37f,
                                 kNaN, std::numeric_limits<float>::infinity()}) {
        const Tensor scale = scales.clone();
        scale.narrow(0, 5, outputs).select(1, 1).mul_(factor);
        const Tensor wide = ops::dequantized_int4(values, scale, in).to(kDouble);
        const Tensor expected = at::linear(x.to(kDouble), wide, bias.to(kDouble));
        const Tensor plain = ops::linear(x, values, scale, bias, "reference");
        Poison poison;
        const Tensor got = ops::linear(x, values, scale, bias, "fused");
        if (!std::isfinite(factor)) {
          EXPECT_TRUE(got.narrow(1, 5, outputs).isnan().all().item<bool>()) << factor;
        }
        for (const auto& [first, count] :
             {std::pair<int64_t, int64_t>(0, 5), {5, outputs}, {5 + outputs, 45 - outputs}}) {
          const auto part = [&, first = first, count = count](const Tensor& y) {
            return y.narrow(1, first, count);
          };
          if (first == 5 && !std::isfinite(factor)) continue;
          EXPECT_TRUE(errs_like_rounding(part(got), part(plain), part(expected), 1e-6))
              << in << ", " << outputs << ", " << factor << ", from " << first;
        }
      }
    }
  }
}

// Inputs that differ a thousand times in size, and weights that differ the opposite way, so that
// all products matter alike.
TEST(LinearOperator, ManyRowsOfBFloat16MeetWeightsOfOppositeSizes) {
  at::manual_seed(19);
  for (const double spread : {0.5, 2.0, 2.5}) {
    for (const int64_t in : {128, 300}) {
      const Tensor size = at::randn({1, in}, kDouble).mul(spread).exp();
      const Tensor x = (at::randn({40, in}, kDouble) / size).to(at::kBFloat16);
      for (const auto& [name, values, scale, wide] :
           held_weights((at::randn({50, in}, kDouble) * size).to(at::kFloat))) {
        EXPECT_TRUE(errs_like_rounding(ops::linear(x, values, scale, {}, "fused"),
                                       ops::linear(x, values, scale, {}, "reference"),
                                       at::linear(x.to(kDouble), wide), 1e-6))
            << name << ", " << spread << ", " << in;
      }
    }
  }
}

// Sums of whole numbers that are beyond float32 before they have the scale of x, and whose results
// are not.
TEST(LinearOperator, ManyRowsOfBFloat16MeetHugeWeights) {
  const Tensor x = at::ones({40, 256}).to(at::kBFloat16);
  for (const double large : {1e31, 1e33, 1e34, 1e35}) {
    for (const auto& [name, values, scale, wide] : held_weights(at::full({16, 256}, large))) {
      const Tensor expected = at::linear(x.to(kDouble), wide);
      EXPECT_TRUE(errs_like_rounding(ops::linear(x, values, scale, {}, "fused"),
                                     ops::linear(x, values, scale, {}, "reference"), expected,
                                     1e-3))
          << name << ", " << large;
    }
  }
}

// Weights that are not finite, all 0, or of next to nothing, in few outputs and in most.
TEST(LinearOperator, ManyRowsOfBFloat16TakeAnyWeight) {
  at::manual_seed(15);
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  for (const int64_t outputs : {2, 30}) {
    for (const double unlike : {kNaN, std::numeric_limits<double>::infinity(), 0.0, 1e-30}) {
      const Tensor x = at::randn({40, 100}).to(at::kBFloat16);
      const Tensor weight = at::randn({50, 100}).to(at::kBFloat16);
      const Tensor finite = ops::linear(x, weight, {}, {}, "fused");
      weight.narrow(0, 5, outputs).fill_(unlike);
      const Tensor plain = ops::linear(x, weight, {}, {}, "reference");
      Poison poison;
      const Tensor got = ops::linear(x, weight, {}, {}, "fused");
      const Tensor others = got.narrow(1, 5 + outputs, 45 - outputs);
      const Tensor expected = at::linear(x.to(kDouble), weight.to(kDouble));
      EXPECT_TRUE(errs_like_rounding(others, finite.narrow(1, 5 + outputs, 45 - outputs),
                                     expected.narrow(1, 5 + outputs, 45 - outputs), 1e-6))
          << outputs << ", " << unlike;
      const Tensor of_unlike = got.narrow(1, 5, outputs), same = plain.narrow(1, 5, outputs);
      if (std::isfinite(unlike)) {
        EXPECT_TRUE(errs_like_rounding(of_unlike, same, expected.narrow(1, 5, outputs), 1e-36))
            << outputs << ", " << unlike;
      } else {
        EXPECT_FALSE(of_unlike.isfinite().any().item<bool>()) << outputs << ", " << unlike;
      }
    }
  }
}

// One row, as in decoding: threads take outputs in runs that depend on who is ahead.
TEST(LinearOperator, AnOutputHasTheSameBitsWhereverItLies) {
  at::manual_seed(12);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const int64_t in : {1, 20, 63, 256, 771}) {
      const Tensor weight = at::randn({150, in}).to(type), x = at::randn({1, in}).to(type);
      const Tensor bias = at::randn({150}).to(type);
      const Tensor expected = at::linear(x.to(kDouble), weight.to(kDouble), bias.to(kDouble));
      Poison poison;
      const Tensor whole = ops::linear(x, weight, {}, bias, "fused");
      EXPECT_TRUE(close(whole, expected, type == at::kFloat ? 2e-6 : 6e-3)) << type << ", " << in;
      for (const int64_t count : {1, 7, 40, 149}) {
        const Tensor part = ops::linear(x, weight.narrow(0, 150 - count, count), {},
                                        bias.narrow(0, 150 - count, count), "fused");
        EXPECT_TRUE(at::equal(part, whole.narrow(1, 150 - count, count)))
            << type << ", " << in << ", " << count;
      }
    }
  }
}

// The same with any number of threads: each takes runs of the outputs until none is left.
TEST(LinearOperator, OneRowHasTheSameBitsOnAnyNumberOfThreads) {
  at::manual_seed(20);
  const int before = at::get_num_threads();
  const Tensor weight = at::randn({2000, 300}), x = at::randn({1, 300}), bias = at::randn({2000});
  const auto [codes, scales] = ops::quantized_int4(weight);
  for (const auto& [values, scale] : {std::pair(weight, Tensor()), std::pair(codes, scales)}) {
    Poison poison;
    at::set_num_threads(1);
    const Tensor alone = ops::linear(x, values, scale, bias, "fused");
    for (const int threads : {1, 2, 5}) {
      at::set_num_threads(threads);
      for (int again = 0; again < 5; ++again) {  // the runs are others each time
        EXPECT_TRUE(at::equal(ops::linear(x, values, scale, bias, "fused"), alone))
            << values.scalar_type() << ", " << threads << " threads";
      }
    }
  }
  at::set_num_threads(before);
}

// A row of values that are far apart, or not finite, is multiplied in another way than the others.
TEST(LinearOperator, RowsKeepTheirBitsBesideOthers) {
  at::manual_seed(11);
  const Tensor weight = at::randn({50, 320});
  for (const auto& [name, values, scale, wide] : held_weights(weight)) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      if (!scale.defined() && type != values.scalar_type()) continue;
      for (const int64_t rows : {2, 3, 16, 24}) {
        const Tensor x = at::randn({rows, 320}).to(type);
        const Tensor alone = ops::linear(x, values, scale, {}, "fused");
        for (const double unlike : {1e6, 1e30, std::numeric_limits<double>::quiet_NaN()}) {
          Tensor beside = x.clone();
          beside[rows - 1][7] = unlike;
          const Tensor y = ops::linear(beside, values, scale, {}, "fused");
          EXPECT_TRUE(at::equal(y.narrow(0, 0, rows - 1), alone.narrow(0, 0, rows - 1)))
              << name << ", " << type << ", " << rows << " rows, " << unlike;
        }
      }
    }
  }
}

// Where they are multiplied in integers: one large value among small ones, rows of nothing, of next
// to nothing and of values that are not finite, and any number of threads.
TEST(LinearOperator, ManyRowsOfBFloat16KeepWhatTheyAre) {
  at::manual_seed(9);
  // What does not fit integers is multiplied by a route, of which this one alone has the same bits
  // with any number of threads.
  for (const char* threads : {"1 thread", "2 threads"}) {
    ops::use_product_routes({{c10::str("bfloat16 nt 16 x 16 x 256, ", threads), "blocked"}});
  }
  const int threads_before = at::get_num_threads();
  at::set_num_threads(2);
  const Tensor weight = at::randn({50, 300}), bias = at::randn({50}).to(at::kBFloat16);
  for (const auto& [name, values, scale, wide] : held_weights(weight)) {
    for (const float tiny : {1.0f, 1e-30f}) {
      Tensor x = at::randn({40, 300});
      x[0][40] = 1e6;
      x[1].zero_();
      x[2] *= 1e30;
      x[3] *= tiny;
      x = x.to(at::kBFloat16);
      const Tensor expected = at::linear(x.to(at::kDouble), wide, bias.to(at::kDouble));
      const Tensor plain = ops::linear(x, values, scale, bias, "reference");
      Poison poison;
      const Tensor got = ops::linear(x, values, scale, bias, "fused");
      for (int64_t m = 0; m < 5; ++m) {
        EXPECT_TRUE(errs_like_rounding(got[m], plain[m], expected[m], 1e-6)) << m;
      }
      EXPECT_TRUE(errs_like_rounding(got, plain, expected, 1e-6));
      at::set_num_threads(1);
      EXPECT_TRUE(at::equal(ops::linear(x, values, scale, bias, "fused"), got));
      at::set_num_threads(2);
    }
    Tensor x = at::randn({40, 300}).to(at::kBFloat16);
    const Tensor finite = ops::linear(x, values, scale, {}, "fused");
    // Few rows that integers do not hold leave the others as they are, and so do many but for
    // rounding.
    for (const int64_t rows : {1, 10, 30}) {
      Tensor uneven = x.clone();
      uneven.narrow(0, 3, rows).select(1, 7).fill_(1e6);
      const Tensor plain = ops::linear(uneven, values, scale, {}, "reference");
      const Tensor got = ops::linear(uneven, values, scale, {}, "fused");
      EXPECT_TRUE(errs_like_rounding(got, plain, at::linear(uneven.to(at::kDouble), wide), 1e-6));
      if (rows > 10) continue;
      EXPECT_TRUE(at::equal(got.narrow(0, 0, 3), finite.narrow(0, 0, 3)));
      EXPECT_TRUE(at::equal(got.narrow(0, 13, 27), finite.narrow(0, 13, 27)));
    }
    x[7][299] = std::numeric_limits<float>::quiet_NaN();
    x[8][0] = std::numeric_limits<float>::infinity();
    const Tensor y = ops::linear(x, values, scale, {}, "fused");
    EXPECT_TRUE(y[7].isnan().all().item<bool>());
    EXPECT_FALSE(y[8].isfinite().any().item<bool>());
    EXPECT_TRUE(errs_like_rounding(y.narrow(0, 9, 31), finite.narrow(0, 9, 31),
                                   at::linear(x.narrow(0, 9, 31).to(at::kDouble), wide), 1e-6));
  }
  at::set_num_threads(threads_before);
}

TEST(LinearOperator, ZerosStayZerosAndNotFiniteIsRefused) {
  Tensor weight = at::randn({3, 8});
  weight[1].zero_();
  const auto [values, scale] = ops::quantized_int8(weight);
  const Tensor y = ops::linear(at::randn({2, 8}), values, scale);
  EXPECT_TRUE(y.select(1, 1).eq(0).all().item<bool>());
  const auto [codes, scales] = ops::quantized_int4(weight);
  EXPECT_TRUE(ops::linear(at::randn({2, 8}), codes, scales).select(1, 1).eq(0).all().item<bool>());
  weight[2][0] = std::numeric_limits<float>::infinity();
  EXPECT_THROW(ops::quantized_int4(weight), c10::ValueError);
  EXPECT_THROW(ops::quantized_int8(weight), c10::ValueError);
}

TEST(LinearOperator, GradientsGoThroughTheReference) {
  Tensor x = at::randn({2, 5}, kDouble).requires_grad_();
  Tensor weight = at::randn({3, 5}, kDouble).requires_grad_();
  EXPECT_TRUE(gradients_agree([&] { return ops::linear(x, weight).square().sum(); }, {x, weight}));
  const auto [values, scale] = ops::quantized_int8(weight);
  EXPECT_TRUE(gradients_agree(
      [&, v = values, s = scale] { return ops::linear(x, v, s).square().sum(); }, {x}));
  const auto [codes, scales] = ops::quantized_int4(weight);
  EXPECT_TRUE(gradients_agree(
      [&, v = codes, s = scales] { return ops::linear(x, v, s).square().sum(); }, {x}));
}

TEST(LinearOperator, LesserInstructionSetsPass) {
  EXPECT_TRUE(passes_on_lesser_instruction_sets("LinearOperator.*"));
}

TEST(LinearOperator, RefusesInOneSentence) {
  const Tensor x = at::randn({2, 8}), weight = at::randn({4, 8});
  const auto [values, scale] = ops::quantized_int8(weight);
  const auto refused = [](const std::function<void()>& f, const char* part) {
    expect_refused("linear", part, f);
  };
  const Tensor v = values, s = scale;
  refused([&] { ops::linear(x.to(at::kLong), weight); }, "x has dtype Long");
  refused([&] { ops::linear(x, weight.t()); }, "weight has shape [8, 4]");
  refused([&] { ops::linear(x, weight.to(at::kDouble)); }, "weight has dtype Double");
  refused([&] { ops::linear(x, v); }, "there is no scale");
  refused([&] { ops::linear(x, v, s.narrow(0, 0, 3)); }, "scale has shape [3]");
  refused([&] { ops::linear(x, v, s.to(at::kDouble)); }, "scale has dtype Double");
  refused([&] { ops::linear(x, weight, s); }, "takes no scale");
  const auto [codes, scales] = ops::quantized_int4(weight);
  const Tensor c = codes, g = scales;
  refused([&] { ops::linear(x, c); }, "weight is of four bits, but there is no scale");
  refused([&] { ops::linear(x, c, g.to(at::kFloat)); }, "expected bfloat16");
  refused([&] { ops::linear(x, c, g.squeeze(1)); }, "expected [O, G]");
  refused([&] { ops::linear(at::randn({2, 40}), c, g); }, "expected [O, 16 G] with G = 2");
  refused([&] { ops::dequantized_int4(c, g, 40); }, "expected [O, 16 G] with G = 2");
  refused([&] { ops::dequantized_int4(c, g, -1); }, "there are -1 inputs");
  refused([&] { ops::dequantized_int4(c.to(at::kFloat), g, 8); }, "expected uint8");
  refused([&] { ops::dequantized_int4(c, g.narrow(0, 0, 1), 8); }, "expected [O, G]");
  refused([&] { ops::quantized_int8(x.to(at::kLong)); }, "weight has dtype Long");
  refused([&] { ops::quantized_int4(x.to(at::kLong)); }, "weight has dtype Long");
  refused([&] { ops::linear(x, weight, {}, s.narrow(0, 0, 3)); }, "bias has shape [3]");
  refused([&] { ops::linear(x, weight, {}, {}, "quick"); }, "backend is \"quick\"");
  refused([&] { ops::linear(at::randn({2, 8}).requires_grad_(), v, s, {}, "fused"); },
          "a gradient is wanted");
}

}  // namespace
}  // namespace headloom::linear_operator_test
