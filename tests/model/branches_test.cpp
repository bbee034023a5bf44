// How large token mixers' outputs start, as they are and with equal_init.
#include "model/branches.h"

#include <gtest/gtest.h>

#include "support.h"

namespace headloom::test::branches_test {
namespace {

ModelConfig model_with(const std::string& mixer, bool equal, int64_t depth = 2) {
  return model_of(str("vocabulary = 256\nmax_length = 128\nwidth = 64\ndepth = ", depth,
                      "\nequal_init = ", equal ? "true" : "false",
                      "\n[[layer]]\nmixer = {type = \"", mixer, "\"", heads_of(mixer, 4), "}\n"));
}

double ratio(const std::string& mixer, bool equal) {
  return measured_branches(model_with(mixer, equal), 128)->front().ratio();
}

TEST(Branches, NormsOfHeadsMakeOutputsLargerThanPlainAttention) {
  const double plain = ratio("mha", false);
  EXPECT_GT(ratio("differential", false), 5 * plain);
  EXPECT_GT(ratio("multi_token", false), 5 * plain);
  EXPECT_NEAR(ratio("talking_heads", false) / plain, 1, 0.2);
}

TEST(Branches, StartAlikeWithEqualInit) {
  const double plain = ratio("mha", true);
  EXPECT_NEAR(plain / ratio("mha", false), 1, 0.2);
  for (const auto& entry : token_mixers()) {
    if (!entry.traits.causal || entry.name == "shaped") continue;
    EXPECT_NEAR(ratio(entry.name, true) / plain, 1, 0.2) << entry.name;
  }
}

// What is measured is what the block adds: the layer without its channel mixer.
TEST(Branches, AreWhatTheBlockAdds) {
  const ModelConfig config = model_of(
      "vocabulary = 20\nmax_length = 16\nwidth = 32\ndepth = 1\nfinal_norm = false\n"
      "[[layer]]\nmixer = {type = \"mha\", heads = 4}\nchannel = {type = \"none\"}\n");
  at::NoGradGuard no_grad;
  Decoder decoder(config);
  AuxiliaryOutputs measured;
  measured.measures_branches = true;
  ModelInput input{.tokens = tokens(2, 16, 20), .auxiliary = &measured};
  const Tensor after = decoder.hidden(input);
  const Tensor before = at::embedding(parameters_of(decoder).at("embedding"), input.tokens);
  EXPECT_NEAR(measured.branches.at(0).residual, root_mean_square(before), 1e-6);
  EXPECT_NEAR(measured.branches.at(0).output, root_mean_square(after - before), 1e-6);
}

TEST(Branches, AreMeasuredInEveryLayerAndDoNotMoveTheGenerator) {
  at::manual_seed(4);
  const Tensor expected = at::randn({3});
  at::manual_seed(4);
  const auto branches = measured_branches(model_with("dcmha", false, 3), 16);
  ASSERT_EQ(branches->size(), 3u);
  EXPECT_EQ(branches->back().layer, 2);
  EXPECT_EQ(branches->back().mixer, "dcmha");
  EXPECT_TRUE(at::equal(at::randn({3}), expected));
  EXPECT_EQ(branches->back().ratio(),
            measured_branches(model_with("dcmha", false, 3), 16)->back().ratio());
}

TEST(Branches, LargeModelsAreNotBuilt) {
  ModelConfig config = model_with("mha", false);
  config.width = 16384;
  EXPECT_FALSE(measured_branches(config, 16).has_value());
}

TEST(Branches, EqualInitNeedsAnOutputProjection) {
  EXPECT_EQ(message_of<UsageError>([] { build_model(model_with("shaped", true)); }),
            "model.layer[0].mixer (shaped) has no output projection, which model.equal_init = true "
            "would scale, expected equal_init = false.");
}

// A checkpoint of before the option has neither key nor tensor.
TEST(ShortConvOfAModel, IsOffUnlessSaid) {
  const Decoder plain(model_with("mha", false)),
      off(model_of(
          "vocabulary = 256\nmax_length = 128\nwidth = 64\ndepth = 2\n[[layer]]\nmixer = {type = "
          "\"mha\", heads = 4}\nblock = {short_conv = 0}\n"));
  EXPECT_EQ(parameters_of(plain).size(), parameters_of(off).size());
  EXPECT_EQ(parameters_of(plain).count("layer0.mixer.short_conv"), 0u);
}

// Two sequences of different lengths, decoded apart and then joined, so that one is padded on the
// left.
TEST(ShortConvOfAModel, DecodesInPiecesAndJoined) {
  at::manual_seed(6);
  at::NoGradGuard no_grad;
  Decoder decoder(
      model_of("vocabulary = 30\nmax_length = 32\nwidth = 32\ndepth = 2\n[[layer]]\n"
               "mixer = {type = \"mha\", heads = 4}\nblock = {short_conv = 4}\n[[layer]]\n"
               "mixer = {type = \"mamba\"}\nblock = {type = \"parallel\", short_conv = 3}\n"));
  const Tensor a = tokens(1, 12, 30), b = tokens(1, 7, 30), more = tokens(2, 5, 30);
  const auto whole = [&](const Tensor& begin, int64_t row) {
    const Tensor all = at::cat({begin, more.narrow(0, row, 1)}, 1);
    return decoder.hidden({.tokens = all}).narrow(1, begin.size(1), 5);
  };
  std::vector<DecoderState> states(2);
  decoder.extend(a.narrow(1, 0, 2), states[0]);
  decoder.extend(a.narrow(1, 2, 10), states[0]);
  decoder.extend(b, states[1]);
  DecoderState joined = DecoderState::join(states);
  EXPECT_EQ(joined.layers[0].mixer.recurrent.count("short_conv"), 1u);
  const Tensor first = decoder.extend(more.narrow(1, 0, 3), joined);
  const Tensor rest = decoder.extend(more.narrow(1, 3, 2), joined);
  const Tensor after = at::cat({first, rest}, 1);
  EXPECT_TRUE(close(after.narrow(0, 0, 1), whole(a, 0), 1e-5));
  EXPECT_TRUE(close(after.narrow(0, 1, 1), whole(b, 1), 1e-5));
}

TEST(ShortConvOfAModel, IsRefusedInAnEncoder) {
  EXPECT_EQ(message_of<UsageError>([] {
              build_model(
                  model_of("kind = \"encoder\"\nhead = \"tokens\"\nsegments = 0\n"
                           "vocabulary = 9\nmax_length = 8\nwidth = 32\ndepth = 1\n"
                           "[[layer]]\nmixer = {heads = 4}\nblock = {short_conv = 4}\n"));
            }),
            "model.layer[0].mixer (mha): short_conv is 4, which looks back only, but the model "
            "is not causal, expected 0.");
}

}  // namespace
}  // namespace headloom::test::branches_test
