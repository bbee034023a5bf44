// Texts whose words keep their places among the tokens: what tags and answers are given by.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/tokenizer.h"

namespace headloom::data {

// What is between white space; views into `text`. Bytes that are no UTF-8 are letters.
std::vector<std::string_view> words_of(std::string_view text);

struct WordTokens {
  std::vector<int32_t> tokens;  // of the words, a space between them
  // Where each word's tokens begin, without one that is only the space before it; and their end.
  std::vector<size_t> begins;
  std::vector<size_t> ends;  // as many as words
};

// Encodes word by word, which gives the tokens of the whole text where no token holds parts of two
// words. Words that come again are looked up. Not for several threads at once.
class WordEncoder {
 public:
  explicit WordEncoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  WordTokens encode(const std::vector<std::string_view>& words);
  // The tokens [first, last] of word `index` that hold its bytes [begin, end): all of the word's
  // where the tokenizer has changed its text.
  std::pair<size_t, size_t> tokens_at(const WordTokens& text, size_t index, std::string_view word,
                                      size_t begin, size_t end) const;

 private:
  struct Known {
    std::vector<int32_t> tokens;
    size_t spaces = 0;  // tokens before the word's own
  };
  const Known& known(const std::string& text);

  const Tokenizer& tokenizer_;
  std::unordered_map<std::string, Known> known_;
};

}  // namespace headloom::data
