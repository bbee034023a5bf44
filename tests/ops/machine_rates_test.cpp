// The loops that bounds are measured with do the work that they are timed for.
#include "ops/machine_rates/machine_rates.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace headloom::test::machine_rates_test {
namespace {

TEST(MachineRates, ExponentialsAreExponentials) {
  const at::Tensor x = at::randn({8192}) * 5;
  const at::Tensor y = at::empty_like(x);
  ops::repeated_exponentials(x, y, 2);
  EXPECT_LT(((y - x.exp()) / x.exp()).abs().max().item<double>(), 1e-6);
  EXPECT_THROW(ops::repeated_exponentials(x.narrow(0, 0, 100), y, 1), c10::ValueError);
}

TEST(MachineRates, EveryValueIsRead) {
  const int64_t n = int64_t{3} << 20;
  const at::Tensor x = at::zeros({n});
  for (const int64_t place : {int64_t{0}, int64_t{1} << 20, n / 2 + 17, n - 1}) {
    x.fill_(0);
    x[place] = 2.5;
    for (const ops::Reading how : ops::kReadings) EXPECT_EQ(ops::read_all(x, how), 2.5) << place;
  }
  EXPECT_THROW(ops::read_all(x.narrow(0, 1, 5), ops::kReadings[0]), c10::ValueError);
}

}  // namespace
}  // namespace headloom::test::machine_rates_test
