// classify_text: the class of a text, which is padded to the longest.
//
// With `path`: a folder whose sub-folders, or files, are the classes, by name. Files are cut into
// pieces of `length` tokens, among them what the tokenizer puts before and after a text; the last
// piece of a file is shorter. Without: strings of a generated language.
//
//   grammars  Each class allows each letter half of the letters as its successor, chosen so that
//             every letter is equally likely at every place under every grammar: only neighbours
//             tell the classes apart. A string fits its own grammar alone.
//   brackets  Class 1 is balanced, "([]){}"; class 0 is such a string with two of its brackets
//             exchanged so that it is not: counting tells nothing. Much harder than grammars.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/sizes.h"
#include "core/text.h"
#include "data/corpus.h"
#include "data/encoded.h"
#include "data/examples.h"
#include "data/labelled.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

constexpr int kMaxGrammarDraws = 10000;
constexpr const char* kGrammarLetters = "abcdefghijklmnopqrstuvwxyz";
constexpr const char* kBrackets = "()[]{}<>";
constexpr uint64_t kGrammarKey = 0x6772616d6d6172;  // the grammars are the same for every seed

struct ClassifyTextOptions {
  std::optional<std::string> path;
  std::vector<std::string> extensions;
  std::vector<std::string> labels;
  std::string tokenizer = "bytes";
  double held_out = 0.1;
  int64_t length = 64;
  std::string language = "grammars";
  int64_t classes = 4;
  int64_t symbols = 8;
  std::optional<int64_t> min_length;
  // No key: the held-out part is that of pieces of this length; 0: of `length`.
  int64_t cut_as = 0;

  int64_t shortest() const { return min_length.value_or((length + 1) / 2); }
};

class Grammars final : public GeneratedTask {
 public:
  Grammars(const ClassifyTextOptions& options, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, options.symbols, options.length, eval_sequences,
                      std::string(kGrammarLetters, static_cast<size_t>(options.symbols))),
        options_(options) {
    // Arrangements of the others after the first letter.
    int64_t circles = 1;
    for (int64_t i = 2; i < options.symbols && circles < options.classes; ++i) circles *= i;
    if (circles < options.classes) {
      usage_error("classify_text has classes = ", options.classes, ", but of ", options.symbols,
                  " letters there are only ", circles, " grammars.");
    }
    Random random({kGrammarKey, static_cast<uint64_t>(options.symbols)});
    while (static_cast<int64_t>(orders_.size()) < options.classes) {
      std::vector<int64_t> order = random.distinct(options.symbols, options.symbols);
      std::rotate(order.begin(), std::find(order.begin(), order.end(), 0), order.end());
      if (std::find(orders_.begin(), orders_.end(), order) == orders_.end()) {
        orders_.push_back(order);
      }
    }
  }

