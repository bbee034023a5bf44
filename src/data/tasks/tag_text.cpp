// tag_text: the tag of each word of a sentence, which is padded to the longest.
//
// With `path`: lines of a token, perhaps other columns, and its tag, between them tabs or spaces;
// an empty line ends a sentence (CoNLL; Tjong Kim Sang and De Meulder 2003). -DOCSTART- lines are
// left out. Words are encoded one by one with a space between; a word's first token has its tag,
// its others, and what the tokenizer puts around, have none (Devlin et al. 2019, section 5.3).
// Longer sentences are cut between words. Without: strings of letters, each of whose tags says
// which of its neighbours come before it in the alphabet: neither, left, right or both.
#include <algorithm>

#include "core/error.h"
#include "core/sizes.h"
#include "core/text.h"
#include "data/examples.h"
#include "data/floors.h"
#include "data/labelled.h"
#include "data/tasks/tasks.h"
#include "data/words.h"

namespace headloom::data {
namespace {

constexpr const char* kTagLetters = "abcdefghijklmnopqrstuvwxyz";

struct TagTextOptions {
  FileOptions files{64};
  std::vector<std::string> labels;
  int64_t symbols = 8;
  std::optional<int64_t> min_length;

  int64_t shortest() const { return min_length.value_or((files.length + 1) / 2); }
};

class Neighbours final : public GeneratedTask {
 public:
  Neighbours(const TagTextOptions& options, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, options.symbols, options.files.length, eval_sequences,
                      std::string(kTagLetters, static_cast<size_t>(options.symbols))),
        options_(options) {}

  Goal goal() const override { return Goal::tags; }
  int64_t classes() const override { return 4; }
  Accuracy accuracy() const override { return Accuracy::token; }
  std::vector<Floor> floors_of(const std::vector<int64_t>& judged) const override {
    constexpr int64_t kCounted = 512;
    std::vector<TaggedWord> trained, asked;
    const auto add = [](const Sample& sample, std::vector<TaggedWord>& to) {
      for (size_t i = 0; i < sample.inputs.size(); ++i) {
        to.push_back({static_cast<uint64_t>(sample.inputs[i]), sample.targets[i]});
      }
    };
    for (int64_t i = 0; i < kCounted; ++i) add(sequence(false, i), trained);
    for (const int64_t i : judged) add(sequence(true, i), asked);
    std::vector<Floor> floors = Task::floors_of(judged);
    add_tag_floors(floors, trained, asked);
    return floors;
  }
  std::string describe() const override {
    return str("Strings of ", options_.shortest(), " to ", length(), " of ", options_.symbols,
               " letters, each tagged with which of its neighbours come before it in the alphabet; "
               "generated, ",
               eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    Sample sample;
    sample.inputs.resize(static_cast<size_t>(options_.shortest() +
                                             random.below(length() - options_.shortest() + 1)));
    for (int64_t& letter : sample.inputs) letter = random.below(options_.symbols);
    for (size_t i = 0; i < sample.inputs.size(); ++i) {
      const auto& text = sample.inputs;
      const bool left = i > 0 && text[i - 1] < text[i];
      const bool right = i + 1 < text.size() && text[i + 1] < text[i];
      sample.targets.push_back(left + 2 * right);
    }
    return sample;
  }

 private:
  TagTextOptions options_;
};

class Sentences final : public ExampleTask {
 public:
  Sentences(const TagTextOptions& options, uint64_t seed, int64_t eval_sequences)
      : ExampleTask("tag_text", options.files.tokenizer, options.files.length, 1),
        path_(*options.files.path),
        split_length_(options.files.split_length()) {
    WordEncoder encoder(tokenizer());
    read(path_, encoder);
    const size_t first_apart = pieces_.size();
    if (options.files.held_out_path) read(*options.files.held_out_path, encoder);
    std::vector<uint64_t> lots;
    for (const Piece& piece : pieces_) lots.push_back(piece.lot);
    split_by_lot(lots, first_apart, options.files.held_out, path_, eval_sequences, seed, trained_);
    std::vector<int64_t> trained;
    for (const size_t i : train()) {
      for (const int32_t tag : pieces_[i].tags) {
        if (tag != kIgnore) trained.push_back(tag);
      }
    }
    labels_.order(options.labels, trained);
  }

