// What models say of inputs that do not fit.
#include <gtest/gtest.h>

#include "model/generation.h"
#include "model/model.h"
#include "support.h"

namespace headloom::test::checks_test {
namespace {

std::shared_ptr<Model> model(const std::string& more = "") {
  return build_model(model_of("width = 16\ndepth = 2\nvocabulary = 9\nmax_length = 8\n" + more +
                              "\n[[layer]]\nmixer = { type = 'mha', heads = 2 }\n"));
}

TEST(ModelChecks, NameTheInput) {
  const auto decoder = model();
  const auto said = [&](const ModelInput& input) {
    return message_of<UsageError>([&] { decoder->forward(input); });
  };
  const Tensor x = tokens(2, 5, 9);
  EXPECT_EQ(said({}), "model: a model of kind \"decoder\" reads tokens, but got none.");
  EXPECT_EQ(said({.tokens = x, .source = x}),
            "model: a model of kind \"decoder\" reads no source, but got some.");
  EXPECT_EQ(said({.tokens = x.narrow(1, 0, 0)}),
            "model: tokens has shape [2, 0], expected at least one position.");
  EXPECT_EQ(said({.tokens = x + 9 * (x == x[1][1])}),
            str("model: tokens has the token ", 9 + x[1][1].item<int64_t>(),
                ", expected one of the vocabulary's 0 to 8."));
  EXPECT_EQ(said({.tokens = x, .lengths = at::full({2}, 6, at::kLong)}),
            "model: lengths must be from 0 to the 5 positions that there are; one is 6.");
  EXPECT_EQ(said({.tokens = x, .documents = x.narrow(0, 0, 1)}),
            "model: documents must be [B, T] = [2, 5]; it is [1, 5].");
  const auto both = model("kind = 'encoder_decoder'\nmax_source_length = 8");
  EXPECT_EQ(
      message_of<UsageError>([&] { both->forward({.tokens = x, .documents = x, .source = x}); }),
      "model: a model of kind \"encoder_decoder\" reads no documents, but got some.");
}

TEST(ModelChecks, ExtendingKeepsTheStateOfWhatFails) {
  const auto decoder = std::dynamic_pointer_cast<Decoder>(model());
  DecoderState state;
  const auto said = [&](const Tensor& x) {
    return message_of<UsageError>([&] { decoder->extend(x, state); });
  };
  EXPECT_TRUE(contains(said(at::zeros({2, 0}, kLong)), "tokens has shape [2, 0]"));
  EXPECT_TRUE(contains(said(at::zeros({2, 3})), "expected integers [B, n]"));
  EXPECT_TRUE(
      contains(said(at::full({2, 3}, 9, kLong)), "expected one of the vocabulary's 0 to 8"));
  EXPECT_TRUE(contains(said(at::full({2, 3}, -1, kLong)), "has the token -1"));
  EXPECT_EQ(state.position.longest, 0);
  decoder->extend(at::zeros({2, 3}, kLong), state);
  EXPECT_EQ(state.batch(), 2);
  EXPECT_TRUE(contains(said(at::zeros({1, 1}, kLong)),
                       "tokens has 1 sequence, expected the 2 that the state has seen."));
  EXPECT_EQ(state.position.longest, 3);
}

TEST(ModelChecks, ConfigurationsOfCodeAreCheckedAsThoseOfFiles) {
  const auto said = [](const std::function<void(ModelConfig&)>& change) {
    ModelConfig config = model()->config();
    change(config);
    return message_of<UsageError>([&] { build_model(config); });
  };
  EXPECT_EQ(said([](ModelConfig& c) { c.depth = 0; }),
            "'model.depth' is 0, expected at least 1 and at most 10000.");
  EXPECT_TRUE(contains(said([](ModelConfig& c) { c.width = -1; }), "'model.width' is -1"));
  EXPECT_TRUE(contains(said([](ModelConfig& c) { c.vocabulary = 0; }), "'model.vocabulary' is 0"));
  EXPECT_TRUE(contains(said([](ModelConfig& c) { c.norm = "foo"; }), "'model.norm' is \"foo\""));
  EXPECT_TRUE(contains(said([](ModelConfig& c) { c.layers.clear(); }), "'model.layer' is empty"));
  EXPECT_EQ(said([](ModelConfig& c) { c.layers[0].channel = nullptr; }),
            "model.layer[0].channel is null, expected what to build.");
}

TEST(ModelChecks, GenerationNamesTheOption) {
  const auto decoder = std::dynamic_pointer_cast<Decoder>(model());
  const auto said = [&](const GenerationOptions& options) {
    return message_of<UsageError>([&] { Generation(*decoder, {{1, 2}}, options); });
  };
  EXPECT_EQ(said({.samples = 0}), "samples is 0, expected at least 1.");
  EXPECT_TRUE(contains(said({.sampling = {.temperature = -1}}), "temperature is -1"));
  EXPECT_TRUE(contains(said({.cache = {.type = "foo"}}), "the cache policy is \"foo:0\""));
  EXPECT_TRUE(contains(message_of<Error>([&] { Generation(*decoder, {}, {}); }), "no prompts"));
  DecoderState state;
  decoder->extend(at::zeros({1, 3}, kLong), state);
  EXPECT_TRUE(contains(message_of<Error>([&] { state.keep({0, 1}); }), "cannot become"));
  EXPECT_TRUE(contains(message_of<Error>([&] { state.reserve(-1); }), "-1 positions"));
}

}  // namespace
}  // namespace headloom::test::checks_test
