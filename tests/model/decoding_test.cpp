// Decoding: a model that is given a sequence in pieces, and texts written from a prompt.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <numeric>
#include <random>

#include "model/describe.h"
#include "model/encoder_decoder.h"
#include "model/generation.h"
#include "support.h"
#include "testing/joined.h"

namespace headloom::test::decoding_test {
namespace {

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
  const std::string shaped = "[[layer]]\nmixer = { type = 'shaped', heads = 4 }\n";
  out.push_back(shaped + "block = { type = 'simplified' }\n");
  out.push_back(shaped + "block = { type = 'simplified', form = 'parallel', comb = 0.3 }\n");
  out.push_back(mha + "channel = { type = 'moe', routed = 3, active = 2 }\nblock = { short_conv = 3 }\n");
  return out;
}

// All outputs of each piece are wanted, or some of the newest.
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
        const int64_t wanted = 1 + at % n;
        const Tensor y = model->extend(tokens.narrow(1, at, n), state, wanted);
        EXPECT_TRUE(close(y, whole.narrow(1, at + n - wanted, wanted), 1e-4))
            << toml << "at " << at;
        at += n;
      }
      EXPECT_EQ(state.position.longest, 37);
    }
  }
  EXPECT_GE(tested, 14);
}

// Whatever is forgotten, and in whatever type keys and values are kept.
TEST(Decoding, OutputsThatNobodyWantsChangeNothing) {
  at::NoGradGuard no_grad;
  const char* const layers[] = {
      "[[layer]]\nmixer = { type = 'mha', heads = 4 }\n",
      "position = { type = 'alibi' }\n[[layer]]\nmixer = { type = 'mha', heads = 4, window = 9 }\n",
      "[[layer]]\nmixer = { type = 'dcmha', heads = 4 }\n",
      "[[layer]]\nmixer = { type = 'shaped', heads = 4 }\n"};
  for (const char* toml : layers) {
    const std::shared_ptr<Decoder> model = decoder(toml);
    const Tensor tokens = at::randint(30, {2, 37}, at::kLong);
    for (const char* policy : {"full", "window:6", "sinks:6", "tova:6"}) {
      for (const char* dtype : {"", "int8"}) {
        const auto begin = [&] { return model->initial_state(CachePolicy::parse(policy, dtype)); };
        DecoderState all = begin(), newest = begin();
        for (const auto& [at, n] : {std::pair(0, 12), {12, 1}, {13, 20}, {33, 4}}) {
          const Tensor piece = tokens.narrow(1, at, n), y = model->extend(piece, all);
          EXPECT_TRUE(close(model->extend(piece, newest, 1), y.narrow(1, n - 1, 1), 1e-5))
              << toml << policy << " " << dtype << " at " << at;
        }
      }
    }
  }
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
          [](DecoderState& state, const std::vector<DecoderState>& others) { state.add(others); },
          model->initial_state(), 1e-4, seed);
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
  const auto refusal = [](const DecoderState& first, const DecoderState& second) {
    std::vector<DecoderState> parts;
    for (const DecoderState* part : {&first, &second}) parts.push_back(part->alias());
    return message_of<Error>([&] { DecoderState::join(parts); });
  };
  EXPECT_TRUE(contains(refusal(a, model->initial_state()), "seen nothing"));
  EXPECT_TRUE(contains(refusal(a, b), "'layer.0.mixer.type' = 'mha'"));
  EXPECT_TRUE(contains(refusal(a, narrow), "full and window:2"));
  EXPECT_TRUE(contains(message_of<Error>([] { DecoderState::join({}); }), "no decoding states"));
}

TEST(Decoding, AFailedAddLeavesTheStateAsItWas) {
  at::NoGradGuard no_grad;
  const auto model = decoder("[[layer]]\nmixer = { type = 'mha', heads = 4 }\n");
  std::vector<DecoderState> others(2);
  model->extend(at::zeros({1, 3}, at::kLong), others[0]);
  model->extend(at::zeros({1, 5}, at::kLong), others[1]);
  // Fails after other layers have been joined.
  others[1].layers.back() = std::move(model->initial_state().layers.back());
  for (const int64_t batch : {0, 1}) {
    DecoderState state;
    if (batch > 0) model->extend(at::ones({batch, 4}, at::kLong), state);
    const std::string message = message_of<Error>([&] { state.add(others); });
    EXPECT_TRUE(contains(message, "some have seen nothing")) << message;
    EXPECT_EQ(state.batch(), batch);
    const Tensor next = at::full({1, 1}, 2, at::kLong), before = at::ones({batch, 4}, at::kLong);
    const Tensor whole = batch > 0 ? at::cat({before, next}, 1) : next;
    EXPECT_TRUE(at::allclose(model->extend(next, state),
                             model->hidden({.tokens = whole}).narrow(1, whole.size(1) - 1, 1), 1e-4,
                             1e-5));
  }
}

