// libheadloom_sentencepiece.so: the only code that is linked to SentencePiece. It must know neither
// torch nor the rest of Headloom.
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include "data/sentencepiece.h"

namespace headloom::data {
namespace {

class Model final : public SentencePiece {
 public:
  bool read(std::string_view bytes) {
    return model_.LoadFromSerializedProto(bytes).ok() && model_.GetPieceSize() > 0;
  }
  int size() const override { return model_.GetPieceSize(); }
  int start() const override { return model_.bos_id(); }
  int end() const override { return model_.eos_id(); }
  std::vector<int> encode(std::string_view text) const override { return model_.EncodeAsIds(text); }
  std::string decode(const std::vector<int>& tokens) const override {
    return model_.DecodeIds(tokens);
  }
  std::string name(int token) const override { return model_.IdToPiece(token); }
  bool is_control(int token) const override { return model_.IsControl(token); }
  bool is_byte(int token) const override { return model_.IsByte(token); }

 private:
  sentencepiece::SentencePieceProcessor model_;
};

class CorpusLines final : public sentencepiece::SentenceIterator {
 public:
  explicit CorpusLines(const std::function<const std::string*()>& next)
      : next_(next), line_(next()) {}

  bool done() const override { return line_ == nullptr; }
  void Next() override { line_ = next_(); }
  const std::string& value() const override { return *line_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const std::function<const std::string*()>& next_;
  const std::string* line_;
};

std::unique_ptr<SentencePiece> read(std::string_view bytes) {
  auto model = std::make_unique<Model>();
  if (!model->read(bytes)) return nullptr;
  return model;
}

std::string learn(const std::unordered_map<std::string, std::string>& options,
                  const std::function<const std::string*()>& next_line, std::string& model) {
  CorpusLines lines(next_line);
  const auto status = sentencepiece::SentencePieceTrainer::Train(options, &lines, &model);
  return status.ok() ? "" : status.error_message();
}

}  // namespace
}  // namespace headloom::data

extern "C" __attribute__((visibility("default"))) const headloom::data::SentencePieceLibrary*
headloom_sentencepiece() {
  static const headloom::data::SentencePieceLibrary library = {headloom::data::read,
                                                               headloom::data::learn};
  return &library;
}
