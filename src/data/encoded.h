// Documents as tokens, which are made once and kept for later processes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "data/corpus.h"
#include "data/tokenizer.h"

namespace headloom::data {

struct EncodedDocuments {
  // [N + 1]: the documents one after the other, the end token after each, and one end token more.
  at::Tensor tokens;
  at::Tensor ends;  // [D] int64: where each document's end token ends, ascending; the last is N
  // Of all tokens that stand for text.
  double piece_bytes = 0.0;

  int64_t begin(size_t document) const;
  int64_t end(size_t document) const { return ends.const_data_ptr<int64_t>()[document]; }
};

// Adds to `counts` [vocabulary] how often each token is among [begin, end).
void count_tokens(const at::Tensor& tokens, int64_t begin, int64_t end,
                  std::vector<int64_t>& counts);
// Bytes of the tokens that stand for text: all but the end token.
double piece_bytes(const std::vector<int64_t>& counts, const Tokenizer& tokenizer);

// The texts of `documents` are given back to the system on the way, so that text and tokens are not
// held together. Tokens that somebody in this process holds are shared, whatever has become of the
// files since. Those that a file describes and that took long to make are kept in tokens-* in
// cache_folder() and mapped by other processes. What is there is checked, and made anew where it is
// damaged or another version's; what cannot be written there is made by every process.
std::shared_ptr<const EncodedDocuments> encode_documents(std::vector<Document>& documents,
                                                         const Tokenizer& tokenizer);

// Texts that have fewer bytes are not kept on disk.
constexpr int64_t kLeastKeptText = int64_t{4} << 20;
// Bytes of tokens-* on disk, of which the least recently used give way.
constexpr int64_t kMostKeptTokens = int64_t{8} << 30;

// Removes files tokens-* of the folder, the least recently used first, until `needed` more bytes
// come to at most `most`. What cannot be removed stays.
void make_room_for_tokens(const std::string& folder, int64_t needed, int64_t most);

}  // namespace headloom::data
