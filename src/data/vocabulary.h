// Learning a vocabulary from text.
#pragma once

#include "data/corpus.h"

namespace headloom::data {

struct VocabularyOptions {
  int64_t size = 8192;         // tokens, the 256 bytes and the document's end among them
  std::string method = "bpe";  // or "unigram"
};

// The bytes of a SentencePiece model (Kudo & Richardson 2018) that keeps every text as it is:
// nothing is normalised, and what the tokens do not cover is spelled in bytes. Deterministic.
// Throws UsageError where the text cannot give so few or so many tokens, with the limit.
std::string learn_vocabulary(const std::vector<Document>& documents,
                             const VocabularyOptions& options);

}  // namespace headloom::data
