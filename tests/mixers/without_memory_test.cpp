// Every mixer can be counted without memory for its weights.
#include "mixers/without_memory.h"

#include <gtest/gtest.h>

#include "core/sizes.h"
#include "mixers/mixer.h"
#include "testing/errors.h"

namespace headloom::test::without_memory_test {
namespace {

template <typename Registry>
void expect_equal_shapes(const Registry& registry) {
  for (const auto& entry : registry) {
    const bool whole = entry.name == "fnet" || entry.name == "linformer";  // look both ways
    const auto build = [&] {
      return entry.make()->build({.width = 96, .max_length = 16, .causal = !whole, .position = {}});
    };
    const auto real = build(), counted = built_without_memory(build);
    ASSERT_EQ(real == nullptr, counted == nullptr) << entry.name;
    if (!real) continue;
    const auto expected = real->named_parameters(), found = counted->named_parameters();
    ASSERT_EQ(expected.size(), found.size()) << entry.name;
    for (const auto& item : expected) {
      const Tensor& p = found[item.key()];
      EXPECT_EQ(p.sizes(), item.value().sizes()) << entry.name << " " << item.key();
      EXPECT_EQ(p.scalar_type(), item.value().scalar_type()) << entry.name << " " << item.key();
      EXPECT_TRUE(p.is_meta()) << entry.name << " " << item.key();
      EXPECT_FALSE(item.value().is_meta()) << entry.name << " " << item.key();
    }
  }
}

TEST(WithoutMemory, TokenMixersHaveTheirShapes) { expect_equal_shapes(token_mixers()); }
TEST(WithoutMemory, ChannelMixersHaveTheirShapes) { expect_equal_shapes(channel_mixers()); }

TEST(WithoutMemory, EndsWithItsScopeAndLeavesTheRandomNumbers) {
  EXPECT_FALSE(WithoutMemory::on());
  at::manual_seed(3);
  const Tensor expected = at::rand({4});
  at::manual_seed(3);
  {
    const WithoutMemory guard;
    EXPECT_TRUE(WithoutMemory::on());
    EXPECT_TRUE(normal({kLargestSize, kLargestSize}, 1).is_meta());
    EXPECT_TRUE(at::ones({kLargestSize}).is_meta());
  }
  EXPECT_FALSE(WithoutMemory::on());
  EXPECT_TRUE(at::equal(at::rand({4}), expected));
}

TEST(WithoutMemory, TheLargestSizesAreCountedOrRefused) {
  for (const auto& entry : token_mixers()) {
    const LayerShape shape{.width = kLargestSize, .max_length = kLargestSize, .position = {}};
    try {
      const auto counted = built_without_memory([&] { return entry.make()->build(shape); });
      EXPECT_THROW(check_weights_fit(*counted, "the mixer"), UsageError) << entry.name;
    } catch (const UsageError&) {  // a tensor of more than 2^63 bytes
    }
  }
  const std::string refusal = message_of<UsageError>([] {
    built_without_memory(
        [] { return std::make_shared<Linear>(kLargestSize, kLargestSize * 8, false, 1); });
  });
  EXPECT_TRUE(contains(refusal, "more than 2.30584e+18 parameters, expected at most 1e+18"))
      << refusal;
}

}  // namespace
}  // namespace headloom::test::without_memory_test
