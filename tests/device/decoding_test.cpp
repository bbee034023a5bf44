// Decoding on a device that is not the CPU: states, policies of the cache, joined sequences and
// texts are those of the CPU. A step waits for the device once, for the scores of the next token.
#include "analysis/analysis.h"
#include "model/generation.h"
#include "serve/engine.h"
#include "support.h"
#include "testing/joined.h"
#include "train/config.h"

namespace headloom::test::device_decoding_test {
namespace {

constexpr const char* kSizes = "width = 32\ndepth = 2\nvocabulary = 30\nmax_length = 40\n";

// What decodes from a state.
std::vector<std::string> models() {
  std::vector<std::string> out;
  for (const auto& entry : token_mixers()) {
    if (!entry.traits.causal || !entry.traits.stateful) continue;
    out.push_back(kSizes + std::string("[[layer]]\nmixer = { type = '") + entry.name + "'" +
                  heads_of(entry.name, 4) + " }\n");
  }
  const std::string mha = "[[layer]]\nmixer = { type = 'mha', heads = 4 }\n";
  for (const char* position : {"learned", "sinusoidal", "alibi"}) {
    out.push_back(str(kSizes, "position = { type = '", position, "' }\n", mha));
  }
  out.push_back(str(kSizes, "position = { type = 'none' }\n[[layer]]\nmixer = { type = 'rwkv' }\n",
                    "channel = { type = 'rwkv_channel' }\n"));
  out.push_back(str(kSizes, "[[layer]]\nmixer = { type = 'dcmha', heads = 4, window = 5 }\n"));
  out.push_back(str(kSizes, mha, "block = { type = 'sequential', short_conv = 3 }\n"));
  return out;
}

TEST(DeviceDecoding, JoinedSequencesAreAsAlone) {
  at::NoGradGuard no_grad;
  for (const std::string& toml : models()) {
    SCOPED_TRACE(toml);
    const auto both = writers_of(toml);
    std::vector<Tensor> inputs, wholes;
    for (int i = 0; i < 4; ++i) {
      inputs.push_back(at::randint(30, {1, 25}, kLong));
      wholes.push_back(both.here->hidden({.tokens = inputs.back()}));
    }
    joined_as_alone<DecoderState>(
        inputs, wholes,
        [&](const Tensor& tokens, DecoderState& state) {
          Tensor y;
          EXPECT_EQ(waits([&] { y = both.away->extend(tokens, state); }), 0);
          EXPECT_EQ(y.device(), kDevice);
          return y.cpu();
        },
        [](DecoderState& state, const std::vector<DecoderState>& others) {
          EXPECT_EQ(waits([&] { state.add(others); }), 0);
        },
        both.away->initial_state(), 1e-4, 1);
  }
}

TEST(DeviceDecoding, PoliciesOfTheCacheAreTheSame) {
  at::NoGradGuard no_grad;
  for (const std::string options :
       {"type = 'mha'", "type = 'dcmha'", "type = 'mha', kv_heads = 2, window = 9"}) {
    for (const char* position : {"rope", "alibi"}) {
      const std::string toml = str(kSizes, "position = { type = '", position,
                                   "' }\n[[layer]]\nmixer = { ", options, ", heads = 4 }\n");
      const auto both = writers_of(toml);
      for (const char* policy : {"full", "window:6", "sinks:7", "tova:6"}) {
        for (const char* dtype : {"", "int8"}) {
          SCOPED_TRACE(str(toml, policy, dtype));
          DecoderState here = both.here->initial_state(CachePolicy::parse(policy, dtype));
          DecoderState away = both.away->initial_state(CachePolicy::parse(policy, dtype));
          const Tensor tokens = at::randint(30, {3, 24}, kLong);
          int64_t at = 0;
          for (const int64_t n : {5, 1, 1, 4, 1, 1, 1, 6, 1, 1}) {
            const Tensor piece = tokens.narrow(1, at, n);
            const Tensor expected = both.here->extend(piece, here);
            Tensor y;
            EXPECT_EQ(waits([&] { y = both.away->extend(piece, away); }), 0);
            EXPECT_TRUE(close(y.cpu(), expected, dtype[0] != '\0' ? 2e-2 : 1e-4)) << at;
            at += n;
          }
          EXPECT_EQ(here.bytes(), away.bytes());
          // Some leave, and their memory with them.
          here = here.select(at::tensor({2, 0}, kLong));
          away = away.select(at::tensor({2, 0}, kLong));
          here.keep({1});
          away.keep({1});
          const Tensor next = at::randint(30, {1, 2}, kLong);
          EXPECT_TRUE(close(both.away->extend(next, away).cpu(), both.here->extend(next, here),
                            dtype[0] != '\0' ? 2e-2 : 1e-4));
        }
      }
    }
  }
}

// The memory of a cache that grows, moves, closes up and gives memory back.
TEST(DeviceDecoding, CachesMoveAsOnTheCpu) {
  at::manual_seed(11);
  CacheTensor here, away;
  for (int round = 0; round < 60; ++round) {
    const Tensor t = at::randn({3, 1 + round % 5 * 7, 2, 4});
    EXPECT_TRUE(at::equal(away.append(there(t)).cpu(), here.append(t))) << round;
    const int64_t all = here.size();
    if (round % 3 == 1) {
      const Tensor which = std::get<0>(at::rand({round % 2 == 0 ? 3 : 1, all})
                                           .argsort(int64_t{1})
                                           .narrow(1, 0, all - 3)
                                           .sort(1));
      const Tensor chosen = which.size(0) == 1 ? which[0] : which;
      here.keep(chosen);
      away.keep(there(chosen));
    } else if (round % 7 == 3) {
      here.keep_last(9);
      away.keep_last(9);
    }
    EXPECT_EQ(here.bytes(), away.bytes());
  }
}

TEST(DeviceDecoding, TextsAreTheSame) {
  at::NoGradGuard no_grad;
  const std::string mha = "[[layer]]\nmixer = { type = 'mha', heads = 4 }\n";
  for (const std::string& toml :
       {kSizes + mha, str(kSizes, "[[layer]]\nmixer = { type = 'gla', heads = 4 }\n"),
        str(kSizes, "kind = 'encoder_decoder'\nmax_source_length = 10\n", mha)}) {
    SCOPED_TRACE(toml);
    const auto both = writers_of(toml);
    GenerationOptions options{
        .sampling = {.temperature = 1.1, .top_k = 20, .top_p = 0.95, .repetition_penalty = 1.2},
        .seed = 5,
        .samples = 2,
        .tokens = 60};
    if (both.here->config().kind == "encoder_decoder") {
      options.sources = {{1, 2, 3}, {4, 5, 6, 7, 8}};
      options.tokens = 20;
    }
    const std::vector<std::vector<int64_t>> prompts = {{1, 2, 3}, {4, 5}};
    Generation here(*both.here, prompts, options), away(*both.away, prompts, options);
    for (int64_t i = 0; i < options.tokens; ++i) {
      Tensor token;
      const int64_t waited = waits([&] { token = away.next(); });
      EXPECT_LE(waited, 3) << i;  // texts that outgrow the model are read anew, by their length
      if (kGuarded && i < 20) {
        EXPECT_EQ(waited, 1) << i;
      }
      ASSERT_TRUE(at::equal(token, here.next())) << i;
    }
  }
}

TEST(DeviceDecoding, AServerWritesTheSame) {
  RunConfig config =
      read_run_config(parse_toml("[task]\ntype = 'text'\npaths = ['none.txt']\n", "run.toml"));
  const Codec codec(config);
  const auto both = writers_of(
      "width = 32\ndepth = 2\nvocabulary = 256\nmax_length = 60\n[[layer]]\n"
      "mixer = { type = 'dcmha', heads = 4 }\n");
  std::vector<std::vector<int64_t>> written[2];
  for (const auto& model : {both.here, both.away}) {
    serve::Engine engine(std::dynamic_pointer_cast<Decoder>(model), codec, {.max_batch = 3});
    std::vector<std::shared_ptr<serve::Answer>> answers;
    for (uint64_t i = 0; i < 5; ++i) {
      serve::Request request{.prompts = {{1 + static_cast<int64_t>(i), 7, 9}},
                             .max_tokens = 6 + static_cast<int64_t>(i),
                             .seed = i};
      request.logprobs = 2;
      request.echo = i == 1;
      if (i == 2) request.sampling.temperature = 0;
      answers.push_back(engine.submit(request));
    }
    for (const auto& answer : answers) {
      std::vector<int64_t> ids;
      while (!answer->done()) {
        for (const serve::Event& e : answer->wait(std::chrono::milliseconds(10))) {
          for (const serve::Token& t : e.tokens) ids.push_back(t.id);
        }
      }
      EXPECT_FALSE(ids.empty());
      written[model == both.away].push_back(ids);
    }
  }
  EXPECT_EQ(written[0], written[1]);
}

TEST(DeviceDecoding, AnalysesAreTheSame) {
  using analysis::Findings;
  for (const char* layer :
       {"mixer = { type = 'dcmha', heads = 4 }\nchannel = { type = 'moe', routed = 4, active = 2, "
        "hidden = 16 }\n",
        "mixer = { type = 'retention', heads = 4 }\nchannel = { type = 'mlp' }\n"}) {
    const auto both = writers_of(str(kSizes, "[[layer]]\n", layer));
    const Tensor tokens = at::randint(30, {2, 12}, kLong);
    int64_t compared = 0;
    for (const analysis::Entry& entry : analysis::analyses()) {
      if (!entry.model) continue;
      SCOPED_TRACE(entry.name);
      const auto found = [&](Model& model) -> std::optional<Findings> {
        const analysis::Subject subject{
            .model = &model, .input = {.tokens = tokens}, .targets = tokens.roll(-1, 1)};
        try {
          return analysis::analyze(entry, subject);
        } catch (const UsageError&) {
          return std::nullopt;
        }
      };
      const auto here = found(*both.here), away = found(*both.away);
      ASSERT_EQ(here.has_value(), away.has_value());
      if (!here) continue;
      ++compared;
      ASSERT_EQ(here->tensors.size(), away->tensors.size());
      for (size_t i = 0; i < here->tensors.size(); ++i) {
        const auto& [name, value] = away->tensors[i];
        ASSERT_TRUE(value.is_cpu()) << name;
        if (!value.is_floating_point() || !value.isfinite().all().item<bool>()) continue;
        EXPECT_TRUE(close(value, here->tensors[i].second, 1e-3)) << name;
      }
    }
    EXPECT_GE(compared, 4);
  }
}

}  // namespace
}  // namespace headloom::test::device_decoding_test
