// Text on its way in and out of a model: tokens, stop strings, UTF-8. Free of torch.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace headloom {
struct RunConfig;
namespace data {
class Task;
class Tokenizer;
}  // namespace data
}  // namespace headloom

namespace headloom {

// A token that stands in a text by its name.
struct NamedToken {
  std::string name;
  int64_t token;
  bool takes_before = false, takes_after = false;  // the white space there belongs to the name
};

// Text as tokens and back: by the tokenizer, or by the task where it has none. Safe to use from
// several threads.
class Codec {
 public:
  // Of a run, whose task is built where it alone knows its tokens.
  explicit Codec(RunConfig& config);

  // With the token that a model expects before a text, where there is one and `start` asks for it.
  // Throws UsageError for text that the vocabulary cannot express.
  std::vector<int64_t> encode(const std::string& text, bool start = true) const;
  // Those of which encode() does not find the names: of the tokens that stand for no text, and of
  // `more`, which files beside the tokenizer have.
  std::vector<NamedToken> unfound(std::vector<NamedToken> more) const;
  // Of a text that spells out where it starts and ends, as chat templates write it: the names of
  // special tokens stand for these, as do those that unfound() gave, and nothing is added.
  std::vector<int64_t> encode_spelled(const std::string& text,
                                      const std::vector<NamedToken>& named) const;
  // The bytes that a token adds in the middle of a text; none for tokens that stand for no text.
  std::string piece(int64_t token) const;
  // The same for each token of a text, from its start on.
  std::vector<std::string> pieces(const std::vector<int64_t>& tokens) const;
  // A token's piece, or its name where it stands for no text.
  std::string name(int64_t token) const;
  // The token that ends a text.
  std::optional<int64_t> end() const;
  // The token that encode() puts before one.
  std::optional<int64_t> start() const;

 private:
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  std::shared_ptr<data::Task> task_;  // where there is no tokenizer
  const int64_t vocabulary_;          // of the model; a tokenizer may have more
};

// A text that is being written: passed on as it comes, up to its end.
class TextStream {
 public:
  // `stops` are not empty; the first to appear ends the text before it.
  explicit TextStream(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // What may be shown now: everything but what may yet turn out to be a stop string.
  std::string add(const std::string& piece);
  // What was held back, once nothing follows.
  std::string rest();
  void end() { ended_ = true; }
  bool ended() const { return ended_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;  // not shown yet
  bool ended_ = false;
};

// Bytes as they come, as valid UTF-8: a character waits until it is whole, and what is no UTF-8
// becomes U+FFFD, one for each maximal part of a sequence (as in Python's errors="replace").
class Utf8Stream {
 public:
  std::string add(std::string_view bytes);
  // What waits, once nothing follows.
  std::string rest();
  // The character, counted from 0, that the first of these bytes would belong to if they came next.
  int64_t place_of(std::string_view bytes) const;

 private:
  std::string held_;
  int64_t characters_ = 0;  // passed on so far
};

}  // namespace headloom
