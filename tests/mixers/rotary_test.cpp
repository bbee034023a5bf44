// The tables of rotary positions.
#include <gtest/gtest.h>

#include <cmath>

#include "mixers/nn.h"
#include "mixers/position_table.h"

namespace headloom::test::rotary_test {
namespace {

// Twice as long a table at each turn would need more memory than there is.
TEST(Rotary, TypesThatTakeTurnsDoNotLengthenTheTable) {
  Rotary rotary({.type = "rope"}, 8);
  const at::Tensor x = at::randn({2, 5, 3, 8}), wide = x.to(at::kDouble);
  const at::Tensor first = rotary.apply(x, {}), first_wide = rotary.apply(wide, {});
  for (int turn = 0; turn < 60; ++turn) {
    ASSERT_TRUE(at::equal(rotary.apply(x, {}), first)) << turn;
    ASSERT_TRUE(at::equal(rotary.apply(wide, {}), first_wide)) << turn;
  }
}

// Texts that go on for ever need no ever longer table.
TEST(Rotary, PositionsBeyondTheTableAreThoseOfALongerOne) {
  const int64_t far = kMostKeptRows + 5;
  const at::Tensor x = at::randn({2, 3, 3, 8});
  for (const at::Tensor& padding : {at::Tensor(), at::tensor({int64_t{0}, far - 4}, at::kLong)}) {
    const Positions seen{.longest = far, .left_padding = padding, .capacity = int64_t{1} << 40};
    Rotary rotary({.type = "rope"}, 8), whole({.type = "rope"}, 8);
    whole.apply(at::zeros({1, far + 3, 1, 8}), {});
    EXPECT_TRUE(at::equal(rotary.apply(x, seen), whole.apply(x, seen)));
  }
  // No memory would hold the table up to here.
  const at::Tensor last = Rotary({.type = "rope"}, 8).apply(x, {.longest = int64_t{1} << 40});
  EXPECT_TRUE(at::allclose(last.norm(2, -1), x.norm(2, -1), 1e-5));
}

// The fastest pair of dimensions turns as before, the slowest `factor` times as slowly.
TEST(Rotary, YarnSlowsDownWhatTurnsSlowly) {
  const at::Tensor x = at::randn({1, 9, 1, 32}, at::kDouble);
  const PositionOptions plain{.type = "rope"};
  PositionOptions yarn{.type = "rope", .scaling = "yarn", .factor = 1, .original_length = 64};
  EXPECT_TRUE(at::allclose(Rotary(yarn, 32).apply(x, {}), Rotary(plain, 32).apply(x, {})));
  yarn.factor = 4;
  const at::Tensor got = Rotary(yarn, 32).apply(x, {}) / (0.1 * std::log(4.0) + 1);
  const auto pair = [](const at::Tensor& t, int64_t i) {
    return at::stack({t.select(-1, i), t.select(-1, i + 16)});
  };
  EXPECT_TRUE(at::allclose(pair(got, 0), pair(Rotary(plain, 32).apply(x, {}), 0)));
  const at::Tensor eighth = x.narrow(1, 8, 1);
  const at::Tensor slow = Rotary(plain, 32).apply(eighth, {.longest = 2});
  EXPECT_TRUE(at::allclose(pair(got.narrow(1, 8, 1), 15), pair(slow, 15)));
  yarn.attention_factor = 3;
  EXPECT_TRUE(at::allclose(Rotary(yarn, 32).apply(x, {}) / 3, got));
}

}  // namespace
}  // namespace headloom::test::rotary_test
