// classify_pairs: the class of two texts together, which are padded to the longest.
//
// With `path`: lines of two texts and a label, tabs between them, no heading. A tokenizer with a
// start token makes "[CLS] first [SEP] second [SEP]", others "first end second"; of a pair that is
// too long the longer text loses its last tokens (as in Devlin et al. 2019's code). Without:
// `count` different letters, then as many: the same in another order (class 1), or so but for
// `changed` of them (class 0). Segments tell the two texts apart.
#include <algorithm>

#include "core/error.h"
#include "core/sizes.h"
#include "core/text.h"
#include "data/examples.h"
#include "data/labelled.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

constexpr const char* kPairsLetters = "abcdefghijklmnopqrstuvwxyz";

struct ClassifyPairsOptions {
  FileOptions files{128};
  std::vector<std::string> labels;
  int64_t symbols = 10;
  int64_t count = 4;
  int64_t changed = 2;
};

class Shuffled final : public GeneratedTask {
 public:
  Shuffled(const ClassifyPairsOptions& options, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, options.symbols + 1, 2 * options.count + 1, eval_sequences,
                      std::string(kPairsLetters, static_cast<size_t>(options.symbols)) + "|"),
        options_(options) {}

  Goal goal() const override { return Goal::label; }
  int64_t classes() const override { return 2; }
  int64_t segments() const override { return 2; }
  Accuracy accuracy() const override { return Accuracy::token; }
  std::string describe() const override {
    return str("Pairs of ", options_.count, " of ", options_.symbols,
               " letters, the second the first in another order or so but for ", options_.changed,
               " of them; the answer is which; generated, ", eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    const auto count = static_cast<size_t>(options_.count);
    const int64_t label = random.below(2);
    // The letters of the first, then those that may come in.
    std::vector<int64_t> letters =
        random.distinct(options_.symbols, options_.count + options_.changed);
    std::vector<int64_t> second(letters.begin(), letters.begin() + options_.count);
    for (size_t i = 0; label == 0 && i < static_cast<size_t>(options_.changed); ++i) {
      second[i] = letters[count + i];
    }
    random.shuffle(second);
    Sample sample{.inputs = {letters.begin(), letters.begin() + options_.count},
                  .targets = {label},
                  .second = options_.count + 1};
    sample.inputs.push_back(options_.symbols);
    sample.inputs.insert(sample.inputs.end(), second.begin(), second.end());
    return sample;
  }

 private:
  ClassifyPairsOptions options_;
};

class Pairs final : public ExampleTask {
 public:
  Pairs(const ClassifyPairsOptions& options, uint64_t seed, int64_t eval_sequences)
      : ExampleTask("classify_pairs", options.files.tokenizer, options.files.length, 2),
        path_(*options.files.path),
        split_length_(options.files.split_length()) {
    std::vector<uint64_t> lots;
    read(path_, lots);
    const size_t first_apart = pairs_.size();
    if (options.files.held_out_path) read(*options.files.held_out_path, lots);
    split_by_lot(lots, first_apart, options.files.held_out, path_, eval_sequences, seed, lots);
    std::vector<int64_t> trained;
    for (const size_t i : train()) trained.push_back(pairs_[i].label);
    labels_.order(options.labels, trained);
  }

  Goal goal() const override { return Goal::label; }
  int64_t classes() const override { return static_cast<int64_t>(labels_.names().size()); }
  std::vector<std::string> labels() const override { return labels_.names(); }
  int64_t segments() const override { return 2; }
  Accuracy accuracy() const override { return Accuracy::token; }
  std::string describe() const override {
    return str("Pairs of texts in ", path_, " with one of ", labels_.names().size(),
               " labels: ", counts(), cut_text(cut_), ".");
  }

 protected:
  int64_t label_of(size_t example) const override {
    return labels_.class_of(pairs_[example].label);
  }
  Sample sample(size_t example) const override {
    const Pair& pair = pairs_[example];
    Sample out = framed(pair.first, &pair.second);
    out.targets = {label_of(example)};
    return out;
  }

 private:
  struct Pair {
    std::vector<int32_t> first, second;
    int64_t label;  // its number
  };