TEST(Decoding, SequencesLeaveWithoutMemoryForASmallerCopy) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the address sanitizer needs more address space than the limit leaves";
#endif
  at::NoGradGuard no_grad;
  const auto model = decoder("[[layer]]\nmixer = { type = 'mha', heads = 4 }\n");
  const Tensor tokens = at::randint(30, {8, 5}, at::kLong);
  DecoderState state = model->initial_state();
  state.reserve(100'000);
  model->extend(tokens.narrow(1, 0, 4), state);
  rlimit before{};
  ::getrlimit(RLIMIT_AS, &before);
  const rlimit now{.rlim_cur = 1, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &now), 0);
  std::string problem;
  try {
    state.keep({7});
  } catch (const std::exception& error) {
    problem = error.what();
  }
  ::setrlimit(RLIMIT_AS, &before);
  EXPECT_EQ(problem, "");
  const Tensor next = model->extend(tokens.narrow(0, 7, 1).narrow(1, 4, 1), state);
  const Tensor whole = model->hidden({.tokens = tokens.narrow(0, 7, 1)});
  EXPECT_TRUE(at::allclose(next, whole.narrow(1, 4, 1), 1e-4, 1e-5));
}

TEST(Decoding, NoSequencesHaveSeenNothing) {
  const Positions two = {.longest = 3, .left_padding = at::tensor({1, 0}, at::kLong)};
  EXPECT_EQ(two.select(at::empty({0}, at::kLong)).longest, 0);
}

// All texts have left, and texts of two lengths join.
TEST(Decoding, AStateOfNothingIsJoinedLikeANewOne) {
  at::NoGradGuard no_grad;
  const auto model = decoder("[[layer]]\nmixer = { type = 'mha', heads = 4 }\n");
  const auto read = [&](int64_t length) {
    DecoderState state = model->initial_state();
    model->extend(at::arange(1, 1 + length).unsqueeze(0), state);
    return state;
  };
  const auto joined = [&](DecoderState state) {
    std::vector<DecoderState> others;
    others.push_back(read(5));
    others.push_back(read(9));
    state.add(others);
    return model->extend(at::full({2, 1}, 3, at::kLong), state);
  };
  DecoderState left = read(4);
  left.keep({});
  EXPECT_TRUE(joined(std::move(left)).equal(joined(model->initial_state())));
}

TEST(Decoding, AStateOfAnotherModelIsRefused) {
  at::NoGradGuard no_grad;
  const Tensor tokens = at::zeros({1, 3}, at::kLong);
  const auto two_heads = decoder("[[layer]]\nmixer = { type = 'mha', heads = 2 }\n");
  const auto refusal = [&](const char* toml) {
    DecoderState state;
    two_heads->extend(tokens, state);
    const auto other = decoder(toml);
    const std::string message = message_of<UsageError>([&] { other->extend(tokens, state); });
    EXPECT_EQ(state.position.longest, 3);  // it goes on with its own
    DecoderState copy = state.select(at::zeros({1}, at::kLong));
    two_heads->extend(tokens, copy);
    return message;
  };
  EXPECT_EQ(refusal("[[layer]]\nmixer = { type = 'mha', heads = 4 }\n"),
            "model: the state is of a model with 'layer.0.mixer.heads' = 2, expected "
            "'layer.0.mixer.heads' = 4.");
  EXPECT_TRUE(contains(refusal("[[layer]]\nmixer = { type = 'retention', heads = 2 }\n"),
                       "expected 'layer.0.mixer.type' = 'retention'."));
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

// Memory that tensors take while it stands.
struct Allocations final : c10::MemoryReportingInfoBase {
  std::vector<int64_t> sizes;  // since it was last cleared
  int64_t held = 0;            // not yet given back

  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
    held += size;
    if (size > 0) sizes.push_back(size);
  }
  bool memoryProfilingEnabled() const override { return true; }
};

