// Decoding with keys and values in int8.
#include <gtest/gtest.h>

#include "model/generation.h"
#include "model/support.h"
#include "train/device.h"

namespace headloom::test::int8_cache_test {
namespace {

// A code that rounding moves to its neighbour is off by 1 / 127 of a head's largest value.
constexpr double kOneCode = 3e-3;

const CachePolicy kInt8{.dtype = "int8"};

// Those that keep keys and values.
std::vector<std::string> models() {
  std::vector<std::string> out;
  for (const char* mixer : {"mha", "dcmha", "talking_heads", "differential", "multi_token"}) {
    out.push_back(str("[[layer]]\nmixer = { type = '", mixer, "', heads = 4 }\n"));
  }
  const std::string mha = "[[layer]]\nmixer = { type = 'mha', heads = 4 }\n";
  out.push_back("position = { type = 'alibi' }\n" + mha);
  out.push_back("[[layer]]\nmixer = { type = 'mha', heads = 4, kv_heads = 2 }\n");
  out.push_back("[[layer]]\nmixer = { type = 'dcmha', heads = 4, window = 9 }\n");
  out.push_back("[[layer]]\nmixer = { type = 'shaped', heads = 4 }\n");
  out.push_back("[[layer]]\nmixer = { type = 'rwkv' }\n" + mha);
  return out;
}

Tensor read(const Decoder& model, const Tensor& tokens, DecoderState state, int64_t piece) {
  std::vector<Tensor> out;
  for (int64_t at = 0; at < tokens.size(1); at += piece) {
    const int64_t n = std::min(piece, tokens.size(1) - at);
    out.push_back(model.extend(tokens.narrow(1, at, n), state));
  }
  return at::cat(out, 1);
}

TEST(Int8Cache, CostsLittleAndPiecesGiveTheSame) {
  at::NoGradGuard no_grad;
  int64_t tested = 0;
  for (const std::string& toml : models()) {
    SCOPED_TRACE(toml);
    const auto model = decoder(toml);
    if (!model) continue;
    ++tested;
    const Tensor text = tokens(2, 70, 30);
    for (const char* dtype : {"float32", "bfloat16"}) {
      const Autocast autocast(dtype);
      const bool wide = std::string(dtype) == "float32";
      const Tensor exact = model->hidden({.tokens = text});
      const Tensor whole = read(*model, text, model->initial_state(kInt8), 70);
      EXPECT_LT(relative_error(whole, exact), 0.1) << dtype;
      EXPECT_GT(relative_error(whole, exact), 1e-4) << dtype;
      const double same = wide ? kOneCode : 0.05;
      for (const int64_t piece : {1, 6, 33}) {
        EXPECT_TRUE(close(read(*model, text, model->initial_state(kInt8), piece), whole, same))
            << dtype << " in pieces of " << piece;
      }
      // A sequence does not see its neighbours.
      const Tensor alone = read(*model, text.narrow(0, 1, 1), model->initial_state(kInt8), 6);
      EXPECT_TRUE(close(alone, whole.narrow(0, 1, 1), same)) << dtype;
    }
  }
  EXPECT_GE(tested, 8);
}

// D + 4 bytes for a head of D numbers.
TEST(Int8Cache, TheStateIsSmaller) {
  at::NoGradGuard no_grad;
  const auto model = decoder("[[layer]]\nmixer = { type = 'mha', heads = 4 }\n");
  DecoderState wide, narrow = model->initial_state(kInt8);
  model->extend(tokens(3, 20, 30), wide);
  model->extend(tokens(3, 20, 30), narrow);
  EXPECT_EQ(wide.bytes(), 3 * 2 * 3 * 20 * 48 * 4);
  EXPECT_EQ(narrow.bytes(), 3 * 2 * 3 * 20 * (48 + 4 * 4));
}

TEST(Int8Cache, ForgetsAsAPolicySays) {
  at::NoGradGuard no_grad;
  for (const char* mixer : {"mha", "dcmha"}) {
    const auto model = decoder(str("[[layer]]\nmixer = { type = '", mixer, "', heads = 4 }\n"));
    const Tensor text = tokens(2, 60, 30);
    for (const char* policy : {"window:16", "sinks:16", "tova:16"}) {
      SCOPED_TRACE(str(mixer, " ", policy));
      const Tensor exact = read(*model, text, model->initial_state(CachePolicy::parse(policy)), 1);
      DecoderState state = model->initial_state(CachePolicy::parse(policy, "int8"));
      const Tensor got = read(*model, text, std::move(state), 1);
      // In tova two weights that are nearly alike may change places.
      EXPECT_LT(relative_error(got, exact), std::string(policy) == "tova:16" ? 0.5 : 0.1);
      state = model->initial_state(CachePolicy::parse(policy, "int8"));
      for (int64_t t = 0; t < 60; ++t) model->extend(text.narrow(1, t, 1), state);
      for (const LayerState& layer : state.layers) {
        EXPECT_EQ(layer.mixer.cache.at("key").size(), 16);
        EXPECT_EQ(layer.mixer.cache.at("key.scale").size(), layer.mixer.cache.at("key").size());
      }
    }
  }
}

TEST(Int8Cache, SequencesJoinAndLeave) {
  at::NoGradGuard no_grad;
  const auto model = decoder("[[layer]]\nmixer = { type = 'dcmha', heads = 4 }\n");
  const Tensor first = tokens(1, 30, 30), second = tokens(1, 17, 30), next = tokens(2, 5, 30);
  const auto begun = [&](const Tensor& text) {
    DecoderState state = model->initial_state(kInt8);
    model->extend(text, state);
    return state;
  };
  std::vector<DecoderState> parts;
  parts.push_back(begun(first));
  parts.push_back(begun(second));
  DecoderState both = DecoderState::join(parts);
  const Tensor together = model->extend(next, both);
  for (int64_t b = 0; b < 2; ++b) {
    const Tensor alone = model->extend(next.narrow(0, b, 1), parts[static_cast<size_t>(b)]);
    EXPECT_TRUE(close(together.narrow(0, b, 1), alone, kOneCode)) << b;
  }
  both.keep({1});
  const Tensor more = tokens(1, 3, 30);
  EXPECT_TRUE(close(model->extend(more, both), model->extend(more, parts[1]), kOneCode));
}

TEST(Int8Cache, IsForLayersThatKeepKeys) {
  const auto model =
      decoder("position = { type = 'none' }\n[[layer]]\nmixer = { type = 'rwkv' }\n");
  EXPECT_TRUE(contains(message_of<UsageError>([&] { model->initial_state(kInt8); }),
                       "in int8, but no layer keeps keys and values"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { CachePolicy::parse("full", "int4"); }),
                       "held in \"int4\", expected int8"));
  // An encoder-decoder's own keys; those of its source stay as they are.
  at::NoGradGuard no_grad;
  const auto answers = std::dynamic_pointer_cast<AutoregressiveModel>(build_model(
      model_of("kind = 'encoder_decoder'\nwidth = 48\ndepth = 2\nvocabulary = 30\nmax_length = 12\n"
               "max_source_length = 12\nlayer = [{ mixer = { type = 'mha', heads = 4 } }]")));
  answers->eval();
  const ModelInput input{.tokens = tokens(2, 7, 30), .source = tokens(2, 9, 30)};
  DecoderState state = answers->initial_state(kInt8, {.tokens = input.source});
  const Tensor got = answers->logits(answers->extend(input.tokens, state));
  EXPECT_LT(relative_error(got, answers->forward(input)), 0.05);
  EXPECT_EQ(state.layers[0].cross.recurrent.at("key").scalar_type(), at::kFloat);
}

}  // namespace
}  // namespace headloom::test::int8_cache_test
