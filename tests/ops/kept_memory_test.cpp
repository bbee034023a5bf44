// Memory that kernels keep from call to call, and when it has to be fresh.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ops/cpu.h"
#include "testing/poison.h"

namespace headloom::ops {
namespace {

TEST(KeptMemory, IsTheSameFromCallToCall) {
  KeptMemory kept(1000);
  const void* const first = kept.bytes(500).data_ptr();
  const at::Tensor other = at::zeros({500}, at::kByte);  // would take the place of what was freed
  EXPECT_EQ(kept.bytes(500).data_ptr(), first);
  EXPECT_EQ(kept.bytes(100).data_ptr(), first);
}

TEST(KeptMemory, OfMoreThanTheMostIsNotKept) {
  KeptMemory kept(1000);
  const at::Tensor first = kept.bytes(2000);
  EXPECT_NE(kept.bytes(2000).data_ptr(), first.data_ptr());
}

TEST(KeptMemory, IsFreshWherePyTorchFillsIt) {
  KeptMemory kept(1000);
  const at::Tensor first = kept.bytes(64);
  first.zero_();
  const test::Poison poison;
  EXPECT_FALSE(at::equal(kept.bytes(64), first));
}

}  // namespace
}  // namespace headloom::ops
