// Decoding: a model that is given a sequence in pieces, and texts written from a prompt.
#include <gtest/gtest.h>

#include <random>

#include "model/describe.h"
#include "model/generation.h"
#include "support.h"
#include "testing/joined.h"

namespace headloom::test {
namespace {

// Null for a mixer that looks both ways.
std::shared_ptr<Decoder> decoder(const std::string& toml) {
  at::manual_seed(3);
  auto model = decoder_if_it_fits(
      model_of("width = 48\ndepth = 3\nvocabulary = 30\nmax_length = 40\n" + toml));
  if (!model) return model;
  model->eval();
  at::NoGradGuard no_grad;
  // What starts as zero or the identity is moved away, so that every part works.
  for (Tensor p : model->parameters()) p.add_(at::randn_like(p) * 0.05);
  return model;
}

// Every token mixer that looks back only, by itself; what surrounds a mixer; mixtures.
std::vector<std::string> models() {
  std::vector<std::string> out;
  for (const auto& entry : token_mixers()) {
    out.push_back("[[layer]]\nmixer = { type = '" + entry.name + "'" + heads_of(entry.name, 4) +
                  " }\n");
  }
  const std::string mha = "[[layer]]\nmixer = { type = 'mha', heads = 4 }\n";
  for (const char* position : {"learned", "sinusoidal", "alibi", "none"}) {
    out.push_back(str("position = { type = '", position, "' }\n", mha));
  }
  out.push_back(
      "norm = 'layer_norm'\nembedding_norm = true\nposition = { type = 'none' }\n"
      "[[layer]]\nmixer = { type = 'rwkv' }\nchannel = { type = 'rwkv_channel' }\n");
  out.push_back(mha + "block = { type = 'parallel', norms = 2 }\n");
  out.push_back(mha + "block = { type = 'sequential', norm_place = 'post' }\n");
  out.push_back(
      "[[layer]]\nmixer = { type = 'dcmha', heads = 4, window = 5 }\n[[layer]]\nmixer = { type = "
      "'dcmha', heads = 4 }\n");
  out.push_back(
      "[[layer]]\nmixer = { type = 'multi_token', heads = 4, conv_layers = 'all', window = 7 }\n");
  return out;
}

TEST(Decoding, PiecesGiveTheWhole) {
  at::NoGradGuard no_grad;
  int64_t tested = 0;
  for (const std::string& toml : models()) {
    const std::shared_ptr<Decoder> model = decoder(toml);
    if (!model) continue;
    if (!model->stacks()[0]->all()[0].mixer->stateful()) {
      std::printf("no state: %s", toml.c_str());
      continue;
    }
    ++tested;
    const Tensor tokens = at::randint(30, {2, 37}, at::kLong);
    const Tensor whole = model->hidden({.tokens = tokens});
    std::mt19937 random(7);
    for (const int64_t most : {1, 4, 20}) {
      DecoderState state;
      for (int64_t at = 0; at < 37;) {
        const int64_t limit = std::min<int64_t>(most, 37 - at);
        const int64_t n = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
        const Tensor y = model->extend(tokens.narrow(1, at, n), state);
        EXPECT_TRUE(close(y, whole.narrow(1, at, n), 1e-4)) << toml << "at " << at;
        at += n;
      }
      EXPECT_EQ(state.position.longest, 37);
    }
  }
  EXPECT_GE(tested, 14);
}

TEST(Decoding, JoinedSequencesAreAsAlone) {
  at::NoGradGuard no_grad;
  for (const std::string& toml : models()) {
    SCOPED_TRACE(toml);
    const std::shared_ptr<Decoder> model = decoder(toml);
    if (!model) continue;
    if (!model->stacks()[0]->all()[0].mixer->stateful()) continue;
    std::vector<Tensor> inputs, wholes;
    for (int i = 0; i < 5; ++i) {
      inputs.push_back(at::randint(30, {1, 37}, at::kLong));
      wholes.push_back(model->hidden({.tokens = inputs.back()}));
    }
    for (const uint32_t seed : {1, 2}) {
      test::joined_as_alone<DecoderState>(
          inputs, wholes,
          [&](const Tensor& tokens, DecoderState& state) { return model->extend(tokens, state); },
          DecoderState::join, model->initial_state(), 1e-4, seed);
    }
  }
}

TEST(Decoding, WhatCannotBeJoinedIsRefused) {
  const auto model = decoder("[[layer]]\nmixer = { type = 'mha', heads = 4 }\n");
  const auto other = decoder("[[layer]]\nmixer = { type = 'retention', heads = 4 }\n");
  const Tensor tokens = at::zeros({1, 3}, at::kLong);
  DecoderState a, b, narrow = model->initial_state(CachePolicy::parse("window:2"));
  model->extend(tokens, a);
  model->extend(tokens, narrow);
  other->extend(tokens, b);
  const auto refusal = [&](const std::vector<DecoderState>& parts) {
    return message_of<Error>([&] { DecoderState::join(parts); });
  };
  EXPECT_TRUE(contains(refusal({a, model->initial_state()}), "seen nothing"));
  EXPECT_TRUE(contains(refusal({a, b}), "another model's"));
  EXPECT_TRUE(contains(refusal({a, narrow}), "full and window:2"));
  EXPECT_TRUE(contains(refusal({}), "no decoding states"));
}

TEST(Decoding, TheStateIsAsLargeAsSaid) {
  at::NoGradGuard no_grad;
  for (const std::string& toml : models()) {
    const std::shared_ptr<Decoder> model = decoder(toml);
    if (!model) continue;
    const auto measured = measured_state(*model, 37);
    if (!model->stacks()[0]->all()[0].mixer->stateful()) {
      EXPECT_FALSE(measured) << toml;
      continue;
    }
    const ModelCosts costs = model_costs(*model, 37);
    EXPECT_EQ(measured->length, 37);
    EXPECT_EQ(measured->bytes, costs.state_bytes) << toml;
    EXPECT_DOUBLE_EQ(measured->bytes_per_token, costs.state_bytes_per_token) << toml;
    // As a text leaves it.
    DecoderState state;
    model->extend(at::zeros({1, 37}, at::kLong), state);
    EXPECT_EQ(static_cast<double>(state.bytes()), costs.state_bytes) << toml;
  }
}

TEST(Decoding, RowsOfAStateAreSelected) {
  at::NoGradGuard no_grad;
  const auto model = decoder("[[layer]]\nmixer = { type = 'dcmha', heads = 4, window = 6 }\n");
  const Tensor tokens = at::randint(30, {3, 12}, at::kLong);
  DecoderState state;
  model->extend(tokens.narrow(1, 0, 9), state);
  const Tensor rows = at::tensor({2, 0, 2}, at::kLong);
  DecoderState chosen = state.select(rows);
  const Tensor next = tokens.narrow(1, 9, 3);
  EXPECT_TRUE(close(model->extend(next.index_select(0, rows), chosen),
                    model->extend(next, state).index_select(0, rows), 1e-6));
}

std::vector<int64_t> written(Decoder& model, int64_t count, double temperature, uint64_t seed,
                             int64_t samples, int64_t which) {
  Continuation text(model, {{1, 2, 3}}, {.temperature = temperature}, seed, samples);
  std::vector<int64_t> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(text.next()[which].item<int64_t>());
  return out;
}

TEST(Decoding, WritesWhatTheWholeModelWould) {
  at::NoGradGuard no_grad;
  const auto model = decoder("[[layer]]\nmixer = { type = 'dcmha', heads = 4 }\n");
  std::vector<int64_t> tokens = {1, 2, 3};
  for (int64_t i = 0; i < 30; ++i) {
    const Tensor input = at::tensor(at::IntArrayRef(tokens), at::kLong).unsqueeze(0);
    tokens.push_back(
        model->logits(model->hidden({.tokens = input}).select(1, -1)).argmax().item<int64_t>());
  }
  tokens.erase(tokens.begin(), tokens.begin() + 3);
  EXPECT_EQ(written(*model, 30, 0, 0, 1, 0), tokens);
  // Sample 2 of three is what its seed alone gives.
  EXPECT_EQ(written(*model, 30, 1, 10, 3, 2), written(*model, 30, 1, 12, 1, 0));
  EXPECT_NE(written(*model, 30, 1, 10, 3, 2), written(*model, 30, 1, 10, 3, 1));
}

// Prompts of different lengths, and texts that outgrow the model at different times.
TEST(Decoding, PromptsGoOnSideBySide) {
  for (const char* position : {"rope", "learned"}) {
    const auto model = decoder(str("position = { type = '", position,
                                   "' }\n[[layer]]\nmixer = { type = 'mha', heads = 4 }\n"));
    const std::vector<std::vector<int64_t>> prompts = {
        {1, 2, 3}, {4}, {5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {16, 17, 18}};
    const SamplingOptions sampling{.temperature = 1, .repetition_penalty = 1.2};
    const int64_t count = 70, samples = 2;
    Continuation together(*model, prompts, sampling, 5, samples);
    std::vector<Tensor> rows;
    for (int64_t i = 0; i < count; ++i) rows.push_back(together.next());
    const Tensor texts = at::stack(rows, 1);
    ASSERT_EQ(texts.size(0), 8);
    for (size_t p = 0; p < prompts.size(); ++p) {
      Continuation alone(*model, {prompts[p]}, sampling, 5, samples);
      for (int64_t i = 0; i < count; ++i) {
        const auto first = static_cast<int64_t>(p) * samples;
        EXPECT_TRUE(at::equal(alone.next(), texts.select(1, i).narrow(0, first, samples)))
            << position << ", prompt " << p << ", token " << i;
      }
    }
  }
}

TEST(Decoding, ATextMayOutgrowTheModel) {
  const auto learned =
      decoder("position = { type = 'learned' }\n[[layer]]\nmixer = { type = 'mha', heads = 4 }\n");
  Continuation text(*learned, {{1, 2, 3}}, {}, 0);
  for (int64_t i = 0; i < 100; ++i) {
    text.next();
    EXPECT_LE(text.state().position.longest, 40);
  }
  DecoderState state;
  EXPECT_TRUE(
      contains(message_of<Error>([&] { learned->extend(at::zeros({1, 41}, at::kLong), state); }),
               "40 learned positions"));
  // The state of a recurrence does not grow, so it goes on.
  const auto rwkv = decoder(
      "position = { type = 'none' }\n[[layer]]\nmixer = { type = 'rwkv' }\nchannel = { type = "
      "'rwkv_channel' }\n");
  Continuation endless(*rwkv, {{1, 2, 3}}, {}, 0);
  const int64_t bytes = endless.state().bytes();
  for (int64_t i = 0; i < 60; ++i) endless.next();
  EXPECT_EQ(endless.state().position.longest, 63);
  EXPECT_EQ(endless.state().bytes(), bytes);
}

}  // namespace
}  // namespace headloom::test
