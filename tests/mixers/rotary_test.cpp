// The tables of rotary positions.
#include <gtest/gtest.h>

#include "mixers/nn.h"

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

}  // namespace
}  // namespace headloom::test::rotary_test
