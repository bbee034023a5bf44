// text: predict every next token of files.
#include <ATen/ATen.h>

#include "core/error.h"
#include "data/packed_text.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

class Text final : public Task {
 public:
  Text(const TextOptions& options, const std::string& tokenizer, uint64_t seed)
      : length_(options.length),
        tokenizer_(make_tokenizer(tokenizer)),
        text_(options, seed, *tokenizer_) {}

  int64_t vocabulary() const override { return tokenizer_->vocabulary(); }
  int64_t length() const override { return length_; }
  Batch train_batch(int64_t index, int64_t batch_size) const override {
    return text_.train(index * batch_size, batch_size);
  }
  int64_t eval_sequences() const override { return text_.eval_sequences(); }
  Batch eval_batch(int64_t first, int64_t count) const override {
    return text_.held_out(first, count);
  }
  Accuracy accuracy() const override { return Accuracy::token; }
  DataSize data_size() const override { return {text_.tokens(), "tokens"}; }
  double bytes_per_token() const override { return text_.bytes_per_token(); }
  std::string describe() const override { return str("Text of ", text_.describe(), "."); }
  std::vector<int64_t> encode(std::string_view text) const override {
    return tokens_of(*tokenizer_, text);
  }
  std::string decode(const std::vector<int64_t>& tokens) const override {
    return tokenizer_->decode(tokens);
  }
  std::optional<int64_t> end_token() const override { return tokenizer_->end_token(); }

 private:
  int64_t length_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  PackedText text_;
};

struct TextSpec final : TaskSpec {
  TextOptions options;
  std::string vocabulary = "bytes";

  std::string type() const override { return "text"; }
  void fields(Fields& f) override {
    options.fields(f);
    f.field("tokenizer", vocabulary, kTokenizerHelp);
  }
  std::shared_ptr<const Tokenizer> tokenizer() const override { return make_tokenizer(vocabulary); }
  std::string* tokenizer_file() override { return vocabulary == "bytes" ? nullptr : &vocabulary; }
  std::vector<DataPath> data_paths() override { return options.data_paths(); }
  void hold_out_all() override { options.hold_out_all(); }
  void split_as(const TaskSpec& other) override {
    if (const auto* text = dynamic_cast<const TextSpec*>(&other)) {
      options.split_length = text->options.length;
    }
  }
  std::optional<TaskSizes> known_sizes() override {
    options.check(type());
    return TaskSizes{.vocabulary = tokenizer()->vocabulary(), .length = options.length};
  }
  std::shared_ptr<Task> build(uint64_t seed) const override {
    options.check(type());
    return std::make_shared<Text>(options, vocabulary, seed);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> text_spec() { return std::make_shared<TextSpec>(); }

}  // namespace headloom::data
