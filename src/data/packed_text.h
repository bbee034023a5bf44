// A corpus as windows of tokens, with its held-out part: what the tasks on running text share.
#pragma once

#include "data/corpus.h"
#include "data/encoded.h"
#include "data/stream.h"
#include "data/tokenizer.h"

namespace headloom::data {

struct TextOptions {
  CorpusOptions corpus;
  int64_t length = 256;
  double held_out = 0.05;
  int64_t eval_tokens = 131072;
  bool separate_documents = false;
  // No key: the held-out part is that of sequences of this length; 0: of `length`.
  int64_t split_length = 0;

  void fields(Fields& f);
  std::vector<DataPath> data_paths();
  void hold_out_all();
  // Throws UsageError, naming the task, for options that do not fit.
  void check(const std::string& task) const;
};

// Documents are packed end to end, each closed by the end token, and cut into windows of `length`;
// a window may span documents. See stream.h for the split and the order.
class PackedText {
 public:
  // Reads the corpus. Throws Error for files that cannot be used, and UsageError where the held-out
  // part has no sequence of options.length.
  PackedText(const TextOptions& options, uint64_t seed, const Tokenizer& tokenizer);

  // Windows of the training text from number `first` on: inputs, and the tokens one further on as
  // targets.
  Batch train(int64_t first, int64_t count) const;
  int64_t eval_sequences() const;
  // Windows of the held-out text, in an order whose first part, however long, is spread over all of
  // it. Of a text that is held out as a whole the last window begins early enough to be full, and
  // has no targets where the one before has them: every token but the first is predicted once.
  Batch held_out(int64_t first, int64_t count) const;
  // Of all the text.
  int64_t tokens() const { return split_.train.size() + split_.held_out.size(); }
  // Of the held-out text. Where the tokenizer changes the text, so that its tokens have not as many
  // bytes as it, the bytes of the tokens times the ratio of both in all the text.
  double bytes_per_token() const { return bytes_per_token_; }
  // "3 files in a, b: 1.2M tokens to train on and ..., of which at most N sequences of T tokens are
  // evaluated"
  std::string describe() const;

 private:
  PackedText(const TextOptions& options, uint64_t seed, Corpus corpus, const Tokenizer& tokenizer);
  int64_t held_out_windows() const;

  TextOptions options_;
  int64_t documents_;
  LeftOut left_out_;
  double bytes_;  // of all the text
  std::shared_ptr<const EncodedDocuments> encoded_;
  Split split_;
  double bytes_per_token_;
  WindowOrder order_;
  std::vector<int64_t> eval_order_;  // of the held-out sequences
};

}  // namespace headloom::data
