// What the engine is asked and what it answers. Free of torch.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "model/sampling_options.h"
#include "serve/limits.h"

namespace headloom::serve {

struct Request {
  std::vector<std::vector<int64_t>> prompts = {};
  int64_t samples = 1;  // texts from each prompt
  // Of each text; absent: default_tokens, or what the length leaves.
  std::optional<int64_t> max_tokens = {};
  const char* max_tokens_key = "max_tokens";  // the key that has set it, for messages
  int64_t default_tokens = 16;
  SamplingOptions sampling = {.temperature = 1};
  // Sample i of a prompt draws with seed + i. Where the seed was drawn, so that nobody knows it, text
  // i of all prompts does: equal prompts go on differently.
  uint64_t seed = 0;
  bool drawn_seed = false;
  std::vector<std::string> stops = {};
  std::vector<int64_t> ends = {};  // tokens that end a text beside the tokenizer's
  // How likely each token was, and of how many likeliest beside it to say so. What the model gives:
  // before temperature and filters.
  std::optional<int64_t> logprobs = {};
  bool echo = false;  // the prompt's tokens as well
};

// A request that is not taken, or that failed, as HTTP says it.
class Refusal : public UsageError {
 public:
  Refusal(int http_status, std::string error_code, const std::string& message,
          std::optional<std::string> about = std::nullopt)
      : UsageError(message),
        status(http_status),
        code(std::move(error_code)),
        param(std::move(about)) {}
  const int status;
  const std::string code;
  // The key that it is about. Nothing: the one in quotes that the message begins with, if it does.
  const std::optional<std::string> param;
};

struct Token {
  int64_t id = 0;
  std::string text = {};                            // the bytes it adds
  std::optional<float> logprob = {};                // natural; absent for the first of a prompt
  std::vector<std::pair<int64_t, float>> top = {};  // tokens and theirs, likeliest first
};

// News of one text.
struct Event {
  int64_t choice = 0;     // prompt * samples + sample
  bool prompt = false;    // its prompt, echoed
  std::string text = {};  // bytes; may lag behind the tokens while they may become a stop string
  // Every token the model wrote is here: those of a stop string and the end too.
  std::vector<Token> tokens = {};
  std::string finish = {};  // of a text's last: "stop" (at its end or a stop string) or "length"
};

// Between the engine, which writes, and one reader.
class Answer {
 public:
  // `texts`: how many it has.
  explicit Answer(int64_t texts) : open_(texts) {}

  // The reader's side. What came since the last call, after waiting for it no longer than
  // `patience`. Throws Refusal where the engine failed.
  std::vector<Event> wait(std::chrono::milliseconds patience);
  // Whether every text has ended and wait() has given all.
  bool done() const;
  // The texts are not wanted any more: they leave before the next step.
  void cancel();

  // The engine's side.
  // An answer that nobody reads, kMostUnread events and more, fails.
  void add(Event event);
  // `status` as HTTP says it. Does not throw: it is what is left to do where memory has run out.
  void fail(int status, const char* message) noexcept;
  bool cancelled() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable news_;
  std::vector<Event> events_;
  int64_t open_;
  bool cancelled_ = false;
  int status_ = 0;  // other than 0: it has failed
  std::string error_;
};

}  // namespace headloom::serve
