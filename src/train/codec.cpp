#include "train/codec.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "train/config.h"

namespace headloom {
namespace {

constexpr const char* kReplacement = "\xef\xbf\xbd";

// Of the sequence that begins bytes (not empty): how long it is, whether it is a character, and
// whether it may become one when more bytes come.
struct FirstCharacter {
  size_t size;
  bool valid, open;
};

FirstCharacter first_character(std::string_view bytes) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return {1, true, false};
  if (lead < 0xc2 || lead > 0xf4) return {1, false, false};
  const size_t size = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  for (size_t i = 1; i < size; ++i) {
    if (i == bytes.size()) return {i, false, true};
    // The second byte's limits exclude longer forms than needed, surrogates and what is above
    // U+10FFFF (Unicode 15, table 3-7).
    const unsigned char low = i > 1 ? 0x80 : lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char high = i > 1 ? 0xbf : lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (at(i) < low || at(i) > high) return {i, false, false};
  }
  return {size, true, false};
}

}  // namespace

Codec::Codec(RunConfig& config)
    : tokenizer_(config.task->tokenizer()),
      vocabulary_(config.model.vocabulary.value_or(std::numeric_limits<int64_t>::max())) {
  if (!tokenizer_) task_ = config.build_task();
}

std::vector<int64_t> Codec::encode(const std::string& text, bool start) const {
  if (!tokenizer_) return task_->encode(text);
  const at::Tensor tokens = tokenizer_->encode(text).to(at::kLong).contiguous();
  std::vector<int64_t> out;
  if (start && this->start()) out.push_back(*this->start());
  const int64_t* first = tokens.const_data_ptr<int64_t>();
  out.insert(out.end(), first, first + tokens.numel());
  for (const int64_t token : out) {
    if (token < vocabulary_) continue;
    usage_error("the text has '", name(token), "', token ", token,
                " of the tokenizer, but the model has only the tokens 0 to ", vocabulary_ - 1, ".");
  }
  return out;
}

std::vector<int64_t> Codec::encode_spelled(const std::string& text) const {
  // A tokenizer.json finds all its special tokens itself, a SentencePiece model none.
  struct Special {
    std::string name;
    int64_t token;
    size_t next;  // where it stands next in the text
  };
  std::vector<Special> specials;
  for (const auto& token : {start(), end()}) {
    if (!token || name(*token).empty()) continue;
    const std::vector<int64_t> self = encode(name(*token), false);
    if (self != std::vector{*token}) {
      specials.push_back({name(*token), *token, text.find(name(*token))});
    }
  }
  std::vector<int64_t> out;
  for (size_t from = 0; from < text.size();) {
    size_t found = text.size();
    const Special* which = nullptr;
    for (Special& one : specials) {
      if (one.next < from) one.next = text.find(one.name, from);
      if (one.next < found) {
        found = one.next;
        which = &one;
      }
    }
    if (found > from) {
      const std::vector<int64_t> piece = encode(text.substr(from, found - from), false);
      out.insert(out.end(), piece.begin(), piece.end());
    }
    if (which == nullptr) break;
    out.push_back(which->token);
    from = found + which->name.size();
  }
  return out;
}

std::string Codec::piece(int64_t token) const {
  if (tokenizer_) return tokenizer_->piece(token);
  return token >= 0 && token < task_->vocabulary() ? task_->decode({token}) : "";
}

std::vector<std::string> Codec::pieces(const std::vector<int64_t>& tokens) const {
  std::vector<std::string> out;
  std::string whole;
  for (const int64_t token : tokens) whole += out.emplace_back(piece(token));
  // Tokenizers that put a space before every text take it away again.
  if (tokenizer_ && whole.starts_with(' ') && tokenizer_->decode(tokens) == whole.substr(1)) {
    std::find_if(out.begin(), out.end(), [](const std::string& p) {
      return !p.empty();
    })->erase(0, 1);
  }
  return out;
}

std::string Codec::name(int64_t token) const {
  // masked_text adds one to a tokenizer that has none.
  if (tokenizer_ && token == tokenizer_->vocabulary()) return "[MASK]";
  const std::string text = piece(token);
  return text.empty() && tokenizer_ ? tokenizer_->name(token) : text;
}

std::optional<int64_t> Codec::end() const {
  return tokenizer_ ? std::optional<int64_t>(tokenizer_->end_token()) : task_->end_token();
}

std::optional<int64_t> Codec::start() const {
  return tokenizer_ ? tokenizer_->start_token() : std::nullopt;
}

std::string TextStream::add(const std::string& piece) {
  held_ += piece;
  size_t safe = held_.size();
  for (const std::string& stop : stops_) safe = std::min(safe, held_.find(stop));
  if (safe < held_.size()) {
    ended_ = true;
    held_.resize(safe);
  }
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > 0 && !ended_; --n) {
      if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) {
        safe = std::min(safe, held_.size() - n);
        break;
      }
    }
  }
  const std::string out = held_.substr(0, safe);
  held_.erase(0, safe);
  return out;
}

std::string TextStream::rest() { return std::exchange(held_, {}); }

std::string Utf8Stream::add(std::string_view bytes) {
  held_ += bytes;
  std::string out;
  size_t at = 0;
  while (at < held_.size()) {
    const FirstCharacter start = first_character(std::string_view(held_).substr(at));
    if (start.open) break;
    out += start.valid ? held_.substr(at, start.size) : kReplacement;
    ++characters_;
    at += start.size;
  }
  held_.erase(0, at);
  return out;
}

std::string Utf8Stream::rest() {
  if (held_.empty()) return "";
  held_.clear();
  ++characters_;
  return kReplacement;
}

int64_t Utf8Stream::place_of(std::string_view bytes) const {
  if (held_.empty() || bytes.empty()) return characters_;
  const std::string begun = held_ + bytes.front();
  const FirstCharacter start = first_character(begun);
  return characters_ + (start.open || start.valid ? 0 : 1);
}

bool is_utf8(std::string_view bytes) {
  while (!bytes.empty()) {
    const FirstCharacter start = first_character(bytes);
    if (!start.valid) return false;
    bytes.remove_prefix(start.size);
  }
  return true;
}

}  // namespace headloom