// Where it is known how many positions come: nothing that stays is allocated, and where the state
// is bounded all is as large as in the step before. Where it is not, what grows with the position
// are maps and masks of one query, less than a copy of a layer's keys in both layers together. (A
// convolution has maps of several queries.)
TEST(Decoding, AStepAllocatesNothingThatGrows) {
  at::NoGradGuard no_grad;
  std::vector<std::string> layers;
  for (const auto& entry : token_mixers()) {
    layers.push_back("mixer = { type = '" + entry.name + "'" + heads_of(entry.name, 2) + " }\n");
  }
  layers.push_back("mixer = { type = 'dcmha', heads = 2, window = 20 }\n");
  layers.push_back("mixer = { type = 'multi_token', heads = 2, conv_layers = 'all' }\n");
  layers.push_back(
      "mixer = { type = 'multi_token', heads = 2, conv_layers = 'all', window = 9 }\n");
  layers.push_back("mixer = { type = 'rwkv' }\nchannel = { type = 'rwkv_channel' }\n");
  // Kernels allocate for whole blocks of keys.
  const int64_t width = 64, prompt = 50, length = 240, block = 64;
  int64_t tested = 0, bounded = 0;
  for (const std::string& layer : layers) {
    at::manual_seed(3);
    const auto model =
        decoder_if_it_fits(model_of(str("vocabulary = 30\ndepth = 2\nwidth = ", width,
                                        "\nmax_length = ", length, "\n[[layer]]\n", layer)));
    if (!model || !model->decoder_layers().stateful()) continue;
    model->eval();
    const TokenMixer& mixer = *model->decoder_layers().all()[0].mixer;
    // What kernels keep for later steps has its size then.
    DecoderState whole = model->initial_state({});
    model->extend(at::zeros({1, length - 1}, at::kLong), whole);
    model->extend(at::zeros({1, 1}, at::kLong), whole);
    for (const char* text : {"full", "window:16", "sinks:16", "tova:16"}) {
      SCOPED_TRACE(layer + text);
      const CachePolicy policy = CachePolicy::parse(text);
      const auto log = std::make_shared<Allocations>();
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, log);
      DecoderState state;
      try {
        state = model->initial_state(policy);
      } catch (const UsageError&) {
        continue;  // nothing to forget
      }
      state.reserve(length);
      model->extend(at::zeros({1, prompt}, at::kLong), state);
      const Tensor token = at::zeros({1, 1}, at::kLong);
      const bool constant =
          policy.evicts() || mixer.state_bytes(length) == mixer.state_bytes(prompt);
      const bool convolves = layer.find("conv_layers") != std::string::npos;
      ++tested;
      bounded += constant ? 1 : 0;
      std::vector<int64_t> before;
      int64_t least = 0;
      for (int64_t t = prompt; t < length; ++t) {
        const int64_t held = log->held;
        log->sizes.clear();
        model->extend(token, state);
        ASSERT_EQ(log->held, held) << "at " << t;
        std::vector<int64_t> sizes = log->sizes;
        ASSERT_FALSE(sizes.empty());
        std::sort(sizes.begin(), sizes.end());
        // Rows move once in a while, which takes no memory.
        const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
        if (t == prompt) least = sum;
        if (!constant && !convolves) {
          ASSERT_LE(sum - least, 4 * width * (t - prompt + block)) << "at " << t;
        } else if (constant && !before.empty()) {
          ASSERT_EQ(sizes, before) << "at " << t;
        }
        before = sizes;
      }
    }
  }
  EXPECT_GE(tested, 30);
  EXPECT_GE(bounded, 20);
}

