// Text as tokens and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace headloom::data {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int64_t vocabulary() const = 0;
  // The token that ends every document; no text contains it.
  virtual int64_t end_token() const = 0;
  // [N], in the smallest integer type that holds the vocabulary.
  virtual at::Tensor encode(std::string_view text) const = 0;
  // The end token is written as nothing.
  virtual std::string decode(const std::vector<int64_t>& tokens) const = 0;
};

// A token is a byte. Byte 0, which text does not contain, ends a document: 256 tokens in all.
std::shared_ptr<const Tokenizer> byte_tokenizer();

}  // namespace headloom::data
