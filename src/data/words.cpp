#include "data/words.h"

#include <algorithm>

#include "core/error.h"
#include "data/unicode.h"

namespace headloom::data {

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  bool inside = false;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = code_point(text.substr(at));
    const size_t length = std::max<size_t>(c.length, 1);
    if (c.length > 0 && is_space(c.value)) {
      inside = false;
    } else if (inside) {
      words.back() = {words.back().data(), words.back().size() + length};
    } else {
      words.push_back(text.substr(at, length));
      inside = true;
    }
    at += length;
  }
  return words;
}

WordTokens WordEncoder::encode(const std::vector<std::string_view>& words) {
  WordTokens out;
  for (const std::string_view word : words) {
    const Known& k = known(str(out.ends.empty() ? "" : " ", word));
    out.begins.push_back(out.tokens.size() + k.spaces);
    out.tokens.insert(out.tokens.end(), k.tokens.begin(), k.tokens.end());
    out.ends.push_back(out.tokens.size());
  }
  return out;
}

std::pair<size_t, size_t> WordEncoder::tokens_at(const WordTokens& text, size_t index,
                                                 std::string_view word, size_t begin,
                                                 size_t end) const {
  const size_t low = text.begins[index], high = text.ends[index];
  std::vector<size_t> ends;  // of each token, in the word
  size_t size = 0;
  for (size_t i = low; i < high; ++i) {
    for (const char c : tokenizer_.piece(text.tokens[i])) size += c != ' ' ? 1 : 0;
    ends.push_back(size);
  }
  if (size != word.size()) return {low, high - 1};
  const auto first = std::upper_bound(ends.begin(), ends.end(), begin);
  const auto last = std::lower_bound(ends.begin(), ends.end(), end);
  return {low + static_cast<size_t>(first - ends.begin()),
          low + static_cast<size_t>(last - ends.begin())};
}

const WordEncoder::Known& WordEncoder::known(const std::string& text) {
  const auto [place, is_new] = known_.try_emplace(text);
  Known& k = place->second;
  if (!is_new) return k;
  for (const int64_t token : tokens_of(tokenizer_, text)) {
    k.tokens.push_back(static_cast<int32_t>(token));
  }
  const auto blank = [&](int32_t token) {
    const std::string piece = tokenizer_.piece(token);
    return !piece.empty() && piece.find_first_not_of(' ') == std::string::npos;
  };
  while (k.spaces < k.tokens.size() && blank(k.tokens[k.spaces])) ++k.spaces;
  return k;
}

}  // namespace headloom::data