  Goal goal() const override { return Goal::tags; }
  int64_t classes() const override { return static_cast<int64_t>(labels_.names().size()); }
  std::vector<std::string> labels() const override { return labels_.names(); }
  std::vector<Floor> floors_of(const std::vector<int64_t>& judged) const override {
    std::vector<Floor> floors = Task::floors_of(judged);
    add_tag_floors(floors, words_in(train()), words_in(held_out(judged)));
    return floors;
  }
  Accuracy accuracy() const override { return Accuracy::token; }
  std::string describe() const override {
    return str("Sentences of ", path_, ", each word with one of ", labels_.names().size(),
               " tags: ", counts(), cut_text(cut_),
               lost_ > 0 ? str("; ", lost_, " words that make no token left out") : "", ".");
  }

 protected:
  Sample sample(size_t example) const override {
    const Piece& piece = pieces_[example];
    Sample out = framed(piece.tokens);
    out.targets.assign(out.inputs.size(), kIgnore);
    const size_t before = tokenizer().start_token() ? 1 : 0;
    for (size_t i = 0; i < piece.tags.size(); ++i) {
      if (piece.tags[i] == kIgnore) continue;
      out.targets[before + i] = labels_.class_of(piece.tags[i]);
    }
    return out;
  }

 private:
  // A sentence, or what of it fits in a sequence.
  struct Piece {
    std::vector<int32_t> tokens;
    std::vector<int32_t> tags;    // as many: numbers of labels, kIgnore where there is none
    std::vector<uint64_t> words;  // hashes, one for each tag that there is
    uint64_t lot;                 // the sentence's
  };

  std::vector<TaggedWord> words_in(const std::vector<size_t>& examples) const {
    std::vector<TaggedWord> out;
    for (const size_t i : examples) {
      auto word = pieces_[i].words.begin();
      for (const int32_t tag : pieces_[i].tags) {
        if (tag != kIgnore) out.push_back({*word++, labels_.class_of(tag)});
      }
    }
    return out;
  }

  void read(const std::string& path, WordEncoder& encoder) {
    const std::vector<std::string> lines = lines_of(path);
    std::vector<std::string_view> words;
    std::vector<int32_t> tags;
    const size_t before = pieces_.size();
    for (size_t i = 0; i <= lines.size(); ++i) {
      const std::string_view line = i < lines.size() ? std::string_view(lines[i]) : "";
      const size_t begin = line.find_first_not_of(" \t");
      if (begin == std::string_view::npos || line.substr(begin).starts_with("-DOCSTART-")) {
        add(words, tags, encoder);
        words.clear();
        tags.clear();
        continue;
      }
      const size_t end = line.find_last_not_of(" \t") + 1;
      const size_t first = line.find_first_of(" \t", begin);
      require(first < end, path, ":", i + 1, ": has one column, '", line.substr(begin, end - begin),
              "', expected a token and, in the last column, its tag.");
      const size_t last = line.find_last_of(" \t", end - 1) + 1;
      words.push_back(line.substr(begin, first - begin));
      tags.push_back(static_cast<int32_t>(
          labels_.number(std::string(line.substr(last, end - last)), str(path, ":", i + 1))));
    }
    require(pieces_.size() > before, path, ": has no line with a token and its tag.");
  }

