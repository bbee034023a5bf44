#include "train/codec.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/utf8.h"
#include "data/unicode.h"
#include "train/config.h"

namespace headloom {
namespace {

constexpr const char* kReplacement = "\xef\xbf\xbd";

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

std::vector<NamedToken> Codec::unfound(std::vector<NamedToken> more) const {
  std::vector<NamedToken> out = std::move(more);
  std::vector<int64_t> tokens;
  if (tokenizer_) tokens = tokenizer_->unfound();
  for (const auto& token : {start(), end()}) {
    if (token) tokens.push_back(*token);
  }
  for (const int64_t token : tokens) out.push_back({.name = name(token), .token = token});
  // An empty name would be found everywhere. Of two at one place the longer one is meant, and of
  // two with one name the first.
  std::erase_if(out, [&](const NamedToken& one) {
    return one.name.empty() || one.token < 0 || one.token >= vocabulary_ ||
           encode(one.name, false) == std::vector{one.token};
  });
  std::stable_sort(out.begin(), out.end(), [](const NamedToken& a, const NamedToken& b) {
    return a.name.size() > b.name.size();
  });
  return out;
}

namespace {

// How many bytes of white space a text begins with.
size_t leading_spaces(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const data::CodePoint c = data::code_point(text.substr(at));
    if (!data::is_space(c.value)) break;
    at += c.length;
  }
  return at;
}

// How many bytes a text has before the white space that it ends with.
size_t without_spaces(std::string_view text) {
  size_t end = 0;
  for (size_t at = 0; at < text.size();) {
    const data::CodePoint c = data::code_point(text.substr(at));
    at += std::max(c.length, size_t{1});  // what is no UTF-8 is no space
    if (!data::is_space(c.value)) end = at;
  }
  return end;
}

}  // namespace

std::vector<int64_t> Codec::encode_spelled(const std::string& text,
                                           const std::vector<NamedToken>& named) const {
  std::vector<size_t> next;  // where each stands next in the text
  for (const NamedToken& one : named) next.push_back(text.find(one.name));
  std::vector<int64_t> out;
  for (size_t from = 0; from < text.size();) {
    size_t found = text.size();
    const NamedToken* which = nullptr;
    for (size_t i = 0; i < named.size(); ++i) {
      if (next[i] < from) next[i] = text.find(named[i].name, from);
      if (next[i] < found) {
        found = next[i];
        which = &named[i];
      }
    }
    size_t until = found;
    if (which != nullptr && which->takes_before) {
      until = from + without_spaces(std::string_view(text).substr(from, found - from));
    }
    if (until > from) {
      const std::vector<int64_t> piece = encode(text.substr(from, until - from), false);
      out.insert(out.end(), piece.begin(), piece.end());
    }
    if (which == nullptr) break;
    out.push_back(which->token);
    from = found + which->name.size();
    if (which->takes_after) from += leading_spaces(std::string_view(text).substr(from));
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

}  // namespace headloom