  Goal goal() const override { return Goal::label; }
  int64_t classes() const override { return options_.classes; }
  Accuracy accuracy() const override { return Accuracy::token; }
  std::string describe() const override {
    return str("Strings of ", options_.shortest(), " to ", options_.length, " of ",
               options_.symbols, " letters, each written by one of ", options_.classes,
               " grammars, which is the answer; generated, ", eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    for (int i = 0; i < kMaxGrammarDraws; ++i) {
      const int64_t label = random.below(options_.classes);
      const std::vector<int64_t>& order = orders_[static_cast<size_t>(label)];
      Sample sample;
      sample.targets = {label};
      int64_t place = random.below(options_.symbols);
      const int64_t count =
          options_.shortest() + random.below(options_.length - options_.shortest() + 1);
      for (int64_t i = 0; i < count; ++i) {
        sample.inputs.push_back(order[static_cast<size_t>(place)]);
        place = (place + 1 + random.below(options_.symbols / 2)) % options_.symbols;
      }
      int64_t fitting = 0;
      for (int64_t c = 0; c < options_.classes; ++c) fitting += fits(sample.inputs, c);
      if (fitting == 1) return sample;
    }
    usage_error("classify_text has strings of ", options_.shortest(), " of ", options_.symbols,
                " letters, which hardly ever fit only one of ", options_.classes,
                " grammars; make them longer.");
  }

 private:
  // Arranged in a circle as the class has it, a letter's successors are the half after it.
  bool fits(const std::vector<int64_t>& letters, int64_t label) const {
    const std::vector<int64_t>& order = orders_[static_cast<size_t>(label)];
    std::vector<int64_t> place(order.size());
    for (size_t i = 0; i < order.size(); ++i) {
      place[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
    }
    for (size_t i = 1; i < letters.size(); ++i) {
      const int64_t step = place[static_cast<size_t>(letters[i])] -
                           place[static_cast<size_t>(letters[i - 1])] + options_.symbols;
      const int64_t turn = step % options_.symbols;
      if (turn < 1 || turn > options_.symbols / 2) return false;
    }
    return true;
  }

  ClassifyTextOptions options_;
  std::vector<std::vector<int64_t>> orders_;  // of each class: its circle of letters
};

class Brackets final : public GeneratedTask {
 public:
  Brackets(const ClassifyTextOptions& options, uint64_t seed, int64_t eval_sequences)
      : GeneratedTask(seed, options.symbols, options.length, eval_sequences,
                      std::string(kBrackets, static_cast<size_t>(options.symbols))),
        options_(options) {}

  Goal goal() const override { return Goal::label; }
  int64_t classes() const override { return 2; }
  Accuracy accuracy() const override { return Accuracy::token; }
  std::string describe() const override {
    return str("Strings of ", options_.shortest(), " to ", options_.length, " brackets of ",
               options_.symbols / 2,
               " kinds, balanced or with two exchanged; the answer is which; ", "generated, ",
               eval_sequences(), " held out.");
  }

 protected:
  Sample draw(Random& random) const override {
    const int64_t least = (options_.shortest() + 1) / 2;
    const int64_t pairs = least + random.below(options_.length / 2 - least + 1);
    Sample sample{.inputs = balanced_string(random, pairs), .targets = {random.below(2)}};
    while (sample.targets[0] == 0 && is_balanced(sample.inputs)) {
      const auto size = static_cast<int64_t>(sample.inputs.size());
      std::swap(sample.inputs[static_cast<size_t>(random.below(size))],
                sample.inputs[static_cast<size_t>(random.below(size))]);
    }
    return sample;
  }

 private:
  // All shapes equally likely (Arnold and Sleep 1980): with r places left and depth d the next
  // bracket closes with probability d (r + d + 2) / (2 r (d + 1)).
  std::vector<int64_t> balanced_string(Random& random, int64_t pairs) const {
    std::vector<int64_t> text, open;
    for (int64_t left = 2 * pairs; left > 0; --left) {
      const auto depth = static_cast<int64_t>(open.size());
      if (random.below(2 * left * (depth + 1)) < depth * (left + depth + 2)) {
        text.push_back(open.back() + 1);
        open.pop_back();
      } else {
        open.push_back(2 * random.below(options_.symbols / 2));
        text.push_back(open.back());
      }
    }
    return text;
  }

  static bool is_balanced(const std::vector<int64_t>& text) {
    std::vector<int64_t> open;
    for (int64_t token : text) {
      if (token % 2 == 0) {
        open.push_back(token);
      } else if (open.empty() || open.back() + 1 != token) {
        return false;
      } else {
        open.pop_back();
      }
    }
    return open.empty();
  }

  ClassifyTextOptions options_;
};

// The pieces of the files of a folder's classes.
class LabelledFiles final : public ExampleTask {
 public:
  LabelledFiles(const ClassifyTextOptions& options, uint64_t seed, int64_t eval_sequences)
      : ExampleTask("classify_text", options.tokenizer, options.length, 1), options_(options) {
    std::vector<size_t> train, held_out;
    const std::vector<ClassPath> found = classes_below(*options.path, options.extensions);
    names_ = class_names(found, options.labels);
    for (const ClassPath& entry : found) add_class(entry, train, held_out);
    split(std::move(train), std::move(held_out), eval_sequences, seed);
  }

  Goal goal() const override { return Goal::label; }
  int64_t classes() const override { return static_cast<int64_t>(names_.size()); }
  std::vector<std::string> labels() const override { return names_; }
  Accuracy accuracy() const override { return Accuracy::token; }
  std::string describe() const override {
    const bool all = train().empty();  // held out
    std::vector<int64_t> of_class(names_.size());
    for (size_t i = 0; all && i < pieces_.size(); ++i) {
      ++of_class[static_cast<size_t>(pieces_[i].label)];
    }
    for (const size_t i : train()) ++of_class[static_cast<size_t>(pieces_[i].label)];
    const auto most = std::max_element(of_class.begin(), of_class.end());
    const size_t counted = all ? pieces_.size() : train().size();
    return str("Pieces of up to ", options_.length,
               options_.tokenizer == "bytes" ? " bytes" : " tokens", " of the ", names_.size(),
               " classes in ", *options_.path, left_out_.in_brackets(), ": ", counts(), "; ",
               100 * *most / static_cast<int64_t>(counted), "% of those ",
               all ? "held out" : "to train on", " are of the class ",
               names_[static_cast<size_t>(most - of_class.begin())], ".");
  }

 protected:
  int64_t label_of(size_t example) const override { return pieces_[example].label; }
  Sample sample(size_t example) const override {
    const Piece& piece = pieces_[example];
    const at::Tensor tokens = piece.tokens.to(at::kInt).contiguous();
    const int32_t* first = tokens.const_data_ptr<int32_t>();
    Sample out = framed({first, first + tokens.numel()});
    out.targets = {label_of(example)};
    return out;
  }

 private:
  struct Piece {
    int64_t label;
    at::Tensor tokens;
  };

  void add_class(const ClassPath& entry, std::vector<size_t>& train,
                 std::vector<size_t>& held_out) {
    const std::string& path = entry.path;
    const int64_t label = class_number(names_, entry.name);
    auto [documents, left_out] = read_corpus({{path}, options_.extensions, {}});
    for (std::vector<std::string>* const names : left_out.kinds()) {
      for (std::string& name : *names) name = entry.name + "/" + name;
    }
    left_out_ += left_out;
    const bool whole = documents.size() >= kManyDocuments;
    if (whole) {
      std::stable_sort(documents.begin(), documents.end(),
                       [](const Document& a, const Document& b) {
                         return document_lot(a.name, kSplitSalt) < document_lot(b.name, kSplitSalt);
                       });
    }
    const auto encoded = encode_documents(documents, tokenizer());
    const int64_t split_length = options_.cut_as > 0 ? options_.cut_as : options_.length;
    const std::vector<Span> as_trained = spans(*encoded, documents.size(), split_length, 0);
    const bool all = options_.held_out == 1.0;
    require(all || as_trained.size() >= 2, "the class '", path, "' has fewer than two pieces of ",
            split_length - frame(1), options_.tokenizer == "bytes" ? " bytes" : " tokens",
            ", expected one to train on and one held out.");
    const int64_t boundary = all ? 0 : as_trained[first_held_out(as_trained, whole)].begin;
    for (const Span& span : spans(*encoded, documents.size(), options_.length, boundary)) {
      (span.begin < boundary ? train : held_out).push_back(pieces_.size());
      pieces_.push_back({label, encoded->tokens.narrow(0, span.begin, span.count)});
    }
  }

  // A piece's tokens, among those of all documents of its class.
  struct Span {
    size_t document;
    int64_t begin, count;
  };

  // The pieces of up to `length` positions. None reaches over `boundary`.
  std::vector<Span> spans(const EncodedDocuments& encoded, size_t documents, int64_t length,
                          int64_t boundary) const {
    std::vector<Span> out;
    for (size_t d = 0; d < documents; ++d) {
      const int64_t end = encoded.end(d) - 1;  // without the mark of the document's end
      for (int64_t at = encoded.begin(d); at < end; at += out.back().count) {
        const int64_t stop = at < boundary ? std::min(end, boundary) : end;
        out.push_back({d, at, std::min(length - frame(1), stop - at)});
      }
    }
    return out;
  }

  // The number of the first piece that is held out, with all that follow. With `whole` documents it
  // begins one, unless less than half of what is wanted, or more than twice as much, would be held
  // out then.
  size_t first_held_out(const std::vector<Span>& pieces, bool whole) const {
    const int64_t present = std::ssize(pieces);
    const int64_t wanted = held_out_count(present, options_.held_out);
    const auto cut = static_cast<size_t>(present - wanted);
    if (!whole) return cut;
    const auto begin_of = [&](size_t document) {
      return std::find_if(pieces.begin(), pieces.end(),
                          [&](const Span& span) { return span.document >= document; }) -
             pieces.begin();
    };
    // The first document is trained on.
    const size_t document = std::max<size_t>(pieces[cut].document, 1);
    const int64_t before = begin_of(document), after = begin_of(document + 1);
    for (const int64_t first : {before, after}) {
      const int64_t held = present - first;
      if (held <= 2 * wanted && 2 * held >= wanted) return static_cast<size_t>(first);
    }
    return cut;
  }

  ClassifyTextOptions options_;
  std::vector<std::string> names_;
  LeftOut left_out_;
  std::vector<Piece> pieces_;
};

struct ClassifyTextSpec final : GeneratedSpec {
  ClassifyTextOptions options;

  std::string type() const override { return "classify_text"; }
  std::vector<std::string>* labels() override { return &options.labels; }
  std::string* tokenizer_file() override {
    return options.tokenizer == "bytes" ? nullptr : &options.tokenizer;
  }
  std::vector<DataPath> data_paths() override {
    if (!options.path) return {};
    return {{"path", &*options.path}};
  }
  void split_as(const TaskSpec& other) override {
    if (const auto* same = dynamic_cast<const ClassifyTextSpec*>(&other)) {
      options.cut_as = same->options.length;
    }
  }
  void hold_out_all() override {
    options.held_out = 1.0;
    eval_sequences = std::numeric_limits<int64_t>::max();
  }
  std::shared_ptr<const Tokenizer> tokenizer() const override {
    return options.path || options.tokenizer != "bytes" ? make_tokenizer(options.tokenizer)
                                                        : nullptr;
  }

 protected:
  void own_fields(Fields& f) override {
    f.field("path", options.path,
            "folder whose sub-folders, or files, are the classes; absent: a generated language");
    f.field("extensions", options.extensions,
            "with path: take only files that end so, \".txt\"; empty: every text file");
    f.field("labels", options.labels,
            "with path: the classes in their order; absent: those found, by name");
    f.field("tokenizer", options.tokenizer, str("with path: ", kTokenizerHelp));
    f.field("held_out", options.held_out,
            "with path: share of each class kept for evaluation, at most 0.5, whole files where "
            "there are many; 1: all, to evaluate only",
            Range<double>{.low = 0.0, .high = 1.0, .open_low = true});
    f.field("length", options.length, "tokens of the longest text (T)", size_from(2));
    f.field("language", options.language, "generated: the kind", {"grammars", "brackets"});
    f.field("classes", options.classes, "generated: how many grammars", between<int64_t>(2, 1000));
    f.field("symbols", options.symbols, "generated: letters, or opening and closing brackets",
            between<int64_t>(2, 26));
    f.field("min_length", options.min_length,
            "generated: tokens of the shortest text; absent: length / 2", size_from(2));
  }
  std::shared_ptr<Task> make(uint64_t seed) const override {
    if (options.path) {
      check_extensions(options.extensions, type());
      if (options.held_out > 0.5 && options.held_out < 1.0) {
        usage_error("classify_text has held_out = ", options.held_out,
                    ", expected at most 0.5, or 1 to evaluate all of the text.");
      }
      return std::make_shared<LabelledFiles>(options, seed, eval_sequences);
    }
    if (options.shortest() > options.length) {
      usage_error("classify_text has min_length = ", options.shortest(),
                  ", expected at most length = ", options.length, ".");
    }
    if (options.language == "brackets") {
      if (options.classes != ClassifyTextOptions{}.classes) {
        usage_error("classify_text has classes = ", options.classes,
                    ", but brackets have two classes; leave it out.");
      }
      if (options.symbols > 8 || options.symbols % 2 != 0) {
        usage_error("classify_text has symbols = ", options.symbols,
                    ", expected 2, 4, 6 or 8 brackets.");
      }
      if (options.shortest() + 1 > options.length && options.length % 2 != 0) {
        usage_error("classify_text has min_length = length = ", options.length,
                    ", but a string of brackets has an even length.");
      }
      return std::make_shared<Brackets>(options, seed, eval_sequences);
    }
    // Shorter strings would often fit several grammars.
    constexpr int64_t kShortest = 8;
    if (options.shortest() < kShortest || options.symbols < 5) {
      usage_error("classify_text has min_length = ", options.shortest(),
                  " and symbols = ", options.symbols, ", but grammars need at least ", kShortest,
                  " of 5 letters.");
    }
    return std::make_shared<Grammars>(options, seed, eval_sequences);
  }
};

}  // namespace

std::shared_ptr<TaskSpec> classify_text_spec() { return std::make_shared<ClassifyTextSpec>(); }

}  // namespace headloom::data
