// The tables of rotary positions.
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace headloom::test::rotary_test