  // Takes tokens from the end of the longer text until both fit into `length` positions. Returns
  // whether that took any.
  bool cut(Pair& pair, int64_t length) const {
    const auto room = static_cast<size_t>(length - frame(2));
    const bool longer = pair.first.size() + pair.second.size() > room;
    while (pair.first.size() + pair.second.size() > room) {
      (pair.first.size() > pair.second.size() ? pair.first : pair.second).pop_back();
    }
    return longer;
  }

  uint64_t lot_of(Pair pair) const {
    cut(pair, split_length_);
    StableHash lot;
    for (const std::vector<int32_t>* text : {&pair.first, &pair.second}) {
      lot.add(text->size());
      add_tokens(lot, *text);
    }
    return lot.value();
  }

  void read(const std::string& path, std::vector<uint64_t>& lots) {
    const std::vector<std::string> lines = lines_of(path);
    const size_t before = pairs_.size();
    for (size_t i = 0; i < lines.size(); ++i) {
      if (lines[i].empty()) continue;
      const auto columns = 1 + std::count(lines[i].begin(), lines[i].end(), '\t');
      require(columns == 3, path, ":", i + 1, ": has ", columns,
              columns == 1 ? " column" : " columns",
              ", expected 3: two texts and a label with tabs between.");
      const std::string_view line = lines[i];
      const size_t one = line.find('\t'), two = line.find('\t', one + 1);
      const std::string label(line.substr(two + 1));
      Pair pair{tokens(line.substr(0, one)), tokens(line.substr(one + 1, two - one - 1)),
                labels_.number(label, str(path, ":", i + 1))};
      lots.push_back(lot_of(pair));
      cut_ += cut(pair, length()) ? 1 : 0;
      pairs_.push_back(std::move(pair));
    }
    require(pairs_.size() > before, path, ": has no pair of texts.");
  }
  std::vector<int32_t> tokens(std::string_view text) const {
    const std::vector<int64_t> wide = encode(text);
    return {wide.begin(), wide.end()};
  }

  std::string path_;
  int64_t split_length_;
  std::vector<Pair> pairs_;
  Labels labels_;
  int64_t cut_ = 0;
};

struct ClassifyPairsSpec final : ExampleSpec<ClassifyPairsOptions> {
  std::string type() const override { return "classify_pairs"; }
  std::vector<std::string>* labels() override { return &options.labels; }
  std::optional<TaskSizes> known_sizes() override {
    if (!options.files.path) return GeneratedSpec::known_sizes();
    if (options.labels.empty()) return std::nullopt;
    return TaskSizes{.goal = Goal::label,
                     .vocabulary = tokenizer()->vocabulary(),
                     .length = options.files.length,
                     .classes = static_cast<int64_t>(options.labels.size()),
                     .segments = 2};
  }

 protected:
  void own_fields(Fields& f) override {
    options.files.fields(f, "file of lines with two texts and a label, tabs between, no heading");
    f.field("length", options.files.length, "with path: tokens of the longest sequence (T)",
            size_from(2));
    f.field("labels", options.labels,
            "with path: the labels in the order of their classes; absent: those found, by name");
    f.field("symbols", options.symbols, "generated: letters", between<int64_t>(3, 26));
    f.field("count", options.count, "generated: letters of each text", size_from(2));
    f.field("changed", options.changed, "generated: letters that differ in pairs of class 0",
            size_from(1));
  }
  std::shared_ptr<Task> make(uint64_t seed) const override {
    check_labels(options.labels);
    if (options.files.path) return std::make_shared<Pairs>(options, seed, eval_sequences);
    if (options.count >= options.symbols) {
      usage_error("classify_pairs has count = ", options.count,
                  ", expected less than symbols = ", options.symbols, ".");
    }
    if (options.changed > options.count || options.changed > options.symbols - options.count) {
      usage_error("classify_pairs has changed = ", options.changed,
                  ", expected at most count = ", options.count,
                  " and symbols - count = ", options.symbols - options.count, ".");
    }
    return std::make_shared<Shuffled>(options, seed, eval_sequences);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> classify_pairs_spec() { return std::make_shared<ClassifyPairsSpec>(); }

}  // namespace headloom::data
