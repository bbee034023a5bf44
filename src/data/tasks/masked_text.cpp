// masked_text: name the hidden tokens of files (Devlin et al. 2019, BERT, section 3.1).
//
// Of each sequence a share `masked` of the tokens (at least one; never a document's end) is chosen
// and is the target. Of the chosen ones `replaced` show the mask token, `random` another one drawn
// evenly, the others themselves. The mask token is the tokenizer's or, where it has none, one more.
// A tokenizer that puts a token before a text has it before each sequence, and the end after.
// Training masks are drawn anew for every sequence number; the held-out ones are fixed.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "data/floors.h"
#include "data/packed_text.h"
#include "data/random.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

constexpr uint64_t kMaskStream = 2;  // apart from the order of the windows

struct MaskedTextOptions {
  TextOptions text;
  std::string tokenizer = "bytes";
  double masked = 0.15;
  double replaced = 0.8;
  double random = 0.1;
};

// With a mask token.
int64_t masked_vocabulary(const Tokenizer& tokenizer) {
  return tokenizer.vocabulary() + (tokenizer.mask_token() ? 0 : 1);
}

class MaskedText final : public Task {
 public:
  MaskedText(const MaskedTextOptions& options, uint64_t seed)
      : options_(options),
        seed_(seed),
        tokenizer_(make_tokenizer(options.tokenizer)),
        text_(inner(options.text, *tokenizer_), seed, *tokenizer_) {}

  Goal goal() const override { return Goal::masked_token; }
  int64_t vocabulary() const override { return masked_vocabulary(*tokenizer_); }
  int64_t length() const override { return options_.text.length; }
  Batch train_batch(int64_t index, int64_t batch_size) const override {
    const int64_t first = index * batch_size;
    return hide(text_.train(first, batch_size), seed_, false, first);
  }
  int64_t eval_sequences() const override { return text_.eval_sequences(); }
  Batch eval_batch(int64_t first, int64_t count) const override {
    return hide(text_.held_out(first, count), 0, true, first);
  }
  Accuracy accuracy() const override { return Accuracy::token; }
  // A token that is shown stands for itself, because few of them are random.
  std::vector<Floor> floors_of(const std::vector<int64_t>& judged) const override {
    int64_t asked = 0, shown = 0;
    std::vector<int64_t> hidden;  // behind the mask
    for (const int64_t number : judged) {
      const Batch batch = eval_batch(number, 1);
      const auto* const inputs = batch.inputs.const_data_ptr<int64_t>();
      const auto* const targets = batch.targets.const_data_ptr<int64_t>();
      for (int64_t t = 0; t < batch.inputs.size(1); ++t) {
        if (targets[t] == kIgnore) continue;
        ++asked;
        if (inputs[t] == mask_token()) {
          hidden.push_back(targets[t]);
        } else if (inputs[t] == targets[t]) {
          ++shown;
        }
      }
    }
    const auto most = std::count(hidden.begin(), hidden.end(), most_frequent(hidden));
    std::vector<Floor> floors = {{"any token", 1.0 / static_cast<double>(vocabulary())}};
    add_floor(floors, "the token that is shown, or the most frequent one for the mask",
              static_cast<double>(shown + most) / static_cast<double>(std::max<int64_t>(1, asked)));
    return floors;
  }
  DataSize data_size() const override { return {text_.tokens(), "tokens"}; }
  std::string describe() const override {
    return str(options_.tokenizer == "bytes" ? "Bytes of " : "Tokens of ", text_.describe(), ", ",
               100 * options_.masked, "% of each hidden and asked for.");
  }
  std::vector<int64_t> encode(std::string_view text) const override {
    return tokens_of(*tokenizer_, text);
  }
  std::string decode(const std::vector<int64_t>& tokens) const override {
    std::string text;
    for (int64_t token : tokens) {
      text += token == mask_token() ? "[?]" : tokenizer_->piece(token);
    }
    return text;
  }

 private:
  // The text's windows leave room for what is put around them.
  static TextOptions inner(TextOptions text, const Tokenizer& tokenizer) {
    if (tokenizer.start_token()) {
      text.length -= 2;
      if (text.split_length > 0) text.split_length -= 2;
    }
    return text;
  }
  int64_t mask_token() const { return tokenizer_->mask_token().value_or(tokenizer_->vocabulary()); }
  Batch framed(Batch batch) const {
    const auto start = tokenizer_->start_token();
    if (!start) return batch;
    const int64_t rows = batch.inputs.size(0);
    const auto column = [&](int64_t token) { return at::full({rows, 1}, token, at::kLong); };
    batch.inputs = at::cat({column(*start), batch.inputs, column(tokenizer_->end_token())}, 1);
    if (batch.documents.defined()) {
      const at::Tensor& d = batch.documents;
      batch.documents = at::cat({d.narrow(1, 0, 1), d, d.narrow(1, d.size(1) - 1, 1)}, 1);
    }
    return batch;
  }