  // The words that pieces of a sentence begin with, which have room for so many tokens each.
  static std::vector<size_t> piece_begins(const WordTokens& text, size_t room) {
    std::vector<size_t> begins;
    size_t size = 0;
    for (size_t w = 0; w < text.begins.size(); ++w) {
      if (text.begins[w] == text.ends[w]) continue;
      // With the space before it, unless a sequence begins with the word.
      size_t from = w > 0 ? text.ends[w - 1] : 0;
      if (begins.empty() || size + text.ends[w] - from > room) {
        begins.push_back(w);
        size = 0;
        from = text.begins[w];
      }
      size += std::min(text.ends[w] - from, room);
    }
    return begins;
  }

  void add(const std::vector<std::string_view>& words, const std::vector<int32_t>& tags,
           WordEncoder& encoder) {
    const WordTokens text = encoder.encode(words);
    StableHash lot;
    add_tokens(lot, text.tokens);
    const auto room = static_cast<size_t>(length() - frame(1));
    const std::vector<size_t> begins = piece_begins(text, room);
    const size_t as_trained =
        piece_begins(text, static_cast<size_t>(split_length_ - frame(1))).size();
    trained_.insert(trained_.end(), as_trained, lot.value());
    bool cut = begins.size() > 1;
    auto next = begins.begin();
    Piece* piece = nullptr;
    for (size_t w = 0; w < words.size(); ++w) {
      if (text.begins[w] == text.ends[w]) {
        ++lost_;
        continue;
      }
      size_t from = w > 0 ? text.ends[w - 1] : 0;
      if (next != begins.end() && *next == w) {
        ++next;
        pieces_.push_back({.tokens = {}, .tags = {}, .words = {}, .lot = lot.value()});
        piece = &pieces_.back();
        from = text.begins[w];
      }
      cut = cut || text.ends[w] - from > room;
      StableHash word;
      word.add(words[w]);
      piece->words.push_back(word.value());
      for (size_t t = from; t < std::min(text.ends[w], from + room); ++t) {
        piece->tokens.push_back(text.tokens[t]);
        piece->tags.push_back(t == text.begins[w] ? tags[w] : static_cast<int32_t>(kIgnore));
      }
    }
    cut_ += cut ? 1 : 0;
  }

  std::string path_;
  int64_t split_length_;
  std::vector<uint64_t> trained_;  // lots of the pieces that there are at that length
  std::vector<Piece> pieces_;
  Labels labels_;
  int64_t cut_ = 0, lost_ = 0;
};

struct TagTextSpec final : ExampleSpec<TagTextOptions> {
  std::string type() const override { return "tag_text"; }
  std::vector<std::string>* labels() override { return &options.labels; }
  std::optional<TaskSizes> known_sizes() override {
    if (!options.files.path) return GeneratedSpec::known_sizes();
    if (options.labels.empty()) return std::nullopt;
    return TaskSizes{.goal = Goal::tags,
                     .vocabulary = tokenizer()->vocabulary(),
                     .length = options.files.length,
                     .classes = static_cast<int64_t>(options.labels.size())};
  }

 protected:
  void own_fields(Fields& f) override {
    options.files.fields(f, "file of lines with a token first and its tag last (CoNLL)");
    f.field("length", options.files.length, "tokens of the longest text (T)", size_from(2));
    f.field("labels", options.labels,
            "with path: the tags in the order of their classes; absent: those found, by name");
    f.field("symbols", options.symbols, "generated: letters", between<int64_t>(2, 26));
    f.field("min_length", options.min_length,
            "generated: tokens of the shortest text; absent: length / 2", size_from(2));
  }
  std::shared_ptr<Task> make(uint64_t seed) const override {
    check_labels(options.labels);
    if (options.files.path) return std::make_shared<Sentences>(options, seed, eval_sequences);
    if (options.shortest() > options.files.length) {
      usage_error("tag_text has min_length = ", options.shortest(),
                  ", expected at most length = ", options.files.length, ".");
    }
    return std::make_shared<Neighbours>(options, seed, eval_sequences);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> tag_text_spec() { return std::make_shared<TagTextSpec>(); }

}  // namespace headloom::data
