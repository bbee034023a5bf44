// text: predict every next byte of files. Documents are packed end to end, each closed by byte 0,
// and cut into windows of `length`; a window may span documents. See data/stream.h for the split
// and the order.
#include <ATen/ATen.h>

#include <cmath>

#include "core/error.h"
#include "core/text.h"
#include "data/corpus.h"
#include "data/stream.h"
#include "data/tasks/tasks.h"
#include "data/tokenizer.h"

namespace headloom::data {
namespace {

constexpr uint64_t kSplitSalt = 1;  // other than that of max_bytes

struct Options {
  CorpusOptions corpus;
  int64_t length = 256;
  double held_out = 0.05;
  int64_t eval_tokens = 131072;
  bool separate_documents = false;
};

class Text final : public Task {
 public:
  Text(const Options& options, uint64_t seed)
      : Text(options, seed, read_corpus(options.corpus), byte_tokenizer()) {}

  int64_t vocabulary() const override { return tokenizer_->vocabulary(); }
  int64_t length() const override { return options_.length; }
  Batch train_batch(int64_t index, int64_t batch_size) const override {
    return windows(split_.train, order_.starts(index * batch_size, batch_size));
  }
  int64_t eval_sequences() const override {
    return std::min(held_out_windows(),
                    std::max<int64_t>(1, options_.eval_tokens / options_.length));
  }
  Batch eval_batch(int64_t first, int64_t count) const override {
    require(first >= 0 && count >= 0 && first + count <= eval_sequences(), "held-out sequences [",
            first, ", ", first + count, ") were asked for, but there are ", eval_sequences());
    std::vector<int64_t> starts;
    for (int64_t i = first; i < first + count; ++i) {
      // Spread over all that is held out.
      starts.push_back(i * held_out_windows() / eval_sequences() * options_.length);
    }
    return windows(split_.held_out, starts);
  }
  Accuracy accuracy() const override { return Accuracy::token; }
  double bytes_per_token() const override { return bytes_per_token_; }
  std::string describe() const override { return description_; }
  std::vector<int64_t> encode(std::string_view text) const override {
    const at::Tensor tokens = tokenizer_->encode(text).to(at::kLong);
    return {tokens.data_ptr<int64_t>(), tokens.data_ptr<int64_t>() + tokens.size(0)};
  }
  std::string decode(const std::vector<int64_t>& tokens) const override {
    return tokenizer_->decode(tokens);
  }
  std::optional<int64_t> end_token() const override { return tokenizer_->end_token(); }

 private:
  Text(const Options& options, uint64_t seed, std::vector<Document> documents,
       std::shared_ptr<const Tokenizer> tokenizer)
      : options_(options),
        tokenizer_(std::move(tokenizer)),
        split_(split(documents)),
        order_(seed, split_.train.size(), options.length) {
    const double train = static_cast<double>(split_.train.size());
    const double held_out = static_cast<double>(split_.held_out.size());
    description_ = str("Bytes of ", documents.size(), documents.size() == 1 ? " file" : " files",
                       " in ", join(options.corpus.paths), ": ", human_bytes(train),
                       " to train on and ", human_bytes(held_out), " held out, ",
                       split_.by_document ? str(split_.held_out_documents, " whole files")
                                          : std::string("the end of the text"),
                       ", of which ", eval_sequences(), " sequences of ", options.length,
                       " bytes are evaluated.");
  }

  Split split(const std::vector<Document>& documents) {
    std::vector<at::Tensor> tokens;
    std::vector<uint64_t> lots;
    double bytes = 0.0;
    double count = 0.0;
    for (const Document& document : documents) {
      tokens.push_back(tokenizer_->encode(document.text));
      lots.push_back(document_lot(document.name, kSplitSalt));
      // The mark of a document's end counts as a byte.
      bytes += static_cast<double>(document.text.size()) + 1.0;
      count += static_cast<double>(tokens.back().size(0)) + 1.0;
    }
    bytes_per_token_ = bytes / count;
    return split_documents(tokens, lots, options_.held_out, options_.length,
                           tokenizer_->end_token());
  }

  int64_t held_out_windows() const { return (split_.held_out.size() - 1) / options_.length; }

  Batch windows(const PackedStream& stream, const std::vector<int64_t>& starts) const {
    return stream.windows(at::tensor(starts, at::kLong), options_.length,
                          options_.separate_documents);
  }

  Options options_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  double bytes_per_token_ = 0.0;  // set by split()
  Split split_;
  WindowOrder order_;
  std::string description_;
};

struct TextSpec final : TaskSpec {
  Options options;

  std::string type() const override { return "text"; }
  void fields(Fields& f) override {
    f.field("paths", options.corpus.paths,
            "files, folders (every text file below them) and globs (* ? [abc])");
    f.field("extensions", options.corpus.extensions,
            "take only files of folders that end so, \".txt\"; empty: every text file");
    f.field("max_bytes", options.corpus.max_bytes,
            "use at most so many bytes, of files chosen by a hash of their names; absent: all",
            at_least(1));
    f.field("length", options.length, "bytes in a sequence (T)", at_least(1));
    f.field("held_out", options.held_out,
            "share of the text kept for evaluation: whole files where there are many, else the end",
            Range<double>{.low = 0.0, .high = 0.5, .open_low = true});
    f.field("eval_tokens", options.eval_tokens,
            "evaluate on at most so many held-out tokens, spread evenly", at_least(1));
    f.field("separate_documents", options.separate_documents,
            "keep attention inside a file where a sequence spans several");
  }
  std::shared_ptr<const Tokenizer> tokenizer() const override { return byte_tokenizer(); }
  std::shared_ptr<Task> build(uint64_t seed) const override {
    if (options.corpus.paths.empty()) {
      usage_error("the task text needs 'paths', the files, folders or globs to read");
    }
    for (const std::string& ending : options.corpus.extensions) {
      if (!ending.starts_with('.')) {
        usage_error("'extensions' of the task text has '", ending,
                    "', but an extension begins with a ", "dot: '.", ending, "'");
      }
    }
    return std::make_shared<Text>(options, seed);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> text_spec() { return std::make_shared<TextSpec>(); }

}  // namespace headloom::data
