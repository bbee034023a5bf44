// WordPiece (Wu et al. 2016) as BERT uses it: its normalisation, its words, its pieces. Equal to
// the BertNormalizer, BertPreTokenizer and WordPiece of Hugging Face's tokenizers. Free of torch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace headloom::data {

struct BertNormalizer {
  bool clean_text = true;            // no control characters, every white space a space
  bool handle_chinese_chars = true;  // spaces around CJK ideographs
  bool strip_accents = true;         // decomposed, without marks
  bool lowercase = true;

  // `text` must be well-formed UTF-8.
  std::string operator()(std::string_view text) const;
};

// Calls `take` for what is between white space, each punctuation mark by itself.
void each_bert_word(std::string_view text, const std::function<void(std::string_view)>& take);

struct WordPieces {
  std::unordered_map<std::string, int32_t> vocabulary;
  int32_t unknown = 0;        // of a word that the vocabulary cannot spell
  std::string prefix = "##";  // of a piece within a word
  size_t longest = 100;       // characters of a word that is taken apart

  // Appends the tokens of `word`, UTF-8: the longest piece first, from the left.
  void encode(std::string_view word, std::vector<int32_t>& out) const;
};

}  // namespace headloom::data
