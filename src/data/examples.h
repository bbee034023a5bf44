// Tasks on examples that stand in files: which are held out, and the order of the others.
#pragma once

#include <limits>
#include <optional>
#include <span>
#include <unordered_map>

#include "core/fields.h"
#include "data/generated.h"
#include "data/stream.h"

namespace headloom::data {

// Where the examples of a file are, and how they become tokens.
struct FileOptions {
  int64_t length;  // a field of the task's own
  std::optional<std::string> path = {}, held_out_path = {};
  double held_out = 0.1;
  std::string tokenizer = "bytes";
  // No key: the held-out part is that of examples that are cut to this length; 0: to `length`.
  int64_t cut_as = 0;

  int64_t split_length() const { return cut_as > 0 ? cut_as : length; }
  // `what` says what stands in the files. `generates`: without a file the task generates its data.
  void fields(Fields& f, const std::string& what, bool generates = true);
  std::vector<DataPath> data_paths();
  // As TaskSpec has them.
  void hold_out_all();
  void split_as(const FileOptions& other) { cut_as = other.length; }
  // As TaskSpec has them, nullptr where there is none: what is generated has letters of its own.
  std::string* tokenizer_file() { return tokenizer == "bytes" ? nullptr : &tokenizer; }
  std::shared_ptr<const Tokenizer> own_tokenizer() const {
    return path || tokenizer != "bytes" ? make_tokenizer(tokenizer) : nullptr;
  }
};

// The lines of a text file without what ends them. Throws Error where it cannot be read or is not
// text.
std::vector<std::string> lines_of(const std::string& path);

// Names of classes in examples, numbered as they come, and then the order of the classes.
class Labels {
 public:
  // `place` is for messages, "file:12".
  int64_t number(const std::string& name, const std::string& place);
  // Orders the classes as `given` or, where it is empty, by the names of those that `trained`
  // counts (numbers). Throws UsageError for a name that `given` lacks, Error for one that nothing
  // is trained on and for fewer than two.
  void order(const std::vector<std::string>& given, const std::vector<int64_t>& trained);

  // After order(): the classes' names, and the class of a number.
  const std::vector<std::string>& names() const { return names_; }
  int64_t class_of(int64_t number) const { return classes_[static_cast<size_t>(number)]; }

 private:
  std::unordered_map<std::string, int64_t> numbers_;
  std::vector<std::string> found_, places_;  // of each number
  std::vector<std::string> names_;
  std::vector<int64_t> classes_;
};

// Derived classes number their examples, split() them once, and make a sample of each.
class ExampleTask : public Task {
 public:
  int64_t vocabulary() const final { return tokenizer_->vocabulary(); }
  int64_t length() const final { return length_; }
  int64_t eval_sequences() const final { return eval_sequences_; }
  DataSize data_size() const final {
    return {static_cast<int64_t>(train_.size() + held_out_.size() + aside_), "examples"};
  }
  Batch train_batch(int64_t index, int64_t batch_size) const final;
  Batch eval_batch(int64_t first, int64_t count) const final;
  std::vector<Floor> floors_of(const std::vector<int64_t>& judged) const override;
  std::vector<int64_t> encode(std::string_view text) const final {
    return tokens_of(*tokenizer_, text);
  }
  std::string decode(const std::vector<int64_t>& tokens) const final {
    return tokenizer_->decode(tokens);
  }

 protected:
  // Throws UsageError, naming the task, where what the tokenizer puts around `texts` texts leaves
  // no room for a token of each.
  ExampleTask(const std::string& type, const std::string& tokenizer, int64_t length, int64_t texts);

  virtual Sample sample(size_t example) const = 0;
  // The class of an example, where each has one.
  virtual int64_t label_of(size_t) const { return kIgnore; }

  // Training visits `train` in an order of its own every epoch; at most `eval_sequences` of
  // `held_out` are evaluated, a fair sample. Examples of a lot are in the same half of them as far
  // as the halves can be equal then; without `lots` each has its own.
  void split(std::vector<size_t> train, std::vector<size_t> held_out, int64_t eval_sequences,
             uint64_t seed, const std::vector<uint64_t>& lots = {});
  // The same of examples with lots, where equal lots are never on both sides. Those from number
  // `first_apart` on are held out, and what else has one of their lots is left aside; where there
  // are none, about `share` of all, chosen among the examples that there were as the run was
  // trained, whose lots `trained` has. Throws Error where a side would be empty, but that nothing
  // is trained on where `share` is 1.
  void split_by_lot(const std::vector<uint64_t>& lots, size_t first_apart, double share,
                    const std::string& path, int64_t eval_sequences, uint64_t seed,
                    const std::vector<uint64_t>& trained);

  // Adds tokens to the hash that is an example's lot: examples that are read alike share one.
  template <typename Tokens>
  static void add_tokens(StableHash& lot, const Tokens& tokens) {
    for (const auto token : tokens) lot.add(static_cast<uint64_t>(token));
  }

  // Tokens around `texts` texts: of a tokenizer with a start token that, and an end after each;
  // of others an end between two.
  int64_t frame(int64_t texts) const { return tokenizer_->start_token() ? texts + 1 : texts - 1; }
  // Those of one or two texts with the frame.
  Sample framed(const std::vector<int32_t>& first,
                const std::vector<int32_t>* second = nullptr) const;

  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const std::vector<size_t>& train() const { return train_; }
  // The examples that are the held-out sequences of these numbers.
  std::vector<size_t> held_out(const std::vector<int64_t>& numbers) const;
  // "N to train on and M of K held out", and how many are trained on nowhere as they are held out.
  std::string counts() const;
  // "; N of them longer than 64 tokens and cut" for `cut` examples, "" for none.
  std::string cut_text(int64_t cut) const;

 private:
  void keep_lots_in_halves(const std::vector<uint64_t>& lots);

  std::shared_ptr<const Tokenizer> tokenizer_;
  int64_t length_;
  std::vector<size_t> train_, held_out_;
  size_t aside_ = 0;
  int64_t eval_sequences_ = 0;
  std::optional<WindowOrder> order_;
};

// A task of files or generated; Options has `FileOptions files`.
template <typename Options>
struct ExampleSpec : GeneratedSpec {
  Options options;

  std::vector<DataPath> data_paths() final { return options.files.data_paths(); }
  void split_as(const TaskSpec& other) final {
    if (const auto* same = dynamic_cast<const ExampleSpec*>(&other)) {
      options.files.split_as(same->options.files);
    }
  }
  void hold_out_all() final {
    options.files.hold_out_all();
    eval_sequences = std::numeric_limits<int64_t>::max();
  }
  std::string* tokenizer_file() final { return options.files.tokenizer_file(); }
  std::shared_ptr<const Tokenizer> tokenizer() const final { return options.files.own_tokenizer(); }
};

}  // namespace headloom::data
