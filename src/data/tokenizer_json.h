// Byte-level BPE as Hugging Face's tokenizer.json describes it: GPT-2, GPT-NeoX, LLaMA 3 and what
// is made like them; and BERT's WordPiece. Free of torch.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/bpe.h"
#include "data/unicode.h"
#include "data/wordpiece.h"

namespace headloom::data {

class JsonTokenizer {
 public:
  // Of a file's content. Throws Error naming the file and what in it is malformed or of a kind that
  // is not read.
  JsonTokenizer(const std::string& text, const std::string& path);

  // Special tokens that the text spells out are themselves; none is added around it. Bytes that are
  // no UTF-8 are kept, each sequence of them as a word of its own.
  std::vector<int32_t> encode(std::string_view text) const;
  // The bytes of a token in the middle of a text; those of special tokens are their names.
  const std::string& piece(int64_t token) const { return pieces_[static_cast<size_t>(token)]; }
  bool is_special(int64_t token) const { return special_[static_cast<size_t>(token)]; }

  // One more than the largest token.
  int64_t vocabulary() const { return static_cast<int64_t>(pieces_.size()); }
  // By its name (<|endoftext|>, </s>, ...), as the file does not say which it is.
  std::optional<int64_t> end_token() const { return end_; }
  // What the file's template puts before a text.
  std::optional<int64_t> start_token() const { return start_; }
  // What stands for a hidden token, by its name ([MASK] or <mask>).
  std::optional<int64_t> mask_token() const { return mask_; }
  bool is_word_piece() const { return words_.has_value(); }

  struct Reader;  // of the file

 private:
  // A token that is found in the text before anything else.
  struct Added {
    std::string content;
    int32_t id = 0;
    bool single_word = false;             // only where no letter is next to it
    bool lstrip = false, rstrip = false;  // swallows spaces beside it
  };
  // Added tokens by their first byte, longer ones first.
  using AddedTable = std::array<std::vector<Added>, 256>;

  enum class Behavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };
  struct Step {  // cuts words
    Regex pattern;
    Behavior behavior = Behavior::isolated;
    bool invert = false;  // what does not match is taken for the matches
  };

  struct Hash {  // finds words without making strings of them
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  // Words whose tokens are known already.
  using Words = std::unordered_map<std::string, std::vector<int32_t>, Hash, std::equal_to<>>;
  template <typename Id, typename Text>
  static void split_added(const AddedTable& table, std::string_view text, const Id& id,
                          const Text& rest);
  std::string normalized(std::string_view text) const;
  template <typename Take>
  static void cut(const Step& step, std::string_view word, const Take& take);
  void encode_valid(std::string_view text, Words& known, std::vector<int32_t>& out) const;
  // Cuts by the steps from number `step` on.
  void encode_normal(std::string_view text, size_t step, Words& known,
                     std::vector<int32_t>& out) const;
  void encode_word(std::string_view word, Words& known, std::vector<int32_t>& out) const;
  // The words that the last call knew are those that the next begins with.
  Words take_known() const;
  void keep_known(Words known) const;

  AddedTable raw_, normal_;  // looked for before and after normalisation
  std::vector<NormalForm> forms_;
  std::vector<Step> steps_;
  // The last step, ByteLevel: a space before each word, a cut, then bytes become characters.
  bool prefix_space_ = false;
  std::optional<Step> byte_step_;
  BytePairs pairs_;
  std::optional<WordPieces> words_;  // then all of the above but the added tokens is unused
  std::optional<BertNormalizer> bert_;
  std::vector<std::string> pieces_;
  std::vector<bool> special_;
  std::optional<int64_t> end_, start_, mask_;
  mutable std::mutex mutex_;
  mutable Words known_;
};

// A tokenizer.json of byte_tokenizer(): token b is byte b, and 0 is special, as it ends a document.
// With `mask` token 256 is [MASK].
std::string byte_tokenizer_json(bool mask);

}  // namespace headloom::data