// Layers that keep no keys and values beside those that forget some of theirs.
TEST(Decoding, APolicyIsForTheLayersThatAttend) {
  at::NoGradGuard no_grad;
  for (const char* other : {"rwkv", "mamba", "retention", "aft"}) {
    const auto model = decoder(str("position = { type = 'none' }\n[[layer]]\nmixer = { type = '",
                                   other, "' }\n[[layer]]\nmixer = { type = 'mha', heads = 4 }\n"));
    const auto bytes = [&](const char* policy, int64_t length) {
      DecoderState state = model->initial_state(CachePolicy::parse(policy));
      for (int64_t i = 0; i < length; ++i) model->extend(at::ones({1, 1}, at::kLong), state);
      return state.bytes();
    };
    EXPECT_EQ(bytes("tova:8", 8), bytes("full", 8)) << other;
    EXPECT_EQ(bytes("tova:8", 30), bytes("tova:8", 8)) << other;
    EXPECT_GT(bytes("full", 30), bytes("full", 8)) << other;
    const auto alone =
        decoder(str("position = { type = 'none' }\n[[layer]]\nmixer = { type = '", other, "' }\n"));
    const std::string said =
        message_of<UsageError>([&] { alone->initial_state(CachePolicy::parse("tova:8")); });
    EXPECT_TRUE(contains(said, "tova:8, but no layer keeps keys and values")) << said;
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
  Generation text(model, {{1, 2, 3}},
                  {.sampling = {.temperature = temperature}, .seed = seed, .samples = samples});
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
    const GenerationOptions options{
        .sampling = sampling, .seed = 5, .samples = samples, .tokens = count};
    Generation together(*model, prompts, options);
    std::vector<Tensor> rows;
    for (int64_t i = 0; i < count; ++i) rows.push_back(together.next());
    const Tensor texts = at::stack(rows, 1);
    ASSERT_EQ(texts.size(0), 8);
    for (size_t p = 0; p < prompts.size(); ++p) {
      Generation alone(*model, {prompts[p]}, options);
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
  Generation text(*learned, {{1, 2, 3}}, {});
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
  Generation endless(*rwkv, {{1, 2, 3}}, {});
  const int64_t bytes = endless.state().bytes();
  for (int64_t i = 0; i < 60; ++i) endless.next();
  EXPECT_EQ(endless.state().position.longest, 63);
  EXPECT_EQ(endless.state().bytes(), bytes);
}

// --- Encoder-decoders ---------------------------------------------------------------------------

std::shared_ptr<EncoderDecoder> encoder_decoder(const std::string& toml) {
  at::manual_seed(3);
  const auto model = std::make_shared<EncoderDecoder>(
      model_of("kind = 'encoder_decoder'\nwidth = 48\ndepth = 2\nvocabulary = 30\nmax_length = 40\n"
               "max_source_length = 12\n" +
               toml + "[[encoder_layer]]\nmixer = { type = 'mha', heads = 4 }\n"));
  model->eval();
  at::NoGradGuard no_grad;
  for (Tensor p : model->parameters()) p.add_(at::randn_like(p) * 0.05);
  return model;
}

// Every mixer that looks back only, reading by plain attention; every mixer that reads a memory,
// beside plain attention; blocks and positions.
std::vector<std::string> encoder_decoders() {
  std::vector<std::string> out;
  const std::string mha = "{ type = 'mha', heads = 4 }";
  const auto add = [&](const std::string& mixer, const std::string& cross,
                       const std::string& more = "", const std::string& top = "") {
    out.push_back(top + "[[layer]]\nmixer = " + mixer + "\ncross = " + cross + "\n" + more);
  };
  LayerShape shape;
  shape.width = 48;
  for (const auto& entry : token_mixers()) {
    const std::string heads = heads_of(entry.name, 4);
    const std::string mixer = "{ type = '" + entry.name + "'" + heads + " }";
    const auto stands = [&](LayerShape own) {
      const auto spec = make_spec(token_mixers(), "token mixer", entry.name);
      read_fields(parse_toml(heads.empty() ? "" : heads.substr(2), "test"), *spec);
      try {
        return spec->build(own);
      } catch (const UsageError&) {
        return std::shared_ptr<TokenMixer>();
      }
    };
    if (const auto built = stands(shape); built && built->stateful()) add(mixer, mha);
    LayerShape cross = shape;
    cross.causal = false;
    cross.cross = true;
    if (const auto built = stands(cross); built) add(mha, mixer);
  }
  add(mha,
      "{ type = 'dcmha', heads = 4, kv_heads = 2, qk_norm = true, groups = 2, static = 'add' }");
  for (const char* mask : {"double", "exact"}) {
    add(mha, str("{ type = 'multi_token', preset = 'released', heads = 4, conv_layers = 'all', "
                 "conv_mask = '",
                 mask, "' }"));
  }
  add("{ type = 'mha', heads = 4, window = 5 }", mha, "block = { type = 'parallel', norms = 2 }\n");
  add(mha, mha, "block = { type = 'sequential', norm_place = 'post' }\n",
      "position = { type = 'learned' }\nnorm = 'layer_norm'\nbias = true\n");
  return out;
}

TEST(EncoderDecoding, SourcesThatDifferInShapeAreNotJoined) {
  at::NoGradGuard no_grad;
  const auto model = encoder_decoder(
      "[[layer]]\nmixer = { type = 'mha', heads = 4 }\ncross = { type = 'mha', heads = 4 }\n");
  const Tensor five = at::zeros({1, 5}, at::kLong), lengths = at::tensor({int64_t{3}}, at::kLong);
  const std::vector<Source> sources = {{five, {}}, {five, lengths}, {five.narrow(1, 0, 4), {}}};
  for (const auto& [a, b] : {std::pair(0, 1), std::pair(1, 0), std::pair(0, 2)}) {
    std::vector<DecoderState> parts;
    for (const int i : {a, b}) {
      parts.push_back(model->initial_state({}, sources[static_cast<size_t>(i)]));
      model->extend(five.narrow(1, 0, 2), parts.back());
    }
    EXPECT_TRUE(contains(message_of<Error>([&] { DecoderState::join(parts); }),
                         "sources are padded to one length, and all of them have lengths or none"));
  }
}

TEST(EncoderDecoding, PiecesGiveTheWhole) {
  at::NoGradGuard no_grad;
  int64_t tested = 0;
  for (const std::string& toml : encoder_decoders()) {
    SCOPED_TRACE(toml);
    const auto model = encoder_decoder(toml);
    const Tensor tokens = at::randint(30, {3, 37}, at::kLong);
    Source source{at::randint(30, {3, 11}, at::kLong), at::tensor({11, 1, 7}, at::kLong)};
    ++tested;
    for (const bool padded : {true, false}) {
      if (!padded) source.lengths = Tensor();
      const Tensor whole = model->hidden(
          {.tokens = tokens, .source = source.tokens, .source_lengths = source.lengths});
      std::mt19937 random(7);
      for (const int64_t most : {1, 4, 20}) {
        DecoderState state = model->initial_state({}, source);
        for (int64_t at = 0; at < 37;) {
          const int64_t limit = std::min<int64_t>(most, 37 - at);
          const int64_t n = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
          const int64_t wanted = 1 + at % n;
          ASSERT_TRUE(close(model->extend(tokens.narrow(1, at, n), state, wanted),
                            whole.narrow(1, at + n - wanted, wanted), 1e-4))
              << "at " << at;
          at += n;
        }
      }
    }
  }
  EXPECT_GE(tested, 15);
}

TEST(EncoderDecoding, JoinedSequencesAreAsAlone) {
  at::NoGradGuard no_grad;
  for (const std::string& toml : encoder_decoders()) {
    SCOPED_TRACE(toml);
    const auto model = encoder_decoder(toml);
    const Tensor sources = at::randint(30, {5, 11}, at::kLong);
    const Tensor lengths = at::tensor({11, 3, 7, 1, 10}, at::kLong);
    const auto source = [&](int64_t i) {
      return Source{sources.narrow(0, i, 1), lengths.narrow(0, i, 1)};
    };
    std::vector<Tensor> inputs, wholes;
    for (int64_t i = 0; i < 5; ++i) {
      inputs.push_back(at::randint(30, {1, 37}, at::kLong));
      inputs.back()[0][0].fill_(i);  // says which source is read
      const Source own = source(i);
      wholes.push_back(
          model->hidden({.tokens = inputs.back(),
                         .source = own.tokens.narrow(1, 0, lengths[i].item<int64_t>())}));
    }
    test::joined_as_alone<DecoderState>(
        inputs, wholes,
        [&](const Tensor& tokens, DecoderState& state) {
          if (state.layers.empty()) {
            state = model->initial_state({}, source(tokens[0][0].item<int64_t>()));
          }
          return model->extend(tokens, state);
        },
        [](DecoderState& state, const std::vector<DecoderState>& others) { state.add(others); },
        DecoderState(), 1e-4, 1);
  }
}

TEST(EncoderDecoding, TheStateIsAsLargeAsSaid) {
  at::NoGradGuard no_grad;
  for (const std::string& toml : encoder_decoders()) {
    const auto model = encoder_decoder(toml);
    const auto measured = measured_state(*model, 12);
    ASSERT_TRUE(measured) << toml;
    const ModelCosts costs = model_costs(*model, 12);
    EXPECT_EQ(measured->bytes, costs.state_bytes) << toml;
    EXPECT_DOUBLE_EQ(measured->bytes_per_token, costs.state_bytes_per_token) << toml;
    DecoderState state = model->initial_state({}, {at::zeros({1, 12}, at::kLong), {}});
    model->extend(at::zeros({1, 12}, at::kLong), state);
    EXPECT_EQ(static_cast<double>(state.bytes()), costs.state_bytes) << toml;
  }
}

// Prompts and sources of different lengths; texts that outgrow the model.
TEST(EncoderDecoding, TextsGoOnSideBySide) {
  at::NoGradGuard no_grad;
  const auto model = encoder_decoder("[[layer]]\nmixer = { type = 'dcmha', heads = 4 }\n");
  const std::vector<std::vector<int64_t>> prompts = {{1}, {2, 3, 4}, {1}},
                                          sources = {{5, 6, 7}, {8}, {9, 10, 11, 12, 13, 14}};
  const int64_t count = 50, samples = 2;
  GenerationOptions options{.sampling = {.temperature = 1},
                            .seed = 5,
                            .samples = samples,
                            .tokens = count,
                            .sources = sources};
  Generation together(*model, prompts, options);
  std::vector<Tensor> rows;
  for (int64_t i = 0; i < count; ++i) rows.push_back(together.next());
  const Tensor texts = at::stack(rows, 1);
  for (size_t p = 0; p < prompts.size(); ++p) {
    options.sources = {sources[p]};
    Generation alone(*model, {prompts[p]}, options);
    for (int64_t i = 0; i < count; ++i) {
      const auto first = static_cast<int64_t>(p) * samples;
      EXPECT_TRUE(at::equal(alone.next(), texts.select(1, i).narrow(0, first, samples)))
          << "prompt " << p << ", token " << i;
    }
  }
  // Greedily, against the whole model.
  options = {.sampling = {.temperature = 0}, .sources = {sources[2]}};
  Generation greedy(*model, {{1}}, options);
  std::vector<int64_t> tokens = {1};
  const auto row = [](const std::vector<int64_t>& list) {
    return at::tensor(at::IntArrayRef(list), at::kLong).unsqueeze(0);
  };
  for (int64_t i = 0; i < 30; ++i) {
    const Tensor hidden = model->hidden({.tokens = row(tokens), .source = row(sources[2])});
    tokens.push_back(model->logits(hidden.select(1, -1)).argmax().item<int64_t>());
    EXPECT_EQ(greedy.next().item<int64_t>(), tokens.back()) << i;
  }
}

TEST(EncoderDecoding, ASourceIsReadWhereItBelongs) {
  const auto model = encoder_decoder("[[layer]]\nmixer = { type = 'mha', heads = 4 }\n");
  DecoderState state;
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { model->extend(at::zeros({1, 1}, at::kLong), state); }),
               "needs a source"));
  const auto plain = decoder("[[layer]]\nmixer = { type = 'mha', heads = 4 }\n");
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { plain->initial_state({}, {at::zeros({1, 1}, at::kLong), {}}); }),
      "reads no source"));
  GenerationOptions options{.sources = {{1}, {2}}};
  EXPECT_TRUE(contains(message_of<Error>([&] { Generation(*model, {{1}}, options); }),
                       "2 sources for 1 prompts"));
  const auto whole = encoder_decoder(
      "[[layer]]\nmixer = { type = 'aft', form = 'full' }\ncross = { type = 'mha', heads = 4 }\n");
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { whole->initial_state({}, {at::zeros({1, 1}, at::kLong), {}}); }),
      "layer 0 (aft) has no state for decoding"));
}

}  // namespace
}  // namespace headloom::test::decoding_test
