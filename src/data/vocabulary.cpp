#include "data/vocabulary.h"

#include <sentencepiece_trainer.h>

#include "core/error.h"

namespace headloom::data {
namespace {

// The lines of all documents: SentencePiece learns from lines.
class Lines final : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(const std::vector<Document>& documents) : documents_(documents) { Next(); }

  bool done() const override { return done_; }
  void Next() override {
    while (at_ >= text().size()) {
      if (++document_ >= documents_.size()) {
        done_ = true;
        return;
      }
      at_ = 0;
    }
    const size_t end = std::min(text().find('\n', at_), text().size());
    line_ = text().substr(at_, end - at_);
    at_ = end + 1;
  }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const std::string& text() const { return documents_[document_].text; }

  const std::vector<Document>& documents_;
  size_t document_ = 0, at_ = 0;
  std::string line_;
  bool done_ = false;
};

}  // namespace

std::string learn_vocabulary(const std::vector<Document>& documents,
                             const VocabularyOptions& options) {
  Lines lines(documents);
  std::string model;
  const auto status =
      sentencepiece::SentencePieceTrainer::Train({{"vocab_size", std::to_string(options.size)},
                                                  {"model_type", options.method},
                                                  {"byte_fallback", "true"},
                                                  {"character_coverage", "0.9995"},
                                                  {"normalization_rule_name", "identity"},
                                                  {"remove_extra_whitespaces", "false"},
                                                  {"add_dummy_prefix", "false"},
                                                  {"allow_whitespace_only_pieces", "true"},
                                                  {"split_digits", "true"},
                                                  {"max_sentence_length", "65536"},
                                                  {"input_sentence_size", "1000000"},
                                                  {"shuffle_input_sentence", "false"},
                                                  {"num_threads", "1"},
                                                  {"bos_id", "-1"},
                                                  {"unk_id", "0"},
                                                  {"eos_id", "1"},
                                                  {"minloglevel", "2"}},
                                                 &lines, &model);
  const std::string message = status.ok() ? "" : status.error_message();
  const size_t end = message.rfind("] ");  // of "file(line) [check] what is wrong"
  require(status.ok(), "no vocabulary of ", options.size, " tokens can be learned from this text: ",
          end == std::string::npos ? message : message.substr(end + 2));
  return model;
}

}  // namespace headloom::data
