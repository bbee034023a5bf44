// A corpus as windows of tokens, with its held-out part: what the tasks on running text share.
#pragma once

#include "data/corpus.h"
#include "data/stream.h"
#include "data/tokenizer.h"

namespace headloom::data {

struct TextOptions {
  CorpusOptions corpus;
  int64_t length = 256;
  double held_out = 0.05;
  int64_t eval_tokens = 131072;
  bool separate_documents = false;

  void fields(Fields& f);
  // Throws UsageError, naming the task, for options that do not fit.
  void check(const std::string& task) const;
};

// Documents are packed end to end, each closed by the end token, and cut into windows of `length`;
// a window may span documents. See stream.h for the split and the order.
class PackedText {
 public:
  // Reads the corpus. Throws Error for files that cannot be used.
  PackedText(const TextOptions& options, uint64_t seed, std::shared_ptr<const Tokenizer> tokenizer);

  // Windows of the training text from number `first` on: inputs, and the tokens one further on as
  // targets.
  Batch train(int64_t first, int64_t count) const;
  int64_t eval_sequences() const;
  // Windows of the held-out text, in an order whose first part, however long, is spread over all of
  // it.
  Batch held_out(int64_t first, int64_t count) const;
  // Of the held-out text. Tokenizers that normalise count the bytes of the normalised text.
  double bytes_per_token() const { return bytes_per_token_; }
  // "3 files in a, b: 1.2M tokens to train on and ..., of which at most N sequences of T tokens are
  // evaluated"
  std::string describe() const;

 private:
  PackedText(const TextOptions& options, uint64_t seed, const std::vector<Document>& documents,
             std::shared_ptr<const Tokenizer> tokenizer);
  Split split(const std::vector<Document>& documents);
  int64_t held_out_windows() const { return (split_.held_out.size() - 1) / options_.length; }

  TextOptions options_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  size_t documents_;
  double bytes_per_token_ = 0.0;  // set by split()
  Split split_;
  WindowOrder order_;
  std::vector<int64_t> eval_order_;  // of the held-out sequences
};

}  // namespace headloom::data