  Batch hide(const Batch& plain, uint64_t seed, bool held_out, int64_t first) const {
    Batch batch = framed(plain);
    const int64_t rows = batch.inputs.size(0), length = batch.inputs.size(1);
    batch.targets = at::full_like(batch.inputs, kIgnore);
    const int64_t before = tokenizer_->start_token() ? 1 : 0;
    for (int64_t row = 0; row < rows; ++row) {
      Random random({seed, kMaskStream, held_out, static_cast<uint64_t>(first + row)});
      int64_t* inputs = batch.inputs.data_ptr<int64_t>() + row * length;
      int64_t* targets = batch.targets.data_ptr<int64_t>() + row * length;
      std::vector<int64_t> open;
      for (int64_t t = 0; t < length; ++t) {
        // What a window overlaps with the one before is asked for there.
        const int64_t place = t - before;
        const bool elsewhere =
            place >= 0 && place < plain.targets.size(1) &&
            plain.targets.const_data_ptr<int64_t>()[row * plain.targets.size(1) + place] == kIgnore;
        if (!elsewhere && inputs[t] != tokenizer_->end_token() &&
            inputs[t] != tokenizer_->start_token()) {
          open.push_back(t);
        }
      }
      const auto count = static_cast<int64_t>(open.size());
      if (count == 0) continue;
      const int64_t hidden =
          std::clamp<int64_t>(std::llround(options_.masked * static_cast<double>(count)), 1, count);
      for (int64_t place : random.distinct(count, hidden)) {
        const int64_t t = open[static_cast<size_t>(place)];
        targets[t] = inputs[t];
        const double lot = static_cast<double>(random.below(1 << 30)) / (1 << 30);
        if (lot < options_.replaced) {
          inputs[t] = mask_token();
        } else if (lot < options_.replaced + options_.random) {
          // Any byte but 0, the end; of other tokenizers any token.
          const bool bytes = options_.tokenizer == "bytes";
          inputs[t] = bytes ? 1 + random.below(255) : random.below(tokenizer_->vocabulary());
        }
      }
    }
    return batch;
  }

  MaskedTextOptions options_;
  uint64_t seed_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  PackedText text_;
};

struct MaskedTextSpec final : TaskSpec {
  MaskedTextOptions options;

  std::string type() const override { return "masked_text"; }
  void fields(Fields& f) override {
    options.text.fields(f);
    f.field("tokenizer", options.tokenizer, kTokenizerHelp);
    f.field("masked", options.masked, "share of a sequence's tokens that is asked for",
            Range<double>{.low = 0.0, .high = 1.0, .open_low = true});
    f.field("replaced", options.replaced, "share of those that shows the mask token",
            between(0.0, 1.0));
    f.field("random", options.random, "share of those that shows a random token; the rest stays",
            between(0.0, 1.0));
  }
  std::shared_ptr<const Tokenizer> tokenizer() const override {
    return make_tokenizer(options.tokenizer);
  }
  std::string* tokenizer_file() override {
    return options.tokenizer == "bytes" ? nullptr : &options.tokenizer;
  }
  std::vector<DataPath> data_paths() override { return options.text.data_paths(); }
  void hold_out_all() override { options.text.hold_out_all(); }
  void split_as(const TaskSpec& other) override {
    if (const auto* masked = dynamic_cast<const MaskedTextSpec*>(&other)) {
      options.text.split_length = masked->options.text.length;
    }
  }
  std::optional<TaskSizes> known_sizes() override {
    options.text.check(type());
    return TaskSizes{.goal = Goal::masked_token,
                     .vocabulary = masked_vocabulary(*tokenizer()),
                     .length = options.text.length};
  }
  std::shared_ptr<Task> build(uint64_t seed) const override {
    options.text.check(type());
    if (options.text.length < 3 && make_tokenizer(options.tokenizer)->start_token()) {
      usage_error("masked_text has length = ", options.text.length, ", but ", options.tokenizer,
                  " puts a token before and one after each sequence; expected at least 3.");
    }
    if (options.replaced + options.random > 1.0) {
      usage_error("masked_text has replaced = ", options.replaced, " and random = ", options.random,
                  ", expected a sum of at most 1.");
    }
    return std::make_shared<MaskedText>(options, seed);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> masked_text_spec() { return std::make_shared<MaskedTextSpec>(); }

}  // namespace headloom::data
