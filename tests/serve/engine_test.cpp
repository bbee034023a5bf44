#include "serve/engine.h"

#include <random>
#include <set>

#include "support.h"

namespace headloom::test::engine_test {
namespace {

using serve::Engine;
using serve::Refusal;
using serve::Request;

std::vector<int64_t> random_prompt(int64_t length, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> out;
  for (int64_t i = 0; i < length; ++i) out.push_back(1 + static_cast<int64_t>(random() % 255));
  return out;
}

struct Served {
  explicit Served(const std::string& toml = kAttention, serve::EngineOptions options = {},
                  int64_t length = 400)
      : model(byte_decoder(toml, length)), engine(model, codec, options) {}

  Written alone(const Request& r) { return collect(*engine.submit(r))[0]; }

  RunConfig config = byte_config();
  Codec codec{config};
  std::shared_ptr<Decoder> model;
  Engine engine;
};

// Tokens for which the model's scores have no two that rounding could exchange are compared.
TEST(Engine, TextsWrittenTogetherAreThoseWrittenAlone) {
  for (const std::string& toml :
       {std::string(kAttention), std::string(kRecurrence),
        std::string("[[layer]]\nmixer = { type = 'mha', heads = 4, kv_heads = 2, window = 9 }\n"
                    "[[layer]]\nmixer = { type = 'mha', heads = 4 }\n"),
        std::string("position = { type = 'learned' }\n[[layer]]\nmixer = { type = 'mha', heads = "
                    "4 }\n"),
        std::string("[[layer]]\nmixer = { type = 'multi_token', heads = 4 }\n"),
        std::string("[[layer]]\nmixer = { type = 'retention', heads = 4 }\n"),
        std::string("[[layer]]\nmixer = { type = 'mamba' }\nchannel = { type = 'none' }\n")}) {
    Served alone(toml, {.max_batch = 1}), together(toml, {.max_batch = 5});
    std::vector<Request> requests;
    for (uint32_t i = 0; i < 12; ++i) {
      Request r{.prompts = {random_prompt(1 + 17 * (i % 5), i)},
                .max_tokens = 5 + 7 * (i % 4),
                .seed = i};
      if (i % 3 == 0) r.sampling.temperature = 0;
      if (i % 3 == 1) r.sampling = {.temperature = 1.3, .top_k = 40, .repetition_penalty = 1.2};
      if (i % 2 == 0) r.logprobs = 2;
      requests.push_back(std::move(r));
    }
    std::vector<std::shared_ptr<serve::Answer>> answers;
    for (const Request& r : requests) answers.push_back(together.engine.submit(r));
    for (size_t i = 0; i < requests.size(); ++i) {
      const Written one = alone.alone(requests[i]), other = collect(*answers[i])[0];
      EXPECT_EQ(one.ids(), other.ids()) << toml << i;
      EXPECT_EQ(one.text, other.text);
      EXPECT_EQ(one.finish, other.finish);
      if (!requests[i].logprobs || one.tokens.size() != other.tokens.size()) continue;
      for (size_t t = 0; t < one.tokens.size(); ++t) {
        EXPECT_NEAR(*one.tokens[t].logprob, *other.tokens[t].logprob, 1e-4);
        EXPECT_EQ(other.tokens[t].top.size(), 2u);
      }
    }
  }
}

// Prompts are longer than a piece, at whose end attention forgets.
TEST(Engine, WhatIsForgottenDoesNotDependOnTheOthers) {
  for (const char* cache : {"window:30", "sinks:30", "tova:30"}) {
    Served alone(kAttention, {.max_batch = 1, .cache = cache}),
        together(kAttention, {.max_batch = 4, .cache = cache});
    std::vector<Request> requests;
    for (uint32_t i = 0; i < 7; ++i) {
      requests.push_back({.prompts = {random_prompt(5 + 83 * (i % 4), i)},
                          .max_tokens = 20 + 9 * (i % 3),
                          .seed = i});
    }
    std::vector<std::shared_ptr<serve::Answer>> answers;
    for (const Request& r : requests) answers.push_back(together.engine.submit(r));
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(alone.alone(requests[i]).ids(), collect(*answers[i])[0].ids()) << cache << " " << i;
    }
  }
  EXPECT_TRUE(contains(message_of<UsageError>([] { Served(kRecurrence, {.cache = "tova:30"}); }),
                       "no layer keeps keys and values"));
}

// A prompt of a piece that is no longer than the model is read at once.
TEST(Engine, NothingIsForgottenWithinAPiece) {
  const Request request{.prompts = {random_prompt(120, 3)}, .max_tokens = 1, .logprobs = 0};
  Served all(kAttention, {}, 130), window(kAttention, {.cache = "window:30"}, 130);
  const Written expected = all.alone(request), found = window.alone(request);
  EXPECT_EQ(found.ids(), expected.ids());
  EXPECT_NEAR(*found.tokens[0].logprob, *expected.tokens[0].logprob, 1e-5);
}

TEST(Engine, EqualPromptsGoOnDifferentlyWhereTheSeedWasDrawn) {
  Served s;
  const std::vector<int64_t> prompt = random_prompt(5, 1);
  const auto texts = [&](bool drawn) {
    std::set<std::vector<int64_t>> out;
    for (const Written& w : collect(*s.engine.submit({.prompts = {prompt, prompt},
                                                      .samples = 2,
                                                      .max_tokens = 20,
                                                      .seed = 7,
                                                      .drawn_seed = drawn}),
                                    4)) {
      out.insert(w.ids());
    }
    return out;
  };
  EXPECT_EQ(texts(true).size(), 4u);
  EXPECT_EQ(texts(false).size(), 2u);
}

TEST(Engine, SamplesDrawWithSeedsOfTheirOwn) {
  Served s;
  const std::vector<std::vector<int64_t>> prompts = {random_prompt(5, 1), random_prompt(30, 2)};
  const auto three =
      collect(*s.engine.submit({.prompts = prompts, .samples = 3, .max_tokens = 20, .seed = 7}), 6);
  EXPECT_NE(three[0].ids(), three[1].ids());
  for (uint64_t i = 0; i < 3; ++i) {
    for (size_t p = 0; p < 2; ++p) {
      EXPECT_EQ(s.alone({.prompts = {prompts[p]}, .max_tokens = 20, .seed = 7 + i}).ids(),
                three[3 * p + i].ids());
    }
  }
}

// Also where the prompt is longer than what is read at a time, beside another text.
TEST(Engine, EchoSaysHowLikelyThePromptIs) {
  at::NoGradGuard no_grad;
  Served s;
  const std::vector<int64_t> prompt = random_prompt(390, 5);
  const Tensor input = at::tensor(at::IntArrayRef(prompt), at::kLong).unsqueeze(0);
  const Tensor expected = s.model->forward(input).log_softmax(-1)[0];
  for (const bool beside : {false, true}) {
    std::shared_ptr<serve::Answer> other;
    if (beside) {
      other = s.engine.submit({.prompts = {random_prompt(4, 6)}, .max_tokens = 300});
      ASSERT_TRUE(soon([&] { return s.engine.load().running == 1; }));
    }
    for (const int64_t max_tokens : {0, 3}) {
      const Written w = s.alone({.prompts = {prompt},
                                 .max_tokens = max_tokens,
                                 .sampling = {.temperature = 0},
                                 .logprobs = 3,
                                 .echo = true});
      ASSERT_EQ(w.prompt.size(), prompt.size());
      EXPECT_EQ(w.tokens.size(), static_cast<size_t>(max_tokens));
      EXPECT_EQ(w.finish, "length");
      EXPECT_FALSE(w.prompt[0].logprob.has_value());
      std::string bytes;
      for (size_t t = 0; t < prompt.size(); ++t) {
        bytes += w.prompt[t].text;
        EXPECT_EQ(w.prompt[t].id, prompt[t]);
        if (t == 0) continue;
        const Tensor row = expected[static_cast<int64_t>(t) - 1];
        ASSERT_NEAR(*w.prompt[t].logprob, row[prompt[t]].item<float>(), 1e-4) << t;
        ASSERT_EQ(w.prompt[t].top.size(), 3u);
        const Tensor best = std::get<0>(row.topk(3));
        for (int64_t k = 0; k < 3; ++k) {
          EXPECT_NEAR(w.prompt[t].top[static_cast<size_t>(k)].second, best[k].item<float>(), 1e-4);
        }
      }
      EXPECT_TRUE(w.text.starts_with(bytes));
      if (max_tokens > 0) {
        EXPECT_NEAR(*w.tokens[0].logprob, expected[389].max().item<float>(), 1e-4);
        EXPECT_EQ(w.tokens[0].top[0].first, w.tokens[0].id);
      }
    }
  }
}

TEST(Engine, TextsEndAtStopStringsAndAtTheEnd) {
  Served s;
  const Request greedy{.prompts = {random_prompt(6, 3)},
                       .max_tokens = 60,
                       .sampling = {.temperature = 1},
                       .seed = 4};
  const Written whole = s.alone(greedy);
  Request r = greedy;
  r.stops = {"never comes", whole.text.substr(20, 4)};
  const Written stopped = s.alone(r);
  EXPECT_EQ(stopped.finish, "stop");
  EXPECT_EQ(stopped.text, whole.text.substr(0, whole.text.find(r.stops[1])));
  // The stop string's tokens are told.
  std::string told;
  for (const serve::Token& t : stopped.tokens) told += t.text;
  EXPECT_EQ(told, stopped.text + r.stops[1]);
  set_end(*s.model, 3);
  const Written ended = s.alone({.prompts = {{65}}, .max_tokens = 300, .seed = 1, .logprobs = 0});
  ASSERT_EQ(ended.finish, "stop");
  EXPECT_EQ(ended.tokens.back().id, 0);  // told, but no text
  EXPECT_TRUE(ended.tokens.back().logprob.has_value());
  EXPECT_EQ(ended.text.size(), ended.tokens.size() - 1);
}

TEST(Engine, WhatTheModelCannotDoIsRefused) {
  Served s(kAttention, {.max_batch = 4, .max_queue = 6});
  const auto refused = [&](Request r) {
    try {
      s.engine.submit(std::move(r));
    } catch (const Refusal& e) {
      EXPECT_EQ(e.status, 400);
      return std::string(e.what());
    }
    return std::string("taken");
  };
  EXPECT_EQ(refused({}), "there is no prompt, expected at least one.");
  EXPECT_EQ(refused({.prompts = {{}}}), "the prompt has no token, expected at least one.");
  EXPECT_EQ(refused({.prompts = {{1}, {256}}}), "prompt 2 has the token 256, expected 0 to 255.");
  EXPECT_EQ(refused({.prompts = {{-1}}}), "the prompt has the token -1, expected 0 to 255.");
  EXPECT_EQ(
      refused({.prompts = {random_prompt(400, 1)}, .max_tokens = 1}),
      "the prompt has 400 tokens and max_tokens is 1, together more than the model's length of "
      "400.");
  EXPECT_TRUE(
      contains(refused({.prompts = {{1}}, .max_tokens = INT64_MAX}), "more than the model"));
  EXPECT_EQ(refused({.prompts = {random_prompt(400, 1)}}),
            "the prompt has 400 tokens, which leaves no room for a text in the model's length of "
            "400.");
  EXPECT_TRUE(
      contains(refused({.prompts = {{1}}, .max_tokens = 400}), "has 1 token and max_tokens"));
  EXPECT_TRUE(contains(refused({.prompts = {{1}}, .samples = 5}), "n is 5, expected 1 to 4"));
  EXPECT_TRUE(contains(refused({.prompts = {{1}}, .samples = 0}), "n is 0, expected 1 to 4"));
  EXPECT_TRUE(contains(refused({.prompts = {{1}, {1}}, .samples = 4}), "expected at most 6 texts"));
  // What just fits is taken, and without max_tokens a text ends at the length.
  EXPECT_EQ(s.alone({.prompts = {random_prompt(400, 1)}, .max_tokens = 0}).finish, "length");
  EXPECT_EQ(s.alone({.prompts = {random_prompt(390, 1)}, .max_tokens = 10}).tokens.size(), 10u);
  EXPECT_EQ(s.alone({.prompts = {random_prompt(397, 1)}}).tokens.size(), 3u);
}

TEST(Engine, TheQueueIsBounded) {
  Served s(kRecurrence, {.max_batch = 2, .max_queue = 3});
  const Request endless{.prompts = {{1, 2, 3}}, .max_tokens = 100'000'000};
  std::vector<std::shared_ptr<serve::Answer>> running = {s.engine.submit(endless),
                                                         s.engine.submit(endless)};
  ASSERT_TRUE(soon([&] { return s.engine.load().running == 2; }));
  std::vector<std::shared_ptr<serve::Answer>> waiting = {
      s.engine.submit({.prompts = {{1}}, .samples = 2, .max_tokens = 4})};
  try {
    s.engine.submit({.prompts = {{1}, {2}}});
    ADD_FAILURE() << "taken";
  } catch (const Refusal& e) {
    EXPECT_EQ(e.status, 429);
    EXPECT_TRUE(contains(e.what(), "2 texts are waiting and this request has 2, more than the 3"));
  }
  waiting.push_back(s.engine.submit({.prompts = {{1}}, .max_tokens = 4}));
  EXPECT_EQ(s.engine.load().waiting, 3);
  EXPECT_FALSE(waiting[1]->done());
  // Who cancels makes room, running or waiting.
  waiting[0]->cancel();
  ASSERT_TRUE(soon([&] { return s.engine.load().waiting == 1; }));
  running[0]->cancel();
  EXPECT_EQ(collect(*waiting[1])[0].tokens.size(), 4u);
  EXPECT_TRUE(soon([&] { return s.engine.load().running == 1; }));
  running[1]->cancel();
  EXPECT_TRUE(soon([&] { return s.engine.load().running == 0; }));
}

TEST(Engine, ACancelledTextLeavesTheOthersAsTheyAre) {
  Served s(kAttention, {.max_batch = 4});
  const Request r{.prompts = {random_prompt(20, 8)}, .max_tokens = 120, .seed = 5};
  const Written expected = s.alone(r);
  const auto before = s.engine.submit({.prompts = {random_prompt(3, 1)}, .max_tokens = 300});
  const auto kept = s.engine.submit(r);
  const auto after = s.engine.submit({.prompts = {random_prompt(50, 2)}, .max_tokens = 300});
  ASSERT_FALSE(before->wait(5s).empty());
  before->cancel();
  ASSERT_FALSE(after->wait(5s).empty());
  after->cancel();
  EXPECT_EQ(collect(*kept)[0].ids(), expected.ids());
  EXPECT_TRUE(soon([&] { return s.engine.load().running == 0; }));
}

// 50000 tokens are 400 pieces, a text's 100 tokens pass between the first 100 of them.
TEST(Engine, ALongPromptDoesNotStopTheOthers) {
  Served s(kRecurrence);
  const auto writing = s.engine.submit({.prompts = {{1, 2, 3}}, .max_tokens = 100});
  ASSERT_FALSE(writing->wait(5s).empty());
  const auto reading = s.engine.submit({.prompts = {random_prompt(50'000, 1)}, .max_tokens = 1});
  collect(*writing);
  EXPECT_TRUE(reading->wait(0ms).empty());
  // The answer is there a moment before its text has left the batch.
  EXPECT_TRUE(soon([&] { return s.engine.load().running == 1; }));
  reading->cancel();  // in the middle of it
  EXPECT_TRUE(soon([&] { return s.engine.load().running == 0; }));
}

TEST(Engine, AModelThatFailsSaysSoAndGoesOn) {
  Served s;
  const Request r{.prompts = {{1, 2, 3}}, .max_tokens = 5, .seed = 2};
  const std::vector<int64_t> expected = s.alone(r).ids();
  at::NoGradGuard no_grad;
  Tensor weight = s.model->parameters()[0];
  const Tensor kept = weight.clone();
  weight.fill_(std::numeric_limits<float>::quiet_NaN());
  const auto answer = s.engine.submit(r);
  EXPECT_TRUE(contains(message_of<Error>([&] { collect(*answer); }), "the model failed: "));
  EXPECT_TRUE(soon([&] { return s.engine.load().running == 0; }));
  weight.copy_(kept);
  EXPECT_EQ(s.alone(r).ids(), expected);
}

// As where memory runs out in the middle: here the second layer is another model's.
TEST(Engine, AStateThatCannotBeAddedLeavesTheOthersAsTheyWere) {
  const at::NoGradGuard no_grad;
  const auto read = [](const Decoder& model, int64_t length) {
    DecoderState state = model.initial_state();
    model.extend(at::arange(1, 1 + length).unsqueeze(0), state);
    return state;
  };
  const std::string layer = "[[layer]]\nmixer = { type = 'mha', heads = 4 }\n";
  const auto model = byte_decoder(layer + layer);
  const auto other = byte_decoder(layer + "[[layer]]\nmixer = { type = 'retention', heads = 4 }\n");
  const auto add = [&](DecoderState& to, const Decoder& from, int64_t length) {
    std::vector<DecoderState> others;
    others.push_back(read(from, length));
    to.add(others);
  };
  DecoderState state = read(*model, 7), same = read(*model, 7);
  add(state, *model, 3);
  add(same, *model, 3);
  EXPECT_TRUE(contains(message_of([&] { add(state, *other, 12); }), "cannot be joined"));
  const Tensor next = at::full({2, 1}, 5, at::kLong);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(model->extend(next, state).equal(model->extend(next, same)));
  }
  EXPECT_EQ(state.bytes(), same.bytes());
}

TEST(Engine, AnAnswerThatNobodyReadsFails) {
  Served s(kRecurrence);
  const std::vector<std::vector<int64_t>> prompts(16, {1});  // a step writes a token of each
  const auto answer = s.engine.submit({.prompts = prompts, .max_tokens = 1'000'000});
  ASSERT_TRUE(soon([&] { return s.engine.load().written > 0 && s.engine.load().running == 0; }));
  EXPECT_EQ(message_of([&] { answer->wait(0ms); }), "the client reads too slowly.");
  EXPECT_LT(s.engine.load().written, 20'000);
}

TEST(Engine, AnswersThatAreNotDoneFailAtItsEnd) {
  std::shared_ptr<serve::Answer> running, waiting;
  {
    Served s(kRecurrence, {.max_batch = 1});
    running = s.engine.submit({.prompts = {{1}}, .max_tokens = 100'000'000});
    waiting = s.engine.submit({.prompts = {{1}}});
    ASSERT_FALSE(running->wait(5s).empty());
  }
  for (const auto& answer : {running, waiting}) {
    EXPECT_EQ(message_of<Error>([&] { collect(*answer); }), "the server ends.");
  }
}

}  // namespace
}  // namespace headloom::test::engine_test
