// Many texts written by one model at once. Free of torch.
#pragma once

#include <memory>
#include <string>

#include "serve/request.h"
#include "train/codec.h"

namespace headloom {
class Decoder;
}

namespace headloom::serve {

struct EngineOptions {
  int64_t max_batch = 16;   // texts written side by side
  int64_t max_queue = 256;  // texts that wait for their turn
  std::string dtype = "float32";
  // What attention forgets and the type of the rest, as CachePolicy::parse reads them.
  std::string cache = "full", cache_dtype = {};
};

// One thread runs the model. Prompts are read in the order they came, a piece between two steps, so
// that a long one does not stop the texts that are being written; then its texts join them. A step
// gives every text its next token, in one call of the model whatever their lengths, and texts that
// are done leave. What a text becomes depends on its own seed and not on its neighbours, but for
// the rounding of sums.
class Engine {
 public:
  // Throws UsageError for a cache policy that the model cannot follow.
  Engine(std::shared_ptr<Decoder> model, const Codec& codec, const EngineOptions& options);
  // Answers that are not done fail.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Throws Refusal for what the model cannot do (400) and where too many wait (429).
  std::shared_ptr<Answer> submit(Request request);

  struct Load {
    int64_t running = 0, waiting = 0;        // texts
    int64_t state_bytes = 0;                 // what is kept of the running ones
    int64_t prompt_tokens = 0, written = 0;  // since it began: tokens read, and written
  };
  Load load() const;
  int64_t vocabulary() const;
  Limits limits() const;
  // Of prompt and text together; absent: no limit.
  std::optional<int64_t> max_length() const;

 private:
  class Loop;
  const std::unique_ptr<Loop> loop_;
};

}  // namespace headloom::serve
