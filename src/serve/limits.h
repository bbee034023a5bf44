// What one request, and one connection, may ask for. Everything is compared with these before
// anything of its size is allocated; `headloom serve --help` and docs/serve.md tell them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace headloom::serve {

constexpr size_t kMostHead = size_t{64} << 10;     // bytes of a request's line and headers
constexpr size_t kMostBody = size_t{4} << 20;      // bytes of its body, as sent
constexpr int kMostDepth = 8;                      // lists and objects of JSON in each other
constexpr int64_t kMostParts = 32768;              // its texts, keys, lists and objects
constexpr int64_t kMostTokens = int64_t{1} << 30;  // max_tokens
constexpr int64_t kMostStops = 64, kMostStopBytes = 1024;
constexpr int64_t kMostLogprobs = 20;
// Tokens of prompts that are echoed, in all texts, each counted with its likeliest.
constexpr int64_t kMostEchoed = int64_t{1} << 21;
constexpr int64_t kMostMessages = 4096;
constexpr size_t kMostAnswer = size_t{64} << 20;  // bytes of an answer that is not streamed
constexpr size_t kMostUnread = 16384;             // pieces of a stream that its client has not read
constexpr int kHeadSeconds = 10, kBodySeconds = 60, kWriteSeconds = 10;

// For people, one a line.
std::string limits_text();

// Of one server, beside those above.
struct Limits {
  int64_t samples = 1;  // n
  int64_t texts = 1;    // prompts times n
  int64_t length = 0;   // tokens of a prompt and its text
};

}  // namespace headloom::serve
