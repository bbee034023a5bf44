#include "data/vocabulary.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "core/error.h"
#include "data/sentencepiece.h"

namespace headloom::data {
namespace {

// Bytes of the longest line that SentencePiece is given. Its BPE keeps the place of a symbol in a
// word in 16 bits with a sign, and counts wrongly or crashes beyond.
constexpr size_t kLongestLine = 32767;

// The lines of all documents, as SentencePiece learns from lines. Longer ones come in parts.
class Lines {
 public:
  explicit Lines(const std::vector<Document>& documents) : documents_(documents) {}

  // Null at the end.
  const std::string* next() {
    while (document_ < documents_.size() && at_ >= text().size()) {
      ++document_;
      at_ = 0;
    }
    if (document_ == documents_.size()) return nullptr;
    const size_t line = std::min(text().find('\n', at_), text().size());
    const size_t end = line - at_ <= kLongestLine ? line : cut(at_ + kLongestLine);
    line_ = text().substr(at_, end - at_);
    at_ = end < line ? end : end + 1;
    return &line_;
  }

 private:
  const std::string& text() const { return documents_[document_].text; }
  // Where to end a part of a line that is longer than `end`: before a space, as no token reaches
  // over one, or else before a character.
  size_t cut(size_t end) const {
    const size_t space = text().rfind(' ', end);
    if (space != std::string::npos && space > at_) return space;
    while (end > at_ + 1 && (static_cast<unsigned char>(text()[end]) & 0xc0) == 0x80) --end;
    return end;
  }

  const std::vector<Document>& documents_;
  size_t document_ = 0, at_ = 0;
  std::string line_;
};

// The number that `message` has after `words`.
std::optional<int64_t> number_after(const std::string& message, std::string_view words) {
  const size_t at = message.find(words);
  if (at == std::string::npos) return std::nullopt;
  int64_t value = 0;
  const char* const first = message.data() + at + words.size();
  const auto result = std::from_chars(first, message.data() + message.size(), value);
  return result.ec == std::errc() ? std::optional(value) : std::nullopt;
}

// What SentencePiece says about its own options, said about the options of this command.
[[noreturn]] void refuse(int64_t size, const std::string& message) {
  const std::string too_small = str("required_chars. ", size, " vs ");
  if (const auto least = number_after(message, too_small)) {
    usage_error("--size ", size,
                " is too small for this text: the bytes and its characters alone are ", *least,
                " tokens, expected at least ", *least, ".");
  }
  if (const auto most = number_after(message, "value <= ")) {
    usage_error("--size ", size, " is too large for this text, which gives ", *most,
                " tokens, expected at most ", *most, ".");
  }
  if (message.find("sentences_.empty()") != std::string::npos) {
    fail("there is no text to learn a vocabulary from: all files are empty.");
  }
  fail("SentencePiece learned no vocabulary of ", size, " tokens from this text: ", message);
}

}  // namespace

std::string learn_vocabulary(const std::vector<Document>& documents,
                             const VocabularyOptions& options) {
  Lines lines(documents);
  std::string model;
  const std::string message = sentencepiece().learn(
      {{"vocab_size", std::to_string(options.size)},
       {"model_type", options.method},
       {"byte_fallback", "true"},
       {"character_coverage", "0.9995"},
       {"normalization_rule_name", "identity"},
       {"remove_extra_whitespaces", "false"},
       {"add_dummy_prefix", "false"},
       {"allow_whitespace_only_pieces", "true"},
       {"split_digits", "true"},
       {"max_sentence_length", std::to_string(kLongestLine)},
       {"input_sentence_size", "1000000"},
       {"shuffle_input_sentence", "false"},
       {"num_threads", "1"},
       {"bos_id", "-1"},
       {"unk_id", "0"},
       {"eos_id", "1"},
       {"minloglevel", "2"}},
      [&] { return lines.next(); }, model);
  if (!message.empty()) refuse(options.size, message);
  return model;
}

}  // namespace headloom::data
