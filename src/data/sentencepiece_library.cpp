// libheadloom_sentencepiece.so: the only code that is linked to SentencePiece. It must know neither
// torch nor the rest of Headloom.
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>

#include "data/sentencepiece.h"

namespace headloom::data {
namespace {

class Model final : public SentencePiece {
 public:
  bool read(std::string_view bytes) {
    if (!model_.LoadFromSerializedProto(bytes).ok() || model_.GetPieceSize() == 0) return false;
    before_line_ = tokens_before_line();
    return true;
  }
  int size() const override { return model_.GetPieceSize(); }
  int start() const override { return model_.bos_id(); }
  int end() const override { return model_.eos_id(); }
  // In parts that begin with a line's end, where the model allows it. Byte-pair encoding keeps a
  // queue of all neighbours, which for a whole book lies outside the caches. A unigram model sums
  // the scores of all tokens in float, and such a sum no longer tells words of a book apart.
  std::vector<int> encode(std::string_view text) const override {
    constexpr size_t kPart = 1024;  // bytes, or more up to the line's end
    std::vector<int> tokens;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end =
          before_line_ < 0 ? text.size() : std::min(text.find('\n', begin + kPart), text.size());
      const std::vector<int> part = model_.EncodeAsIds(text.substr(begin, end - begin));
      tokens.insert(tokens.end(), part.begin() + (begin == 0 ? 0 : before_line_), part.end());
      begin = end;
    }
    return tokens;
  }
  std::string decode(const std::vector<int>& tokens) const override {
    return model_.DecodeIds(tokens);
  }
  std::string name(int token) const override { return model_.IdToPiece(token); }
  bool is_control(int token) const override { return model_.IsControl(token); }
  bool is_byte(int token) const override { return model_.IsByte(token); }

 private:
  // How many tokens a part that begins with a line's end has before that, as many models put a
  // space before a text. -1: parts have not the tokens of the whole text.
  int tokens_before_line() const {
    const std::vector<int> end = model_.EncodeAsIds("\n");
    if (end.empty() || end.size() > 2 || (end.size() == 2 && name(end[0]) != "\xe2\x96\x81")) {
      return -1;
    }
    if (name(end.back()) != "<0x0A>" && name(end.back()) != "\n") return -1;
    if (model_.EncodeAsIds(" ").empty()) return -1;  // spaces at both ends of a text are left out
    for (int token = 0; token < size(); ++token) {
      const std::string& piece = model_.IdToPiece(token);
      if (piece.size() > 1 && piece.find('\n') != std::string::npos) return -1;
    }
    return static_cast<int>(end.size()) - 1;
  }

  sentencepiece::SentencePieceProcessor model_;
  int before_line_ = -1;
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
