// Text as tokens and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/hash.h"

namespace headloom::data {

class Tokenizer {
 public:
  // `file`: the content of the file that describes the tokenizer; "" for bytes.
  explicit Tokenizer(std::string_view file) { checksum_.add(file); }
  virtual ~Tokenizer() = default;
  // Of the file: tokenizers with the same give the same tokens.
  uint64_t checksum() const { return checksum_.value(); }
  virtual int64_t vocabulary() const = 0;
  // The token that ends every document. Only a text that spells out its name contains it.
  virtual int64_t end_token() const = 0;
  // The token that a model expects before a text, where there is one. Where there is, an encoder's
  // sequence also ends in end_token().
  virtual std::optional<int64_t> start_token() const { return std::nullopt; }
  // The token that hides another, where there is one.
  virtual std::optional<int64_t> mask_token() const { return std::nullopt; }
  // Tokens that stand for no text and whose names encode() takes for text.
  virtual std::vector<int64_t> unfound() const { return {}; }
  // [N], in the smallest integer type that holds the vocabulary.
  virtual at::Tensor encode(std::string_view text) const = 0;
  // What a token adds in the middle of a text: bytes, perhaps a part of a character. Nothing for
  // tokens that stand for no text, such as the end, and for those beyond the vocabulary.
  virtual std::string piece(int64_t token) const = 0;
  // What a token that stands for no text is called, such as "</s>".
  virtual std::string name(int64_t token) const = 0;
  // The text of tokens from its start on.
  virtual std::string decode(const std::vector<int64_t>& tokens) const {
    std::string text;
    for (const int64_t token : tokens) text += piece(token);
    return text;
  }

 private:
  Fnv1a checksum_;
};

// The tokens of `text`, for prompts and samples.
std::vector<int64_t> tokens_of(const Tokenizer& tokenizer, std::string_view text);

// A token is a byte. Byte 0, which text does not contain, ends a document: 256 tokens in all.
std::shared_ptr<const Tokenizer> byte_tokenizer();

// "bytes", or a file: a SentencePiece model (*.model), or a tokenizer.json of Hugging Face with
// byte-level BPE or BERT's WordPiece (*.json). Where such a file names no end token, one more is
// added. Throws UsageError for other names and Error naming the file that cannot be used.
std::shared_ptr<const Tokenizer> make_tokenizer(const std::string& name);

}  // namespace headloom::data
