// What mixers say of inputs that do not fit, when they are called by themselves.
#include <gtest/gtest.h>

#include "support.h"
#include "testing/errors.h"

namespace headloom::checks_test {
namespace {

using test::message_of;

LayerShape shape_of(bool causal) { return {.width = 96, .max_length = 16, .causal = causal}; }

TEST(Checks, EveryTokenMixerNamesItselfAndTheArgument) {
  for (const auto& entry : token_mixers()) {
    const bool whole = entry.name == "fnet" || entry.name == "linformer";
    const auto mixer = test::mixer(entry.name, "", shape_of(!whole));
    EXPECT_EQ(mixer->type(), entry.name);
    const std::string begin = str("mixer '", entry.name, "': ");
    const auto said = [&](const Tensor& x, const MixerContext& context = {}) {
      return message_of<UsageError>([&] { mixer->forward(x, context); });
    };
    const Tensor x = at::randn({2, 5, 96});
    EXPECT_EQ(said({}), begin + "x is missing, expected a tensor [B, T, width].");
    EXPECT_EQ(said(at::randn({2, 5, 95})),
              begin + "x must be [B, T, width = 96]; it is [2, 5, 95].");
    EXPECT_EQ(said(at::randn({2, 0, 96})),
              begin + "x must have at least one position (T of [B, T, width]); it is [2, 0, 96].");
    EXPECT_EQ(said(x.to(at::kLong)), begin + "x must be of a floating type; it is Long.");
    EXPECT_EQ(said(x, {.lengths = at::full({2}, 6, at::kLong)}),
              begin + "lengths must be from 0 to the 5 positions that there are; one is 6.");
    EXPECT_EQ(said(x, {.documents = at::zeros({2, 5})}),
              begin + "documents must be int64 (torch.long); it is Float.");
    if (!entry.traits.cross_attention) {
      EXPECT_EQ(said(x, {.memory = x}),
                entry.name + " does not read a memory; cross-attention needs an attention mixer.");
    }
    if (!mixer->stateful()) continue;
    MixerState state = mixer->initial_state({});
    mixer->extend(x, state, {});
    EXPECT_EQ(message_of<UsageError>([&] { mixer->extend(at::randn({3, 1, 96}), state, {}); }),
              begin + "x must have the 2 sequences of the state; it is [3, 1, 96].");
  }
}

TEST(Checks, ShapesOfCodeAreChecked) {
  for (const auto& entry : token_mixers()) {
    const auto said = [&](const std::function<void(LayerShape&)>& change) {
      LayerShape shape = shape_of(entry.traits.causal);
      change(shape);
      return message_of<UsageError>([&] { entry.make()->build(shape); });
    };
    const std::string begin = entry.name + ": the layer's ";
    EXPECT_EQ(said([](LayerShape& s) { s.width = 0; }),
              begin + "width is 0, expected 1 to 1073741824.");
    EXPECT_EQ(said([](LayerShape& s) { s.depth = -1; }),
              begin + "depth is -1, expected 1 to 1073741824.");
    EXPECT_EQ(said([](LayerShape& s) { s.init_std = -1; }),
              begin + "init_std is -1, expected a finite number above 0.");
    EXPECT_EQ(said([](LayerShape& s) { s.position.base = -1; }),
              entry.name + ": 'position.base' is -1.0, expected above 0.");
  }
  EXPECT_TRUE(message_of<UsageError>([] {
                test::mixer("mha", "heads = 7", shape_of(true));
              }).starts_with("mha: heads is 7"));
  EXPECT_EQ(message_of<UsageError>([] { Norm("foo", 4); }),
            "norm is \"foo\", expected rms_norm, layer_norm or none.");
  EXPECT_TRUE(message_of<UsageError>([] {
                converted(at::ones({2, 2}), at::kLong);
              }).starts_with("weights cannot be held as Long"));
  const auto mha = test::mixer("mha", "", shape_of(true));
  EXPECT_EQ(message_of<UsageError>([&] { mha->build_cross_cache({}, {}); }),
            "mixer 'mha': memory is missing, expected a tensor [B, T, width].");
  MixerState none;
  EXPECT_TRUE(message_of<Error>([&] {
                mha->extend_cross(at::randn({1, 1, 96}), none);
              }).starts_with("cross-attention has no memory to read"));
}

TEST(Checks, EveryChannelMixerNamesItselfAndTheArgument) {
  for (const auto& entry : channel_mixers()) {
    const auto mixer = test::channel_mixer(entry.name, "", shape_of(true));
    if (!mixer) continue;
    EXPECT_EQ(
        message_of<UsageError>([&] { mixer->forward(at::randn({2, 5, 95}), {}); }),
        str("channel_mixer '", entry.name, "': x must be [B, T, width = 96]; it is [2, 5, 95]."));
  }
}

}  // namespace
}  // namespace headloom::checks_test
